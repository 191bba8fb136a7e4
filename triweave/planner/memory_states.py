"""Weights, gradients and optimizer state of one rank, in bytes.

Ours: units of a flat buffer each, parameters 64 elements apart, padded to a multiple of 64 x dp (`sharding/unit.py`).
Megatron: one buffer padded to dp x 128 elements at its end (`param_and_grad_buffer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from triweave.layout import REDUCTIONS_BESIDE, UNITS_AHEAD, Layout
from triweave.model_spec import ModelSpec
from triweave.moments import MOMENTS_BYTES
from triweave.parameters import has_tied_copy, holds_embedding, holds_head
from triweave.planner.assumptions import Assumptions
from triweave.planner.memory_ours import Unit
from triweave.planner.sizes import DTYPE_BYTES, local_vocabulary

_ALIGNMENT = 64
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class ParameterUnit:
    """Parameters that are gathered and reduced together: a layer, the embedding, the final norm, the head."""

    name: str
    shapes: tuple[int, ...]
    """Elements of each parameter on this rank."""

    def numel(self, multiple: int) -> int:
        """Elements of the flat buffer, its padding included."""
        return _flat_elements(self.shapes, multiple)


@dataclass(frozen=True, slots=True)
class States:
    """What one rank holds all through a step, in bytes."""

    weights: int
    gradients: int
    master_weights: int
    moments: int
    step_working_set: int
    """The most that the reduction, the gradient norm and the update take beside them."""


def layer_shapes(spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Elements of each parameter of one decoder layer on one tensor-parallel rank: `parameters.stage_parameters`."""
    tp, hidden = layout.tp, spec.hidden_size
    query = spec.query_size // tp
    key_value = max(1, spec.num_key_value_heads // tp) * spec.head_dim
    ffn = spec.intermediate_size // tp
    shapes = [
        (query + 2 * key_value) * hidden,
        query * hidden,
        (2 if spec.gated_mlp else 1) * ffn * hidden,
        ffn * hidden,
        hidden,
        hidden,
    ]
    if spec.attention_bias:
        shapes.append(query + 2 * key_value)
    if spec.qk_norm:
        shapes += [spec.head_dim, spec.head_dim]
    return tuple(shapes)


def stage_units(spec: ModelSpec, layout: Layout, stage: int, a: Assumptions) -> list[ParameterUnit]:
    """The units of virtual stage `stage`, in model order."""
    vocabulary = local_vocabulary(spec.vocab_size, layout.tp, a) * spec.hidden_size
    units = []
    if holds_embedding(layout, stage):
        units.append(ParameterUnit("embed", (vocabulary,)))
    shapes = layer_shapes(spec, layout)
    units += [ParameterUnit("layer", shapes)] * layout.layers[stage]
    if holds_head(layout, stage):
        units.append(ParameterUnit("norm", (spec.hidden_size,)))
        if not spec.tie_word_embeddings:
            units.append(ParameterUnit("head", (vocabulary,)))
        elif has_tied_copy(spec, layout):
            units.append(ParameterUnit("embed", (vocabulary,)))
    return units


_PRODUCTS = 4
"""Of a layer's parameters the first: the weights of its products."""


def weight_casts(unit: ParameterUnit, a: Assumptions) -> int:
    """Bytes of a unit's weights in fp8, one way; a rank keeps them both ways until the weights change."""
    return sum(unit.shapes[:_PRODUCTS]) if a.fp8 and unit.name == "layer" else 0


def data_parallel_size(layout: Layout) -> int:
    """Ranks among which a unit is cut and padded: those that hold the same parameters, or one shard group of them."""
    return layout.shard_ranks if layout.uses_shard_groups else layout.replicas


def states_of(units: list[ParameterUnit], layout: Layout, dtype: str, a: Assumptions) -> States:
    """Bytes of a rank that holds `units`, under `layout.shard`."""
    dp = data_parallel_size(layout)
    shard = layout.shard if dp > 1 else "none"
    if a.bookkeeping == "megatron":
        sizes = [_round_up(sum(sum(unit.shapes) for unit in units), dp * 128)]
        largest = max((sum(unit.shapes) for unit in units), default=0)
    else:
        sizes = flat_sizes(units, dp)
        largest = max(sizes, default=0)
    numel = sum(sizes)
    owned = numel if shard == "none" else numel // dp
    element = a.weight_bytes or DTYPE_BYTES[dtype]
    own_master = a.master_weights and (element < _FLOAT32 or shard == "full")
    weights = numel * element
    if shard == "full":
        weights = 0 if own_master else owned * element
    gradients = (numel if shard in ("none", "optimizer") else owned) * a.gradient_bytes
    # Ours: norms of a unit's gradients, 64 elements each, and their squares; reductions and gathers are in place.
    rows = (largest if shard == "none" else largest // dp) // _ALIGNMENT
    working_set = 2 * _FLOAT32 * rows if a.bookkeeping == "ours" else 0
    return States(
        weights=weights,
        gradients=gradients,
        master_weights=_FLOAT32 * owned if own_master else 0,
        moments=MOMENTS_BYTES[a.moments] * owned,
        step_working_set=working_set,
    )


def shared_units(units: list[ParameterUnit], layout: Layout, stage: int, dtype: str, a: Assumptions) -> dict[str, Unit]:
    """What the modules of a stage add where gradients are autograd's own, or weights or gradients lie in shards.

    `layer` is the stage's last one, the first to run backward, where most else is kept. `layer -1` and so on are those
    before it: there gradients of the layers behind are still being reduced.
    """
    order = units
    if holds_head(layout, stage) and units[-1].name == "norm":
        order = [*units, units[0]]  # The head's weight is the embedding's, on this very stage.
    places = {unit.name: place for place, unit in enumerate(order)}
    if holds_head(layout, stage):
        places["head"] = len(order) - 1
    for before in range(1, min(REDUCTIONS_BESIDE + 1, layout.layers[stage])):
        places[f"layer -{before}"] = places["layer"] - before
    dp = data_parallel_size(layout)
    if a.gradients_of_autograd:
        return {
            name: Unit(new_gradients=tuple(size * a.gradient_bytes for size in order[place].shapes))
            for name, place in places.items()
        }
    if dp == 1 or layout.shard in ("none", "optimizer"):
        return dict.fromkeys(places, Unit())
    sizes = flat_sizes(order, dp)
    element = DTYPE_BYTES[dtype] if layout.shard == "full" else 0
    if a.bookkeeping == "megatron":
        return {
            name: Unit(
                gathered_weights=sizes[place] * element * a.prefetched_units,
                gathered_again=sizes[place] * element * a.prefetched_units,
                whole_gradients=sizes[place] * a.gradient_bytes,
                reduced_gradients=sizes[place] // dp * a.gradient_bytes,
            )
            for name, place in places.items()
        }
    overlap = _overlap(layout, stage, sizes)
    # Freed with the weights that they were made of; by rows too in backward, where a product runs again.
    once = int(layout.shard == "full")
    again = 2 * once if {"attention", "mlp", "layer"} & set(layout.recompute) else once
    return {
        name: Unit(
            gathered_weights=overlap.ahead_in_forward(place) * element + once * weight_casts(order[place], a),
            gathered_again=overlap.ahead_in_backward(place) * element + again * weight_casts(order[place], a),
            whole_gradients=sizes[place] * _FLOAT32,
            reducing=overlap.reducing(place) * _FLOAT32,
            still_reducing=overlap.still_reducing(place) * _FLOAT32,
        )
        for name, place in places.items()
    }


def weights_ahead(units: list[ParameterUnit], layout: Layout, dtype: str) -> int:
    """Bytes of the weights that are gathered for the next forward while a weight half runs, which needs none."""
    dp = data_parallel_size(layout)
    if dp == 1 or layout.shard != "full":
        return 0
    return DTYPE_BYTES[dtype] * sum(unit.numel(_ALIGNMENT * dp) for unit in units[:UNITS_AHEAD])


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Which units of a stage stand beside the one that computes, in elements: the order of `sharding.Sharding.begin`.

    At the ends of a stage the schedule decides what follows; the common case is taken: under GPipe another forward
    after a forward, elsewhere the backward of the same stage, and backward after forward the other way round.
    """

    sizes: list[int]
    """Elements of the stage's units, in the order of its forward."""
    from_forward: list[int]
    """Units whose weights are used, in order, from a forward on."""
    from_backward: list[int]
    """The same from a backward on; the lookup's backward needs no weights, and comes last."""
    without_weights: int
    """Units at the start of the stage whose backward needs no weights."""

    def ahead_in_forward(self, place: int) -> int:
        """The unit at `place` and those whose weights are gathered beside it."""
        return self._window(self.from_forward, place)

    def ahead_in_backward(self, place: int) -> int:
        """The same while it runs backward."""
        at = len(self.sizes) - 1 - place
        if place < self.without_weights:
            return sum(self.sizes[coming] for coming in self.from_backward[at : at + UNITS_AHEAD])
        return self._window(self.from_backward, at)

    def reducing(self, place: int) -> int:
        """Units whose backward came just before that of the unit at `place`, on the same micro-batch.

        Another micro-batch's are let go near the end of a forward, and where most is kept a forward came last.
        """
        return sum(self.sizes[place + 1 :][:REDUCTIONS_BESIDE])

    def still_reducing(self, place: int) -> int:
        """Units whose backward, on an earlier micro-batch, came just before the forward of the unit at `place`."""
        return 0 if place == len(self.sizes) - 1 else sum(self.sizes[:REDUCTIONS_BESIDE])

    def _window(self, uses: list[int], at: int) -> int:
        return sum(self.sizes[place] for place in set(uses[at : at + 1 + UNITS_AHEAD]))


def _overlap(layout: Layout, stage: int, sizes: list[int]) -> _Overlap:
    without_weights = 1 if holds_embedding(layout, stage) else 0
    forward = list(range(len(sizes)))
    backward = forward[without_weights:][::-1]
    if layout.schedule == "gpipe":
        return _Overlap(sizes, forward * 2, backward * 2, without_weights)
    return _Overlap(sizes, [*forward, *backward], [*backward, *forward], without_weights)


def weight_gradient_cache(spec: ModelSpec, layout: Layout, units: list[ParameterUnit], dtype: str) -> int:
    """Transformer Engine's dummy weight gradients: one buffer for every distinct weight shape of a rank."""
    shapes: set[int] = set()
    for unit in units:
        # The embedding's gradient is summed by the lookup's own backward.
        if unit.name != "embed":
            shapes |= set(unit.shapes)
    return sum(shapes) * DTYPE_BYTES[dtype]


def flat_sizes(units: list[ParameterUnit], dp: int) -> list[int]:
    """Elements of each unit's flat buffer among `dp` ranks; of neighbours that are alike it is found once."""
    sizes: list[int] = []
    for unit, alike in groupby(units):
        sizes += [unit.numel(_ALIGNMENT * dp)] * len(list(alike))
    return sizes


@lru_cache(maxsize=4096)
def _flat_elements(shapes: tuple[int, ...], multiple: int) -> int:
    return _round_up(sum(_round_up(size, _ALIGNMENT) for size in shapes), multiple)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
