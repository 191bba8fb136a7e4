"""Runs the configurations of a campaign: those of two GPUs in one pair of processes, the others each on one GPU.

Every configuration appends a row to the results as soon as it is measured, so a run that is cut keeps what it has and
the next one goes on. One that fails is a row with its error. After a failure in the pair both processes are started
anew, for a GPU that waits for its peer cannot be called back; alone, the next one follows in the same process.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from campaign_cases import Case
from measuring import Watchdog, wait

from triweave.config.schema import RuntimeConfig
from triweave.dryrun.batch import make_batch
from triweave.dryrun.on_gpu import OutOfMemory, fill_on_device, measure_rank
from triweave.errors import RunFailed
from triweave.training.engine import build_engine
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.start_ranks import run_ranks
from triweave.training.step import train_step

WARM_UP, TIMED = 2, 4
ALONE_TIMED = 3
LEARNING_RATE, MAX_GRAD_NORM = 1e-6, 1.0
LIMIT_S = 60.0
"""A configuration that takes longer hangs."""
MAX_FAILURES = 3
"""Times that the pair is started anew."""


@dataclass(frozen=True, slots=True)
class Session:
    """What the processes of a campaign share; times are of `time.monotonic`, one clock for all processes of a host."""

    results: Path
    told_by: str
    """Hash of the file of predictions."""
    end_s: float
    """No configuration is begun later."""

    def rows(self) -> list[dict[str, Any]]:
        """What is there so far; a line that was cut off is none."""
        if not self.results.exists():
            return []
        found = []
        for line in self.results.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def todo(self, cases: Sequence[Case]) -> list[Case]:
        """Cases without a row."""
        done = {row["name"] for row in self.rows() if row["told_by"] == self.told_by}
        return [case for case in cases if case.name not in done]

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row, in one write."""
        line = json.dumps({"name": name, "told_by": self.told_by, **row})
        with self.results.open("a") as file:
            file.write(line + "\n")
        print(line[:400], flush=True)

    def begun(self, who: str) -> Path:
        """Where process `who` says what it is at."""
        return self.results.with_name(f".{self.results.name}.{who}")


def run_campaign(cases: Sequence[Case], session: Session, *, gpus: int) -> None:
    """Run what has no row yet: whole runs of one GPU, which are short, pairs, ranks alone. Says of what it leaves."""
    session.results.parent.mkdir(parents=True, exist_ok=True)
    _run_alone([case for case in cases if case.layout.world_size == 1], session, gpus)
    for _ in range(1 + MAX_FAILURES):
        pairs = session.todo([case for case in cases if case.on_two]) if gpus > 1 else []
        if not pairs or time.monotonic() > session.end_s:
            break
        if run_ranks(2, partial(measure_pairs, pairs, session)):
            at = session.begun("pair")
            name = at.read_text() if at.exists() else pairs[0].name
            if name in {case.name for case in session.todo(pairs)}:
                session.add(name, {"failed": "a process ended without a word, or none went on"})
    _run_alone([case for case in cases if not case.on_two], session, gpus)
    left = session.todo(cases)
    print(f"{len(cases) - len(left)} of {len(cases)} configurations have a row", file=sys.stderr)


def _run_alone(cases: Sequence[Case], session: Session, gpus: int) -> None:
    todo = session.todo(cases)
    if todo and time.monotonic() < session.end_s:
        run_ranks(min(2, gpus), partial(measure_alone, todo, session))


def measure_pairs(cases: Sequence[Case], session: Session, process: Process) -> int:
    """One of the two processes: all cases in turn.

    Raises:
        RunFailed: one failed; its row says how.
    """
    watchdog = Watchdog(LIMIT_S)
    threading.Thread(target=watchdog.watch, daemon=True).start()
    device = choose_device(RuntimeConfig(), process)
    with process_group(process, device, int(2 * LIMIT_S)):
        for case in cases:
            watchdog.begin(case.name)
            if not _go_on(session, device):
                break
            if process.rank == 0:
                session.begun("pair").write_text(case.name)
            begin = time.monotonic()
            try:
                found = measure_pair(case, device)
            except Exception:  # whatever it is, it is this row's result
                session.add(case.name, {"failed": _last_lines()})
                raise RunFailed(f"{case.name} failed on rank {process.rank}") from None
            if process.rank == 0:
                session.add(case.name, {**found, "wall_s": time.monotonic() - begin, **machine(device)})
        watchdog.deadline = float("inf")
    return 0


def _go_on(session: Session, device: torch.device) -> bool:
    """Whether there is time left, as rank 0 says."""
    left = torch.tensor(session.end_s - time.monotonic(), dtype=torch.float32, device=device)
    dist.broadcast(left, 0)
    return float(left) > 0


def measure_pair(case: Case, device: torch.device) -> dict[str, Any]:
    """Steps of the trainer as it is; the same row on both ranks."""
    clear(device, case)
    idle = used_on_card(device)
    resolved = case.resolved
    engine = build_engine(resolved, device, lambda units: fill_on_device(units, case.spec))
    # The same tokens on both ranks: those of a tensor-parallel group look up each other's words.
    torch.manual_seed(0)
    batch = make_batch(resolved, device)
    times = []
    for _ in range(WARM_UP + TIMED):
        begin = time.perf_counter()
        loss, grad_norm = train_step(engine, batch, LEARNING_RATE, MAX_GRAD_NORM)
        times.append(time.perf_counter() - begin)
    mine = {
        **memory_of(device),
        "unseen_bytes": engine.unseen_bytes,
        "idle_bytes": idle,
        "step_s": statistics.median(times[WARM_UP:]),
        "steps_s": times,
    }
    carried_by = (engine.sharding.memory if case.layout.dp > 1 else engine.tp.transport).name
    wait(device)
    # Peers may still copy out of this rank's memory.
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    del engine, batch
    gc.collect()
    # The groups of this case end with it: every communicator of NCCL takes memory.
    for group in [one for one in dist.distributed_c10d._world.pg_map if one is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, mine)
    return {
        "ranks": ranks,
        "step_s": max(rank["step_s"] for rank in ranks),
        "loss": loss,
        "grad_norm": grad_norm,
        "carried_by": carried_by,
    }


def measure_alone(cases: Sequence[Case], session: Session, process: Process) -> int:
    """One of the processes that run alone: its share of the cases."""
    watchdog = Watchdog(LIMIT_S)
    threading.Thread(target=watchdog.watch, daemon=True).start()
    device = choose_device(RuntimeConfig(), process)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for case in cases[process.rank :: process.world_size]:
        if time.monotonic() > session.end_s:
            break
        watchdog.begin(case.name)
        begin = time.monotonic()
        try:
            row = measure_one(case, device)
        except Exception:  # as above
            row = {"failed": _last_lines()}
        session.add(case.name, {**row, "wall_s": time.monotonic() - begin, **machine(device)})
    watchdog.deadline = float("inf")
    return 0


def measure_one(case: Case, device: torch.device) -> dict[str, Any]:
    """A run of one GPU, or a rank without the others."""
    clear(device, case)
    idle = used_on_card(device)
    found = measure_rank(case.resolved, case.rank or 0, device, steps=ALONE_TIMED)
    if isinstance(found, OutOfMemory):
        return {"failed": f"out of memory at {found.at}: {found.message}"}
    mine = {**memory_of(device), "unseen_bytes": 0, "idle_bytes": idle, "step_s": found.step_s}
    return {
        "ranks": [mine],
        "step_s": found.step_s,
        "actions": [[kind.value, stage, seconds] for (kind, stage), seconds in found.actions.items()],
        "rest_s": found.rest_s,
        "loss": found.loss,
        "grad_norm": found.grad_norm,
    }


def clear(device: torch.device, case: Case) -> None:
    """Give back what earlier cases have left, and set the allocator as this one wants it."""
    gc.collect()
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{case.expandable}")
    torch.empty(1, device=device)
    torch.cuda.reset_peak_memory_stats(device)


def memory_of(device: torch.device) -> dict[str, int]:
    """What the allocator and the driver say; zeros on a CPU, where neither is there."""
    if device.type != "cuda":
        return {"allocated_bytes": 0, "reserved_bytes": 0, "used_bytes": 0}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "used_bytes": used_on_card(device),
    }


def used_on_card(device: torch.device) -> int:
    """What the driver has given out, to whom ever."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def machine(device: torch.device) -> dict[str, str]:
    """What it ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}


def _last_lines() -> str:
    return "\n".join(traceback.format_exc().strip().splitlines()[-6:])
