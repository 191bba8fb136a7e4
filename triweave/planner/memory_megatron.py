"""The bookkeeping of Megatron-Core with Transformer Engine, and of the programs that published rows come from.

Fused norm-linear modules keep the norm's input and its output (a slice under sequence parallelism, gathered again
in backward); rotated queries and keys and a copy of the values; flash attention's output and one float32 a row;
gate and up in one product. `Assumptions` says where another program differs. Formula: planning notes 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triweave.planner.assumptions import Assumptions
from triweave.planner.memory_ours import Unit
from triweave.planner.sizes import Sizes
from triweave.planner.tape import Block, Pass, Tape


def embedding_block(s: Sizes, a: Assumptions, unit: Unit) -> Block:
    """Lookup of the tokens; masked by vocabulary slice, reduced or scattered."""
    f = Tape()
    f.make("gathered weights", unit.gathered_weights)
    f.make("token rows", 8 * s.tokens)
    f.make("looked up", s.hidden)
    if s.sequence_parallel:
        f.make("output", s.slice)
        f.free("looked up")
    else:
        f.rename("looked up", "output")
    f.free("gathered weights")
    kept = {"token rows": 8 * s.tokens}
    b = Tape({**kept, "gradient": s.slice})
    b.make("whole gradients", unit.whole_gradients)
    b.make("gathered gradient", s.gathered)
    _add_gradients(b, unit.new_gradients)
    b.free("gathered gradient", "gradient", "token rows")
    b.make("reduced gradients", unit.reduced_gradients)
    b.free("reduced gradients", "whole gradients")
    return Block(kept, Pass.of(f), Pass.of(b), {**kept, "gradient": s.hidden})


def layer_block(s: Sizes, a: Assumptions, unit: Unit) -> Block:
    """One decoder layer."""
    whole = "layer" in s.recompute
    f = Tape({"input": s.slice})
    f.make("gathered weights", unit.gathered_weights)
    _layer_forward(f, s, a)
    if whole:
        f.free(*(name for name in tuple(f.held) if name not in ("input", "output", "gathered weights")))
    f.free("gathered weights")
    kept = {name: size for name, size in f.held.items() if name != "output"}
    b = Tape({**kept, "gradient": s.slice})
    b.make("gathered weights", unit.gathered_weights)
    b.make("whole gradients", unit.whole_gradients)
    if whole or a.selective_ops:
        again = replace(a, selective_ops=False)
        _layer_forward(b, s, again)
        b.free("output", "gate", "down kept")
    query_key_value, projection, gate_up, down = unit.new_gradients[:4] or (0, 0, 0, 0)
    _mlp_backward(b, s, a, gate_up, down)
    _attention_backward(b, s, a, query_key_value, projection)
    b.free("gathered weights")
    b.make("reduced gradients", unit.reduced_gradients)
    b.free("reduced gradients", "whole gradients", "gradient")
    put_off = {
        "products' inputs": 2 * s.slice + s.query + s.ffn,
        "output gradients": 2 * s.hidden + s.qkv + s.gate_up,
    }
    return Block(kept, Pass.of(f), Pass.of(b), put_off)


def head_block(s: Sizes, a: Assumptions, unit: Unit) -> Block:
    """Final norm, logits and loss, in one of four ways (`Assumptions.loss`)."""
    f = Tape({"input": s.slice})
    f.make("gathered weights", unit.gathered_weights)
    _norm(f, s, a, "head")
    f.make("logits", s.logits)
    whole = s.logits * (s.tp if a.loss == "gathered" else 1)
    in_float32 = whole // s.element * 4
    if a.loss == "gathered":
        _gather_logits(f, s)
        f.make("float32 logits", in_float32)
        f.make("probabilities", in_float32)
        f.free("float32 logits")
    elif a.loss == "vocab-parallel":
        f.make("probabilities", in_float32)
        f.free("logits")
    f.free("gathered weights")
    kept = dict(f.held)
    if "layer" in s.recompute and a.loss == "gathered":
        kept.pop("head input", None)

    b = Tape(kept)
    b.make("gathered weights", unit.gathered_weights)
    b.make("whole gradients", unit.whole_gradients)
    if a.loss == "gathered":
        b.make("loss gradient", in_float32)
        b.make("float32 gradient", in_float32)
        b.free("probabilities", "loss gradient")
        b.make("logits' gradient", whole)
        b.free("float32 gradient")
        if s.tp > 1:
            b.make("slice's gradient", s.logits)
            b.free("logits' gradient")
            b.rename("slice's gradient", "logits' gradient")
        if "layer" in s.recompute:
            # The head is checkpointed as every layer is: its product and the gathering are done again.
            b.make("slice of logits", s.logits)
            _gather_slices(b, s)
            b.free("slice of logits", "logits again")
    elif a.loss == "vocab-parallel":
        b.make("logits' gradient", s.logits)
        b.free("probabilities")
    elif a.loss == "compiled":
        b.make("logits' gradient", s.logits)
        b.free("logits")
    else:
        b.rename("logits", "logits' gradient")
    b.make("gathered input", s.gathered)
    b.make("input's gradient", s.hidden)
    _add_gradients(b, unit.new_gradients)
    b.free("logits' gradient", "gathered input", "head input", "normalised head input", "float32 head input", "logits")
    b.make("gradient", s.slice)
    b.free("input's gradient", "gathered weights")
    b.make("reduced gradients", unit.reduced_gradients)
    b.free("reduced gradients", "whole gradients", "input", "gradient")
    return Block(kept, Pass.of(f), Pass.of(b), {"head input": s.slice, "logits' gradient": s.logits})


def _gather_logits(t: Tape, s: Sizes) -> None:
    if s.tp > 1:
        t.rename("logits", "slice of logits")
        _gather_slices(t, s)
        t.free("slice of logits")
        t.rename("logits again", "logits")


def _gather_slices(t: Tape, s: Sizes) -> None:
    """`all_gather` into a list and a concatenation: NCCL fills one flat buffer, copied to the list, then joined."""
    if s.tp > 1:
        slices = [f"slice {number}" for number in range(1, s.tp)]
        for name in slices:
            t.make(name, s.logits)
        t.make("flat slices", s.logits * s.tp)
        t.free("flat slices")
        t.make("logits again", s.logits * s.tp)
        t.free(*slices)


# --- forward ----------------------------------------------------------------------------------------------------------


def _layer_forward(t: Tape, s: Sizes, a: Assumptions) -> None:
    _norm(t, s, a, "attention")
    _quantise(t, s, a, "attention input", s.slice)
    t.make("query-key-value", s.qkv)
    if a.rotary_tables_per_layer:
        t.make("rotary tables", 4 * s.rotary)
    t.make("queries", s.query)
    t.make("keys", s.key_value)
    if not a.whole_qkv:
        t.make("values", s.key_value)
        t.free("query-key-value")
    if a.attention == "flash":
        t.make("attention output", s.query)
        t.make("logsumexp", s.logsumexp)
    else:
        _softmax_forward(t, s, a)
        t.make("attention output", s.query)
    if a.attention == "recomputed-softmax":
        t.free(*_SCORES)
    if a.fp8_inputs:
        t.make("projection input", s.query // s.element)
    _row_output(t, s, "attended")
    t.make("mlp residual", s.slice)
    t.free("attended")
    if "attention" in s.recompute:
        t.free(*_ATTENTION)
    if "norm" in s.recompute or a.selective_ops:
        t.free("attention input")
    if a.selective_ops:
        t.free("keys", "mlp residual")

    _norm(t, s, a, "mlp")
    _quantise(t, s, a, "mlp input", s.slice)
    if a.fused_swiglu:
        t.make("gate and up", s.gate_up)
    else:
        t.make("gate", s.ffn)
        t.make("up", s.ffn)
        t.make("silu of gate", s.ffn)
    t.make("product", s.ffn)
    _quantise(t, s, a, "product", s.ffn)
    _row_output(t, s, "down")
    t.make("output", s.slice)
    t.free("down")
    if "mlp" in s.recompute:
        t.free(*_MLP)
    if "norm" in s.recompute:
        t.free("mlp input")
    if "swiglu" in s.recompute:
        t.free("product")
    if a.selective_ops:
        t.free("mlp input", "product", "gate and up")
        t.make("gate", s.ffn)
        t.make("down kept", s.slice)


def _softmax_forward(t: Tape, s: Sizes, a: Assumptions) -> None:
    """Scores, their mask, probabilities, and dropout's mask and output: the 5 a s^2 b of 2205.05198 and more."""
    t.make("scores", s.scores)
    if a.attention == "masked-softmax":
        t.make("attention mask", s.batch * s.seq * s.seq)
        t.make("masked scores", s.scores)
    t.make("attention probabilities", s.scores)
    t.free("scores", "masked scores")
    t.make("dropout mask", s.scores // s.element)
    t.make("dropped probabilities", s.scores)


def _quantise(t: Tape, s: Sizes, a: Assumptions, name: str, size: int) -> None:
    """What a product in fp8 reads: a copy of one byte an element, kept in place of the 16-bit tensor."""
    if a.fp8_inputs:
        t.make("quantised", size // s.element)
        t.free(name)
        t.rename("quantised", name)


_SCORES = ("attention mask", "attention probabilities", "dropout mask", "dropped probabilities")
_NORM_ATTENTION = ("normalised attention input", "float32 attention input")
_ATTENTION = (
    "attention input",
    *_NORM_ATTENTION,
    "query-key-value",
    "rotary tables",
    "queries",
    "keys",
    "values",
    *_SCORES,
    "attention output",
    "logsumexp",
    "projection input",
)
_MLP = (
    "mlp input",
    "normalised mlp input",
    "float32 mlp input",
    "gate and up",
    "gate",
    "up",
    "silu of gate",
    "product",
)


def _norm(t: Tape, s: Sizes, a: Assumptions, name: str) -> None:
    """A norm and the gathering of its output."""
    if not a.fused_norm:
        # x.float() for its square and its product with the root, then the 16-bit factor of the weight's gradient.
        t.make(f"float32 {name} input", s.slice // s.element * 4)
        t.make(f"float32 normalised {name} input", s.slice // s.element * 4)
        t.make(f"normalised {name} input", s.slice)
        t.free(f"float32 normalised {name} input")
    if a.keeps_gathered_input and s.sequence_parallel:
        t.make("normed slice", s.slice)
        t.make(f"{name} input", s.hidden)
        t.free("normed slice")
    else:
        t.make(f"{name} input", s.slice)
        t.make("gathered input", s.gathered)
        t.free("gathered input")


def _row_output(t: Tape, s: Sizes, name: str) -> None:
    if s.sequence_parallel:
        t.make("partial sum", s.hidden)
        t.make(name, s.slice)
        t.free("partial sum")
    else:
        t.make(name, s.hidden)


# --- backward ---------------------------------------------------------------------------------------------------------


def _add_gradients(t: Tape, sizes: Sequence[int]) -> None:
    """Gradients of weights, one after the other added to their sums."""
    for size in sizes:
        t.make("weight's gradient", size)
        t.free("weight's gradient")


def _mlp_backward(t: Tape, s: Sizes, a: Assumptions, gate_up: int, down: int) -> None:
    if "mlp" in s.recompute:
        _norm(t, s, a, "mlp")
        t.make("gate and up", s.gate_up)
    if "mlp" in s.recompute or "swiglu" in s.recompute:
        t.make("product", s.ffn)
    t.make("gathered gradient", s.gathered)
    t.make("product's gradient", s.ffn)
    _add_gradients(t, [down])
    t.free("product", "gathered gradient")
    t.make("projected gradient", s.gate_up)
    t.free("product's gradient", "gate and up", "gate", "up", "silu of gate")
    # Gate and up are two products where the activation is not fused; each leaves a gradient of their input.
    _column_backward(t, s, a, "mlp input", "mlp residual", [gate_up] if a.fused_swiglu else [gate_up // 2] * 2)


def _attention_backward(t: Tape, s: Sizes, a: Assumptions, query_key_value: int, projection: int) -> None:
    if "attention" in s.recompute:
        _norm(t, s, a, "attention")
        for name, size in (
            ("queries", s.query),
            ("keys", s.key_value),
            ("values", s.key_value),
            ("attention output", s.query),
            ("logsumexp", s.logsumexp),
        ):
            t.make(name, size)
    t.make("gathered gradient", s.gathered)
    t.make("attention output's gradient", s.query)
    _add_gradients(t, [projection])
    t.free("gathered gradient")
    if a.attention == "flash":
        t.make("attention scratch", s.query // s.element * 4)
    else:
        if a.attention == "recomputed-softmax":
            _softmax_forward(t, s, a)
        t.make("dropped gradient", s.scores)
        t.free("dropped probabilities", "attention probabilities")
        t.make("probabilities' gradient", s.scores)
        t.free("dropped gradient", "dropout mask")
        t.make("scores' gradient", s.scores)
        t.free("probabilities' gradient")
    t.make("attention gradients", s.qkv)
    t.free("attention scratch", "scores' gradient", "attention output's gradient")
    t.free(*(name for name in _ATTENTION if name not in ("attention input", *_NORM_ATTENTION)))
    t.make("projected gradient", s.qkv)
    t.free("attention gradients")
    _column_backward(t, s, a, "attention input", "input", [query_key_value])


def _column_backward(t: Tape, s: Sizes, a: Assumptions, kept: str, source: str, weights: Sequence[int]) -> None:
    """Backward of products that read one input, of its norm, and the sum with the residual stream's gradient."""
    if not a.keeps_gathered_input:
        t.make("gathered input", s.gathered)
    for number, weight in enumerate(weights):
        t.make("input's other gradient" if number else "input's gradient", s.hidden)
        _add_gradients(t, [weight])
    t.free("input's other gradient")
    if s.sequence_parallel:
        t.make("normed gradient", s.slice)
        t.free("gathered input", "input's gradient")
    else:
        t.rename("input's gradient", "normed gradient")
    t.free("projected gradient", kept)
    t.make("source's gradient", s.slice)
    t.free("normed gradient", f"normalised {kept}", f"float32 {kept}", source)
    t.make("sum", s.slice)
    t.free("source's gradient", "gradient")
    t.rename("sum", "gradient")
