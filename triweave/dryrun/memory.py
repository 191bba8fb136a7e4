"""The memory of one rank's step: the trainer's own code, on a card and among ranks that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from triweave.config.validate import ResolvedRun
from triweave.dryrun import components
from triweave.dryrun.allocations import Allocations
from triweave.dryrun.batch import make_batch
from triweave.dryrun.card import META, Card
from triweave.dryrun.graphs import capture_on_paper
from triweave.dryrun.lone_rank import LAUNCH_QUEUE, LoneGroup, lone_rank
from triweave.dryrun.places import Places
from triweave.dryrun.transport import transport_on_paper
from triweave.groups import Groups
from triweave.layout import Layout
from triweave.overlap import exchange_bytes
from triweave.planner.allocator import CachingAllocator
from triweave.planner.assumptions import OURS
from triweave.planner.memory_moments import Moment, worst_moments
from triweave.schedule.actions import PipelineSchedule
from triweave.schedule.build import build_schedule
from triweave.sharding import Unit, filling
from triweave.sharing import beside_bytes
from triweave.training.determinism import deterministic
from triweave.training.engine import Engine, build_engine
from triweave.training.step import train_step
from triweave.transport.choose import choose_transport
from triweave.transport.copy_engine import CopyEngines

_BOUNDLESS = 2**62
PAGE = 2**21
"""What the driver maps memory by."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank takes of its card. Bytes."""

    rank: int
    stages: tuple[int, ...]
    """Virtual stages of the rank."""
    peak_bytes: int
    """The most that tensors take at once: `torch.cuda.max_memory_allocated()`."""
    reserved_bytes: int
    """What the caching allocator takes from the driver for them: `torch.cuda.max_memory_reserved()`."""
    context_bytes: int
    """The CUDA context with PyTorch's kernels. cuBLAS's workspaces are tensors of the caching allocator's."""
    nccl_bytes: int
    """NCCL's buffers, which torch's allocator does not know."""
    peer_bytes: int
    """What copies between GPUs of one host take beside the tensors."""
    components: Mapping[str, int]
    """The parts of the peak by name; they add up to it."""
    at: str
    """The moment of the peak: the schedule's action and the module."""
    micro_batches: int
    """Micro-batches that were run; more only repeat the steady state."""

    @property
    def used_bytes(self) -> int:
        """What the card reports as used."""
        return self.reserved_bytes + self.context_bytes + self.nccl_bytes + self.peer_bytes


def rank_memory(resolved: ResolvedRun, rank: int, *, expandable: bool = True, one_gpu: bool = False) -> RankMemory:
    """Play rank `rank` of a run for two steps and follow every allocation; needs no GPU and no other rank.

    Args:
        resolved: the run.
        rank: of its grid.
        expandable: whether the allocator runs with `expandable_segments:True`.
        one_gpu: what `measure_rank` takes, which has one GPU and no peers: slices are gathered and summed by
            collectives, and messages are gone at once.
    """
    layout = resolved.layout
    places = Places()
    allocator = CachingAllocator(_BOUNDLESS, expandable)
    memory = Allocations(places, allocator)
    with (
        deterministic(resolved.run.runtime),
        lone_rank(rank, layout.world_size),
        memory,
        Card(resolved.run.model.attention, memory.handed_out),
    ):
        transport = choose_transport if one_gpu else transport_on_paper(resolved.gpus_per_node, memory.set_apart)
        fewer = replace(resolved, num_micro_batches=layout.pp)
        engine = build_engine(fewer, META, adopt_weights, transport, capture_on_paper(memory, one_gpu=one_gpu))
        name_states(memory, engine)
        memory.add(OURS.workspace_bytes, components.WORKSPACE)
        places.begin(engine, lambda: memory.launches)
        for channel in engine.groups.channels.values():
            if isinstance(channel.handle, LoneGroup) and not one_gpu:
                channel.handle.launches = lambda: memory.launches
        # A step loads all its micro-batches, also those that need not be run here.
        batch = make_batch(resolved, META, cp_rank=engine.groups.cp.rank)
        rates = resolved.run.optimizer.learning_rate, resolved.run.optimizer.max_grad_norm
        # One micro-batch, so that the optimizer makes its moments: the step that follows is the fuller one, and begins
        # with the capture of graphs.
        train_step(replace(engine, schedule=of_first_micro_batch(engine.schedule)), batch, *rates)
        launches = places.launched[-1] - places.launched[0]
        if layout.cuda_graphs:
            # A pass of a layer is one launch then; those of embedding and head are left out, and so too many are run.
            launches = 2 * max(1, sum(layout.layers[stage] for stage in engine.stages))
        count = enough_micro_batches(layout, engine.groups.at.pp, resolved.num_micro_batches, launches)
        schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, count)
        train_step(replace(engine, schedule=schedule), batch, *rates)
    gpu = resolved.cluster.gpu if resolved.cluster else None
    return RankMemory(
        rank=rank,
        stages=layout.stages_of(engine.groups.at.pp),
        peak_bytes=memory.peak.size,
        reserved_bytes=memory.peak_reserved,
        context_bytes=gpu.context_bytes if gpu and gpu.usable_bytes else OURS.context_bytes,
        nccl_bytes=nccl_bytes(engine.groups),
        peer_bytes=0 if one_gpu else peer_bytes(engine, resolved),
        components={name: size for name, size in memory.peak.components.items() if size},
        at=memory.peak.at,
        micro_batches=count,
    )


def of_first_micro_batch(schedule: PipelineSchedule) -> PipelineSchedule:
    """What a schedule does with its first micro-batch."""
    ranks = tuple(tuple(action for action in rank if action.micro_batch == 0) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


def enough_micro_batches(layout: Layout, pp_rank: int, num_micro_batches: int, launches: int) -> int:
    """The fewest micro-batches with which a pipeline rank meets every moment that it meets with all of them.

    More are run on top: two, so that what precedes and follows each moment is there too (a message on its way, a
    buffer that waits for the next one), and as many as the host can be ahead of the GPU.

    Args:
        layout: the grid.
        pp_rank: the pipeline rank.
        num_micro_batches: of the whole step.
        launches: kernels of one micro-batch on this rank.
    """

    def moments(count: int) -> frozenset[Moment]:
        numbers = layout.schedule, layout.pp, layout.vpp, count, pp_rank
        return frozenset(worst_moments(*numbers, offload=bool(layout.offload)))

    wanted = moments(num_micro_batches)
    step = layout.pp if layout.schedule == "interleaved" else 1
    fewer = range(layout.pp, num_micro_batches, step)
    enough = next((count for count in fewer if moments(count) == wanted), num_micro_batches)
    ahead = ceil(LAUNCH_QUEUE / launches) if layout.pp > 1 else 0
    return min(enough + step * ceil((2 + ahead) / step), num_micro_batches)


def adopt_weights(units: list[Unit]) -> None:
    """Take the units' weights as they are: there are no numbers to give them."""
    for _ in filling(units):
        pass


def name_states(memory: Allocations, engine: Engine) -> None:
    """Tell weights from master weights and gradient sums, which one file makes."""
    for unit in engine.sharding.units:
        memory.name(unit.gradient, components.GRADIENTS)
        memory.name(unit.master, components.MASTER_WEIGHTS)
        memory.name(unit.weight, components.WEIGHTS)


def peer_bytes(engine: Engine, resolved: ResolvedRun) -> int:
    """What GPUs of one host take to copy from each other.

    Under tensor parallelism slices, whole pages of them; under data parallelism flags and parts of sums: the weights
    and sums themselves are counted where they were made.
    """
    total = 0
    transport = engine.tp.transport
    if isinstance(transport, CopyEngines):
        total += -(-exchange_bytes(engine.tp.size, transport.received[0].numel()) // PAGE) * PAGE
    shards, shard, runtime = engine.groups.shards, resolved.layout.shard, resolved.run.runtime
    one_node = len({rank // resolved.gpus_per_node for rank in shards.ranks}) == 1
    if runtime.overlap_dp == "auto" and one_node:
        total += beside_bytes(shard, [unit.numel for unit in engine.sharding.units], shards.size)
    return total


def nccl_bytes(groups: Groups) -> int:
    """What NCCL takes for this rank's communicators."""
    used = (groups.world, groups.tp, groups.cp, groups.shards, groups.across, groups.kv, groups.tied)
    shared = sum(group.size > 1 for group in used)
    return shared * OURS.nccl_bytes_per_group + len(groups.channels) * OURS.nccl_bytes_per_channel
