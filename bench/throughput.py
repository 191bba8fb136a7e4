"""Training throughput of triweave and its peers: the same GPUs, shapes and tokens a step, and one table.

    python bench/throughput.py                              # two GPUs: the best settings found, Llama-3-8B at 8,192
    python bench/throughput.py --set all --shape 8b-8k --shape 8b-4k --shape 70b-4k --out runs/throughput
    python bench/throughput.py --only triweave --set all    # all of ours, in one pair of processes
    python bench/throughput.py --shape tiny                 # two CPU processes, a rehearsal

Cases of one system that follow each other share their processes, with random weights and tokens: two steps to warm up,
then the median of four. A case's result is one JSON file in the output folder; a case whose file is there is not run
again, so that a call that was cut short is continued by the same call, and a failed case is tried again once its file
is gone. A case that does not fit, or whose system is not installed, is a row that says so, and ends no other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "peers")]

from launch import run_session  # noqa: E402
from settings import SETS, SHAPES, cases_of, sessions  # noqa: E402
from workload import Case, model_flops_utilization  # noqa: E402

OURS = "triweave"
HEAD = (
    "| system | layout | settings | tokens/s/GPU | MFU, full attention | MFU, causal | peak GiB | step s (range)"
    " | ours / best peer |"
)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: a table for each shape and layout, the fastest first, then what could not be measured and why."""
    groups: dict[tuple[str, str], list[tuple[Case, dict[str, Any]]]] = {}
    for row in rows:
        case = Case(**row["case"])
        groups.setdefault((case.shape, case.layout), []).append((case, row))
    parts = []
    for (shape, layout), members in groups.items():
        ran = sorted((m for m in members if m[1]["outcome"] == "ok"), key=lambda m: statistics.median(m[1]["step_s"]))
        peers = [statistics.median(row["step_s"]) for case, row in ran if case.system != OURS]
        tokens = members[0][0].tokens
        lines = [f"### {shape}, {layout}: {tokens:,} tokens a step", "", HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
        lines += [_line(case, row, min(peers, default=None)) for case, row in ran]
        lines += [
            f"| {case.system} | {layout} | {case.settings} | {row['outcome']} | | | | | |"
            for case, row in members
            if row["outcome"] != "ok"
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(case: Case, row: dict[str, Any], best_peer_s: float | None) -> str:
    median = statistics.median(row["step_s"])
    ratio = f"{best_peer_s / median:.3f}" if case.system == OURS and best_peer_s else ""
    cells = [
        case.system,
        case.layout,
        case.settings,
        f"{case.tokens / median / case.world_size:,.0f}",
        f"{model_flops_utilization(case, median, causal=False):.1%}",
        f"{model_flops_utilization(case, median, causal=True):.1%}",
        f"{row['peak_allocated_gib']:.1f}",
        f"{median:.3f} ({min(row['step_s']):.3f} to {max(row['step_s']):.3f})",
        ratio,
    ]
    return f"| {' | '.join(cells)} |"


def ahead(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: on each shape the best of every system over all layouts, and ours against it."""
    best: dict[tuple[str, str], tuple[float, Case]] = {}
    for row in rows:
        if row["outcome"] == "ok":
            case = Case(**row["case"])
            speed = case.tokens / statistics.median(row["step_s"]) / case.world_size
            key = case.shape, case.system
            best[key] = max(best.get(key, (0.0, case)), (speed, case), key=lambda pair: pair[0])
    lines = ["| shape | system | best tokens/s/GPU | by | ours / this |", "|---|---|---|---|---|"]
    for (shape, system), (speed, case) in best.items():
        ours = best.get((shape, OURS))
        ratio = f"{ours[0] / speed:.3f}" if ours and system != OURS else ""
        lines.append(f"| {shape} | {system} | {speed:,.0f} | {case.layout}, {case.settings} | {ratio} |")
    return "\n".join(lines)


def notes(rows: Iterable[dict[str, Any]]) -> str:
    """What stands below the table: how each system computed, and how the failed cases ended."""
    rows = list(rows)
    said = sorted({f"- {row['notes']} (torch {row['torch']}, {row['device']})" for row in rows if "notes" in row})
    for row in rows:
        if row.get("logged_tokens_per_s"):
            said.append(f"- {Case(**row['case']).name} itself logs {row['logged_tokens_per_s']:,.0f} tokens/s/GPU")
    losses = {Case(**row["case"]).name: row.get("loss") for row in rows if row.get("loss")}
    if losses:
        told = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        said.append(f"- loss of the last step, on random tokens: {told}")
    for row in rows:
        if row["outcome"] not in ("ok", "out of memory") and "log_tail" in row:
            said += [f"\n{Case(**row['case']).name}: {row['outcome']}", *(f"    {line}" for line in row["log_tail"])]
    return "\n".join(said)


def run(waiting: list[Case], out: Path, limit_s: float, end: float, marks: Mapping[str, Any] | None = None) -> None:
    """Run cases in their order and write each one's row into `out` as it comes, until all are done or time is over.

    What `marks` holds goes into every row.
    """
    known = {case.name: case for case in waiting}
    while waiting and time.monotonic() < end:
        together = sessions(waiting)[0]
        succeeded = False
        for row in run_session(together, out.resolve() / together[0].name, limit_s, end):
            case = Case(**row["case"])
            waiting.remove(known[case.name])
            if row["outcome"] not in ("ok", "out of memory") and succeeded:
                # Perhaps for what ran before it: it is tried alone, as the first of new processes.
                print(f"{case.name}: {row['outcome']} after other cases, tried again", flush=True)
                waiting.insert(0, known[case.name])
                continue
            succeeded = row["outcome"] == "ok"
            (out / f"{case.name}.json").write_text(json.dumps(row | dict(marks or {}), indent=1))
            print(f"{case.name}: {row['outcome']}, {row['wall_s']} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="best", choices=SETS, help="which list of cases")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be given more than once")
    parser.add_argument("--only", default="", help="cases whose name holds one of these, between commas")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput"), help="results; what is there is not rerun")
    parser.add_argument("--limit-s", type=int, default=150, help="of one case, after which its ranks end")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="no case goes on beyond this")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    options = parser.parse_args()
    cases = cases_of(options.set, options.shape or ["8b-8k"])
    cases = [case for case in cases if any(wanted in case.name for wanted in options.only.split(","))]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    paths = {case.name: options.out / f"{case.name}.json" for case in cases}
    waiting = [case for case in cases if not paths[case.name].exists()]
    run(waiting, options.out, options.limit_s, time.monotonic() + options.budget_s)
    rows = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    print(f"\n{table(rows)}\n\n{ahead(rows)}\n\n{notes(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
