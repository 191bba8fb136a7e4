"""The table of `bench/eight.py`: each bar beside its figure, then every row. Reads files and measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from throughput import OURS, ahead, notes, table
from triweave_case import resolved_of
from workload import PEAK_FLOPS, Case

from triweave.dryrun.on_gpu import mfu_of
from triweave.schedule.actions import Kind

GIB = 2**30
TRAINED, COLLECTIVES, ALONE = "as trained", "collectives", "alone"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """Everything that the output folder holds."""

    gpus: int
    rows: Sequence[Row]
    memory: Row = field(default_factory=dict)
    """What `check` said, by the names of cases; empty where nothing was told."""
    times: Row = field(default_factory=dict)
    told_by: Row = field(default_factory=dict)
    """Hashes of both, as rows name them."""
    layers: Sequence[Row] = ()
    """Rows of `bench/overlap.py`."""
    left: Sequence[str] = ()
    """Names of cases without a row."""

    def of(self, *systems: str) -> list[tuple[Case, Row]]:
        """Rows of some systems, with their cases."""
        pairs = ((Case(**row["case"]), row) for row in self.rows)
        return [(case, row) for case, row in pairs if case.system in systems]

    def ran(self, *systems: str) -> list[tuple[Case, Row]]:
        """Those that were measured."""
        return [(case, row) for case, row in self.of(*systems) if row["outcome"] == "ok"]


def micro_batch_s(row: Row, way: str) -> float:
    """Forward and backward of one micro-batch of a stage."""
    return float(sum(row["actions_s"][way].values()))


def exposed(row: Row, way: str = TRAINED) -> float:
    """What communication adds to a stage's forward and backward, as a share of the same without communication."""
    return micro_batch_s(row, way) / micro_batch_s(row, ALONE) - 1


def stage_mfu(case: Case, row: Row, *, causal: bool) -> float:
    """Share of the peak in forward and backward of a stage, the optimizer apart."""
    actions = {(Kind(name[0]), int(name[1:])): seconds for name, seconds in row["actions_s"][TRAINED].items()}
    return mfu_of(resolved_of(case), actions, PEAK_FLOPS, causal=causal)


def measured_s(case: Case, row: Row) -> float:
    """What the planner's seconds are held against: a step, or a micro-batch of a stage."""
    return micro_batch_s(row, TRAINED) if case.system == "stage" else statistics.median(row["step_s"])


def time_errors(found: Found, profile: str) -> dict[str, float]:
    """Signed errors of the planner's seconds, by the names of cases that ran after these very predictions."""
    errors = {}
    for case, row in found.ran(OURS, "stage"):
        told = found.times.get(case.name, {}).get(profile, {})
        if "seconds" in told and row["told_by"]["times"] == found.told_by["times"]:
            errors[case.name] = told["seconds"] / measured_s(case, row) - 1
    return errors


def memory_errors(found: Found) -> dict[str, float]:
    """Signed errors of `check`, of the fullest rank of each case; a CPU's memory is not measured."""
    errors = {}
    for case, row in found.ran(OURS, "stage"):
        told = found.memory.get(case.name)
        if told and row["peak_allocated_gib"] and row["told_by"]["check"] == found.told_by["check"]:
            errors[case.name] = told_gib(told) / row["peak_allocated_gib"] - 1
    return errors


def told_gib(told: Iterable[Row]) -> float:
    """Of the fullest rank."""
    return float(max(one["allocated_bytes"] for one in told) / GIB)


def is_refused(row: Row) -> bool:
    """Whether the rules of this version kept a case from running."""
    return str(row["outcome"]).startswith("refused")


def fastest_s(found: Found, systems: Sequence[str]) -> float:
    """The shortest step of Llama-3-8B by some systems, whatever the layout; 0 where none was measured."""
    whole = (pair for pair in found.ran(*systems) if not is_cut(pair[0]))
    return min((measured_s(case, row) for case, row in whole), default=0.0)


def is_cut(case: Case) -> bool:
    """Whether a case is of 70B, whose layers are counted: all of them, or as many as fit."""
    return "layers" in case.options


def bars(found: Found) -> Iterator[str]:
    """Every bar with what was reached."""
    stages, gpus = found.ran("stage"), found.gpus
    yield "| what | bar | reached | |"
    yield "|---|---|---|---|"
    mfus = [stage_mfu(case, row, causal=True) for case, row in stages]
    yield _bar(f"causal MFU of 70B's layers at TP {gpus}, the slowest stage", ">= 50 %", min, mfus, 0.5)
    shares = [exposed(row) for case, row in stages]
    yield _bar(f"exposed communication of those layers at TP {gpus}, the worst", "< 12 %", max, shares, 0.12)
    best = [fastest_s(found, systems) for systems in (("torchtitan", "megatron-core"), (OURS,))]
    ratios = [best[0] / best[1]] if all(best) else []
    yield _bar("Llama-3-8B, our best layout over the best peer's", ">= 1.15", min, ratios, 1.15, "{:.3f}")
    for profile in ("probed", "shipped"):
        yield _errors(f"seconds told with the profile that was {profile}", time_errors(found, profile), 0.03, 0.08)
    yield _errors("memory told by `check`, the fullest rank", memory_errors(found), 0.01, 0.01)
    proved = found.of("verify")
    equal = sum(row.get("pass", False) for _, row in proved)
    ran = [row for _, row in proved if not is_refused(row)]
    met = "" if not ran else "met" if equal == len(ran) else "MISSED"
    yield f"| layouts that equal transformers in bf16 | all | {equal} of {len(ran)} that are trained | {met} |"


def _bar(what: str, bar: str, worst: Any, values: Sequence[float], limit: float, shown: str = "{:.1%}") -> str:
    if not values:
        return f"| {what} | {bar} | not run | |"
    value = worst(values)
    met = value >= limit if bar.startswith(">") else value < limit
    return f"| {what} | {bar} | {shown.format(value)} | {'met' if met else 'MISSED'} |"


def _errors(what: str, errors: Mapping[str, float], mean: float, worst: float) -> str:
    wanted = f"mean <= {mean:.0%}, worst <= {worst:.0%}"
    if not errors:
        return f"| {what} | {wanted} | not run, or not told | |"
    sizes = [abs(error) for error in errors.values()]
    bias = statistics.mean(errors.values())
    met = statistics.mean(sizes) <= mean and max(sizes) <= worst
    told = f"mean {statistics.mean(sizes):.2%}, worst {max(errors.values(), key=abs):+.2%}, bias {bias:+.2%}"
    return f"| {what} | {wanted} | {told}, {len(sizes)} of them | {'met' if met else 'MISSED'} |"


def verdicts(found: Found) -> Iterator[str]:
    """Each layout against transformers."""
    yield "| layout | verdict | loss off | worst output | worst gradient | loss, first and last step |"
    yield "|---|---|---|---|---|---|"
    for case, row in found.of("verify"):
        name = f"{case.layout}, {case.settings}"
        if row["outcome"] != "ok":
            yield f"| {name} | {row['outcome']} | | | | |"
            continue
        verdict = "equal" if row["pass"] else f"DIFFERENT from {row['first_difference']} on"
        yield (
            f"| {name} | {verdict} | {row['loss_relative']:.1e} | {row['worst_output']:.1e} |"
            f" {row['worst_gradient']:.1e} | {row['losses'][0]:.4f}, {row['losses'][-1]:.4f} |"
        )


def stages(found: Found) -> Iterator[str]:
    """Each stage of 70B's grid: where its micro-batch's time goes."""
    yield (
        "| case | as trained, ms | with collectives | alone | exposed | with collectives | MFU, causal | full"
        " | step ms of its micro-batches | rest ms |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case, row in found.of("stage"):
        name = f"sequence {case.seq_len:,}, {case.layout}, {case.settings}"
        if row["outcome"] != "ok":
            yield f"| {name} | {row['outcome']} | | | | | | | | |"
            continue
        times = " | ".join(f"{1e3 * micro_batch_s(row, way):.1f}" for way in (TRAINED, COLLECTIVES, ALONE))
        causal, full = (stage_mfu(case, row, causal=causal) for causal in (True, False))
        yield (
            f"| {name} | {times} | {exposed(row):.1%} | {exposed(row, COLLECTIVES):.1%} | {causal:.1%} | {full:.1%}"
            f" | {1e3 * statistics.median(row['step_s']):.0f} of {row['micro_batches']} | {1e3 * row['rest_s']:.1f} |"
        )


def told(found: Found) -> Iterator[str]:
    """Each of our rows beside what was said before it ran."""
    yield "| case | measured s | probed: told | off | shipped: told | off | measured GiB | `check` | off | fullest at |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    times = {profile: time_errors(found, profile) for profile in ("probed", "shipped")}
    memory = memory_errors(found)
    for case, row in found.of(OURS, "stage"):
        said = found.times.get(case.name, {})
        cells = [f"{measured_s(case, row):.4f}" if row["outcome"] == "ok" else row["outcome"]]
        for profile, errors in times.items():
            seconds = said.get(profile, {}).get("seconds")
            cells += [f"{seconds:.4f}" if seconds else "-", _signed(errors.get(case.name))]
        ranks = found.memory.get(case.name, ())
        fullest = max(ranks, key=lambda one: one["allocated_bytes"], default=None)
        cells += [f"{row['peak_allocated_gib']:.2f}" if row.get("peak_allocated_gib") else "-"]
        cells += [f"{told_gib(ranks):.2f}" if fullest else "-", _signed(memory.get(case.name))]
        yield f"| {case.name} | {' | '.join(cells)} | {fullest['at'] if fullest else '-'} |"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def layer_lines(found: Found) -> Iterator[str]:
    """Single layers, by `bench/overlap.py`: a second measurement of what is exposed, and whether results are right."""
    for row in found.layers:
        if row["section"] == "right":
            yield f"- {row['what']}: {row['value']}"
    yield ""
    yield "| layer | alone ms | collectives | overlapped | exposed: collectives | overlapped | host issues it in |"
    yield "|---|---|---|---|---|---|---|"
    for row in found.layers:
        if row["section"] == "layers":
            times = " | ".join(f"{row[way]:.3f}" for way in ("alone", "plain", "overlapped"))
            shares = " | ".join(f"{row[f'{way}_exposed']:.1%}" for way in ("plain", "overlapped"))
            yield f"| {row['model']}, sequence {row['seq']:,} | {times} | {shares} | {row['overlapped_host']:.2f} ms |"


def page(found: Found, head: str) -> list[str]:
    """The whole page."""
    of_8b = [row for case, row in found.of(OURS, "torchtitan", "megatron-core") if not is_cut(case)]
    deep = [row for case, row in found.of(OURS) if is_cut(case)]
    parts = [
        f"# {found.gpus} GPUs of one host",
        head,
        "## Bars",
        "\n".join(bars(found)),
        "## Llama-3-8B, ours and the peers",
        f"{table(of_8b)}\n\n{ahead(of_8b)}",
        f"## Stages of Llama-3-70B's grid, TP {found.gpus} x PP 4, under 80 GB",
        "\n".join(stages(found)),
        f"## Llama-3-70B at TP {found.gpus} alone: all of its 80 layers, or as many as fit",
        table(deep),
        "## Told before, and measured",
        "Seconds of a step; of a stage, of one micro-batch forward and backward.",
        "\n".join(told(found)),
        "## Equal to transformers",
        "\n".join(verdicts(found)),
        "## Layers alone",
        "\n".join(layer_lines(found)),
        notes(row for row in found.rows if not is_refused(row)),
    ]
    if found.left:
        parts.append("Not run: " + ", ".join(found.left))
    return "\n\n".join(part for part in parts if part).splitlines()
