"""The bookkeeping of this package's trainer: what `triweave/llama.py` and its layers make, keep and free.

Written beside the layers' code, operation by operation, as PyTorch runs it on a GPU. A test runs the trainer and
holds what is kept between forward and backward to these tapes, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from triweave.planner.sizes import Sizes
from triweave.planner.tape import Block, Pass, Tape

_ATTENTION = ("queries", "keys", "values", "attention output", "logsumexp")


@dataclass(frozen=True, slots=True)
class Unit:
    """What data-parallel ranks share out of one unit of parameters, where its module runs; bytes."""

    gathered_weights: int = 0
    """The whole weights, present only while the module computes (`shard: full`)."""
    whole_gradients: int = 0
    """The whole float32 gradients, present only during the module's backward (`gradients` and `full`)."""
    reduced_gradients: int = 0
    """This rank's slice of them, as the reduction gives it."""
    new_gradients: tuple[int, ...] = ()
    """Every weight's gradient of one micro-batch, made before it is added to the sum (gradients of autograd's own)."""


def embedding_block(s: Sizes, unit: Unit) -> Block:
    """Lookup of `[seq, batch]` tokens; its output is the first layer's input."""
    f = Tape()
    f.make("gathered weights", unit.gathered_weights)
    f.make("token rows", 8 * s.tokens)
    f.make("token mask", s.tokens)
    f.make("looked up", s.hidden)
    if s.sequence_parallel:
        f.make("output", s.slice)
        f.free("looked up")
    else:
        f.rename("looked up", "output")
    f.free("gathered weights")
    kept = _kept(f)

    b = Tape({**kept, "gradient": s.slice})
    b.make("gathered weights", unit.gathered_weights)
    b.make("whole gradients", unit.whole_gradients)
    b.make("gathered gradient", s.gathered)
    b.make("gradient in float32", s.hidden // s.element * 4)
    b.free("gradient in float32", "gathered gradient", "gradient", "token rows", "token mask", "gathered weights")
    b.make("reduced gradients", unit.reduced_gradients)
    b.free("reduced gradients", "whole gradients")
    return Block(kept, Pass.of(f), Pass.of(b), {**kept, "gradient": s.hidden})


def layer_block(s: Sizes, unit: Unit) -> Block:
    """One decoder layer, from its input to its output, `[seq/tp, batch, hidden]` each."""
    whole = "layer" in s.recompute
    f = Tape({"input": s.slice})
    f.make("gathered weights", unit.gathered_weights)
    _layer_forward(f, s, keep=not whole)
    f.free("gathered weights")
    kept = _kept(f)

    b = Tape({**kept, "gradient": s.slice})
    b.make("gathered weights", unit.gathered_weights)
    b.make("whole gradients", unit.whole_gradients)
    if whole:
        _layer_forward(b, s, keep=True)
        b.free("output")
    _mlp_backward(b, s)
    _attention_backward(b, s)
    b.free("gathered weights")
    b.make("reduced gradients", unit.reduced_gradients)
    b.free("reduced gradients", "whole gradients", "gradient")
    return Block(kept, Pass.of(f), Pass.of(b), _put_off(s))


def head_block(s: Sizes, unit: Unit) -> Block:
    """Final norm, logits and loss."""
    f = Tape({"input": s.slice})
    f.make("gathered weights", unit.gathered_weights)
    f.make("head input", s.slice)
    _gather(f, s)
    f.make("logits", s.logits)
    f.free("gathered input", "gathered weights")
    f.make("loss mask", s.tokens)
    f.make("probabilities", s.logits // s.element * 4)
    if s.element == 4:
        f.rename("probabilities", "logits' gradient")
    else:
        f.make("logits' gradient", s.logits)
        f.free("probabilities")
    f.free("logits")
    kept = _kept(f)

    b = Tape(kept)
    b.make("gathered weights", unit.gathered_weights)
    b.make("whole gradients", unit.whole_gradients)
    _column_backward(b, s, "head input", "logits' gradient")
    b.free("loss mask", "gathered weights")
    b.make("reduced gradients", unit.reduced_gradients)
    b.free("reduced gradients", "whole gradients")
    _norm_backward(b, s, "input")
    b.rename("source's gradient", "gradient")
    b.free("gradient")
    return Block(kept, Pass.of(f), Pass.of(b), {"head input": s.slice, "logits' gradient": s.logits})


# --- forward ----------------------------------------------------------------------------------------------------------


def _layer_forward(t: Tape, s: Sizes, *, keep: bool) -> None:
    _attention_forward(t, s, keep=keep and "attention" not in s.recompute)
    _mlp_forward(t, s, keep=keep and "mlp" not in s.recompute)
    if not keep:
        t.free("mlp residual")


def _attention_forward(t: Tape, s: Sizes, *, keep: bool) -> None:
    """Without `keep` nothing is saved: a tensor goes when the last operation that reads it is done."""
    t.make("attention input", s.slice)
    _gather(t, s)
    t.make("query-key-value", s.qkv)
    t.free("gathered input")
    if not keep or "norm" in s.recompute:
        t.free("attention input")
    for name, size in (("queries", s.query), ("keys", s.key_value)):
        t.make("times cosine", size)
        t.make("negated half", size // 2)
        t.make("rotated half", size)
        t.free("negated half")
        t.make("times sine", size)
        t.free("rotated half")
        t.make(name, size)
        t.free("times cosine", "times sine")
    t.make("values", s.key_value)
    t.make("attention output", s.query)
    t.make("logsumexp", s.logsumexp)
    if not keep:
        t.free("queries", "keys", "values", "logsumexp")
    _row_output(t, s, "attended")
    t.free("query-key-value")
    if not keep:
        t.free("attention output")
    t.make("mlp residual", s.slice)
    t.free("attended")


def _mlp_forward(t: Tape, s: Sizes, *, keep: bool) -> None:
    t.make("mlp input", s.slice)
    _gather(t, s)
    t.make("gate and up", s.gate_up)
    t.free("gathered input")
    if not keep or "norm" in s.recompute:
        t.free("mlp input")
    t.make("silu of gate", s.ffn)
    t.make("product", s.ffn)
    t.free("silu of gate")
    _row_output(t, s, "down")
    if not keep or "swiglu" in s.recompute:
        t.free("product")
    if not keep:
        t.free("gate and up")
    t.make("output", s.slice)
    t.free("down")


def _gather(t: Tape, s: Sizes) -> None:
    """The gathered copy of a product's input; without sequence parallelism the input is whole."""
    t.make("gathered input", s.gathered)


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
        _mlp_forward(t, s, keep=True)
        t.free("output")
    t.make("gathered gradient", s.gathered)
    if "swiglu" in s.recompute:
        t.make("silu of gate", s.ffn)
        t.make("product", s.ffn)
        t.free("silu of gate")
    t.make("product's gradient", s.ffn)
    t.free("gathered gradient", "product")
    # grad * up * sigmoid * (1 + gate * (1 - sigmoid)), then grad * gate * sigmoid, then both side by side.
    t.make("sigmoid", s.ffn)
    t.make("a", s.ffn)
    t.make("b", s.ffn)
    t.free("a")
    t.make("c", s.ffn)
    t.make("d", s.ffn)
    t.free("c")
    t.make("e", s.ffn)
    t.free("d")
    t.make("gate's gradient", s.ffn)
    t.free("b", "e")
    t.make("a", s.ffn)
    t.make("up's gradient", s.ffn)
    t.free("a")
    t.make("projected gradient", s.gate_up)
    t.free("gate's gradient", "up's gradient", "sigmoid", "product's gradient", "gate and up")
    if "norm" in s.recompute:
        t.make("mlp input", s.slice)
    _column_backward(t, s, "mlp input", "projected gradient")
    _norm_backward(t, s, "mlp residual")
    _join_residual(t, s)


def _attention_backward(t: Tape, s: Sizes) -> None:
    if "attention" in s.recompute:
        _attention_forward(t, s, keep=True)
        t.free("mlp residual")
    t.make("gathered gradient", s.gathered)
    t.make("attention output's gradient", s.query)
    t.free("gathered gradient")
    # FlashAttention 2 and cuDNN sum the queries' gradient in float32.
    t.make("attention scratch", s.query // s.element * 4)
    t.make("queries' gradient", s.query)
    t.make("keys' gradient", s.key_value)
    t.make("values' gradient", s.key_value)
    t.free("attention scratch", "attention output's gradient", *_ATTENTION)
    for name, size in (("keys'", s.key_value), ("queries'", s.query)):
        t.make("times sine", size)
        t.make("rotated back", size)
        t.free("times sine")
        t.make("times cosine", size)
        t.make("turned", size)
        t.free("times cosine", "rotated back", f"{name} gradient")
        t.rename("turned", f"{name} gradient")
    t.make("projected gradient", s.qkv)
    t.free("queries' gradient", "keys' gradient", "values' gradient")
    if "norm" in s.recompute:
        t.make("attention input", s.slice)
    _column_backward(t, s, "attention input", "projected gradient")
    _norm_backward(t, s, "input")
    _join_residual(t, s)


def _column_backward(t: Tape, s: Sizes, kept: str, gradient: str) -> None:
    """Of a column-parallel product: its input is gathered again beside the input gradient's product."""
    _gather(t, s)
    t.make("input's gradient", s.hidden)
    if s.sequence_parallel:
        t.make("normed gradient", s.slice)
        t.free("gathered input", "input's gradient")
    else:
        t.rename("input's gradient", "normed gradient")
    t.free(gradient, kept)


def _norm_backward(t: Tape, s: Sizes, source: str) -> None:
    """The norm is computed again for its backward."""
    t.make("normed again", s.slice)
    t.make("source's gradient", s.slice)
    t.free("normed again", "normed gradient", source)


def _join_residual(t: Tape, s: Sizes) -> None:
    """The gradients of the norm and of the residual stream are added."""
    t.make("sum", s.slice)
    t.free("source's gradient", "gradient")
    t.rename("sum", "gradient")


def _kept(t: Tape) -> dict[str, int]:
    """What is held at the end of a forward; the output belongs to who reads it."""
    return {name: size for name, size in t.held.items() if name != "output"}


def _put_off(s: Sizes) -> dict[str, int]:
    """Inputs and output gradients of a layer's four products, until its weight gradients are computed."""
    return {
        "attention input": s.slice,
        "mlp input": s.slice,
        "attention output": s.query,
        "product": s.ffn,
        "output gradients": 2 * s.hidden + s.qkv + s.gate_up,
    }
