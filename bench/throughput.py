"""Training throughput of triweave and its peers: the same GPUs, shapes and tokens a step, and one table.

    python bench/throughput.py                              # two GPUs: the best settings found, Llama-3-8B at 8,192
    python bench/throughput.py --set all --shape 8b-4k --shape 70b-4k --out runs/throughput
    python bench/throughput.py --shape tiny                 # two CPU processes, a rehearsal

Every case runs in processes of its own, with random weights and tokens: three steps to warm up, then the median of
six. Its result is one JSON file in the output folder; a case whose file is there is not run again, so that a call that
was cut short is continued by the same call, and a failed case is tried again once its file is gone. A case that does
not fit, or whose system is not installed, is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "bench" / "peers"
sys.path[:0] = [str(ROOT), str(PEERS)]

from torchtitan_log import logged_tokens_per_s  # noqa: E402
from workload import SYSTEMS, WARM_UP, Case, case_sets, model_flops_utilization, shapes, write_case  # noqa: E402

OURS = "triweave"
SETTLE_S = 10.0
"""Time for the other ranks to end by themselves after one has failed."""
MARGIN_S = 20.0
"""Time beyond the ranks' own limit after which they are killed from here."""
TAIL_LINES = 8
HEAD = (
    "| system | layout | settings | tokens/s/GPU | MFU, full attention | MFU, causal | peak GiB | step s (range)"
    " | ours / best peer |"
)


def run_case(case: Case, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one case, one process a rank, and give back its row; whatever goes wrong is an answer, not an error."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("rank-*"):
        stale.unlink()
    write_case(case, folder / "case.json")
    begin = time.monotonic()
    codes = _run_ranks(case, folder, limit_s)
    row: dict[str, Any] = {"case": asdict(case), "wall_s": round(time.monotonic() - begin, 1)}
    results = [folder / f"rank-{rank}.json" for rank in range(case.world_size)]
    if not any(codes) and all(path.exists() for path in results):
        log = (folder / "rank-0.log").read_text(errors="replace")
        row["logged_tokens_per_s"] = logged_tokens_per_s(log, after_step=WARM_UP)
        return row | _merge([json.loads(path.read_text()) for path in results])
    failed = next((rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)), 0)
    log = (folder / f"rank-{failed}.log").read_text(errors="replace")
    return row | {"outcome": _outcome(codes, log), "log_tail": log.splitlines()[-TAIL_LINES:]}


def _run_ranks(case: Case, folder: Path, limit_s: float) -> list[int]:
    """Exit codes of the ranks, all of which are gone when this returns."""
    script = str(PEERS / SYSTEMS[case.system])
    command = [sys.executable, str(PEERS / "guarded.py"), str(int(limit_s)), sys.executable, script]
    environment = _environment(case, folder)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(case.world_size):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        # One group for all, so that one signal ends them with whatever they have started.
                        process_group=ranks[0].pid if ranks else 0,
                    )
                )
        _wait(ranks, time.monotonic() + limit_s + MARGIN_S)
    finally:
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks[0].pid, signal.SIGKILL)
    return [rank.wait() for rank in ranks]


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until every rank has ended, or `SETTLE_S` after the first that failed, or until the deadline."""
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes):
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + SETTLE_S)
        time.sleep(0.2)


def _environment(case: Case, folder: Path) -> dict[str, str]:
    """What torchrun would set, and the same allocator for every system: the one that torchtitan's launcher takes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // case.world_size)),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(case.world_size),
        "LOCAL_WORLD_SIZE": str(case.world_size),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "BENCH_CASE": str(folder / "case.json"),
    }


def _merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks': a step takes as long as its slowest rank, and memory is that of the fullest."""
    steps = [max(step) for step in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    peak = max(rank["peak_allocated_gib"] for rank in ranks)
    return ranks[0] | {"outcome": "ok", "step_s": steps, "peak_allocated_gib": peak}


def _outcome(codes: list[int], log: str) -> str:
    if "OutOfMemoryError" in log:
        return "out of memory"
    if -signal.SIGALRM in codes or all(code == -signal.SIGKILL for code in codes):
        return "timed out"
    return "failed"


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


def notes(rows: Iterable[dict[str, Any]]) -> str:
    """What stands below the table: how each system computed, and how the failed cases ended."""
    rows = list(rows)
    said = sorted({f"- {row['notes']} (torch {row['torch']}, {row['device']})" for row in rows if "notes" in row})
    for row in rows:
        if row.get("logged_tokens_per_s"):
            said.append(f"- {Case(**row['case']).name} itself logs {row['logged_tokens_per_s']:,.0f} tokens/s/GPU")
    for row in rows:
        if row["outcome"] not in ("ok", "out of memory"):
            said += [f"\n{Case(**row['case']).name}: {row['outcome']}", *(f"    {line}" for line in row["log_tail"])]
    return "\n".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="best", choices=list(case_sets("tiny")), help="which list of cases")
    parser.add_argument("--shape", action="append", choices=list(shapes()), help="may be given more than once")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput"), help="results; what is there is not rerun")
    parser.add_argument("--limit-s", type=int, default=240, help="of one case, after which its ranks end")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="no case goes on beyond this")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    options = parser.parse_args()
    cases = [case for shape in options.shape or ["8b-8k"] for case in case_sets(shape)[options.set]]
    cases = [case for case in cases if options.only in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    end = time.monotonic() + options.budget_s
    for case in cases:
        path = options.out / f"{case.name}.json"
        limit_s = min(options.limit_s, end - time.monotonic())
        if path.exists() or limit_s < 1:
            continue
        row = run_case(case, options.out.resolve() / case.name, limit_s)
        if row["outcome"] == "timed out" and limit_s < options.limit_s:
            print(f"{case.name}: ended with the budget, left for the next call", flush=True)
            continue
        path.write_text(json.dumps(row, indent=1))
        print(f"{case.name}: {row['outcome']}, {row['wall_s']} s", flush=True)
    paths = [options.out / f"{case.name}.json" for case in cases]
    rows = [json.loads(path.read_text()) for path in paths if path.exists()]
    print(f"\n{table(rows)}\n\n{notes(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
