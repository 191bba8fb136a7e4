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
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from math import erf, hypot, log, sqrt
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from triweave.errors import InputError
from triweave.layout import Layout, Schedule, Shard, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import GIB, MEGATRON
from triweave.planner.memory import StageMemory, predict_memory
from triweave.planner.memory_programs import PROGRAMS
from triweave.planner.memory_replay import fits, replay_rank
from triweave.planner.published_memory import Case, capacity_of, case_of
from triweave.planner.time_rows import step_s_of_row

DEVIATIONS = (0.0, 0.5, 1.0, 1.5, 2.0)
STATED = 1.0
"""The margin that `fits` takes when nobody asks for another."""
SPARE = (-4.0, -2.0, -1.0, *DEVIATIONS, 4.0, 8.0)
MARGIN = MEGATRON.uncertainty
"""One standard deviation of a margin, as a share of the card."""
SPREAD = hypot(MEGATRON.uncertainty, MEGATRON.allocator_uncertainty)
SPREADS = (0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.055, 0.06, 0.07, 0.08, 0.1)
BINS = (0.0, 0.02, 0.2, 0.5, 0.8, 0.98, 1.01)


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
    """One layout with a known outcome: did it run, and how much does the prediction leave to spare."""

    group: str
    name: str
    oom: bool
    spare: float
    """The most of `SPARE`, in standard deviations, that it leaves and still fits; minus infinity if none."""
    formula_fits: bool
    formula_gib: float

    def fits(self, deviations: float) -> bool:
        return self.spare >= deviations

    def probability(self, spread: float) -> float:
        """Of running out: the middle of the step of `SPARE` that it falls in, under a normal error of `spread`."""
        place = bisect_right(SPARE, self.spare)
        low = SPARE[place - 1] if place else SPARE[0] - 2
        high = SPARE[place] if place < len(SPARE) else SPARE[-1] + 2
        return 0.5 * (1.0 - erf((low + high) / 2 * MARGIN / spread / sqrt(2.0)))


def outcomes(rows: Sequence[dict[str, str]]) -> list[Fit]:
    """Every row that ran or ran out of memory, on a card that the catalogue knows, with a program that is known."""
    with ProcessPoolExecutor() as pool:
        return [one for one in pool.map(outcome, rows, chunksize=8) if one is not None]


def outcome(row: dict[str, str]) -> Fit | None:
    oom, capacity = row["mfu"] == "OOM", capacity_of(row["gpu_type"])
    if capacity is None or not (oom or step_s_of_row(row)):
        return None
    try:
        case = case_of(row)
    except InputError:
        return None

    def too_much(spare: float) -> bool:
        return not fits(case.spec, case.layout, capacity_bytes=capacity, deviations=spare, **arguments(case))

    place = bisect_left(SPARE, True, key=too_much)
    kernel = row["source"].partition("kernel=")[2]
    name = f"{row['model']} seq{row['seq']} {kernel} tp{row['tp']} pp{row['pp']} dp{row['dp']} mbs{row['mbs']}"
    formula = megatron_formula(case)
    return Fit(
        outcome_group(row),
        f"{name} sp{row['sp']} {row['recompute']}",
        oom,
        SPARE[place - 1] if place else float("-inf"),
        formula <= capacity,
        formula / GIB,
    )


def outcome_group(row: dict[str, str]) -> str:
    word = next(word for word, _ in PROGRAMS if word in row["source"])
    return f"{word} {row['model']}" if word == "2311.05610" else word.lower()


def score(layouts: Sequence[Fit], deviations: float) -> tuple[float, float]:
    """Share that is right, and share that runs out of memory although it was said to fit."""
    right = mean(one.fits(deviations) != one.oom for one in layouts)
    return right, mean(one.fits(deviations) and one.oom for one in layouts)


def chosen(layouts: Sequence[Fit]) -> float:
    return max(DEVIATIONS, key=lambda deviations: (score(layouts, deviations)[0], deviations))


def surprise(layouts: Sequence[Fit], spread: float) -> float:
    """Mean negative log likelihood of the outcomes."""
    chances = [(one.probability(spread), one.oom) for one in layouts]
    return mean(-log(max(1e-6, chance if oom else 1 - chance)) for chance, oom in chances)


def chosen_spread(layouts: Sequence[Fit]) -> float:
    return min(SPREADS, key=lambda spread: surprise(layouts, spread))


def best_threshold(layouts: Sequence[Fit]) -> float:
    """Share that Megatron's formula gets right with a threshold fitted on these very layouts."""
    return max(mean((one.formula_gib > limit.formula_gib) == one.oom for one in layouts) for limit in layouts)


def outcome_report(layouts: list[Fit]) -> tuple[list[str], dict[str, Any]]:
    groups: defaultdict[str, list[Fit]] = defaultdict(list)
    for one in layouts:
        groups[one.group].append(one)
    lines = ["", "## Fits or not, by source", ""]
    lines += [
        "| source | rows | ran out | right | false alarms | missed | right by Megatron's formula and the capacity |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, members in [*sorted(groups.items()), ("all", layouts)]:
        right, missed = score(members, STATED)
        count, wrong = len(members), round((1 - right) * len(members))
        unseen = round(missed * count)
        formula = mean(one.formula_fits != one.oom for one in members)
        lines.append(
            f"| {name} | {count} | {sum(one.oom for one in members)} | {right:.1%} | {wrong - unseen} | {unseen} | "
            f"{formula:.1%} |"
        )
    sweeps = {name: members for name, members in groups.items() if name.startswith("2311.05610")}
    both = [one for members in sweeps.values() for one in members]
    if both:
        lines += ["", "## Fits or not: A100-80GB sweeps of 2311.05610, by margin", ""]
        lines += ["| layouts | margin | rows | right | missed out-of-memory |", "|---|---|---|---|---|"]
        for name, members in [*sorted(sweeps.items()), ("both", both)]:
            for deviations in DEVIATIONS:
                right, missed = score(members, deviations)
                lines.append(f"| {name} | {deviations} | {len(members)} | {right:.1%} | {missed:.1%} |")
        for held_out, members in sorted(sweeps.items()):
            margin = chosen([one for one in both if one.group != held_out] or both)
            right, missed = score(members, margin)
            lines.append(f"| {held_out}, margin chosen on the other | {margin} | | {right:.1%} | {missed:.1%} |")
        lines += ["", f"Megatron's formula with a threshold fitted on these rows: {best_threshold(both):.1%} right."]
    lines += ["", f"Wrong at {STATED}:", ""]
    wrong_ones = sorted((o for o in layouts if o.fits(STATED) == o.oom), key=lambda o: (o.oom, o.group, o.name))
    lines += [f"- {'missed' if o.oom else 'false alarm'}: {o.group}: {o.name}" for o in wrong_ones]
    lines += ["", *reliability(groups)]
    answer = {name: score(members, STATED) for name, members in [*groups.items(), ("all", layouts)]}
    return lines, answer


def reliability(groups: dict[str, list[Fit]]) -> list[str]:
    """Predicted probability against observed share, the spread of each group chosen on all other groups."""
    everything = [one for members in groups.values() for one in members]
    chances: list[tuple[float, float, bool]] = []
    lines = ["## Is the probability of running out of memory right", ""]
    lines += ["| group left out | spread chosen on the others | surprise with it | with the stated one |"]
    lines += ["|---|---|---|---|"]
    for name, members in sorted(groups.items()):
        spread = chosen_spread([one for one in everything if one.group != name] or members)
        lines.append(f"| {name} | {spread} | {surprise(members, spread):.3f} | {surprise(members, SPREAD):.3f} |")
        chances += [(one.probability(spread), one.probability(SPREAD), one.oom) for one in members]
    best = chosen_spread(everything)
    lines += ["", f"The stated spread is {SPREAD:.3f} of the card; the best on all rows is {best}.", ""]
    lines += ["| probability | rows, left out | predicted | ran out | rows, stated spread | predicted | ran out |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for low, high in pairwise(BINS):
        cells = [f"{low} to {high}"]
        for which in (0, 1):
            inside = [(one[which], one[2]) for one in chances if low <= one[which] < high]
            cells.append(str(len(inside)))
            cells += [f"{mean(part):.1%}" for part in zip(*inside, strict=True)] if inside else ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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

    answer: dict[str, Any] = {"peaks": [vars(p) | {"error": p.error} for p in peaks], "not_predicted": dict(refused)}
    if layouts := outcomes(rows):
        more, answer["fits"] = outcome_report(layouts)
        lines += more
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
