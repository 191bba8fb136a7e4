"""Step times predicted and measured: the planner's time model held against published runs.

    python bench/predict_time.py [ROWS.csv ...] [--docs docs/planner-time.md]

Folds: the two numbers of a stack (its efficiency, the share of the links it reaches) fitted on one group of
measurements and tried on groups that had no part in it, beside a baseline with one fitted efficiency constant.
Sources: every row with the constants that ship. Then the largest misses, and the rows that cannot be priced with the
reason. Writes bench/results/predict_time.md and .json; with --docs the tables are put into the page as well.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from triweave.planner.time_rows import Row, Run, run_of_row, step_s_of_row
from triweave.planner.time_stack import Stack
from triweave.planner.time_step import predict_step

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = ("published_runs.csv", "published_vtrain_single_node.csv")


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
    stack = run.stack if fitted is None else variant(run.stack, *fitted)
    step = predict_step(
        run.decoder,
        run.layout,
        run.cluster,
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        precision=run.precision,
        stack=stack,
        on=run.on,
    )
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


def has(*words: str) -> Callable[[Row], bool]:
    return lambda row: all(word in " ".join((row["source"], row["gpu_type"], row["recompute"])) for word in words)


def sheet(*words: str, kernel: str | None = None, seq: str | None = None) -> Callable[[Row], bool]:
    """Rows of Hagemann et al. (2311.05610) whose sheet's name holds all `words`."""
    return lambda row: (
        "2311.05610" in row["source"]
        and all(word in row["source"] for word in words)
        and (kernel is None or row["source"].endswith(f"kernel={kernel}"))
        and (seq is None or row["seq"] == seq)
    )


LINKS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RMS = "flash_attention2+RMSkernel"
FLASH1 = "flash_attentionv1.0.8"
FOLDS: tuple[tuple[str, Callable[[Row], bool], tuple[tuple[str, Callable[[Row], bool]], ...], bool], ...] = (
    (
        "13B, sequence 2k (2 sheets, FA2 + RMS kernel)",
        sheet("13B", kernel=RMS, seq="2048"),
        (("30B, 2k", sheet("30B")), ("13B, 8k", sheet("13B", kernel=RMS, seq="8192"))),
        True,
    ),
    (
        "13B, 8k (2 sheets, FA2 + RMS kernel)",
        sheet("13B", kernel=RMS, seq="8192"),
        (("30B, 2k", sheet("30B")), ("13B, 2k", sheet("13B", kernel=RMS, seq="2048"))),
        True,
    ),
    (
        "30B, 2k (FA2 + RMS kernel)",
        sheet("30B"),
        (("13B, 2k", sheet("13B", kernel=RMS, seq="2048")), ("13B, 8k", sheet("13B", kernel=RMS, seq="8192"))),
        True,
    ),
    (
        "13B, 2k, FA1",
        sheet(kernel=FLASH1, seq="2048"),
        (
            ("13B, 8k, FA1", sheet(kernel=FLASH1, seq="8192")),
            ("13B, 2k, fused softmax", sheet(kernel="fused")),
            ("13B, 2k, plain PyTorch", sheet(kernel="torch", seq="2048")),
            ("13B, 8k, plain PyTorch", sheet(kernel="torch", seq="8192")),
            ("13B, 8k, FA2", sheet(kernel="flash_attention2", seq="8192")),
            ("13B, 2k, FA2", sheet(kernel="flash_attention2", seq="2048")),
        ),
        False,
    ),
    ("MosaicML A100", has("mosaicml", "A100"), (("MosaicML H100", has("mosaicml", "H100")),), False),
    ("MosaicML H100", has("mosaicml", "H100"), (("MosaicML A100", has("mosaicml", "A100")),), False),
    (
        "Megatron 2021, table 1",
        has("arXiv 2104.04473"),
        (("Megatron 2022", has("2205.05198")), ("vTrain, many nodes", has("ground_truth_multi"))),
        False,
    ),
    (
        "vTrain, 2 GPUs",
        lambda row: "ground_truth_single" in row["source"] and row["gpus"] == "2",
        (
            ("vTrain, 4 GPUs", lambda row: "ground_truth_single" in row["source"] and row["gpus"] == "4"),
            ("vTrain, 8 GPUs", lambda row: "ground_truth_single" in row["source"] and row["gpus"] == "8"),
            ("vTrain, many nodes", has("ground_truth_multi")),
        ),
        False,
    ),
    (
        "InternEvo, full recompute",
        lambda row: "InternEvo" in row["source"] and row["recompute"] == "full",
        (("InternEvo, none", lambda row: "InternEvo" in row["source"] and row["recompute"] == "none"),),
        False,
    ),
    (
        "NVIDIA 8B, H100, bf16",
        lambda row: "dgxc" in row["source"] and row["model"] == "llama3-8b" and row["precision"] == "bf16",
        (
            (
                "8B, fp8",
                lambda row: "dgxc" in row["source"] and row["model"] == "llama3-8b" and row["precision"] == "fp8",
            ),
            ("70B", lambda row: "dgxc" in row["source"] and row["model"] == "llama3-70b"),
            ("GPT 175B", lambda row: "dgxc" in row["source"] and row["model"] == "gpt3-175b"),
        ),
        False,
    ),
)


def folds(cases: Sequence[Case]) -> tuple[list[list[str]], list[Case], list[Prediction]]:
    """Rows of the first table, and every held-out prediction."""
    table: list[list[str]] = []
    tested: list[Case] = []
    predictions: list[Prediction] = []
    for name, chosen, groups, fits_links in FOLDS:
        calibration = [case for case in cases if chosen(case.row)]
        if not calibration:
            continue
        fitted = fit(calibration, LINKS if fits_links else [calibration[0].run.stack.links])
        baseline = one_constant(calibration)
        for title, wanted in groups:
            held_out = [case for case in cases if wanted(case.row)]
            if not held_out:
                continue
            ours = [predict(case, fitted) for case in held_out]
            steps = [step for step, _ in ours]
            result = score(held_out, steps, [bounds for _, bounds in ours])
            plain = score(held_out, [baseline(case) for case in held_out], None)
            tested += held_out
            predictions += ours
            numbers = f"{fitted[0]:.2f}" + (f", {fitted[1]:.1f}" if fits_links else "")
            table.append(
                [
                    name,
                    numbers,
                    title,
                    str(result.n),
                    *result.cells,
                    f"{100 * (result.inside or 0):.0f} %",
                    *plain.cells[:4],
                ]
            )
    return table, tested, predictions


def group_of(row: Row) -> str:
    source = row["source"]
    if "2311.05610" in source:
        kernel = source.split("kernel=")[-1]
        return f"Hagemann {row['model'][6:9]} seq {row['seq']} {row['gpus']} GPUs {kernel} {row['recompute'][:5]}"
    for word, name in (
        ("ground_truth_multi", "vTrain many nodes"),
        ("ground_truth_single", "vTrain one node"),
        ("mosaicml", "MosaicML"),
        ("InternEvo", "InternEvo"),
        ("2104.04473", "Megatron 2021"),
        ("2205.05198", "Megatron 2022"),
        ("dgxc", "NVIDIA dgxc"),
        ("SimuMax", "SimuMax"),
        ("torchtitan", "torchtitan"),
        ("torchao", "torchao"),
        ("nanotron", "nanotron"),
        ("ultrascale", "nanotron playbook"),
        ("Bridge", "Megatron-Bridge"),
        ("NeMo", "NeMo"),
        ("docs.nvidia", "NeMo docs"),
    ):
        if word in source:
            gpu = row["gpu_type"].split("-")[0]
            kind = "fp8" if "fp8" in row["precision"] else "bf16"
            return f"{name} {gpu} {kind} {row['recompute'][:9]}".rstrip()
    return source[:40]


def by_source(cases: Sequence[Case]) -> list[list[str]]:
    groups: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[group_of(case.row)].append(case)
    table = []
    for name, members in sorted(groups.items()):
        ours = [predict(case) for case in members]
        result = score(members, [step for step, _ in ours], [bounds for _, bounds in ours])
        table.append([name, str(result.n), *result.cells, f"{100 * (result.inside or 0):.0f} %"])
    return table


def misses(cases: Sequence[Case], count: int) -> list[list[str]]:
    found = []
    for case in cases:
        if "ground_truth_single" in case.row["source"]:
            continue
        found.append((predict(case)[0] / case.measured - 1, case))
    found.sort(key=lambda pair: -abs(pair[0]))
    return [
        [
            f"{100 * error:+.0f} %",
            group_of(case.row),
            case.row["model"],
            f"{case.row['gpus']} GPUs, seq {case.row['seq']}, mbs {case.row['mbs']}",
            f"tp{case.row['tp']} pp{case.row['pp']} cp{case.row['cp'] or 1} sp{case.row['sp'] or '?'}",
            f"{case.measured:.3g} s",
        ]
        for error, case in found[:count]
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def summary(name: str, held_out: Sequence[tuple[Case, Prediction]]) -> tuple[str, dict[str, float]]:
    """A sentence and its numbers for all held-out predictions, or for some."""
    cases = [case for case, _ in held_out]
    result = score(cases, [step for _, (step, _) in held_out], [bounds for _, (_, bounds) in held_out])
    off = sorted(abs(math.log(step / case.measured)) for case, (step, _) in held_out)
    nine_tenths = off[int(0.9 * len(off))]
    sentence = (
        f"{name}: n {result.n}, MAPE {100 * result.mape:.1f} %, mean {100 * result.mean:+.1f} %, "
        f"nine tenths within {100 * nine_tenths:.0f} %, {100 * (result.inside or 0):.0f} % in their 90 % range."
    )
    numbers = {"n": result.n, "mape": result.mape, "mean": result.mean, "inside": result.inside or 0.0}
    return sentence, {key: round(value, 4) for key, value in numbers.items()}


FOLD_HEADER = [
    *("calibrated on", "fitted", "tried on", "n", "MAPE", "mean", "tau", "pick's loss", "worst pick", "in range"),
    *("baseline MAPE", "its mean", "its tau", "its pick's loss"),
]
SOURCE_HEADER = ["source", "n", "MAPE", "mean", "tau", "pick's loss", "worst pick", "in range"]
MARKS = ("<!-- tables: python bench/predict_time.py --docs -->", "<!-- end of tables -->")


def tables(cases: Sequence[Case], left_out: Counter[tuple[str, str]]) -> tuple[str, dict[str, dict[str, float]]]:
    """The whole page of results, and its summary in numbers."""
    table, tested, predictions = folds(cases)
    pairs = list(zip(tested, predictions, strict=True))
    sentences, numbers = [], {}
    for key, name, wanted in (
        ("all", "All held-out predictions", lambda source: True),
        ("llama_sweeps", "Llama sweeps (Hagemann et al.)", lambda source: "2311.05610" in source),
        ("vtrain", "vTrain", lambda source: "vTrain" in source),
        ("others", "The rest", lambda source: "2311.05610" not in source and "vTrain" not in source),
    ):
        chosen = [pair for pair in pairs if wanted(pair[0].row["source"])]
        if chosen:
            sentence, numbers[key] = summary(name, chosen)
            sentences.append(f"- {sentence}")
    parts = [
        "### Calibrated on one group, tried on another\n",
        "Fitted: the stack's efficiency, and in the first three folds also the share of the links it reaches.\n",
        markdown(FOLD_HEADER, table),
        "\n".join(sentences) + "\n",
        "### Every source, with the constants that ship\n",
        markdown(SOURCE_HEADER, by_source(cases)),
        "### The largest misses (vTrain's single-node rows aside)\n",
        markdown(["error", "source", "model", "run", "layout", "measured"], misses(cases, 30)),
        "### Rows that are not priced\n",
        markdown(["source", "reason", "rows"], [[*key, str(n)] for key, n in sorted(left_out.items())]),
    ]
    return "\n".join(parts), numbers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Step times predicted and measured.")
    parser.add_argument("rows", nargs="*", type=Path, default=[DATA / name for name in FILES])
    parser.add_argument("--docs", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    absent = [str(path) for path in options.rows if not path.is_file()]
    if absent:
        print(f"no such file: {', '.join(absent)}", file=sys.stderr)
        return 2
    text, numbers = tables(*read(options.rows))
    results = ROOT / "bench" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "predict_time.md").write_text(text, encoding="utf-8")
    (results / "predict_time.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        before, _, rest = page.partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        options.docs.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
