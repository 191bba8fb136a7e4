"""Memory predictions against published measurements, beside Megatron-LM's own formula.

    python bench/predict_memory.py ROWS.csv [--out bench/results]

ROWS.csv has the columns of `published_runs.csv`. Three questions: how far off is the peak where it was measured; which
layouts run out of memory; what does the allocator reserve. Nothing is fitted to these rows. The one free number, how
many standard deviations a layout must leave to spare, is also chosen on one model and tried on the other.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from triweave.cluster import CATALOGUE
from triweave.errors import InputError
from triweave.layout import Layout, Schedule, Shard, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import GIB
from triweave.planner.memory import StageMemory, predict_memory
from triweave.planner.memory_replay import fits, replay_rank
from triweave.planner.published_memory import Case, case_of

DEVIATIONS = (0.0, 0.5, 1.0, 1.5, 2.0)
STATED = 1.0
"""The margin that `fits` takes when nobody asks for another."""


@dataclass(frozen=True)
class Peak:
    """One measured peak, in the unit that its source prints."""

    group: str
    name: str
    measured: float
    predicted: float
    megatron: float
    at: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def megatron_error(self) -> float:
        return self.megatron / self.measured - 1


def arguments(case: Case) -> dict[str, Any]:
    return {
        "seq_len": case.seq_len,
        "num_micro_batches": case.num_micro_batches,
        "dtype": case.dtype,
        "assumptions": case.assumptions,
    }


def stages_of(case: Case) -> tuple[StageMemory, ...]:
    return predict_memory(case.spec, case.layout, **arguments(case))


def megatron_formula(case: Case) -> float:
    """Megatron-LM's `report_theoretical_memory`, in bytes (planning notes 2.1, Megatron notes 4)."""
    spec, layout = case.spec, case.layout
    h, layers, tp, pp = spec.hidden_size, spec.num_hidden_layers, layout.tp, layout.pp
    kv = spec.key_value_size / spec.query_size
    ffn = spec.intermediate_size
    per_layer = 2 * h * h * (1 + kv) + 2 * h * ffn * (1.5 if spec.gated_mlp else 1) + 2 * h
    vocabulary = spec.vocab_size * h * (1 if pp > 1 or spec.tie_word_embeddings else 2)
    per_parameter = 6 + 12 / layout.dp if layout.shard != "none" else 18
    states = (layers / pp * per_layer + vocabulary) / tp * per_parameter
    tokens = case.seq_len * layout.micro_batch
    selective = layout.uses_sequence_parallel
    layer = tokens * h * ((18 + 4 * ffn / h) / tp if selective else 10 + 24 / tp)
    activations = layer * layers + tokens * (8 + h) * pp
    activations *= min(1, case.num_micro_batches / pp) if pp > 1 else 1
    if pp == 1:
        activations += tokens * h * 4 * (1 + spec.vocab_size / h) / (tp if selective else 1)
    return states + activations * (1.0 if selective else 1.05)


def measured_peaks(rows: Iterable[dict[str, str]]) -> tuple[list[Peak], Counter[str]]:
    peaks, refused = [], Counter[str]()
    for row in rows:
        if not row["peak_mem_gib"]:
            continue
        try:
            case = case_of(row)
        except InputError as problem:
            refused[str(problem)] += 1
            continue
        metric = {"allocated": "peak_allocated_bytes", "reserved": "reserved_bytes", "used": "used_bytes"}[case.metric]
        worst = max(stages_of(case), key=lambda stage: getattr(stage, metric))
        peaks.append(
            Peak(
                group_of(row["source"]),
                f"{row['model']} tp{row['tp']} pp{row['pp']} dp{row['dp']} mbs{row['mbs']} {row['recompute']} "
                f"{row['precision']}",
                float(row["peak_mem_gib"]),
                getattr(worst, metric) / case.unit,
                megatron_formula(case) / case.unit,
                worst.at,
            )
        )
    return peaks, refused


def group_of(source: str) -> str:
    for word in ("SimuMax", "InternEvo", "sailor", "mxfp8", "torchao", "nvfp4"):
        if word in source:
            return word
    for word in ("202412 T1", "202412 T2", "202412 T3", "h200_202506"):
        if word in source:
            return f"torchtitan {word}"
    return source.split()[0]


@dataclass(frozen=True)
class Fit:
    """One layout of the A100 sweeps: did it run, and would it, by margin."""

    model: str
    name: str
    oom: bool
    fits: dict[float, bool]
    formula_gib: float


def sweeps(rows: Iterable[dict[str, str]]) -> Iterator[Fit]:
    capacity = CATALOGUE["a100-80gb"].usable_bytes
    for row in rows:
        if "2311.05610" not in row["source"]:
            continue
        case = case_of(row)
        answers = {
            deviations: fits(case.spec, case.layout, capacity_bytes=capacity, deviations=deviations, **arguments(case))
            for deviations in DEVIATIONS
        }
        kernel = row["source"].partition("kernel=")[2]
        name = f"{row['model']} seq{row['seq']} {kernel} tp{row['tp']} pp{row['pp']} mbs{row['mbs']} sp{row['sp']}"
        yield Fit(
            row["model"],
            f"{name} {row['recompute']}",
            row["mfu"] == "OOM",
            answers,
            megatron_formula(case) / GIB,
        )


def score(layouts: Sequence[Fit], deviations: float) -> tuple[float, float]:
    """Share that is right, and share that runs out of memory although it was said to fit."""
    right = mean(one.fits[deviations] != one.oom for one in layouts)
    return right, mean(one.fits[deviations] and one.oom for one in layouts)


def chosen(layouts: Sequence[Fit]) -> float:
    return max(DEVIATIONS, key=lambda deviations: (score(layouts, deviations)[0], deviations))


def best_threshold(layouts: Sequence[Fit]) -> float:
    """Share that Megatron's formula gets right with a threshold fitted on these very layouts."""
    return max(mean((one.formula_gib > limit.formula_gib) == one.oom for one in layouts) for limit in layouts)


def reserved(rows: Iterable[dict[str, str]]) -> Iterator[tuple[str, float, float]]:
    """SimuMax prints what the allocator had reserved; the replay says what it would reserve."""
    for row in rows:
        found = re.search(r"reserved ([\d.]+) GiB", row["source"])
        if found is None:
            continue
        case = case_of(row)
        worst = max(stages_of(case), key=lambda stage: stage.peak_allocated_bytes)
        replayed = replay_rank(case.spec, case.layout, worst.pp_rank, capacity=10**15, **arguments(case))
        yield f"{row['model']} tp{row['tp']} pp{row['pp']}", float(found[1]), replayed.peak_reserved / GIB


SMOKE = Path(__file__).parent / "results" / "2026-11-30-smoke-2xh200.md"
SMOKE_MODEL = ModelSpec(1001, 2048, 5632, 8, 16, 8, 128)
"""The model that `smoke.py` trains."""


def own_runs() -> Iterator[tuple[str, float, float]]:
    """Our trainer's peaks on two H200, printed to a tenth of a GiB; bfloat16, whose attention is a flash kernel."""
    for name, measured in re.findall(r"^\| ([^|]+) \| bfloat16 \|.*\| ([\d.]+) \|$", SMOKE.read_text("utf-8"), re.M):
        axis, *words = name.split()
        schedules = [word for word in words if word in get_args(Schedule)]
        recompute = words[words.index("recompute") + 1 :] if "recompute" in words else []
        shards = [word for word in words if word in get_args(Shard)]
        layout = Layout(
            **{axis[:2]: 2},
            vpp=2 if "interleaved" in words else 1,
            sequence_parallel="no" not in words,
            schedule=schedules[0] if schedules else "1f1b",
            shard=shards[0] if shards else "optimizer",
            recompute=tuple(recompute),
        )
        layout = replace(layout, layers=even_layers(8, layout.num_stages))
        stages = predict_memory(SMOKE_MODEL, layout, seq_len=2048, num_micro_batches=8 // layout.dp)
        yield name, float(measured), max(stage.peak_allocated_bytes for stage in stages) / GIB


def report(rows: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    peaks, refused = measured_peaks(rows)
    groups: defaultdict[str, list[Peak]] = defaultdict(list)
    for peak in peaks:
        groups[peak.group].append(peak)
    lines = ["# Memory: predicted and measured", "", "## Peaks by source", ""]
    lines += [
        "| source | rows | mean error | worst | bias | Megatron's formula: mean | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, members in sorted(groups.items()):
        errors, formula = [p.error for p in members], [abs(p.megatron_error) for p in members]
        lines.append(
            f"| {name} | {len(members)} | {mean(map(abs, errors)):.2%} | {max(map(abs, errors)):.2%} | "
            f"{mean(errors):+.2%} | {mean(formula):.1%} | {max(formula):.1%} |"
        )
    lines += ["", "## Every row", "", "| source | run | measured | predicted | error | formula | peaks at |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {p.group} | {p.name} | {p.measured:.2f} | {p.predicted:.2f} | {p.error:+.2%} | "
        f"{p.megatron_error:+.1%} | {p.at} |"
        for p in sorted(peaks, key=lambda p: (p.group, p.name))
    ]
    lines += ["", "Not predicted:", "", *(f"- {count} x {problem}" for problem, count in refused.items())]

    lines += [
        "",
        "## Reserved by the allocator (replayed)",
        "",
        "| run | measured | replayed | error |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {real:.2f} | {said:.2f} | {said / real - 1:+.2%} |" for name, real, said in reserved(rows)]

    own = list(own_runs())
    lines += ["", "## Our own trainer on two H200 (allocated, bfloat16)", ""]
    lines += ["| layout | measured | predicted | error |", "|---|---|---|---|"]
    lines += [f"| {name} | {real:.1f} | {said:.2f} | {said / real - 1:+.1%} |" for name, real, said in own]
    lines += ["", f"Mean error {mean(abs(said / real - 1) for _, real, said in own):.2%}; measured to 0.1 GiB."]

    layouts = list(sweeps(rows))
    answer: dict[str, Any] = {"peaks": [vars(p) | {"error": p.error} for p in peaks], "not_predicted": dict(refused)}
    if layouts:
        lines += ["", "## Fits or not: A100-80GB sweeps of 2311.05610", ""]
        lines += ["| layouts | margin | rows | right | missed out-of-memory |", "|---|---|---|---|---|"]
        models = sorted({one.model for one in layouts})
        for model in [*models, "all"]:
            members = [one for one in layouts if model in (one.model, "all")]
            for deviations in DEVIATIONS:
                right, missed = score(members, deviations)
                lines.append(f"| {model} | {deviations} | {len(members)} | {right:.1%} | {missed:.1%} |")
        for held_out in models:
            margin = chosen([one for one in layouts if one.model != held_out] or layouts)
            right, missed = score([one for one in layouts if one.model == held_out], margin)
            lines.append(f"| {held_out}, margin chosen on the others | {margin} | | {right:.1%} | {missed:.1%} |")
        lines += ["", f"Megatron's formula with a threshold fitted on these rows: {best_threshold(layouts):.1%} right."]
        wrong = [one for one in layouts if one.fits[STATED] == one.oom]
        lines += ["", f"Wrong at {STATED}:", ""]
        lines += [
            f"- {'missed' if one.oom else 'false alarm'}: {one.name}"
            for one in sorted(wrong, key=lambda w: (w.oom, w.name))
        ]
        answer["fits"] = {model: score([o for o in layouts if o.model == model], STATED) for model in models}
        answer["fits"]["all"] = score(layouts, STATED)
    return "\n".join([*lines, ""]), answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, help="folder for predict_memory.md and predict_memory.json")
    options = parser.parse_args()
    with options.rows.open(encoding="utf-8", newline="") as file:
        text, answer = report(list(csv.DictReader(file)))
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "predict_memory.md").write_text(text, encoding="utf-8")
        (options.out / "predict_memory.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
