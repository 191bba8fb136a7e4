"""Seconds of the two ends of a model, the embedding and the head with its loss, for one micro-batch on one rank."""

from __future__ import annotations

from functools import lru_cache

from triweave.planner.time_collectives import all_reduce_s, overlapped_s, reduce_scatter_s
from triweave.planner.time_exchange import Linear, column_s, uses_copy_engines
from triweave.planner.time_parts import Parts, Place, Work


@lru_cache(maxsize=8192)
def head_work(place: Place) -> Work:
    """Final norm, output head (in bf16 whatever the layers are in) and loss."""
    decoder, stack = place.decoder, place.stack
    vocab = -(-decoder.vocab // place.tp.ranks)
    forward, backward_input, backward_weight = place.products(vocab, decoder.hidden, "bf16")
    norm = place.memory(place.own_tokens * decoder.hidden, stack.norm)
    loss = place.memory(place.tokens * vocab, stack.loss)
    gather, reduce = _gather_s(place), _sum_s(place)
    if stack.overlap_tp:
        # As in a layer: the sum travels while the weight gradient is multiplied.
        reduce = overlapped_s(reduce, backward_weight, place.slowdown("collectives"))
    if uses_copy_engines(place):
        products = (forward, backward_input, backward_weight)
        gather, reduce = column_s(place, Linear(vocab, decoder.hidden), products)
    # Maximum and sum of exponentials of every token, in float32.
    statistics = 2 * all_reduce_s(place.machine, place.tp, 4.0 * place.tokens, rings=stack.rings) / place.links
    return Work(
        Parts(forward, memory=norm[0] + loss[0], tensor_parallel=gather + statistics),
        Parts(backward_input, memory=norm[1] + loss[1], tensor_parallel=reduce),
        Parts(backward_weight, memory=place.accumulate(decoder.hidden * vocab)),
    )


@lru_cache(maxsize=8192)
def embedding_work(place: Place) -> Work:
    """The lookup, its sum over the tensor-parallel ranks; gradients are added row by row."""
    forward, backward = place.memory(place.tokens * place.decoder.hidden, place.stack.lookup)
    return Work(
        Parts(memory=forward, tensor_parallel=_sum_s(place)),
        Parts(tensor_parallel=_gather_s(place)),
        Parts(memory=backward),
    )


def _gather_s(place: Place) -> float:
    """The residual stream made whole."""
    if not place.sequence_parallel:
        return 0.0
    return reduce_scatter_s(place.machine, place.tp, place.activation_bytes) / place.links


def _sum_s(place: Place) -> float:
    """Partial residual streams summed, and cut along the sequence where it is split."""
    if place.sequence_parallel:
        return _gather_s(place)
    rings = place.stack.rings
    return all_reduce_s(place.machine, place.tp, place.activation_bytes, rings=rings) / place.links
