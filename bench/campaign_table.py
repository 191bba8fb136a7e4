"""The table of a campaign: what was told against what was measured. Reads two files and predicts nothing."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from campaign_cases import Case, from_json

from triweave.dryrun.on_gpu import Measured, grid_step
from triweave.schedule.actions import Kind

GIB = 2**30
MIN_TIMES = 40
Told = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration: what was told, and its row."""

    case: Case
    told: Told
    row: Told

    @property
    def failed(self) -> str:
        """What went wrong, empty if nothing did."""
        return str(self.row.get("failed", ""))

    @property
    def on_gpu(self) -> bool:
        """Whether there is memory to compare: a CPU's allocator is another."""
        return not self.failed and bool(self.row["ranks"][0]["allocated_bytes"])

    @property
    def timed(self) -> bool:
        """Whether its step is one that the planner prices, and its numbers are numbers: a GPU is faster on NaN."""
        return not self.failed and self.case.rank is None and math.isfinite(self.row["grad_norm"])

    @property
    def time_off(self) -> float:
        """Signed error of the step time."""
        return float(self.told["step"]["step_s"] / self.row["step_s"] - 1)

    def ranks(self) -> Iterator[tuple[Told, Told, float, Told]]:
        """Of each stage: the check, the closed form and its error against the check, and what its rank measured."""
        told = self.told
        if "check" not in told:
            return
        for check, planner, off in zip(told["check"], told["planner"], closed_form_errors(told), strict=True):
            yield check, planner, off, self.row["ranks"][0 if self.case.rank is not None else check["rank"]]


@dataclass(frozen=True, slots=True)
class Memory:
    """Signed errors of one rank. Memory that peers read is on both sides: torch's allocator does not count it."""

    name: str
    words: str
    measured_gib: float
    check: float
    """The check's allocated against torch's."""
    reserved: float
    used: float
    """Against what the driver says of the card."""
    planner: float
    """The closed form against the check."""
    planner_measured: float | None
    """The closed form against torch's; None for a rank alone, which has no peers to copy from."""
    at: str


def closed_form_errors(told: Told) -> list[float]:
    """Of each rank that was played: the closed form against the check in the grid; none where times alone were told."""
    if "check" not in told:
        return []
    return [
        planner["allocated_bytes"] / (grid["allocated_bytes"] + grid["peer_bytes"]) - 1
        for grid, planner in zip(told["check_grid"], told["planner"], strict=True)
    ]


def joined(predictions: Told, sealed: str, rows: Sequence[Told]) -> list[Pair]:
    """Each configuration with its row; a measurement goes before a failure.

    Raises:
        SystemExit: no row was run against these predictions.
    """
    known = [row for row in rows if row["told_by"] == sealed]
    if not known:
        others = sorted({row["told_by"] for row in rows})
        raise SystemExit(f"no row was run against predictions {sealed}; there are rows of {others or 'nothing'}")
    best: dict[str, Told] = {}
    for row in known:
        if row["name"] not in best or "failed" in best[row["name"]]:
            best[row["name"]] = row
    cases = ((from_json(one["case"]), one["predicted"]) for one in predictions["cases"])
    return [Pair(case, told, best[case.name]) for case, told in cases if case.name in best]


def memory_errors(pairs: Sequence[Pair]) -> list[Memory]:
    """One for every rank that was measured on a GPU."""
    found = []
    for pair in pairs:
        for check, planner, off, real in pair.ranks() if pair.on_gpu else ():
            measured = real["allocated_bytes"] + real["unseen_bytes"]
            found.append(
                Memory(
                    name=pair.case.name if len(pair.told["check"]) == 1 else f"{pair.case.name} stage {check['rank']}",
                    words=pair.case.words,
                    measured_gib=measured / GIB,
                    check=(check["allocated_bytes"] + check["peer_bytes"]) / measured - 1,
                    reserved=(check["reserved_bytes"] + check["peer_bytes"])
                    / (real["reserved_bytes"] + real["unseen_bytes"])
                    - 1,
                    used=check["used_bytes"] / real["used_bytes"] - 1,
                    planner=off,
                    planner_measured=None if pair.case.rank is not None else planner["allocated_bytes"] / measured - 1,
                    at=check["at"],
                )
            )
    return found


def summary(errors: Sequence[float]) -> str:
    """Mean of the sizes, worst, and bias with its standard error."""
    if not errors:
        return "nothing measured"
    bias, wide = bias_of(errors)
    worst = max(errors, key=abs)
    mean = statistics.mean(map(abs, errors))
    return f"mean {mean:.2%}, worst {worst:+.2%}, bias {bias:+.2%} +- {wide:.2%}, {len(errors)} of them"


def bias_of(errors: Sequence[float]) -> tuple[float, float]:
    """Mean of signed errors, and its standard error."""
    wide = statistics.stdev(errors) / math.sqrt(len(errors)) if len(errors) > 1 else 0.0
    return statistics.mean(errors), wide


def bars(predictions: Told, pairs: Sequence[Pair]) -> Iterator[str]:
    """Every bar with what was reached; the closed form is held against the check in all that was predicted."""
    memory = memory_errors(pairs)
    closed_form = [off for one in predictions["cases"] for off in closed_form_errors(one["predicted"])]
    timed = [pair for pair in pairs if pair.timed]
    times = [pair.time_off for pair in timed if pair.case.group != "host"]
    waiting = [pair.time_off for pair in timed if pair.case.group == "host"]

    def line(what: str, errors: Sequence[float], mean: float, worst: float, also: bool = True) -> str:
        met = bool(errors) and statistics.mean(map(abs, errors)) <= mean and max(map(abs, errors)) <= worst and also
        wanted = f"mean <= {mean:.0%}" + (f", worst <= {worst:.0%}" if worst < 1 else "")
        return f"| {what} | {wanted} | {summary(errors)} | {_met(met) if errors else ''} |"

    bias, wide = bias_of(times) if times else (0.0, 0.0)
    yield "| what | bar | reached | |"
    yield "|---|---|---|---|"
    yield line("`check` allocated against torch's peak", [one.check for one in memory], 0.01, 0.03)
    yield line("`check` reserved against torch's", [one.reserved for one in memory], 0.03, 1)
    yield line("closed form against `check`", closed_form, 0.01, 0.03)
    measured = [one.planner_measured for one in memory if one.planner_measured is not None]
    yield line("closed form against torch's peak", measured, 0.01, 0.03)
    yield line(
        f"step time, {MIN_TIMES} runs or more, bias within two standard errors of none",
        times,
        0.03,
        0.08,
        also=len(times) >= MIN_TIMES and abs(bias) <= 2 * wide,
    )
    inside = [pair for pair in timed if _inside(pair)]
    if waiting:
        yield f"| step time of one GPU that waits for its host | worst <= 8 % | {summary(waiting)} | |"
    yield f"| step time inside the range that was told | 90 % | {len(inside)} of {len(timed)} | |"
    lost = regret(pairs)
    if lost is not None:
        yield f"| the planner's pick of two GPUs against the best | <= 1 % | {lost:+.2%} | {_met(lost <= 0.01)} |"
    used = [one.used for one in memory]
    yield f"| `check` used on the card against the driver's | | {summary(used)} | |"


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def _inside(pair: Pair) -> bool:
    low, high = pair.told["step"]["range_s"]
    return bool(low <= pair.row["step_s"] <= high)


def picks(pairs: Sequence[Pair]) -> list[Pair]:
    """The layouts of one model and batch, fastest first."""
    return sorted((p for p in pairs if p.case.group == "pick" and p.timed), key=lambda p: p.row["step_s"])


def regret(pairs: Sequence[Pair]) -> float | None:
    """How much longer the planner's pick takes than the fastest layout; None where none was measured."""
    measured = picks(pairs)
    if not measured:
        return None
    picked = min(measured, key=lambda pair: pair.told["step"]["step_s"])
    return float(picked.row["step_s"] / measured[0].row["step_s"] - 1)


def by_class(pairs: Sequence[Pair]) -> Iterator[str]:
    """Signed errors of the step by what the runs have in common: where a bias comes from."""
    classes: dict[str, Callable[[Case], str]] = {
        "axis": lambda case: next(
            (f"{axis} 2" for axis in ("tp", "pp", "dp") if case.layout.size(axis) > 1), "one GPU"
        ),
        "schedule": lambda case: case.layout.schedule if case.layout.pp > 1 else "",
        "shard": lambda case: case.layout.shard if case.layout.dp > 1 else "",
        "recompute": lambda case: "+".join(case.layout.recompute) or "nothing recomputed",
        "model": lambda case: case.model,
        "sequence": lambda case: f"seq {case.seq_len}",
        "micro-batch": lambda case: f"micro-batch {case.layout.micro_batch}",
    }
    yield "| runs | step time |"
    yield "|---|---|"
    for name, of in classes.items():
        found: defaultdict[str, list[float]] = defaultdict(list)
        for pair in pairs:
            if pair.timed and of(pair.case):
                found[of(pair.case)].append(pair.time_off)
        for key, errors in sorted(found.items()):
            yield f"| {name}: {key} | {summary(errors)} |"


def grids(pairs: Sequence[Pair]) -> Iterator[str]:
    """The step of a pipeline put together from its ranks, each alone on one GPU, against the pair."""
    whole = {pair.case.name: pair for pair in pairs if pair.timed}
    ranks: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.case.of and not pair.failed:
            ranks[pair.case.of].append(pair)
    yield "| pipeline | pair, ms | from one GPU | off |"
    yield "|---|---|---|---|"
    for name, found in ranks.items():
        if name not in whole or len(found) < whole[name].case.layout.pp:
            continue
        pair = whole[name]
        timeline = grid_step(
            pair.case.resolved, [_measured(one) for one in found], pair.case.cluster.gpu.nvlink_bandwidth
        )
        step = timeline.total_s + max(one.row["rest_s"] for one in found)
        real = pair.row["step_s"]
        yield f"| {name}: {pair.case.words} | {real * 1e3:.1f} | {step * 1e3:.1f} | {step / real - 1:+.2%} |"


def _measured(pair: Pair) -> Measured:
    row = pair.row
    return Measured(
        rank=pair.case.rank or 0,
        step_s=row["step_s"],
        actions={(Kind(kind), stage): seconds for kind, stage, seconds in row["actions"]},
        rest_s=row["rest_s"],
        peak_allocated=row["ranks"][0]["allocated_bytes"],
        peak_reserved=row["ranks"][0]["reserved_bytes"],
        micro_batches=pair.case.resolved.num_micro_batches,
        loss=row["loss"],
        grad_norm=row["grad_norm"],
    )


def table(predictions: Told, sealed: str, rows: Sequence[Told]) -> list[str]:
    """The whole page."""
    pairs = joined(predictions, sealed, rows)
    total, failures = len(predictions["cases"]), [pair for pair in pairs if pair.failed]
    ran = next((pair.row for pair in pairs if not pair.failed), {"device": "nothing", "torch": "-"})
    lines = [
        "# Drawn configurations, predicted first and measured then",
        "",
        f"{len(pairs) - len(failures)} of {total} configurations measured on {ran['device']}, torch {ran['torch']}; "
        f"{len(failures)} failed. Predictions `{sealed}`: `{predictions['command']}`, torch {predictions['torch']}, "
        f"profile: {predictions['profile']}.",
        "",
        "Random weights and tokens, bf16. Steps: median of four after two to warm up; alone, of three after one.",
        "Errors are of the prediction: + is more than was measured. Allocated counts what peers read, which torch's",
        "allocator does not.",
        "",
        *bars(predictions, pairs),
        "",
        "## The pick among layouts of two GPUs",
        "",
        "| | layout | step, ms | told | off |",
        "|---|---|---|---|---|",
        *_pick_lines(pairs),
        "",
        "## The grid's step from one GPU",
        "",
        *grids(pairs),
        "",
        "## Step time",
        "",
        "| run | configuration | ms | told | range | off | largest parts of what was told, ms |",
        "|---|---|---|---|---|---|---|",
        *(_time_line(pair) for pair in sorted((p for p in pairs if p.timed), key=lambda p: -abs(p.time_off))),
        "",
        *by_class(pairs),
        "",
        "## Memory",
        "",
        "| rank | configuration | allocated GiB | `check` off | reserved off | used off | closed form | at |",
        "|---|---|---|---|---|---|---|---|",
        *map(_memory_line, sorted(memory_errors(pairs), key=lambda one: -max(abs(one.check), abs(one.planner)))),
    ]
    if failures:
        lines += ["", "## Failed", ""]
        lines += [f"- {pair.case.name}, {pair.case.words}: {pair.failed.splitlines()[-1]}" for pair in failures]
    return lines


def _pick_lines(pairs: Sequence[Pair]) -> Iterator[str]:
    measured = picks(pairs)
    told = min((pair.told["step"]["step_s"] for pair in measured), default=0.0)
    for number, pair in enumerate(measured):
        mark = "best" if number == 0 else ""
        mark += " pick" if pair.told["step"]["step_s"] == told else ""
        yield (
            f"| {mark.strip()} | {pair.case.words} | {pair.row['step_s'] * 1e3:.1f}"
            f" | {pair.told['step']['step_s'] * 1e3:.1f} | {pair.time_off:+.2%} |"
        )


def _time_line(pair: Pair) -> str:
    low, high = pair.told["step"]["range_s"]
    parts = sorted(pair.told["step"]["breakdown"].items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name.replace('_', ' ')} {seconds * 1e3:.1f}" for name, seconds in parts[:4] if seconds > 0)
    told, real = pair.told["step"]["step_s"] * 1e3, pair.row["step_s"] * 1e3
    return (
        f"| {pair.case.name} | {pair.case.words} | {real:.1f} | {told:.1f} | {low * 1e3:.0f} to {high * 1e3:.0f}"
        f" | {pair.time_off:+.2%} | {shown} |"
    )


def _memory_line(one: Memory) -> str:
    return (
        f"| {one.name} | {one.words} | {one.measured_gib:.2f} | {one.check:+.2%} | {one.reserved:+.2%}"
        f" | {one.used:+.2%} | {one.planner:+.2%} | {one.at} |"
    )
