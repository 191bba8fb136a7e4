"""One layer of the trainer as a list of operations: what each computes, moves and takes, without communication."""

from __future__ import annotations

from typing import Literal, NamedTuple

from triweave.planner.time_attention import attention_s
from triweave.planner.time_operations import Operation
from triweave.planner.time_parts import Place
from triweave.planner.time_trainer import Kernels

Direction = Literal["forward", "backward"]


class LayerOperation(NamedTuple):
    """One kernel, or one matrix product, of one micro-batch on one rank."""

    name: str
    direction: Direction
    flops: float
    """0 where memory is what counts."""
    bytes: float
    """Read and written; 0 where arithmetic is what counts."""
    seconds: float


def layer_operations(place: Place, kernels: Kernels) -> tuple[LayerOperation, ...]:
    """Every operation of a layer, forward and then backward, in no particular order within either.

    Their seconds sum to what `time_layer.layer_work` charges for products, attention and memory when the place's stack
    is made of the same kernels.
    """
    decoder, tp = place.decoder, place.tp.ranks
    query = decoder.query // tp
    key_value = max(1, decoder.kv_heads // tp) * decoder.head_dim
    width = decoder.ffn // tp
    qkv, own = query + 2 * key_value, place.own_tokens * decoder.hidden
    listed = [
        *_product("queries, keys, values", place, qkv, decoder.hidden),
        *_product("output projection", place, decoder.hidden, query),
        *_product("gate and up", place, decoder.ffn_in // tp, decoder.hidden),
        *_product("down", place, decoder.hidden, width),
        *_attention(place),
        *_kernels("norm", place, kernels.norm, 2 * own),
        *_kernels("residual", place, kernels.residual, 2 * own),
        *_kernels("rotary", place, kernels.rotary, place.tokens * (query + key_value)),
        *_kernels("heads", place, kernels.heads, place.tokens * qkv),
        *_kernels("swiglu", place, kernels.swiglu, place.tokens * width),
    ]
    return tuple(sorted(listed, key=lambda one: one.direction == "backward"))


def _product(name: str, place: Place, n: int, k: int) -> list[LayerOperation]:
    flops = 2.0 * place.tokens * n * k
    forward, input_gradient, weight_gradient = place.products(n, k)
    return [
        LayerOperation(name, "forward", flops, 0.0, forward),
        LayerOperation(f"{name}: input gradient", "backward", flops, 0.0, input_gradient),
        LayerOperation(f"{name}: weight gradient", "backward", flops, 0.0, weight_gradient),
    ]


def _attention(place: Place) -> list[LayerOperation]:
    decoder, stack = place.decoder, place.stack
    heads = max(1, decoder.heads // place.tp.ranks)
    seq, ranks = place.seq // place.cp.ranks, place.cp.ranks
    seconds = attention_s(place.machine, stack.attention, place.micro_batch, seq, heads, decoder.head_dim)
    flops = 2.0 * place.micro_batch * heads * decoder.head_dim * place.seq**2 / ranks
    forward, backward = (one * ranks / stack.efficiency for one in seconds)
    return [
        LayerOperation("attention", "forward", flops, 0.0, forward),
        LayerOperation("attention", "backward", 2.5 * flops, 0.0, backward),
    ]


def _kernels(name: str, place: Place, operation: Operation, elements: float) -> list[LayerOperation]:
    rate = place.machine.hbm_kernel_bytes_per_s * place.stack.efficiency
    directions: tuple[Direction, Direction] = ("forward", "backward")
    return [
        LayerOperation(
            f"{name}: {kernel.name}",
            direction,
            0.0,
            elements * (kernel.read + kernel.write),
            elements * kernel.bytes / rate,
        )
        for direction, kernels in zip(directions, operation, strict=True)
        for kernel in kernels
    ]
