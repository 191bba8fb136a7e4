"""Several cases of one system in the same processes: what is loaded and compiled once is there for all of them.

The command writes the cases into a folder and starts one process a rank on it; each rank works through the list and
leaves one result a case. A rank whose case fails ends, since nobody knows what state its GPU and its peers are in; so
does one that cannot give the memory of a case back. The command then starts new processes for the cases that are left.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workload import Case

FOLDER, LIMIT = "BENCH_SESSION", "BENCH_LIMIT_S"
"""Variables that tell a rank where its cases are, and the seconds that one may take."""
NOT_CLEAN = 75
"""Exit code of a rank that still held memory before its next case: that one was not begun."""
MOST_LEFT_BYTES = 5 * 2**30
"""Context and communicators of a process that has run some cases."""


def write_cases(cases: list[Case], folder: Path) -> None:
    """Write what `read_cases` reads, when `BENCH_SESSION` names `folder`."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


def read_cases() -> list[Case]:
    """The cases that this rank was started for."""
    cases: list[Case] = [Case(**row) for row in json.loads((Path(os.environ[FOLDER]) / "cases.json").read_text())]
    return cases


def result_path(folder: Path, case: Case, rank: int) -> Path:
    """Where a rank leaves its result."""
    return folder / f"{case.name}.rank-{rank}.json"


def headline(case: Case) -> str:
    """The line of a rank's log with which a case begins."""
    return f"=== {case.name} ==="


def log_of(case: Case, text: str) -> str:
    """The part of a rank's log that is about one case; before the first it is about all of them."""
    _, found, rest = text.partition(f"{headline(case)}\n")
    return rest.partition("\n=== ")[0] if found else text


def measure_all(measure: Callable[[Case], dict[str, Any]]) -> None:
    """Work through this rank's cases; does not return if one fails."""
    folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
    for number, case in enumerate(read_cases()):
        # Set anew for each: its default action ends a process even while it waits in a collective.
        signal.alarm(int(os.environ[LIMIT]))
        if _give_memory_back() > MOST_LEFT_BYTES and number > 0:
            _leave(NOT_CLEAN)
        print(headline(case), flush=True)
        try:
            result = measure(case)
        except BaseException:
            traceback.print_exc()
            _leave(1)
        path = result_path(folder, case, rank)
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)


def _give_memory_back() -> int:
    """Forget the last case. Returns bytes of this rank's GPU that are still taken, by whatever it is."""
    import torch
    import torch.distributed as dist

    if "torch._dynamo" in sys.modules:
        # As in a new process: shapes that changed would otherwise be compiled as variable ones, which is slower.
        torch._dynamo.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    if dist.is_initialized():
        # What a peer has mapped of this rank's memory is free only when the peer has let go of it too.
        dist.barrier(device_ids=[torch.cuda.current_device()])
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _leave(code: int) -> None:
    """End without destructors: they would wait for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
