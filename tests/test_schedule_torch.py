"""Our orders against those that torch.distributed.pipelining runs. No process group: the stages are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from triweave.layout import Schedule
from triweave.schedule import Action, Kind, PipelineSchedule, build_schedule


class RecordingStage:
    """Stands in for a stage of torch's pipeline: computes nothing, sends nothing, remembers what it was told to do."""

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_last = stage_index == num_stages - 1
        self.done: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.done.append(Action(Kind.FORWARD, self.stage_index, micro_batch))
        return torch.zeros(())

    def backward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(Action(Kind.BACKWARD, self.stage_index, micro_batch))

    def no_messages(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, scale: int) -> None:
        pass


@pytest.mark.parametrize(("name", "theirs"), [("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)])
@pytest.mark.parametrize(("pp", "m"), [(1, 1), (1, 3), (2, 2), (4, 4), (4, 9), (8, 20)])
def test_executed_order_equals_torchs(
    monkeypatch: pytest.MonkeyPatch, name: Schedule, theirs: Any, pp: int, m: int
) -> None:
    """1F1B and GPipe do, rank by rank, what torch's executor tells its stage to do.

    Compared with the executor, since the list that torch's Schedule1F1B prints starts its last stage at micro-batch 1.
    """
    monkeypatch.setattr(theirs, "_initialize_stage", lambda *args, **kwargs: None)
    ours = build_schedule(name, pp, 1, m)
    for rank in range(pp):
        stage = RecordingStage(rank, pp)
        theirs(stage, m)._step_microbatches()
        assert tuple(stage.done) == ours.ranks[rank]


def planned_by_torch(theirs: Any, pp: int, vpp: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """The action lists that torch's schedule class plans, without its idle slots and gradient reductions."""
    numbers = SimpleNamespace(
        pp_group_size=pp, n_local_stages=vpp, _n_microbatches=m, microbatches_per_round=m // max(1, m // pp)
    )
    ranks = [theirs._calculate_single_rank_operations(numbers, rank) for rank in range(pp)]
    return tuple(
        tuple(
            Action(Kind(action.computation_type.value), action.stage_index, action.microbatch_index)
            for action in rank
            if action is not None and action.computation_type.value in {kind.value for kind in Kind}
        )
        for rank in ranks
    )


@pytest.mark.parametrize(
    ("pp", "vpp", "m"), [(1, 2, 3), (2, 1, 4), (2, 2, 2), (2, 2, 6), (4, 2, 4), (4, 3, 12), (8, 4, 24)]
)
def test_interleaved_order_equals_torchs(pp: int, vpp: int, m: int) -> None:
    """The interleaved order is torch's (and so Megatron's), rank by rank."""
    assert build_schedule("interleaved", pp, vpp, m).ranks == planned_by_torch(ScheduleInterleaved1F1B, pp, vpp, m)


@pytest.mark.parametrize(("pp", "m"), [(1, 2), (2, 2), (2, 6), (4, 4), (4, 12), (8, 32)])
def test_zero_bubble_order_equals_torchs(pp: int, m: int) -> None:
    """ZB-H1 is torch's interleaved zero bubble with one stage a rank, where torch takes m: a multiple of pp."""
    assert build_schedule("zero-bubble", pp, 1, m).ranks == planned_by_torch(ScheduleInterleavedZeroBubble, pp, 1, m)


def as_torch(schedule: PipelineSchedule) -> dict[int, list[Any]]:
    """Our schedule in torch's words."""
    return {
        rank: [
            torch_schedules._Action.from_str(f"{action.stage}{action.kind.value}{action.micro_batch}")
            for action in actions
        ]
        for rank, actions in enumerate(schedule.ranks)
    }


@pytest.mark.parametrize(
    "numbers", [("gpipe", 4, 1, 6), ("1f1b", 4, 1, 7), ("interleaved", 4, 3, 8), ("zero-bubble", 4, 1, 7)]
)
def test_torchs_own_checks_accept_our_schedules(numbers: tuple[Schedule, int, int, int]) -> None:
    """torch finds our lists complete, can place every send and receive, and runs them dry without a deadlock."""
    schedule = build_schedule(*numbers)
    pp, stages = schedule.pp, schedule.num_stages
    owners = torch_schedules._validate_schedule(as_torch(schedule), pp, stages, schedule.num_micro_batches)
    assert owners == {stage: stage % pp for stage in range(stages)}
    with_messages = torch_schedules._add_send_recv(as_torch(schedule), lambda stage: stage % pp, stages)
    torch_schedules._simulate_comms_compute(with_messages, lambda stage: stage % pp, stages)
