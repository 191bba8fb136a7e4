"""What surrounds the training of one rank: the lock, the meeting of the ranks, the watch, the end of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from triweave.checkpoint.owner import Owner
from triweave.config.validate import ResolvedRun
from triweave.data.cache import PreparedData
from triweave.errors import RunFailed
from triweave.groups import Groups
from triweave.recovery.agreement import check_collectives, check_same, exchange, facts_of, largest, settled
from triweave.recovery.out_of_memory import explain_out_of_memory, is_out_of_memory
from triweave.recovery.self_check import LIMIT_S, check_groups, together
from triweave.recovery.stop import StopRequest, stop_requests
from triweave.recovery.watch import Watch, watching
from triweave.training.claim import claimed_run
from triweave.training.determinism import deterministic
from triweave.training.endings import noted, noting_leave
from triweave.training.grid_map import Place, gather_places
from triweave.training.process import Process
from triweave.training.processes import choose_device, meet, process_group
from triweave.training.rank_order import check_rank_order, refusing_for_all
from triweave.training.start_ranks import lost_a_peer


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that has met the others."""

    process: Process
    device: torch.device
    stop: StopRequest
    asked: int
    """Number of the signal by which any rank was asked to stop before all had met; 0 if none was, the same on all."""
    watch: Watch
    meeting: Store | None
    """Where the ranks have met; None for a single process."""
    timeout_s: float
    """In which the others answer."""
    places: tuple[Place, ...]
    """Of all ranks on rank 0, on the others their own."""
    owner: Owner | None
    """Who the run is, on rank 0: what it saves names it."""

    def together(self, what: str) -> AbstractContextManager[None]:
        """Say which ranks are missing when `what`, that all ranks do in the block, fails for want of them."""
        return together(self.meeting, what, self.process.rank, self.process.world_size)

    def leave_stopped(self) -> None:
        """Let no rank go before rank 0 has written down that the run is stopped, nor rank 0 before all know it.

        A launcher ends the others when it sees one go, and rank 0 may keep the store. All ranks call it together.

        Raises:
            RunFailed: a rank does not come.
        """
        if self.meeting is not None:
            number, size = self.process.rank, self.process.world_size
            settled(self.meeting, "stopped", number, "", self.timeout_s)
            exchange(self.meeting, "leaving", number, size, "", self.timeout_s)

    def check_groups(self, groups: Groups) -> str:
        """Try every process group once. All ranks call it together, before the first step. Returns how it went.

        Raises:
            RunFailed: a group does not work; the message names it, the operation and the ranks.
        """
        begin = time.monotonic()
        count = check_groups(groups, self.meeting, min(LIMIT_S, self.timeout_s))
        return f"{count} process groups of rank {self.process.rank} tried in {time.monotonic() - begin:.2f} s"

    def check_collectives(self) -> None:
        """See that all ranks have called the same collectives so far. All ranks call it together, after a step.

        Of gloo's only: NCCL's records have not been held against this on every axis (`bench/survive.py --only
        collectives` does it), and a false alarm would stop a good run.

        Raises:
            RunFailed: one has not.
        """
        if self.device.type == "cuda":
            return
        check_collectives(self.meeting, self.process.rank, self.process.world_size, self.timeout_s)


@contextmanager
def at_work(resolved: ResolvedRun, prepared: PreparedData, process: Process) -> Iterator[Rank]:
    """Meet the other ranks, see that all are about to do the same, and be watched while the block runs.

    Raises:
        RunFailed: a rank is missing or differs, or memory has run out in the block.
        GivenUp: the run has started so often without a new step that it is not to start again.
        InputError: another job holds the run's folder or its checkpoints, or those are another run's.
    """
    runtime = resolved.run.runtime
    device = choose_device(runtime, process)
    folder, facts = Path(resolved.run.output_dir), facts_of(resolved, prepared.summary.fingerprint, device)
    with deterministic(runtime), stop_requests(process.stop) as stop, ExitStack() as held:
        owner = None
        if process.rank == 0:
            # By the rank that writes there; the lock goes with it, whatever ends it.
            with refusing_for_all(process):
                owner = held.enter_context(claimed_run(resolved.run, facts))
            held.enter_context(noted(folder, process, lost_a_peer))
        meeting = meet(process, runtime.timeout_s)
        check_rank_order(meeting, process, resolved)
        check_same(meeting, process.rank, process.world_size, facts, runtime.timeout_s)
        asked = largest(meeting, "asked to stop", process.rank, process.world_size, stop.number, runtime.timeout_s)
        if process.rank != 0:
            # Not before: now rank 0 holds the folder and has written this start down.
            held.enter_context(noted(folder, process, lost_a_peer))
        places = gather_places(meeting, process, device, runtime.timeout_s)
        watch = Watch(
            process.rank,
            process.world_size,
            # A connection of its own: the main thread may hold the other one up.
            None if meeting is None else meeting.clone(),  # type: ignore[attr-defined]
            noting_leave(folder, process),
            step_limit_s=runtime.hang_timeout_s or runtime.timeout_s,
            other_limit_s=runtime.timeout_s,
            rank_0_keeps_store=process.rank_0_keeps_store,
        )
        rank = Rank(process, device, stop, asked, watch, meeting, runtime.timeout_s, places, owner)
        if asked:
            # No group is made: one rank would leave it while another still enters.
            yield rank
            return
        with watching(watch), process_group(process, device, runtime.collective_timeout_s, meeting):
            try:
                yield rank
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise RunFailed(explain_out_of_memory(error, resolved, process.rank, watch.where())) from None
