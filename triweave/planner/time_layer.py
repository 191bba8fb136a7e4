"""Seconds of one layer, of the head and of the embedding for one micro-batch on one rank, by where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from triweave.layout import Layout, Recompute
from triweave.planner.machine import Machine
from triweave.planner.time_attention import attention_s
from triweave.planner.time_collectives import (
    GroupShape,
    all_reduce_s,
    group_shape,
    overlapped_s,
    reduce_scatter_s,
    send_s,
)
from triweave.planner.time_matmul import Precision, matmul_s
from triweave.planner.time_shapes import Decoder
from triweave.planner.time_stack import Bytes, Stack


class Parts(NamedTuple):
    """Seconds by what is done. Sums element by element with `add`."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def add(*parts: Parts) -> Parts:
    """Element-wise sum."""
    return Parts(*(sum(column) for column in zip(*parts, strict=True)))


def scaled(parts: Parts, factor: float) -> Parts:
    """Every part times `factor`."""
    return Parts(*(value * factor for value in parts))


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of block: forward, the input and weight halves of backward, and what is recomputed before backward."""

    forward: Parts
    backward_input: Parts
    backward_weight: Parts
    recompute: Parts = Parts()


@dataclass(frozen=True, slots=True)
class Place:
    """What the blocks of a run have in common; the key under which their costs are remembered."""

    decoder: Decoder
    machine: Machine
    stack: Stack
    tp: GroupShape
    cp: GroupShape
    cp_crosses_nodes: bool
    micro_batch: int
    seq: int
    sequence_parallel: bool
    recompute: tuple[Recompute, ...]
    precision: Precision

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.seq // self.cp.ranks


def place_of(
    decoder: Decoder,
    layout: Layout,
    machine: Machine,
    stack: Stack,
    *,
    seq_len: int,
    gpus_per_node: int,
    precision: Precision,
) -> Place:
    """The place that a layout gives its blocks."""
    cp = group_shape(layout, "cp", gpus_per_node)
    return Place(
        decoder,
        machine,
        stack,
        group_shape(layout, "tp", gpus_per_node),
        cp,
        cp.nodes > 1,
        layout.micro_batch,
        seq_len,
        layout.uses_sequence_parallel,
        layout.recompute,
        precision,
    )


@lru_cache(maxsize=8192)
def layer_work(place: Place) -> Work:
    """One decoder layer."""
    decoder, machine, stack, tp = place.decoder, place.machine, place.stack, place.tp.ranks
    tokens = place.tokens
    qkv = ((decoder.query + 2 * decoder.key_value) // tp, decoder.hidden)
    out = (decoder.hidden, decoder.query // tp)
    inputs = 2 if decoder.gated and not stack.fused_gate else 1
    up = (decoder.ffn_in // tp // inputs, decoder.hidden)
    down = (decoder.hidden, decoder.ffn // tp)
    matmul = {name: _products(place, *shape) for name, shape in (("qkv", qkv), ("out", out), ("up", up), ("down", down))}
    matmul["up"] = tuple(seconds * inputs for seconds in matmul["up"])
    attention_forward, attention_backward = attention_s(
        machine, stack.attention, place.micro_batch, place.seq, max(1, decoder.heads // tp), decoder.head_dim
    )
    attention_forward, attention_backward = (
        attention_forward / place.cp.ranks,
        attention_backward / place.cp.ranks,
    )
    own = tokens // tp if place.sequence_parallel else tokens
    bandwidth = machine.hbm_kernel_bytes_per_s

    def memory(elements: float, cost: Bytes) -> tuple[float, float]:
        return elements * cost.forward / bandwidth, elements * cost.backward / bandwidth

    norm = memory(own * decoder.hidden, stack.norm)
    residual = memory(own * decoder.hidden, stack.residual)
    rotary = memory(tokens * (decoder.query + decoder.key_value) / tp, stack.rotary)
    heads = memory(tokens * (decoder.query + 2 * decoder.key_value) / tp, stack.heads)
    activation = memory(tokens * decoder.ffn / tp, stack.activation)
    casts = _casts_s(place, (decoder.hidden, decoder.query / tp, decoder.hidden, decoder.ffn / tp))
    accumulate = decoder.layer_parameters / tp * stack.accumulate / bandwidth

    products_forward = sum(cost[0] for cost in matmul.values())
    memory_forward = 2 * (norm[0] + residual[0]) + rotary[0] + heads[0] + activation[0] + casts
    memory_backward = 2 * (norm[1] + residual[1]) + rotary[1] + heads[1] + activation[1] + casts
    tp_forward, tp_backward = _tensor_parallel(place, matmul["qkv"], matmul["up"])
    cp_forward, cp_backward = _context_parallel(place, attention_forward, attention_backward)

    forward = Parts(products_forward, attention_forward, memory_forward, tp_forward, cp_forward)
    backward_input = Parts(
        sum(cost[1] for cost in matmul.values()), attention_backward, memory_backward, tp_backward, cp_backward
    )
    backward_weight = Parts(sum(cost[2] for cost in matmul.values()), memory=accumulate)
    forward = _at_least(forward, stack.kernels[0] * machine.launch_s)
    backward_input = _at_least(backward_input, stack.kernels[1] * machine.launch_s * 0.7)
    backward_weight = _at_least(backward_weight, stack.kernels[1] * machine.launch_s * 0.3)

    recompute = Parts()
    half = tp_forward / 2
    if "layer" in place.recompute:
        recompute = forward
    else:
        if "mlp" in place.recompute:
            mlp = matmul["up"][0] + matmul["down"][0]
            recompute = add(recompute, Parts(mlp, memory=norm[0] + activation[0], tensor_parallel=half))
        if "attention" in place.recompute:
            products = matmul["qkv"][0] + matmul["out"][0]
            bytes_s = norm[0] + rotary[0] + heads[0]
            recompute = add(recompute, Parts(products, attention_forward, bytes_s, half, cp_forward))
        if "norm" in place.recompute:
            recompute = add(recompute, Parts(memory=2 * norm[0]))
        if "swiglu" in place.recompute and "mlp" not in place.recompute:
            recompute = add(recompute, Parts(memory=activation[0]))
    return _calibrated(Work(forward, backward_input, backward_weight, recompute), stack)


@lru_cache(maxsize=8192)
def head_work(place: Place) -> Work:
    """Final norm, output head and loss."""
    decoder, machine, stack, tp = place.decoder, place.machine, place.stack, place.tp.ranks
    vocab = -(-decoder.vocab // tp)
    product = matmul_set(place, vocab, decoder.hidden, "bf16")
    bandwidth = machine.hbm_kernel_bytes_per_s
    own = place.tokens // tp if place.sequence_parallel else place.tokens
    norm = own * decoder.hidden / bandwidth
    logits = place.tokens * vocab / bandwidth
    activations = 2.0 * place.tokens * decoder.hidden
    gather = reduce_scatter_s(machine, place.tp, activations) if place.sequence_parallel else 0.0
    reduce = gather if place.sequence_parallel else all_reduce_s(machine, place.tp, activations)
    maxima = 2 * all_reduce_s(machine, place.tp, 4.0 * place.tokens)
    accumulate = decoder.hidden * vocab * stack.accumulate / bandwidth
    forward = Parts(
        product[0], memory=norm * stack.norm.forward + logits * stack.loss.forward, tensor_parallel=gather + maxima
    )
    backward_input = Parts(
        product[1], memory=norm * stack.norm.backward + logits * stack.loss.backward, tensor_parallel=reduce
    )
    return _calibrated(Work(forward, backward_input, Parts(product[2], memory=accumulate)), stack)


@lru_cache(maxsize=8192)
def embedding_work(place: Place) -> Work:
    """The lookup: rows read and written, their sum over the tensor-parallel ranks, gradients added row by row."""
    machine, tokens, hidden = place.machine, place.tokens, place.decoder.hidden
    lookup = tokens * hidden * 4.0 / machine.hbm_kernel_bytes_per_s
    activations = 2.0 * tokens * hidden
    sum_s = (reduce_scatter_s if place.sequence_parallel else all_reduce_s)(machine, place.tp, activations)
    gather = reduce_scatter_s(machine, place.tp, activations) if place.sequence_parallel else 0.0
    work = Work(
        Parts(memory=lookup, tensor_parallel=sum_s),
        Parts(tensor_parallel=gather),
        Parts(memory=3 * lookup),
    )
    return _calibrated(work, place.stack)


def _products(place: Place, n: int, k: int) -> tuple[float, float, float]:
    return matmul_set(place, n, k, place.precision)


def matmul_set(place: Place, n: int, k: int, precision: Precision) -> tuple[float, float, float]:
    """Forward, input gradient and weight gradient of a linear layer with `[n, k]` weights."""
    m, machine = place.tokens, place.machine
    return (
        matmul_s(machine, m, n, k, precision, "NT"),
        matmul_s(machine, m, k, n, precision, "NN"),
        matmul_s(machine, n, k, m, precision, "TN"),
    )


def _casts_s(place: Place, widths: tuple[float, ...]) -> float:
    """fp8: each product's input is read in bf16 and written in fp8, straight and transposed."""
    if place.precision != "fp8":
        return 0.0
    return place.tokens * sum(widths) * 4.0 / place.machine.hbm_kernel_bytes_per_s


def _tensor_parallel(
    place: Place, qkv: tuple[float, float, float], up: tuple[float, float, float]
) -> tuple[float, float]:
    """Exposed communication of a layer, forward and backward (planning notes 2.7).

    Sequence parallel: a gather before and a reduce-scatter after each half of the layer, the same backward, and the
    gathered inputs once more, beside the input gradient's product. Without: one all-reduce each, forward after the
    row-parallel product, backward beside the column-parallel one's weight gradient.
    """
    machine, stack, group = place.machine, place.stack, place.tp
    if group.ranks == 1:
        return 0.0, 0.0
    activations = 2.0 * place.tokens * place.decoder.hidden
    if not place.sequence_parallel:
        once = all_reduce_s(machine, group, activations) / stack.links
        if not stack.overlap_tp:
            return 2 * once, stack.reductions * once
        return 2 * once, sum(overlapped_s(once, products[2], stack.slowdown) for products in (qkv, up))
    once = reduce_scatter_s(machine, group, activations) / stack.links
    gathers = 1 if stack.gathers_again else 0
    if not stack.overlap_tp:
        return 4 * once, (4 + 2 * gathers) * once
    hidden = sum(
        gathers * overlapped_s(once, products[1], stack.slowdown) + overlapped_s(once, products[2], stack.slowdown)
        for products in (qkv, up)
    )
    return 4 * once, 2 * once + hidden


def _context_parallel(place: Place, forward: float, backward: float) -> tuple[float, float]:
    """Keys and values round the ring beside attention; backward carries their gradients as well."""
    ranks = place.cp.ranks
    if ranks == 1:
        return 0.0, 0.0
    tensors = 2 * 2.0 * place.tokens * place.decoder.key_value / place.tp.ranks
    hop = send_s(place.machine, tensors, crosses_nodes=place.cp_crosses_nodes)
    slowdown = place.stack.slowdown
    return (
        (ranks - 1) * overlapped_s(hop, forward / ranks, slowdown),
        (ranks - 1) * overlapped_s(2 * hop, backward / ranks, slowdown),
    )


def _at_least(parts: Parts, floor: float) -> Parts:
    """The host cannot launch faster than this: what is missing counts as memory-bound operations."""
    compute = parts.matmul + parts.attention + parts.memory
    return parts._replace(memory=parts.memory + max(0.0, floor - compute))


def _calibrated(work: Work, stack: Stack) -> Work:
    """Compute over the stack's measured efficiency; communication as it is."""

    def apply(parts: Parts) -> Parts:
        matmul, attention, memory = (
            seconds / stack.efficiency for seconds in (parts.matmul, parts.attention, parts.memory)
        )
        return parts._replace(matmul=matmul, attention=attention, memory=memory)

    return Work(*(apply(p) for p in (work.forward, work.backward_input, work.backward_weight, work.recompute)))
