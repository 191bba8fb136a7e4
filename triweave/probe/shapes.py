"""What is measured: the shapes that the layers of Llama models have on one rank, most useful first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from triweave.catalogue import find_model
from triweave.model_spec import ModelSpec
from triweave.planner.time_matmul import Operands

HEAD_TOKENS = 8192
"""Products with the vocabulary are measured up to so many tokens: logits of twice as many would fill a small card."""


class Product(NamedTuple):
    """`[m, k] x [k, n]` as one of the three products of a linear layer."""

    operands: Operands
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


class AttentionShape(NamedTuple):
    """Causal attention of one rank."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int


class LayerShape(NamedTuple):
    """A decoder layer and the micro-batch that passes it."""

    spec: ModelSpec
    batch: int
    seq: int


def models(small: bool) -> tuple[ModelSpec, ...]:
    """The family, the most useful first; small ones for a rehearsal on a CPU."""
    if small:
        return (ModelSpec(512, 64, 128, 2, 8, 8, 8),)
    names = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b")
    return tuple(find_model(name) for name in names)


def tensor_parallel_sizes(spec: ModelSpec, small: bool) -> tuple[int, ...]:
    """Over how many ranks a model's layers are cut."""
    sizes = (1, 2) if small else (1, 2, 4, 8)
    return tuple(tp for tp in sizes if spec.num_attention_heads % tp == 0 and spec.intermediate_size % tp == 0)


def token_counts(small: bool) -> tuple[int, ...]:
    """Tokens of a micro-batch, or of a piece of one."""
    return (64, 128) if small else (8192, 4096, 16384, 2048)


def products(small: bool, *, heads: bool = True) -> tuple[Product, ...]:
    """All products of the family's layers, each once; `heads` says whether with the vocabulary as well."""
    found: dict[Product, None] = {}
    for spec in models(small):
        for tp in tensor_parallel_sizes(spec, small):
            for out, inner, is_head in linear_layers(spec, tp):
                for tokens in token_counts(small):
                    if is_head and (tokens > HEAD_TOKENS or not heads):
                        continue
                    found.update(dict.fromkeys(products_of(tokens, out, inner)))
    return tuple(found)


def linear_layers(spec: ModelSpec, tp: int) -> Iterator[tuple[int, int, bool]]:
    """Output and input features of a rank's linear layers, and whether each is the head."""
    heads = spec.num_attention_heads // tp * spec.head_dim
    key_values = max(1, spec.num_key_value_heads // tp) * spec.head_dim
    yield heads + 2 * key_values, spec.hidden_size, False
    yield spec.hidden_size, heads, False
    yield 2 * spec.intermediate_size // tp, spec.hidden_size, False
    yield spec.hidden_size, spec.intermediate_size // tp, False
    yield -(-spec.vocab_size // tp), spec.hidden_size, True


def products_of(tokens: int, out: int, inner: int) -> tuple[Product, Product, Product]:
    """Forward, input gradient and weight gradient of a linear layer."""
    return (
        Product("NT", tokens, out, inner),
        Product("NN", tokens, inner, out),
        Product("TN", out, inner, tokens),
    )


def attention_shapes(small: bool) -> tuple[AttentionShape, ...]:
    """Sequences of 1k to 32k, alone and where they are short several at once; the longest of one model alone."""
    found: dict[AttentionShape, None] = {}
    if small:
        runs: tuple[tuple[int, int], ...] = ((64, 1), (128, 2))
    else:
        runs = ((8192, 1), (4096, 1), (2048, 1), (4096, 2), (2048, 4), (8192, 2), (1024, 1), (16384, 1), (32768, 1))
    first, *others = models(small)
    for spec in models(small):
        for tp in tensor_parallel_sizes(spec, small):
            if spec in others[1:] and tp > 2:
                # A kernel is chosen and compiled for each shape, which takes longer than to run it.
                continue
            heads, kv_heads = spec.num_attention_heads // tp, max(1, spec.num_key_value_heads // tp)
            for seq, batch in runs:
                if seq <= 8192 or spec == first:
                    found[AttentionShape(batch, seq, heads, kv_heads, spec.head_dim)] = None
    return tuple(found)


def layer_shapes(small: bool, tp: int) -> tuple[LayerShape, ...]:
    """Whole layers that the parts are held against, and of which the host's time is taken."""
    if small:
        return (LayerShape(models(True)[0], 1, 64),)
    eight, seventy, one, _ = models(False)
    shapes = [LayerShape(eight, 1, 8192), LayerShape(seventy, 1, 4096)]
    # Over several ranks smaller ones take the host as long as the GPU, and say nothing of it.
    small_ones = [LayerShape(eight, 1, 4096), LayerShape(one, 1, 8192)]
    return (*shapes, *([LayerShape(eight, 2, 8192)] if tp > 1 else small_ones))
