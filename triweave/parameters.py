"""Which slice of which Hugging Face tensor every rank holds, as pure data.

The model is built with these shapes, weights are read and written by these slices, gradients are reduced and
counted by these replicas, and the planner prices these bytes: one definition for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from triweave.layout import Layout
from triweave.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `[offset, offset + rows)` of a local parameter: a slice of one Hugging Face tensor."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face tensor."""
    dim: int
    """Dimension of the Hugging Face tensor that is cut."""
    start: int
    """First index of the slice along `dim`."""
    stop: int
    """One past its last index; never inside vocabulary padding."""
    offset: int = 0
    """First row of the local parameter that the slice fills."""
    replicas: int = 1
    """Tensor-parallel ranks that hold this same slice."""
    partial: bool = False
    """Whether each replica computes only a part of the gradient, so that the replicas must be summed."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter as a tensor-parallel rank holds it."""

    name: str
    """Module path in the stage; a fused product (`qkv_proj`, `gate_up_proj`) holds several pieces."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    unit: str
    """What is gathered and reduced together over data-parallel ranks: a layer, the embedding, the norm, the head."""
    decay: bool
    """Whether weight decay applies: to matrices, never to norms and biases."""

    @property
    def numel(self) -> int:
        """Number of elements on this rank, vocabulary padding included."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def vocab_rows(vocab_size: int, tp: int) -> int:
    """Vocabulary rows of one tensor-parallel rank: the vocabulary padded to a multiple of `tp`, divided by it."""
    return -(-vocab_size // tp)


def kv_replicas(spec: ModelSpec, tp: int) -> int:
    """Tensor-parallel ranks that hold the same key/value head: more than 1 when tp exceeds the key/value heads."""
    return max(1, tp // spec.num_key_value_heads)


def first_kv_head(spec: ModelSpec, tp: int, tp_rank: int) -> int:
    """First key/value head of a tensor-parallel rank: the one that its first query head reads."""
    return tp_rank * spec.num_key_value_heads // tp


def holds_embedding(layout: Layout, stage: int) -> bool:
    """Whether a virtual stage looks tokens up."""
    return stage == 0


def holds_head(layout: Layout, stage: int) -> bool:
    """Whether a virtual stage computes logits."""
    return stage == layout.num_stages - 1


def has_tied_copy(spec: ModelSpec, layout: Layout) -> bool:
    """Whether the tied embedding lives twice: on the first and on the last pipeline rank."""
    return spec.tie_word_embeddings and layout.stage_owner(layout.num_stages - 1) != 0


def stage_parameters(spec: ModelSpec, layout: Layout, stage: int, tp_rank: int) -> Iterator[LocalParameter]:
    """Every parameter that tensor-parallel rank `tp_rank` holds of virtual stage `stage`, in model order.

    A head tied to an embedding on the same pipeline rank is that embedding and is not listed again.
    """
    if holds_embedding(layout, stage):
        yield _vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight", "embed", spec, layout, tp_rank)
    for layer in layout.layers_of(stage):
        yield from _layer_parameters(spec, layout, layer, tp_rank)
    if holds_head(layout, stage):
        yield _norm("model.norm.weight", "norm", spec, layout)
        if not spec.tie_word_embeddings:
            yield _vocabulary("lm_head.weight", "lm_head.weight", "head", spec, layout, tp_rank)
        elif has_tied_copy(spec, layout):
            # Its own unit, laid out as the first stage's, so that shards of the two copies match one to one.
            yield _vocabulary("lm_head.weight", "model.embed_tokens.weight", "embed", spec, layout, tp_rank)


def _vocabulary(name: str, hf_name: str, unit: str, spec: ModelSpec, layout: Layout, tp_rank: int) -> LocalParameter:
    rows = vocab_rows(spec.vocab_size, layout.tp)
    start = min(tp_rank * rows, spec.vocab_size)
    stop = min(start + rows, spec.vocab_size)
    piece = Piece(hf_name, (spec.vocab_size, spec.hidden_size), 0, start, stop)
    return LocalParameter(name, (rows, spec.hidden_size), (piece,), unit, decay=True)


def _norm(name: str, unit: str, spec: ModelSpec, layout: Layout) -> LocalParameter:
    shape = (spec.hidden_size,)
    # Under sequence parallelism every rank sees other positions, so each holds a part of the gradient.
    piece = Piece(name, shape, 0, 0, shape[0], replicas=layout.tp, partial=layout.uses_sequence_parallel)
    return LocalParameter(name, shape, (piece,), unit, decay=False)


def _layer_parameters(spec: ModelSpec, layout: Layout, layer: int, tp_rank: int) -> Iterator[LocalParameter]:
    prefix, unit, tp = f"model.layers.{layer}", f"layers.{layer}", layout.tp
    hidden, head_dim = spec.hidden_size, spec.head_dim
    query_rows = spec.query_size // tp
    kv_rows = max(1, spec.num_key_value_heads // tp) * head_dim
    kv_start = first_kv_head(spec, tp, tp_rank) * head_dim
    replicas = kv_replicas(spec, tp)

    def qkv(kind: str, columns: tuple[int, ...]) -> tuple[Piece, ...]:
        attention = f"{prefix}.self_attn"
        shape, start = (spec.query_size, *columns), tp_rank * query_rows
        query = Piece(f"{attention}.q_proj.{kind}", shape, 0, start, start + query_rows)
        key, value = (
            Piece(
                f"{attention}.{name}_proj.{kind}",
                (spec.key_value_size, *columns),
                0,
                kv_start,
                kv_start + kv_rows,
                offset,
                replicas,
                partial=replicas > 1,
            )
            for name, offset in (("k", query_rows), ("v", query_rows + kv_rows))
        )
        return query, key, value

    qkv_rows = query_rows + 2 * kv_rows
    yield LocalParameter(
        f"{prefix}.self_attn.qkv_proj.weight", (qkv_rows, hidden), qkv("weight", (hidden,)), unit, decay=True
    )
    if spec.attention_bias:
        yield LocalParameter(f"{prefix}.self_attn.qkv_proj.bias", (qkv_rows,), qkv("bias", ()), unit, decay=False)
    yield _row_parallel(f"{prefix}.self_attn.o_proj.weight", unit, hidden, spec.query_size, tp, tp_rank)

    rows = spec.intermediate_size // tp
    gate, up = (
        Piece(
            f"{prefix}.mlp.{name}_proj.weight",
            (spec.intermediate_size, hidden),
            0,
            tp_rank * rows,
            (tp_rank + 1) * rows,
            offset,
        )
        for name, offset in (("gate", 0), ("up", rows))
    )
    yield LocalParameter(f"{prefix}.mlp.gate_up_proj.weight", (2 * rows, hidden), (gate, up), unit, decay=True)
    yield _row_parallel(f"{prefix}.mlp.down_proj.weight", unit, hidden, spec.intermediate_size, tp, tp_rank)
    yield _norm(f"{prefix}.input_layernorm.weight", unit, spec, layout)
    yield _norm(f"{prefix}.post_attention_layernorm.weight", unit, spec, layout)


def _row_parallel(name: str, unit: str, rows: int, columns: int, tp: int, tp_rank: int) -> LocalParameter:
    width = columns // tp
    piece = Piece(name, (rows, columns), 1, tp_rank * width, (tp_rank + 1) * width)
    return LocalParameter(name, (rows, width), (piece,), unit, decay=True)
