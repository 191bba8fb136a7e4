"""Seconds of one decoder layer for one micro-batch on one rank."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from triweave.planner.machine import Trainer
from triweave.planner.time_attention import attention_s
from triweave.planner.time_collectives import all_reduce_s, overlapped_s, reduce_scatter_s, send_s
from triweave.planner.time_exchange import Linear, Products, column_s, row_s, uses_copy_engines
from triweave.planner.time_host import host_of_stack
from triweave.planner.time_parts import Parts, Place, Work, add, chain
from triweave.planner.time_stack import Bytes

_MERGE_OUTPUT = Bytes(10, 10)
"""A step of the ring: its output read (2) and added to a float32 sum (8); backward the same with queries' gradients."""
_MERGE_KEYS = Bytes(0, 10)
"""Backward, gradients of keys and values: those of the step read (2) and added to the float32 sums that travel (8)."""
_SUMMED_PARTS, _SUMMED_PARTS_OF_TWO = Bytes(19, 11), Bytes(14, 10)
"""Ours, per element of the queries, of which one half sees keys in two parts and the other in three (among two ranks in
two). The first part weighted (6), one between added (10), the last added and rounded (8); backward each read (2), their
sum written (2) and copied (4)."""


class _Context(NamedTuple):
    """What context parallelism adds to an attention: seconds, forward and backward."""

    exposed: tuple[float, float] = (0.0, 0.0)
    """Communication that nothing hides."""
    memory: tuple[float, float] = (0.0, 0.0)
    """Passes that add up what the parts gave."""


class _Half(NamedTuple):
    """Attention or MLP with its norm and residual."""

    work: Work
    norm: float
    """Seconds of the norm forward: what the recomputation called `norm` repeats."""
    cheap: float
    """Seconds of the element-wise operation before the last product: what `swiglu` repeats."""
    last: Parts
    """Its last product forward, and what this rank waits for there: nothing keeps what comes of it."""

    @property
    def again(self) -> Parts:
        """What running it again for backward takes: that ends where the last input is kept (`layers.linear`)."""
        return add(self.work.forward, self.last.times(-1.0))


@lru_cache(maxsize=8192)
def layer_work(place: Place) -> Work:
    """One decoder layer."""
    stack, chosen = place.stack, place.recompute
    attention, mlp = _attention(place), _mlp(place)
    whole, ahead = chain(attention.work, mlp.work), 1.0
    if place.trainer is not None:
        # Layers over several ranks were measured with slices and copy engines between them. Without sequence
        # parallelism a layer is one of one rank and its all-reduces, on the host (`time_host`) as on the GPU.
        ranks = place.tp.ranks if place.sequence_parallel else 1
        ahead, back = _ratios(place.trainer, ranks, products_share(whole))
        whole = Work(whole.forward.times(ahead), whole.backward_input.times(back), whole.backward_weight.times(back))
    if not stack.own:
        host = host_of_stack(place)
        whole = Work(
            whole.forward.at_least(host.forward),
            whole.backward_input.at_least(host.backward_input),
            whole.backward_weight.at_least(host.backward_weight),
        )
    forward, backward_input, backward_weight, _ = whole
    if "layer" in chosen:
        return whole._replace(recompute=add(forward, mlp.last.times(-ahead)) if stack.own else forward)
    repeated = [
        Parts(
            stack.rerun.matmul * forward.matmul,
            stack.rerun.attention * forward.attention,
            stack.rerun.memory * forward.memory,
        )
    ]
    for name, half in (("attention", attention), ("mlp", mlp)):
        if name in chosen:
            repeated.append(half.again if stack.own else half.work.forward)
        elif "norm" in chosen:
            repeated.append(Parts(memory=half.norm))
    if "swiglu" in chosen and "mlp" not in chosen:
        repeated.append(Parts(memory=mlp.cheap))
    return Work(forward, backward_input, backward_weight, add(*repeated))


def products_share(work: Work) -> float:
    """Of a layer's seconds forward and backward, those of matrix products."""
    whole = add(work.forward, work.backward_input, work.backward_weight)
    return whole.matmul / whole.total


def _ratios(trainer: Trainer, ranks: int, share: float) -> tuple[float, float]:
    """Measured over priced time of a layer with such a share of products: straight between the measured ones."""
    known = trainer.layer_ratios.get(ranks) or trainer.layer_ratios.get(1)
    if not known:
        return 1.0, 1.0
    shares = [point[0] for point in known]
    after = bisect_left(shares, share)
    if after in (0, len(known)):
        return known[min(after, len(known) - 1)][1:]
    (left, *low), (right, *high) = known[after - 1], known[after]
    weight = (share - left) / (right - left)
    forward, backward = (one + weight * (other - one) for one, other in zip(low, high, strict=True))
    return forward, backward


def _attention(place: Place) -> _Half:
    decoder, machine, stack, tp = place.decoder, place.machine, place.stack, place.tp.ranks
    query = decoder.query // tp
    # With more ranks than key/value heads every rank still holds a whole one.
    key_value = max(1, decoder.kv_heads // tp) * decoder.head_dim
    qkv = place.products(query + 2 * key_value, decoder.hidden)
    out = place.products(decoder.hidden, query)
    # A context-parallel rank's share of causal attention is one kernel a step of the ring, each as much work as causal
    # attention over its own tokens (two slices, one from each end of the sequence, balance it).
    core_forward, core_backward = (
        seconds * place.cp.ranks / stack.efficiency
        for seconds in attention_s(
            machine,
            stack.attention,
            place.micro_batch,
            place.seq // place.cp.ranks,
            max(1, decoder.heads // tp),
            decoder.head_dim,
        )
    )
    norm = place.memory(place.own_tokens * decoder.hidden, stack.norm)
    residual = place.memory(place.own_tokens * decoder.hidden, stack.residual)
    rotary = place.memory(place.tokens * (query + key_value), stack.rotary)
    heads = place.memory(place.tokens * (query + 2 * key_value), stack.heads)
    casts = place.casts(place.tokens * (decoder.hidden + query))
    gradient_casts = place.casts(place.tokens * (query + 2 * key_value + decoder.hidden)) if stack.own else casts
    weights = (Linear(query + 2 * key_value, decoder.hidden), Linear(decoder.hidden, query))
    tp_forward, tp_backward = _tensor_parallel(place, weights, qkv, out, place.stack.reductions // 2)
    context = (_gathered_keys if stack.own else _ring)(place, query, key_value, core_forward, core_backward)
    parameters = decoder.hidden * (2 * query + 2 * key_value)
    work = Work(
        Parts(
            qkv[0] + out[0],
            core_forward,
            norm[0] + residual[0] + rotary[0] + heads[0] + casts + context.memory[0],
            tp_forward,
            context.exposed[0],
        ),
        Parts(
            qkv[1] + out[1],
            core_backward,
            norm[1] + residual[1] + rotary[1] + heads[1] + gradient_casts + context.memory[1],
            tp_backward,
            context.exposed[1],
        ),
        Parts(qkv[2] + out[2], memory=place.accumulate(parameters)),
    )
    last = Parts(out[0], memory=residual[0], tensor_parallel=_row_ahead_s(place, weights[1], out, tp_forward))
    return _Half(work, norm[0], 0.0, last)


def _mlp(place: Place) -> _Half:
    decoder, stack, tp = place.decoder, place.stack, place.tp.ranks
    width = decoder.ffn // tp
    inputs = 2 if decoder.gated and not stack.fused_gate else 1
    one = place.products(decoder.ffn_in // tp // inputs, decoder.hidden)
    up: Products = (inputs * one[0], inputs * one[1], inputs * one[2])
    down = place.products(decoder.hidden, width)
    norm = place.memory(place.own_tokens * decoder.hidden, stack.norm)
    residual = place.memory(place.own_tokens * decoder.hidden, stack.residual)
    activation = place.memory(place.tokens * width, stack.activation)
    casts = place.casts(place.tokens * (decoder.hidden + width))
    gradient_casts = place.casts(place.tokens * (decoder.ffn_in // tp + decoder.hidden)) if stack.own else casts
    weights = (Linear(decoder.ffn_in // tp, decoder.hidden), Linear(decoder.hidden, width))
    reductions = stack.reductions - stack.reductions // 2
    tp_forward, tp_backward = _tensor_parallel(place, weights, up, down, reductions)
    parameters = decoder.hidden * (decoder.ffn_in // tp + width)
    work = Work(
        Parts(up[0] + down[0], 0.0, norm[0] + residual[0] + activation[0] + casts, tp_forward),
        Parts(up[1] + down[1], 0.0, norm[1] + residual[1] + activation[1] + gradient_casts, tp_backward),
        Parts(up[2] + down[2], memory=place.accumulate(parameters)),
    )
    last = Parts(down[0], memory=residual[0], tensor_parallel=_row_ahead_s(place, weights[1], down, tp_forward))
    return _Half(work, norm[0], activation[0], last)


def _tensor_parallel(
    place: Place, weights: tuple[Linear, Linear], column: Products, row: Products, reductions: int
) -> tuple[float, float]:
    """Exposed communication of half a layer, forward and backward.

    Sequence parallel: a gather before and a reduce-scatter after, the same backward, and the gathered input once
    more beside the input gradient's product. Without: an all-reduce after the row-parallel product, and in backward
    one beside the column-parallel product's weight gradient.
    """
    machine, stack, group, slowdown = place.machine, place.stack, place.tp, place.slowdown("collectives")
    if group.ranks == 1:
        return 0.0, 0.0
    if uses_copy_engines(place):
        ahead, back = zip(column_s(place, weights[0], column), row_s(place, weights[1], row), strict=True)
        return sum(ahead), sum(back)
    if not place.sequence_parallel:
        once = all_reduce_s(machine, group, place.activation_bytes, rings=stack.rings) / place.links
        return once, (overlapped_s(once, column[2], slowdown) if stack.overlap_tp else reductions * once)
    once = reduce_scatter_s(machine, group, place.activation_bytes) / place.links
    if stack.pipelined < 1:
        return 2 * once * stack.pipelined, 2 * once * stack.pipelined
    if stack.piece_tokens and group.nodes == 1:
        # Across nodes there are no copy engines, and collectives carry what is whole (`transport.choose`).
        return _in_pieces(place, column, row, once)
    again = 1 if stack.gathers_again and not place.keeps_gathered else 0
    if not stack.overlap_tp:
        return 2 * once, (2 + again) * once
    hidden = again * overlapped_s(once, column[1], slowdown) + overlapped_s(once, column[2], slowdown)
    return 2 * once, once + hidden


def _row_ahead_s(place: Place, weight: Linear, product: Products, both: float) -> float:
    """Of the exchanges of half a layer forward, that of its row-parallel product."""
    if uses_copy_engines(place):
        return row_s(place, weight, product)[0]
    return both / 2 if place.sequence_parallel else both


def _in_pieces(place: Place, column: Products, row: Products, once: float) -> tuple[float, float]:
    """Exposed communication where every gather and scatter travels beside its own product, cut in pieces.

    A rank multiplies its own slice while the others' arrive, and sends parts of a sum while it computes the next: of n
    pieces n - 1 have something to hide under. In backward the gather for the weight gradient has the input gradient's
    product as well, and the last scatter the weight gradient's.
    """
    stack, ranks, slowdown = place.stack, place.tp.ranks, place.slowdown("collectives")
    together = -(-stack.piece_tokens // max(1, place.own_tokens))
    pieces = 1 + -(-(ranks - 1) // together)
    share = (pieces - 1) / pieces

    def exposed(communication: float, compute: float) -> float:
        return overlapped_s(communication, share * compute, slowdown)

    forward = exposed(once, column[0]) + exposed(once, row[0])
    backward = exposed(once, row[1]) + overlapped_s(
        (1 if place.keeps_gathered else 2) * once, share * column[1] + column[2], slowdown
    )
    return forward, backward


def _ring(place: Place, query: int, key_value: int, forward: float, backward: float) -> _Context:
    """Keys and values round the ring beside attention; backward carries their gradients as well."""
    others = place.cp.ranks - 1
    if not others:
        return _Context()
    tensors = 2 * 2.0 * place.tokens * key_value
    hop = send_s(place.machine, tensors, crosses_nodes=place.cp.nodes > 1)
    slowdown, steps = place.stack.slowdown, place.cp.ranks
    merge = place.memory(others * place.tokens * query, _MERGE_OUTPUT)
    merge_keys = place.memory(others * place.tokens * 2 * key_value, _MERGE_KEYS)
    exposed = (
        others * overlapped_s(hop, forward / steps, slowdown),
        others * overlapped_s(2 * hop, backward / steps, slowdown),
    )
    return _Context(exposed, (merge[0], merge[1] + merge_keys[1]))


def _gathered_keys(place: Place, query: int, key_value: int, forward: float, backward: float) -> _Context:
    """Ours: keys and values of each half of the sequence are gathered, and their gradients reduce-scattered.

    Of the work 1 in 2 cp needs own keys alone, and at least half needs those of the first half. What hides what is in
    `layers/context_parallel.py`; in backward the last rank has nothing between the two gathers, and nobody has
    anything left beside the last reduce-scatter.
    """
    ranks, slowdown = place.cp.ranks, place.slowdown("collectives")
    if ranks == 1:
        return _Context()
    own = 2 * place.tokens * key_value
    half = reduce_scatter_s(place.machine, place.cp, 2.0 * own * ranks / 2)
    ahead = overlapped_s(half, forward / (2 * ranks), slowdown) + overlapped_s(half, forward / 2, slowdown)
    back = overlapped_s(2 * half, backward / (2 * ranks), slowdown) + overlapped_s(half, backward / 2, slowdown) + half
    # Own ones put together (4), and backward zeros (2) and sums (6) of what is gathered and of the own.
    keys = place.memory(own, Bytes(4, 19 + 8 * ranks))
    parts = place.memory(place.tokens * query, _SUMMED_PARTS if ranks > 2 else _SUMMED_PARTS_OF_TWO)
    return _Context((ahead, back), (keys[0] + parts[0], keys[1] + parts[1]))
