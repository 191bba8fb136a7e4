"""The bookkeeping of this package's trainer: what `triweave/llama.py` and its layers make, keep and free.

Written beside the layers' code, operation by operation, as PyTorch runs it on a GPU. A test runs the trainer and
holds what is kept between forward and backward to these tapes, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triweave.planner.sizes import Sizes
from triweave.planner.tape import Block, Pass, Tape

_FLOAT32 = 4
_ATTENTION = ("query-key-value", "attention output", "logsumexp")
_IN_CONTEXT = (
    "own keys' gradient",
    "gradient of the first half",
    "gradient of the second half",
    "received gradient",
    "more received gradient",
)
_OFFLOADED = {
    "attention": (
        *("attention input", "gathered attention input", "attention input by columns"),
        *(*_ATTENTION, "attention output by columns"),
    ),
    "mlp": (
        *("mlp input", "gathered mlp input", "mlp input by columns"),
        *("gate and up", "product", "product by columns"),
    ),
}


@dataclass(frozen=True, slots=True)
class Unit:
    """What data-parallel ranks share out of one unit of parameters, where its module runs; bytes."""

    gathered_weights: int = 0
    """Whole weights while the module's forward computes: its own, and those gathered ahead (`shard: full`)."""
    gathered_again: int = 0
    """The same in its backward."""
    whole_gradients: int = 0
    """The whole float32 gradients that the module's backward adds to (`gradients` and `full`)."""
    reduced_gradients: int = 0
    """This rank's slice of them, where the reduction gives it in a buffer of its own."""
    reducing: int = 0
    """Whole gradients of earlier units that are still being reduced in the module's backward."""
    still_reducing: int = 0
    """What the last backward may have left so when the module's forward computes."""
    new_gradients: tuple[int, ...] = ()
    """Every weight's gradient of one micro-batch, made before it is added to the sum (gradients of autograd's own)."""


def embedding_block(s: Sizes, unit: Unit) -> Block:
    """Lookup of `[seq, batch]` tokens; its output is the first layer's input."""
    f = Tape()
    _make_shared(f, unit.gathered_weights, unit.still_reducing)
    f.make("token rows", 8 * s.tokens)
    f.make("token mask", s.tokens)
    f.make("looked up", s.hidden)
    if s.sequence_parallel:
        f.make("output", s.slice)
        f.free("looked up")
    else:
        f.rename("looked up", "output")
    f.free("gathered weights", "gradients in flight")
    kept = _kept(f)

    b = Tape({**kept, "gradient": s.slice})
    _make_shared(b, unit.gathered_again, unit.reducing)
    b.make("whole gradients", unit.whole_gradients)
    b.make("gathered gradient", s.gathered)
    b.make("gradient in float32", s.hidden // s.element * 4)
    b.free("gradient in float32", "gathered gradient", "gradient", "token rows", "token mask", "gathered weights")
    b.free("whole gradients", "gradients in flight")
    return Block(kept, Pass.of(f), Pass.of(b), {**kept, "gradient": s.hidden})


def layer_block(s: Sizes, unit: Unit) -> Block:
    """One decoder layer, from its input to its output, `[seq/tp, batch, hidden]` each."""
    whole = "layer" in s.recompute
    f = Tape({"input": s.slice})
    _make_shared(f, unit.gathered_weights, unit.still_reducing)
    _layer_forward(f, s, keep=not whole)
    f.make("output", s.slice)
    f.free("down", "gathered weights", "gradients in flight")
    if {"norm", "mlp", "layer"} & s.recompute or not s.keeps_slice:
        f.free("mlp input")
    if whole:
        f.free("mlp residual")
    kept = _kept(f)

    b = Tape({**kept, "gradient": s.slice})
    _make_shared(b, unit.gathered_again, unit.reducing)
    b.make("whole gradients", unit.whole_gradients)
    if whole:
        # Until the last product has kept its input: what comes after is not run again.
        _layer_forward(b, s, keep=True)
        given_up = {"norm", "mlp"} & s.recompute or not s.keeps_slice
        b.free("down", *(("mlp input",) if given_up else ()))
    _mlp_backward(b, s)
    _attention_backward(b, s)
    b.free("gathered weights")
    b.free("whole gradients", "gradients in flight", "gradient")
    moved = kept if "layer" in s.offload else [name for kind in s.offload for name in _OFFLOADED[kind]]
    stays = {name: size for name, size in kept.items() if name not in moved}
    offloaded = {name: size for name, size in kept.items() if name in moved}
    return Block(stays, Pass.of(f), Pass.of(b), _put_off(s), offloaded)


def head_block(s: Sizes, unit: Unit) -> Block:
    """Final norm, logits and loss."""
    f = Tape({"input": s.slice})
    _make_shared(f, unit.gathered_weights, unit.still_reducing)
    f.make("head input", s.slice)
    f.make("gathered head input", s.gathered)
    f.make("logits", s.logits)
    f.free("head input" if s.keeps_gathered else "gathered head input", "gathered weights")
    f.make("row statistics", 8 * s.tokens)
    f.free("gradients in flight")
    kept = _kept(f)

    b = Tape(kept)
    _make_shared(b, unit.gathered_again, unit.reducing)
    b.make("whole gradients", unit.whole_gradients)
    b.rename("logits", "logits' gradient")
    b.free("row statistics")
    _column_backward(b, replace(s, fp8=False), "head input", "logits' gradient")
    b.free("gathered weights")
    b.free("whole gradients", "gradients in flight")
    _norm_backward(b, s, "input")
    b.free("gradient")
    return Block(kept, Pass.of(f), Pass.of(b), {"head input": s.column_input, "logits' gradient": s.logits})


def _make_shared(t: Tape, weights: int, reducing: int) -> None:
    """What data-parallel communication holds while a block computes: it runs beside, on tensors of other units too."""
    t.make("gathered weights", weights)
    t.make("gradients in flight", reducing)


# --- forward ----------------------------------------------------------------------------------------------------------


def _layer_forward(t: Tape, s: Sizes, *, keep: bool) -> None:
    """Up to what the MLP adds to the stream, `down`."""
    t.make("attention input", s.slice)
    _attention_forward(t, s, keep=keep and "attention" not in s.recompute)
    t.make("mlp residual", s.slice)
    t.make("mlp input", s.slice)
    t.free("attended")
    if not keep or {"norm", "attention"} & s.recompute or not s.keeps_slice:
        t.free("attention input")
    _mlp_forward(t, s, keep=keep and "mlp" not in s.recompute)
    if "norm" in s.recompute:
        t.free("attention input by columns", "mlp input by columns")


def _attention_forward(t: Tape, s: Sizes, *, keep: bool) -> None:
    """From the norm's output. Without `keep` nothing is saved: what the function holds goes when it returns."""
    t.make("gathered attention input", s.gathered)
    _cast_input(t, s, "attention input")
    t.make("query-key-value", s.qkv)
    t.free("input by rows")
    if not (keep and s.keeps_gathered):
        t.free("gathered attention input")
    # Queries, keys and values are the product itself, rotated in place.
    if s.cp > 1:
        _context_forward(t, s)
    t.make("attention output", s.query)
    t.make("logsumexp", s.logsumexp)
    if not keep:
        t.free("logsumexp")
    t.make("attention output by rows", s.in_fp8(s.query))
    t.make("attention output by columns", s.in_fp8(s.query))
    _row_output(t, s, "attended")
    t.free("attention output by rows")
    if not keep:
        t.free("query-key-value", "attention output", "attention input by columns", "attention output by columns")


def _mlp_forward(t: Tape, s: Sizes, *, keep: bool) -> None:
    """From the norm's output, likewise."""
    t.make("gathered mlp input", s.gathered)
    _cast_input(t, s, "mlp input")
    t.make("gate and up", s.gate_up)
    t.free("input by rows")
    if not (keep and s.keeps_gathered):
        t.free("gathered mlp input")
    t.make("product", s.ffn)
    t.make("product by rows", s.in_fp8(s.ffn))
    t.make("product by columns", s.in_fp8(s.ffn))
    _row_output(t, s, "down")
    t.free("product by rows")
    if not keep or "swiglu" in s.recompute or s.fp8:
        t.free("product")
    if not keep or "swiglu" in s.recompute:
        t.free("product by columns")
    if not keep:
        t.free("gate and up", "mlp input by columns")


def _cast_input(t: Tape, s: Sizes, name: str) -> None:
    """What a column-parallel product in fp8 reads, and what backward will read where that is kept."""
    t.make("input by rows", s.in_fp8(s.hidden))
    if s.keeps_columns:
        t.make(f"{name} by columns", s.in_fp8(s.hidden))


def _row_output(t: Tape, s: Sizes, name: str) -> None:
    """What a row-parallel product gives: a partial sum that is scattered, or summed in place."""
    if s.sequence_parallel:
        t.make("partial sum", s.hidden)
        t.make(name, s.slice)
        t.free("partial sum")
    else:
        t.make(name, s.hidden)


# --- backward ---------------------------------------------------------------------------------------------------------


def _mlp_backward(t: Tape, s: Sizes) -> None:
    """From `gradient` of the layer's output to `gradient` of what attention gave."""
    if "mlp" in s.recompute:
        t.make("mlp input", s.slice)
        _mlp_forward(t, s, keep=True)
        t.free("down", *(("mlp input",) if "norm" in s.recompute or not s.keeps_slice else ()))
    t.make("gathered gradient", s.gathered)
    _cast_gradient_of_sum(t, s)
    if "swiglu" in s.recompute:
        t.make("product", s.ffn)
    t.make("product's gradient", s.ffn)
    t.free("gradient by rows")
    t.make("gradient by columns", s.in_fp8(s.hidden))
    t.make("product by columns", s.in_fp8(s.ffn))
    t.free("gathered gradient", "gradient by columns", "product", "product by columns")
    t.make("projected gradient", s.gate_up)
    t.free("product's gradient", "gate and up")
    if "norm" in s.recompute:
        t.make("mlp input", s.slice)
    _column_backward(t, s, "mlp input", "projected gradient")
    _norm_backward(t, s, "mlp residual")


def _attention_backward(t: Tape, s: Sizes) -> None:
    if "attention" in s.recompute:
        t.make("attention input", s.slice)
        _attention_forward(t, s, keep=True)
        given_up = "norm" in s.recompute or not s.keeps_slice
        t.free("attended", *(("attention input",) if given_up else ()))
    t.make("gathered gradient", s.gathered)
    _cast_gradient_of_sum(t, s)
    t.make("attention output's gradient", s.query)
    t.free("gradient by rows")
    t.make("gradient by columns", s.in_fp8(s.hidden))
    t.free("gathered gradient", "gradient by columns", "attention output by columns")
    if s.cp > 1:
        _context_backward(t, s)
    else:
        # FlashAttention 2 and cuDNN sum the queries' gradient in float32.
        t.make("attention scratch", s.query // s.element * 4)
    t.make("queries' gradient", s.query)
    t.make("keys' gradient", s.key_value)
    t.make("values' gradient", s.key_value)
    t.free("attention scratch", "attention output's gradient", *_IN_CONTEXT, *_ATTENTION)
    t.make("projected gradient", s.qkv)
    t.free("queries' gradient", "keys' gradient", "values' gradient")
    if "norm" in s.recompute:
        t.make("attention input", s.slice)
    _column_backward(t, s, "attention input", "projected gradient")
    _norm_backward(t, s, "input")


def _context_forward(t: Tape, s: Sizes) -> None:
    """Attention over the keys of all context-parallel ranks (`layers/context_parallel.py`), on a rank in the middle.

    Its queries, two slices, are asked of their own keys, then of the first half's, then the second slice of the second
    half's: two and a half outputs, of two ranks one half less. What a slice sees of all is put together in float32.
    """
    own, of_parts = 2 * s.key_value, s.query + _parts_seen(s)
    t.make("own keys and values", own)
    t.make("gathered keys and values", s.cp * own)
    t.make("attention of own keys", s.query)
    t.free("own keys and values")
    t.make("attention of the first half", s.query)
    t.free("gathered keys and values")
    t.make("gathered keys and values", s.cp * own // 2)
    t.make("attention of the second half", of_parts - 2 * s.query)
    t.free("gathered keys and values")
    t.make("attention output", s.query)
    t.make("attention added up", s.query // s.element * _FLOAT32 // 2)
    t.free(
        "attention added up", *(f"attention of {keys}" for keys in ("own keys", "the first half", "the second half"))
    )


def _context_backward(t: Tape, s: Sizes) -> None:
    """The same backward: the second half first, whose gradients travel while those of the first are computed."""
    own, half, slice_ = 2 * s.key_value, s.cp * s.key_value, s.query // 2
    t.make("own keys and values", own)
    t.make("gathered keys and values", 2 * half)
    t.make("own keys' gradient", own)
    t.make("queries' gradients", s.query)
    t.free("own keys and values")
    t.make("attention scratch", slice_ // s.element * _FLOAT32)
    t.make("gradient of the second half", half)
    t.make("gradients of a part", slice_ + half - own // 2)
    t.free("gradients of a part", "gathered keys and values")
    t.make("gathered keys and values", half)
    t.make("received gradient", own // 2)
    t.make("more queries' gradients", _parts_seen(s) - slice_)
    t.make("gradient of the first half", half)
    t.make("gradients of a part", slice_ + half)
    t.free("gradients of a part", "attention scratch", "gathered keys and values")
    t.make("last queries' gradient", slice_)
    t.make("more received gradient", own // 2)
    t.make("queries' gradient", s.query)
    t.make("queries' gradient of a slice", slice_)
    t.free("queries' gradient of a slice", "last queries' gradient", "more queries' gradients", "queries' gradients")


def _parts_seen(s: Sizes) -> int:
    """What a rank's queries get of whole slices of others, bytes: three times half of them, among two ranks twice."""
    return s.query if s.cp == 2 else s.query + s.query // 2


def _column_backward(t: Tape, s: Sizes, kept: str, gradient: str) -> None:
    """Of a column-parallel product: its input is gathered again beside the input gradient's product, or was kept so."""
    gathered = f"gathered {kept}"
    casts = "gradient by rows", "gradient by columns", "input by columns", f"{kept} by columns"
    for name in casts[:2]:
        t.make(name, s.in_fp8(t.held[gradient]))
    if not s.keeps_gathered:
        t.make(gathered, s.gathered)
    t.make("input's gradient", s.hidden)
    if not s.keeps_columns or "norm" in s.recompute:
        t.make("input by columns", s.in_fp8(s.hidden))
    if s.sequence_parallel:
        t.make("normed gradient", s.slice)
        t.free(gathered, "input's gradient")
    else:
        t.rename("input's gradient", "normed gradient")
    t.free(gradient, *casts, *(() if s.keeps_gathered else (kept,)))


def _cast_gradient_of_sum(t: Tape, s: Sizes) -> None:
    """What a row-parallel product's input gradient reads in fp8; both ways at once where no slices travel."""
    t.make("gradient by rows", s.in_fp8(s.hidden))
    if s.keeps_columns:
        t.make("gradient by columns", s.in_fp8(s.hidden))


def _norm_backward(t: Tape, s: Sizes, source: str) -> None:
    """Of a norm, or of a norm and the residual stream beside it: one gradient out of both."""
    t.make("source's gradient", s.slice)
    t.free("normed gradient", source, "gradient")
    t.rename("source's gradient", "gradient")


def _kept(t: Tape) -> dict[str, int]:
    """What is held at the end of a forward; the output belongs to who reads it."""
    return {name: size for name, size in t.held.items() if name != "output"}


def _put_off(s: Sizes) -> dict[str, int]:
    """Inputs and output gradients of a layer's four products, until its weight gradients are computed."""
    if s.fp8:
        inputs = s.in_fp8(s.hidden) if s.keeps_columns else s.column_input
        of_sums = s.in_fp8(s.hidden) if s.keeps_columns else s.hidden
        return {
            "attention input": inputs,
            "mlp input": inputs,
            "attention output": s.in_fp8(s.query),
            "product": s.in_fp8(s.ffn),
            "output gradients": 2 * of_sums + s.in_fp8(s.qkv + s.gate_up),
        }
    return {
        "attention input": s.column_input,
        "mlp input": s.column_input,
        "attention output": s.query,
        "product": s.ffn,
        "output gradients": 2 * s.hidden + s.qkv + s.gate_up,
    }
