"""Seconds of tensor-parallel slices that copy engines carry behind products, as `transport.copy_engine` does it.

A gather stages its slice, a copy inside the GPU; each peer's slice is pulled while the pieces before it are multiplied.
A scatter pushes parts of a sum while the next is multiplied, and adds what arrived. For what is kept whole a rank's own
slice is written once more. A product is cut where `overlap.pays_to_cut` says so, and then is as many smaller ones.
"""

from __future__ import annotations

from typing import NamedTuple

from triweave.overlap import pays_to_cut, slices_together
from triweave.planner.machine import Curve
from triweave.planner.time_collectives import overlapped_s
from triweave.planner.time_matmul import Operands, matmul_s
from triweave.planner.time_parts import Place
from triweave.planner.time_stack import Measured

Products = tuple[float, float, float]
"""Seconds of output, input gradient and weight gradient."""

_STAGE = (Measured("copy", 4),)
_ADDITION = (Measured("add", 6),)
"""Also what moves as many bytes: a slice that is read once and written twice."""


class Linear(NamedTuple):
    """One rank's weight of a linear layer."""

    out: int
    inner: int


def uses_copy_engines(place: Place) -> bool:
    """Whether the trainer's slices travel so, and it was measured how fast."""
    return place.sequence_parallel and _slice_curve(place) is not None


def column_s(place: Place, weight: Linear, products: Products) -> tuple[float, float]:
    """What a column-parallel product's exchange adds to it, forward and backward."""
    pulls, slowdown = _pulls_s(place), place.slowdown("copies")
    forward = _stage_s(place) + _beside(place, weight, products[0], pulls, weight.out, "NT")
    # Its input is gathered again for the weight gradient, beside the input gradient's product.
    pieces = _pieces(place, weight.out)
    room = (pieces - 1) / pieces * products[1] + products[2]
    backward = _stage_both_s(place) + overlapped_s(2 * pulls, room, slowdown) + _sum_s(place)
    return forward, backward + _cut_s(place, weight, pieces, products[1], "NN")


def row_s(place: Place, weight: Linear, products: Products) -> tuple[float, float]:
    """What a row-parallel product's exchange adds to it, forward and backward."""
    pulls = _pulls_s(place)
    forward = _beside(place, weight, products[0], pulls, weight.inner, "NT") + _sum_s(place)
    backward = _stage_both_s(place) + _beside(place, weight, products[1], pulls, weight.inner, "NN")
    return forward, backward


def _beside(place: Place, weight: Linear, product: float, copies: float, other: int, operands: Operands) -> float:
    """What is left of the copies beside a product, and what cutting it costs."""
    pieces = _pieces(place, other)
    room = (pieces - 1) / pieces * product
    own = _stage_both_s(place) - _stage_s(place) if pieces == 1 and operands == "NT" else 0.0
    return overlapped_s(copies, room, place.slowdown("copies")) + own + _cut_s(place, weight, pieces, product, operands)


def _cut_s(place: Place, weight: Linear, pieces: int, product: float, operands: Operands) -> float:
    """How much longer the pieces of a product take than the whole."""
    if pieces == 1:
        return 0.0
    rows = -(-place.tokens // pieces)
    n, k = weight if operands == "NT" else (weight.inner, weight.out)
    piece = matmul_s(place.machine, rows, n, k, place.precision, operands) / place.stack.efficiency
    return max(0.0, pieces * piece - product)


def _pieces(place: Place, other: int) -> int:
    """In how many pieces a product is done, its rows of hidden size travelling; `other` features on its other side."""
    ranks = place.tp.ranks
    if not pays_to_cut(ranks, place.own_tokens, place.decoder.hidden, other):
        return 1
    return 1 + -(-(ranks - 1) // slices_together(place.own_tokens))


def _slice_curve(place: Place) -> Curve | None:
    if place.trainer is None or place.tp.nodes > 1:
        return None
    measured = {ranks: curve for (what, ranks), curve in place.trainer.copies.items() if what == "slice"}
    # Slices come from one peer at a time: a group that was not measured pulls as the largest that was.
    return measured.get(place.tp.ranks, measured[max(measured)]) if measured else None


def _pulls_s(place: Place) -> float:
    """The slices of all peers, one after the other."""
    curve = _slice_curve(place)
    return (place.tp.ranks - 1) * curve(place.activation_bytes / place.tp.ranks) if curve is not None else 0.0


def _stage_s(place: Place) -> float:
    return place.passes(place.own_tokens * place.decoder.hidden, 4, _STAGE)


def _stage_both_s(place: Place) -> float:
    return place.passes(place.own_tokens * place.decoder.hidden, 6, _ADDITION)


def _sum_s(place: Place) -> float:
    """A part of each rank read, their sum written: an addition of two, and as much longer as there are more."""
    return place.passes(place.own_tokens * place.decoder.hidden * (place.tp.ranks + 1) / 3, 6, _ADDITION)
