"""Start the ranks of a session, take each case's result as it comes, and leave no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import session
from torchtitan_log import logged_tokens_per_s
from workload import SYSTEMS, WARM_UP, Case

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "bench" / "peers"
SETTLE_S = 10.0
"""Time for the other ranks to end by themselves after one has failed."""
START_S = 60.0
"""Time beyond a case's own limit for processes to start, after which they are killed from here."""
TAIL_LINES = 8
NO_NUMBER = "loss is no number"
"""How a case ended whose steps were timed on nothing that a run would compute with."""


def run_session(cases: list[Case], folder: Path, limit_s: float, end: float) -> Iterator[dict[str, Any]]:
    """Run cases of one system in the same processes, one a rank, and yield their rows.

    The rows are those of the cases that ran, in their order, and that of the case which ended the session; or those of
    all, where the ranks ended before they began one. A session that was cut by `end`, or whose ranks want to start
    anew, gives none for the cases it left.

    Args:
        cases: of one system and number of processes.
        folder: made empty; it keeps logs and results.
        limit_s: of one case.
        end: moment of `time.monotonic` at which all are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    session.write_cases(cases, folder)
    world = cases[0].num_processes
    ranks = _start(cases[0], folder, limit_s)
    waiting, since = list(cases), time.monotonic()
    settled: float | None = None
    try:
        while waiting:
            now, codes = time.monotonic(), [rank.poll() for rank in ranks]
            paths = [session.result_path(folder, waiting[0], rank) for rank in range(world)]
            if all(path.exists() for path in paths):
                case = waiting.pop(0)
                log = session.log_of(case, (folder / "rank-0.log").read_text(errors="replace"))
                row = {"case": asdict(case), "wall_s": round(now - since, 1)}
                row["logged_tokens_per_s"] = logged_tokens_per_s(log, after_step=WARM_UP)
                yield row | _merge([json.loads(path.read_text()) for path in paths])
                since = now
                continue
            if settled is None and any(code is not None for code in codes):
                settled = now + SETTLE_S
            if all(code is not None for code in codes) or now > (settled or min(end, since + limit_s + START_S)):
                break
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks[0].pid, signal.SIGKILL)
        exits = [rank.wait() for rank in ranks]
    cut = time.monotonic() >= end and not any(code not in (0, -signal.SIGKILL) for code in exits)
    if waiting and session.NOT_CLEAN not in exits and not cut:
        wall_s = round(time.monotonic() - since, 1)
        for case in waiting[:1] if _began(waiting[0], folder) else waiting:
            yield {"case": asdict(case), "wall_s": wall_s} | _failure(case, folder, exits)


def _start(case: Case, folder: Path, limit_s: float) -> list[subprocess.Popen[bytes]]:
    script = str(PEERS / SYSTEMS[case.system])
    command = [sys.executable, str(PEERS / "guarded.py"), str(int(limit_s + START_S)), sys.executable, script]
    environment = _environment(case, folder, limit_s)
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(case.num_processes):
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
    return ranks


def _environment(case: Case, folder: Path, limit_s: float) -> dict[str, str]:
    """What torchrun would set, and the same allocator for every system: the one that torchtitan's launcher takes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // case.num_processes)),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # Multicast, which NCCL takes among more than two GPUs, needs the fabric manager to grant it.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(case.num_processes),
        "LOCAL_WORLD_SIZE": str(case.num_processes),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH")])),
        session.FOLDER: str(folder),
        session.LIMIT: str(int(limit_s)),
    }


def _merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks': a step takes as long as its slowest rank, and memory is that of the fullest."""
    steps = [max(step) for step in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    peak = max(rank["peak_allocated_gib"] for rank in ranks)
    # A GPU at its power limit is faster on what is no number.
    outcome = "ok" if all(isfinite(rank.get("loss") or 0.0) for rank in ranks) else NO_NUMBER
    return ranks[0] | {"outcome": outcome, "step_s": steps, "peak_allocated_gib": peak}


def _began(case: Case, folder: Path) -> bool:
    """Whether a rank came as far as this case."""
    logs = (path.read_text(errors="replace") for path in folder.glob("rank-*.log"))
    return any(session.headline(case) in log for log in logs)


def _failure(case: Case, folder: Path, codes: list[int]) -> dict[str, Any]:
    """What the rank that failed says, or rank 0 where none did."""
    failed = next((rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)), 0)
    log = session.log_of(case, (folder / f"rank-{failed}.log").read_text(errors="replace"))
    return {"outcome": _outcome(codes, log), "log_tail": log.splitlines()[-TAIL_LINES:]}


def _outcome(codes: list[int], log: str) -> str:
    if "OutOfMemoryError" in log:
        return "out of memory"
    if "ModuleNotFoundError" in log or "PackageNotFoundError" in log:
        return "not installed"
    if -signal.SIGALRM in codes or all(code == -signal.SIGKILL for code in codes):
        return "timed out"
    return "failed"
