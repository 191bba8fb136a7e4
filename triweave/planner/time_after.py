"""Seconds of a step beside its pipeline: replicas' gradients and weights, the optimizer, the batch that arrives."""

from __future__ import annotations

from typing import Literal, NamedTuple

from triweave.layout import Layout
from triweave.planner.machine import Curve
from triweave.planner.time_actions import ActionCosts, replica_shape, shard_shape
from triweave.planner.time_collectives import GroupShape, all_reduce_s, overlapped_s, reduce_scatter_s
from triweave.planner.time_parts import Place
from triweave.planner.time_stack import Measured
from triweave.sharing import shares_weights

_TOKEN_BYTES = 32
"""Token, target, position and document of one token, int64 each."""
_WEIGHT_CASTS = (Measured("fp8 amax", 2), Measured("fp8 cast", 6))
_UNIT_LAUNCHES = 10
"""Kernels of a unit after its last backward: its norm, two updates, the weights on their way."""


def batch_copy_s(costs: ActionCosts) -> float:
    """Seconds for a rank's tokens to come from the host, before its first micro-batch; 0 where it was not measured."""
    place = costs.place
    if place.trainer is None or place.trainer.host_copy is None:
        return 0.0
    return place.trainer.host_copy(_TOKEN_BYTES * place.micro_batch * place.seq * costs.micro_batches)


def after_backward_s(
    costs: ActionCosts, layout: Layout, rank: int, busy: float, gpus_per_node: int
) -> tuple[float, float]:
    """Exposed data-parallel communication of a step, and the optimizer, on one pipeline rank.

    Args:
        costs: of the step's actions.
        layout: how it is spread.
        rank: the pipeline rank.
        busy: seconds that it computes in a step.
        gpus_per_node: of the cluster.
    """
    place, micro_batches = costs.place, costs.micro_batches
    gpu, stack = place.machine, place.stack
    parameters = sum(_unit_parameters(costs, layout, rank))
    group = shard_shape(layout, gpus_per_node)
    shard = parameters if layout.shard == "none" else parameters / group.ranks
    optimizer = _optimizer_s(costs, layout, rank, parameters, shard)
    tied = _tied_sum_s(costs, layout, gpus_per_node)
    if layout.replicas == 1:
        return tied, optimizer
    # Reduction hides under the last micro-batch's backward, gathering under the first's forward.
    room = busy / micro_batches
    across = _across(costs, layout, rank, gpus_per_node)
    if _copies(place, group, "gather") is not None and layout.shard in ("none", "optimizer"):
        return tied + _by_copy_engines_s(costs, layout, rank, group, across, room), optimizer
    gradients = stack.gradient_size * parameters
    if layout.shard == "full":
        reduce = gather = 0.0
    elif layout.shard == "none":
        reduce, gather = all_reduce_s(gpu, group, gradients), 0.0
    else:
        reduce = (all_reduce_s if stack.reduces_whole else reduce_scatter_s)(gpu, group, gradients)
        gather = reduce_scatter_s(gpu, group, 2.0 * parameters)
    slowdown = place.slowdown("collectives")
    if layout.shard == "gradients":
        # A head that is the embedding is reduced after its own backward as well.
        moved = sum(costs.blocks[stage].parameters for stage in layout.stages_of(rank))
        reduce *= moved / parameters
        # Every micro-batch reduces, beside its own backward; zeros and additions to the shard are in its way.
        copies = micro_batches * stack.scatter_copies.of(moved, group.ranks) / gpu.hbm_kernel_bytes_per_s
        last = reduce * _unit_parameters(costs, layout, rank)[0] / moved
        reduce *= micro_batches
        hidden = last + overlapped_s(reduce - last, 2 / 3 * busy, slowdown)
        hidden += across.last_s + overlapped_s(across.others_s, 2 / 3 * room, slowdown)
    else:
        copies = 0.0
        beside = across.beside(reduce)
        hidden = across.last_s + overlapped_s(beside, 2 / 3 * room, slowdown)
    reduce += across.total_s
    by_copies = _weights_s(costs, layout, rank, group, room)
    hidden += by_copies if by_copies is not None else overlapped_s(gather, room / 3, slowdown)
    return tied + copies + stack.overlap_dp * hidden + (1 - stack.overlap_dp) * (reduce + gather), optimizer


def _tied_sum_s(costs: ActionCosts, layout: Layout, gpus_per_node: int) -> float:
    """Seconds in which the first and the last stage sum the gradients of the weight that both hold, if they do."""
    place = costs.place
    if not (place.stack.own and place.decoder.tied and layout.pp > 1):
        return 0.0
    apart = layout.tp * layout.cp * layout.dp * (layout.pp - 1)
    owned = place.decoder.head_parameters / place.tp.ranks
    if layout.shard != "none":
        owned /= shard_shape(layout, gpus_per_node).ranks
    return all_reduce_s(place.machine, GroupShape(2, 2 if apart < gpus_per_node else 1), 4.0 * owned)


class _Across(NamedTuple):
    """Seconds of the sums over shard groups, each of a unit's part; zeros where there is one shard group."""

    last_s: float
    """Of the unit whose backward comes last: nothing is left to compute beside it."""
    others_s: float
    own_wires: bool
    """Whether these sums leave the node and those inside a group do not, so that both travel at once."""

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.last_s + self.others_s

    def beside(self, inside_s: float) -> float:
        """What the sums inside the groups, which come first, and all of these but the last take together."""
        return max(inside_s, self.others_s) if self.own_wires else inside_s + self.others_s


def _across(costs: ActionCosts, layout: Layout, rank: int, gpus_per_node: int) -> _Across:
    """Shard groups sum their parts among each other once a step, however often they reduce inside."""
    place, inside = costs.place, shard_shape(layout, gpus_per_node)
    between = replica_shape(layout, gpus_per_node)
    if between.ranks == 1:
        return _Across(0.0, 0.0, False)
    element = place.stack.gradient_size / inside.ranks
    units = _unit_parameters(costs, layout, rank)
    seconds = {unit: all_reduce_s(place.machine, between, element * unit) for unit in set(units)}
    return _Across(seconds[units[0]], sum(seconds[unit] for unit in units[1:]), between.nodes > 1 and inside.nodes == 1)


def _optimizer_s(costs: ActionCosts, layout: Layout, rank: int, parameters: float, shard: float) -> float:
    place = costs.place
    whole = layout.shard in ("none", "optimizer")
    zeroed = 4 * (parameters if whole else shard) if place.stack.zeroes or not whole else 0.0
    # A stack's efficiency is of its layers, and was fitted without the optimizer.
    seconds = place.stack.efficiency * place.passes(shard, place.stack.optimizer, place.stack.optimizer_measured)
    if place.stack.own and place.precision == "fp8":
        # Weights change once a step: the largest magnitude, then either order in memory.
        layers = sum(layout.layers[stage] for stage in layout.stages_of(rank))
        seconds += place.passes(layers * place.decoder.layer_parameters / place.tp.ranks, 8, _WEIGHT_CASTS)
    if place.trainer is not None and place.trainer.launch_s is not None:
        units = sum(layout.layers[stage] for stage in layout.stages_of(rank)) + 3
        seconds = max(seconds, _UNIT_LAUNCHES * units * place.trainer.launch_s)
    return seconds + zeroed / place.machine.hbm_kernel_bytes_per_s


def _by_copy_engines_s(
    costs: ActionCosts, layout: Layout, rank: int, group: GroupShape, across: _Across, room: float
) -> float:
    """Exposed seconds where buffers are copied from GPU to GPU, unit by unit.

    A unit's sums leave after its last backward, and the last unit's have nothing left to hide under; its weights are
    gathered after the update, and the first unit's are waited for. What shard groups sum across is a collective.
    """
    place = costs.place
    units = _unit_parameters(costs, layout, rank)
    kind: Literal["all_reduce", "reduce_scatter"] = "all_reduce" if layout.shard == "none" else "reduce_scatter"
    reduce = _copies(place, group, kind)
    if reduce is None:
        return 0.0
    sums = [reduce(4.0 * unit) for unit in units]
    beside = across.beside(sum(sums[1:]))
    exposed = sums[0] + across.last_s + overlapped_s(beside, 2 / 3 * room, place.slowdown("buffers"))
    exposed += place.slowdown("collectives") * min(across.others_s, 2 / 3 * room)
    return exposed + (_weights_s(costs, layout, rank, group, room) or 0.0)


def _weights_s(costs: ActionCosts, layout: Layout, rank: int, group: GroupShape, room: float) -> float | None:
    """Exposed seconds of gathering whole weights by copy engines; None where training does not, or it is not known."""
    place, gather = costs.place, _copies(costs.place, group, "gather")
    if gather is None or not shares_weights(layout.shard):
        return None
    weights = [gather(2.0 * unit) for unit in _unit_parameters(costs, layout, rank)]
    return weights[0] + overlapped_s(sum(weights[1:]), room / 3, place.slowdown("copies"))


def _unit_parameters(costs: ActionCosts, layout: Layout, rank: int) -> list[float]:
    """Weights of a pipeline rank's units in the order of their forwards: embedding, layers, head if it is another."""
    decoder, tp = costs.place.decoder, costs.place.tp.ranks
    stages = layout.stages_of(rank)
    units = [decoder.layer_parameters / tp] * sum(layout.layers[stage] for stage in stages)
    if 0 in stages:
        units.insert(0, decoder.head_parameters / tp)
    if layout.num_stages - 1 in stages and not (decoder.tied and 0 in stages):
        units.append(decoder.head_parameters / tp)
    return units


def _copies(place: Place, group: GroupShape, what: str) -> Curve | None:
    if place.trainer is None or group.nodes > 1:
        return None
    return place.trainer.copies.get((what, group.ranks))
