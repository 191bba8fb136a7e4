"""Measured runs that the time model can price, its predictions for them, and how far off they are."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from triweave.planner.predict import step_of_run
from triweave.planner.time_rows import Row, Run, run_of_row, step_s_of_row
from triweave.planner.time_stack import Stack


@dataclass(frozen=True)
class Case:
    """One measured run that can be priced."""

    row: Row
    run: Run
    measured: float

    @property
    def sweep(self) -> tuple[str, ...]:
        """What a planner would be given: everything but the layout. Cases that share it are one choice."""
        row = self.row
        sheet = row["source"].split(" trial ")[0] + row["source"].split("kernel=")[-1]
        keys = ("model", "layers", "seq", "gpus", "gbs", "gpu_type", "precision")
        return (sheet, *(row[key] for key in keys))


@dataclass(frozen=True)
class Score:
    n: int
    mape: float
    mean: float
    tau: float | None
    regret: float | None
    worst_regret: float | None
    inside: float | None

    @property
    def cells(self) -> list[str]:
        def percent(value: float | None, sign: str = "") -> str:
            return "-" if value is None else f"{100 * value:{sign}.1f} %"

        tau = "-" if self.tau is None else f"{self.tau:.2f}"
        return [percent(self.mape), percent(self.mean, "+"), tau, percent(self.regret), percent(self.worst_regret)]


def read(paths: Iterable[Path]) -> tuple[list[Case], Counter[tuple[str, str]]]:
    """Cases, and the rows with a measurement that cannot be priced, by source and reason."""
    cases, left_out = [], Counter[tuple[str, str]]()
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                measured = step_s_of_row(row)
                if row["mfu"] == "OOM":
                    continue
                run = run_of_row(row)
                if measured is None or isinstance(run, str):
                    reason = "no measured time" if measured is None else str(run)
                    left_out[row["source"].split(" trial ")[0][:70], reason] += 1
                else:
                    cases.append(Case(row, run, measured))
    return cases, left_out


@lru_cache(maxsize=4096)
def variant(stack: Stack, efficiency: float, links: float) -> Stack:
    return replace(stack, efficiency=efficiency, links=links)


Prediction = tuple[float, tuple[float, float]]


def predict(case: Case, fitted: tuple[float, float] | None = None) -> Prediction:
    run = case.run
    return predict_run(run if fitted is None else replace(run, stack=variant(run.stack, *fitted)))


def predict_run(run: Run) -> Prediction:
    step = step_of_run(run)
    return step.step_s, step.range_s


def fit(cases: Sequence[Case], links: Sequence[float]) -> tuple[float, float]:
    """Efficiency and share of the links with the smallest mean error on `cases`."""

    def error(fitted: tuple[float, float]) -> float:
        return statistics.mean(abs(math.log(predict(case, fitted)[0] / case.measured)) for case in cases)

    grid = [(percent / 100, share) for percent in range(84, 112, 2) for share in links]
    return min(grid, key=error)


def one_constant(cases: Sequence[Case]) -> Callable[[Case], float]:
    """The baseline: hardware FLOPs over peak times one efficiency, fitted."""

    def at_peak(case: Case) -> float:
        run = case.run
        passes = 4 / 3 if "layer" in run.layout.recompute else 1
        tokens = run.global_batch * run.seq_len / run.layout.world_size
        peak = run.on.peak_fp8 if run.precision == "fp8" and run.on.peak_fp8 else run.on.peak_bf16
        return passes * run.decoder.flops_per_token(run.seq_len, causal=False) * tokens / peak

    factor = math.exp(statistics.median(math.log(case.measured / at_peak(case)) for case in cases))
    return lambda case: factor * at_peak(case)


def score(cases: Sequence[Case], predicted: Sequence[float], ranges: Sequence[tuple[float, float]] | None) -> Score:
    errors = [p / case.measured - 1 for case, p in zip(cases, predicted, strict=True)]
    sweeps: defaultdict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for case, p in zip(cases, predicted, strict=True):
        sweeps[case.sweep].append((p, case.measured))
    choices = [sweep for sweep in sweeps.values() if len(sweep) >= 4]
    regrets = [picked(sweep) / min(measured for _, measured in sweep) - 1 for sweep in choices]
    taus = [value for sweep in choices if (value := kendall(sweep)) is not None]
    inside = None
    if ranges is not None:
        inside = statistics.mean(low <= case.measured <= high for case, (low, high) in zip(cases, ranges, strict=True))
    return Score(
        len(cases),
        statistics.mean(map(abs, errors)),
        statistics.mean(errors),
        statistics.mean(taus) if taus else None,
        statistics.mean(regrets) if regrets else None,
        max(regrets, default=None),
        inside,
    )


def picked(sweep: Sequence[tuple[float, float]]) -> float:
    """Measured time of the layout predicted fastest; of several that are predicted alike, their mean."""
    fastest = min(p for p, _ in sweep)
    return statistics.mean(measured for p, measured in sweep if p <= fastest * (1 + 1e-9))


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of predicted against measured, a difference under 0.3 % counting as a tie on either side."""
    agree = predicted_ties = measured_ties = count = 0
    for i, (p, m) in enumerate(pairs):
        for q, n in pairs[:i]:
            left = 0 if abs(p / q - 1) < 0.003 else (1 if p > q else -1)
            right = 0 if abs(m / n - 1) < 0.003 else (1 if m > n else -1)
            count += 1
            agree += left * right
            predicted_ties += left == 0
            measured_ties += right == 0
    scale = math.sqrt((count - predicted_ties) * (count - measured_ties))
    return agree / scale if scale else None
