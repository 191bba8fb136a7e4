"""Step times predicted and measured: the planner's time model held against published runs.

    python bench/predict_time.py [ROWS.csv ...] [--out bench/results] [--docs docs/planner-time.md]

Folds: the two numbers of a stack (its efficiency, the share of the links it reaches) fitted on one group of
measurements and tried on groups that had no part in it, beside a baseline with one fitted efficiency constant.
Unseen GPUs: every row of a GPU priced without a number that came from it. Sources: every row with the constants that
ship. Then this project's own runs, what the rows themselves can bear (runs measured twice, the order that noise
allows, FLOP conventions), the largest misses, and the rows that cannot be priced with the reason.
Writes predict_time.md and .json into --out, runs/ if it is not given; with --docs the tables are put into the page too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from time_cases import Case, Prediction, fit, one_constant, predict, read, score
from time_doubts import flop_conventions, noise, repeated, repeats, sheets
from time_groups import FOLDS, LINKS, group_of
from time_own import CAUSES, one_layer, own_causes, own_runs, read_own
from time_unseen import unseen_gpus

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = ("published_runs.csv", "published_vtrain_single_node.csv")


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
SHEET_HEADER = [
    *("sheet", "layouts", "tau", "tau of a perfect model", "pick's loss", "a perfect model's"),
    "tau without two-stage layouts",
]
OWN_HEADER = ["model", "layout", "measured s", "error before the run", "error now", "in range", "fused, forecast s"]
CAUSE_HEADER = ["model", "layout", "missing", "gathers as measured", *(name for name, _ in CAUSES), "left"]
OWN_RUNS = ROOT / "bench" / "results" / "2026-11-30-speed-2xh200.json"
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
    own = list(read_own(OWN_RUNS))
    parts = [
        "### Calibrated on one group, tried on another\n",
        "Fitted: the stack's efficiency, and in the first three folds also the share of the links it reaches.\n",
        markdown(FOLD_HEADER, table),
        "\n".join(sentences) + "\n",
        "### GPUs that no number came from\n",
        markdown(["GPU", "share of peak known from", "n", "MAPE", "mean", "in range"], unseen_gpus(cases)),
        "### Our own steps on two H200\n",
        markdown(OWN_HEADER, own_runs(own)),
        "Milliseconds that were missing, and where they went:\n",
        markdown(CAUSE_HEADER, own_causes(own)),
        "### One layer of our trainer, operation by operation\n",
        "Llama-3-8B, 8,192 tokens, one H200, nothing recomputed, nothing communicated.\n",
        markdown(["kernels", "operation", "TFLOP", "GB moved", "forward ms", "backward ms"], one_layer()),
        "### Every source, with the constants that ship\n",
        summary("All priced rows", [(case, predict(case)) for case in cases])[0] + "\n",
        markdown(SOURCE_HEADER, by_source(cases)),
        "### Order and pick on the Llama sweeps, and what noise allows\n",
        f"One measurement has a standard deviation of {100 * noise(repeats(cases)):.2f} %, from the pairs below.\n",
        markdown(SHEET_HEADER, sheets(cases)),
        "### One layout, measured twice\n",
        markdown(["source", "model", "run", "measured", "apart"], repeated(cases)),
        "### FLOP conventions of the rows that print FLOP/s or MFU\n",
        markdown(["source", "rows", "convention", "half within", "rows that differ"], flop_conventions(cases)),
        "### The largest misses (vTrain's single-node rows aside)\n",
        markdown(["error", "source", "model", "run", "layout", "measured"], misses(cases, 30)),
        "### Rows that are not priced\n",
        markdown(["source", "reason", "rows"], [[*key, str(n)] for key, n in sorted(left_out.items())]),
    ]
    return "\n".join(parts), numbers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Step times predicted and measured.")
    parser.add_argument("rows", nargs="*", type=Path, default=[DATA / name for name in FILES])
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of what is written")
    parser.add_argument("--docs", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    absent = [str(path) for path in options.rows if not path.is_file()]
    if absent:
        print(f"no such file: {', '.join(absent)}", file=sys.stderr)
        return 2
    text, numbers = tables(*read(options.rows))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "predict_time.md").write_text(text, encoding="utf-8")
    (options.out / "predict_time.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        before, _, rest = page.partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        options.docs.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
