"""Seconds of every action of a step: what one micro-batch costs each virtual stage, and each message between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from triweave.cluster import Cluster
from triweave.errors import InputError, Problem, nearest_number
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.machine import Machine, Precision, machine_of
from triweave.planner.time_collectives import GroupShape, all_reduce_ports_s, overlapped_s, reduce_scatter_s, send_s
from triweave.planner.time_ends import embedding_work, head_work
from triweave.planner.time_host import stage_hosts
from triweave.planner.time_layer import layer_work
from triweave.planner.time_offload import Offloaded, offload_s, offloaded_of
from triweave.planner.time_parts import Place, Work, chain, place_of
from triweave.planner.time_pipeline import StageCost
from triweave.planner.time_shapes import Decoder, decoder_of
from triweave.planner.time_stack import Stack
from triweave.planner.time_trainer import TRIWEAVE


class Ends(NamedTuple):
    """Which ends of the model a virtual stage holds."""

    embedding: bool
    head: bool


class StageBlocks(NamedTuple):
    """One micro-batch on one virtual stage."""

    work: Work
    gather_s: float
    """ZeRO-3: what gathering weights adds to the forward."""
    scatter_s: float
    """ZeRO-3: what gathering them again and scattering gradients adds to the backward."""
    offload_s: tuple[float, float]
    """What copies to host memory add to the forward, and copies back to the backward."""
    parameters: float
    """Weights of the stage on one tensor-parallel rank."""
    cost: StageCost
    """All of it by action, messages left out."""

    @property
    def gathering_s(self) -> float:
        """What sharded weights cost a micro-batch."""
        return self.gather_s + self.scatter_s


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """What a schedule is simulated with."""

    place: Place
    micro_batches: int
    """Of a step, on one data-parallel rank."""
    blocks: tuple[StageBlocks, ...]
    """One for each virtual stage, in model order."""
    stages: tuple[StageCost, ...]
    """Their actions, with the messages that they wait for, and what messages take from sums on the same ports."""
    hosts: tuple[StageCost, ...]
    """What the host needs to issue each action."""
    transfer_s: float
    """One message that travels beside the compute."""

    def busy_s(self, layout: Layout) -> list[float]:
        """Seconds that each pipeline rank computes in a step."""
        totals = [cost.total for cost in self.stages]
        return [self.micro_batches * sum(totals[rank :: layout.pp]) for rank in range(layout.pp)]


def action_costs(
    spec: ModelSpec | Decoder,
    layout: Layout,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    precision: Precision = "bf16",
    stack: Stack = TRIWEAVE,
    on: Machine | None = None,
) -> ActionCosts:
    """Seconds of every action of `layout`; the arguments are those of `time_step.predict_step`.

    Raises:
        InputError: a batch or a layer map that does not fit the layout, or a GPU without measured speeds.
    """
    _check(layout, global_batch)
    gpu = on if on is not None else machine_of(cluster)
    per_node = cluster.gpus_per_node
    place = place_of(decoder_of(spec), layout, gpu, stack, seq_len=seq_len, gpus_per_node=per_node, precision=precision)
    group = shard_shape(layout, per_node) if layout.shard == "full" else None
    moved = offloaded_of(spec, layout, seq_len) if isinstance(spec, ModelSpec) else None
    last = layout.num_stages - 1
    between = {count: _stage_blocks(place, count, Ends(False, False), group, moved) for count in {*layout.layers[1:-1]}}
    blocks = [between[count] for count in layout.layers[1:-1]]
    blocks.insert(0, _stage_blocks(place, layout.layers[0], Ends(True, last == 0), group, moved))
    if last:
        blocks.append(_stage_blocks(place, layout.layers[last], Ends(False, True), group, moved))
    transfer = _transfer_s(place, layout, per_node)
    stages = [block.cost for block in blocks]
    if transfer and not stack.overlap_pp:
        stages = [
            StageCost(cost.forward + transfer, cost.backward_input + transfer, cost.backward_weight) for cost in stages
        ]
        transfer = 0.0
    elif transfer:
        stages = _beside_sums(place, layout, stages, transfer)
    hosts = stage_hosts(place, layout)
    return ActionCosts(place, layout.micro_batches(global_batch), tuple(blocks), tuple(stages), hosts, transfer)


def shard_shape(layout: Layout, gpus_per_node: int) -> GroupShape:
    """Ranks that share out weights, gradients or optimizer states, or that sum whole gradients if nothing is shared.

    They are neighbours along data and context parallel: all of them, or those of one shard group.
    """
    ranks = layout.shard_ranks if layout.uses_shard_groups else layout.replicas
    return GroupShape(ranks, max(1, min(ranks, gpus_per_node // layout.tp)))


def replica_shape(layout: Layout, gpus_per_node: int) -> GroupShape:
    """Ranks that hold the same slice in different shard groups; one where there is one shard group."""
    ranks = layout.replicas // layout.shard_ranks if layout.uses_shard_groups else 1
    return GroupShape(ranks, max(1, min(ranks, gpus_per_node // (layout.tp * layout.shard_ranks))))


def _check(layout: Layout, global_batch: int) -> None:
    problems = []
    share = layout.dp * layout.micro_batch
    if global_batch % share or global_batch < share:
        rule = f"must be a multiple of dp {layout.dp} x micro_batch {layout.micro_batch} = {share}"
        below = max(1, global_batch // share) * share
        problems.append(
            Problem("train.global_batch", global_batch, rule, nearest_number(global_batch, (below, below + share)))
        )
    if len(layout.layers) != layout.num_stages:
        rule = f"must name the layers of {layout.num_stages} virtual stages, not of {len(layout.layers)}"
        problems.append(Problem("layout.layers", layout.layers, rule))
    if problems:
        raise InputError(problems)


@lru_cache(maxsize=65536)
def _stage_blocks(
    place: Place, num_layers: int, ends: Ends, group: GroupShape | None, moved: Offloaded | None
) -> StageBlocks:
    """One micro-batch on `num_layers` layers and the ends.

    The weights are sharded over `group`, None if they are whole; `moved` is what each layer keeps in host memory.
    """
    work = _stage_work(place, num_layers, ends)
    decoder = place.decoder
    parameters = (num_layers * decoder.layer_parameters + sum(ends) * decoder.head_parameters) / place.tp.ranks
    gather, scatter = (0.0, 0.0) if group is None else _sharding_s(place, work, parameters, num_layers, group)
    out, back = (0.0, 0.0) if moved is None else offload_s(place, layer_work(place), num_layers, moved)
    cost = StageCost(
        work.forward.total + gather + out,
        work.recompute.total + work.backward_input.total + scatter + back,
        work.backward_weight.total,
    )
    return StageBlocks(work, gather, scatter, (out, back), parameters, cost)


@lru_cache(maxsize=65536)
def _stage_work(place: Place, num_layers: int, ends: Ends) -> Work:
    works = [layer_work(place).times(num_layers)]
    if ends.embedding:
        works.append(embedding_work(place))
    if ends.head:
        works.append(head_work(place))
    return chain(*works)


def _sharding_s(place: Place, work: Work, parameters: float, num_layers: int, group: GroupShape) -> tuple[float, float]:
    """ZeRO-3: what gathering weights and scattering gradients adds to a stage's forward and backward, per micro-batch.

    A layer's weights are gathered while the layer before computes (backward again), its gradients scattered while
    the next one computes. The first gather and the last scatter of a stage have nothing to hide under.
    """
    stack, count = place.stack, max(1, num_layers)
    layer = parameters / count
    gather = reduce_scatter_s(place.machine, group, 2.0 * layer)
    scatter = reduce_scatter_s(place.machine, group, stack.gradient_size * layer)
    forward = work.forward.total / count
    backward = (work.recompute.total + work.backward_input.total + work.backward_weight.total) / count
    slowdown = place.slowdown("collectives")
    hidden_forward = overlapped_s(gather, forward, slowdown)
    hidden_backward = overlapped_s(gather + scatter, backward, slowdown)
    bandwidth = place.machine.hbm_kernel_bytes_per_s
    unpacking = stack.gather_copies.of(parameters, group.ranks) / bandwidth
    packing = stack.scatter_copies.of(parameters, group.ranks) / bandwidth
    share = stack.overlap_dp
    added_forward = count * (share * hidden_forward + (1 - share) * gather)
    added_backward = count * (share * hidden_backward + (1 - share) * (gather + scatter))
    if share:
        added_forward += max(0.0, gather - overlapped_s(gather, forward, 0.0))
        added_backward += max(0.0, scatter - overlapped_s(scatter, backward, 0.0))
    return added_forward + unpacking, added_backward + unpacking + packing


def _beside_sums(place: Place, layout: Layout, stages: list[StageCost], transfer: float) -> list[StageCost]:
    """Stages whose messages share network ports with sums of their tensor-parallel group, where that spans nodes.

    Both get half of a port while both want it. A message that takes t seconds alone then takes t (1 + f) beside work of
    which sums have the ports for a share f, and that work takes t f longer. It is charged to the action that sends
    it: the message leaves, and the next action ends, that much later.
    """
    if place.tp.nodes == 1:
        return stages
    ports = all_reduce_ports_s(place.machine, place.tp, place.activation_bytes, rings=place.stack.rings)
    # With sequence parallelism, gathers and scatters of half the volume each, and two more gathers in backward.
    sums = 4 + (1 if place.sequence_parallel and place.stack.gathers_again and not place.keeps_gathered else 0)
    alone = max(0.0, transfer - place.machine.nic_latency_s)
    found = []
    for stage, (count, cost) in enumerate(zip(layout.layers, stages, strict=True)):
        longer = alone * min(1.0, count * sums * ports / cost.total)
        ahead, back = longer * (stage < layout.num_stages - 1), longer * (stage > 0)
        found.append(replace(cost, forward=cost.forward + ahead, backward_input=cost.backward_input + back))
    return found


def _transfer_s(place: Place, layout: Layout, gpus_per_node: int) -> float:
    """One activation, or its gradient, from a stage to the next."""
    if layout.pp == 1:
        return 0.0
    size = 2.0 * place.tokens * place.decoder.hidden
    if place.sequence_parallel or place.stack.sends_slices:
        size /= place.tp.ranks
    crosses = layout.tp * layout.cp * layout.dp >= gpus_per_node
    return send_s(place.machine, size, crosses_nodes=crosses)
