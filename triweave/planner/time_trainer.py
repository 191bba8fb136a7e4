"""What this package's trainer runs, kernel by kernel, and what it overlaps: the stack `TRIWEAVE`.

Counted from `layers`, `gradients`, `sharding` and `training.optimizer`. Weight gradients are added to their float32
sums by the product itself; the rate of such products (`time_matmul.OPERAND_RATE`) has that in it. Two sets of kernels
are described, plain PyTorch operations and fused ones; `TRIWEAVE` is the set, and the overlaps, that the trainer has
now.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triweave.moments import MomentsDtype
from triweave.planner.time_operations import Kernel, Operation, known, moved
from triweave.planner.time_stack import Copies, Host, Measured, Stack


@dataclass(frozen=True, slots=True)
class Kernels:
    """The memory-bound operations of a model; bytes are per element of what each one is named for."""

    norm: Operation
    """Per hidden element, each of a layer's two norms and the last one."""
    residual: Operation
    """Per hidden element, each of a layer's two additions."""
    rotary: Operation
    """Per element of queries and keys."""
    heads: Operation
    """Per element of queries, keys and values: copies around attention."""
    swiglu: Operation
    """Per element of the inner width (gate, up and their product have one each)."""
    loss: Operation
    """Per logit."""
    host: Host
    """Seconds to launch a layer's kernels."""


def _of(operation: str, size: float, share: float = 1.0) -> tuple[Measured]:
    return (Measured(operation, size, share),)


_NORM = Operation(
    (Kernel("rms_norm", 2, 2),),
    (
        # The output is thrown away: only its graph is needed to call the fused backward.
        Kernel("rms_norm again", 2, 2),
        Kernel("input gradient", 4, 2),
        Kernel("weight gradient", 4, 0),
    ),
)
_ADD = Kernel("add", 4, 2)
# Values are a sixth to a third of queries, keys and values: four bytes of each are one of the three together.
_VALUES = (0.5, 0.5)

EAGER = Kernels(
    norm=_NORM,
    residual=Operation((_ADD,), (_ADD,)),
    rotary=Operation(
        (
            Kernel("x cos", 2, 2, strided=True),
            Kernel("negate the second half", 1, 1, strided=True),
            Kernel("halves side by side", 2, 2),
            Kernel("times sin", 2, 2, strided=True),
            _ADD,
        ),
        (
            Kernel("dy cos", 2, 2, strided=True),
            Kernel("dy sin", 2, 2, strided=True),
            Kernel("negate the first half", 1, 1, strided=True),
            Kernel("halves side by side", 2, 2),
            _ADD,
        ),
    ),
    heads=Operation(
        (Kernel("copy the values", *_VALUES),),
        (Kernel("gradients of queries, keys, values side by side", 2, 2),),
    ),
    swiglu=Operation(
        (Kernel("silu(gate)", 2, 2, strided=True), Kernel("times up", 4, 2, strided=True)),
        (
            Kernel("sigmoid(gate)", 2, 2, strided=True),
            Kernel("dy up", 4, 2, strided=True),
            Kernel("times sigmoid", 4, 2),
            Kernel("1 - sigmoid", 2, 2),
            Kernel("times gate", 4, 2, strided=True),
            Kernel("plus 1", 2, 2),
            Kernel("product: gate's gradient", 4, 2),
            Kernel("dy gate", 4, 2, strided=True),
            Kernel("times sigmoid", 4, 2),
            Kernel("gradients side by side", 4, 4),
        ),
    ),
    loss=Operation(
        (
            Kernel("to float32", 2, 4),
            Kernel("maximum", 4, 0),
            Kernel("less the maximum", 4, 4),
            Kernel("exponential", 4, 4),
            Kernel("sum", 4, 0),
            Kernel("over the sum", 4, 4),
            Kernel("to bf16", 4, 2),
        ),
        (Kernel("times the loss's gradient", 2, 2),),
    ),
    host=Host(0.25e-3, 0.5e-3, 30e-6),
)
"""Plain PyTorch operations; a norm and attention are single kernels."""

FUSED = Kernels(
    # The stream passes the norm: the first of a layer's two additions, and both of its gradients', are the norm's.
    # Half of a layer each: 4 bytes of norm and 5 of addition of the 18 that its norms and additions move.
    norm=Operation(
        (Kernel("norm", 2, 2, _of("layer norms", 18, 4 / 18)),),
        (Kernel("norm backward", 4, 2, _of("norm backward", 8, 6 / 8)),),
    ),
    residual=Operation(
        (
            Kernel("added by the second norm, one of two", 1, 1, _of("layer norms", 18, 2 / 18)),
            Kernel("added alone, the other", 2, 1, _of("layer norms", 18, 3 / 18)),
        ),
        (Kernel("the stream's gradient, added by the norm backward", 2, 0, _of("norm backward", 8, 2 / 8)),),
    ),
    rotary=Operation((Kernel("rotate in place", 2, 2, _of("rotary", 4)),)),
    heads=Operation(
        (), (Kernel("rotate back, with the values' gradients, into one", 2, 2, _of("rotary backward", 4)),)
    ),
    swiglu=Operation(
        (Kernel("swiglu", 4, 2, _of("swiglu", 6)),), (Kernel("swiglu backward", 6, 4, _of("swiglu backward", 10)),)
    ),
    loss=Operation(
        (Kernel("maximum, sum and target", 2, 0, _of("loss", 2)),),
        (Kernel("gradient in place, scaled", 2, 2, _of("loss backward", 4)),),
    ),
    host=Host(0.15e-3, 0.3e-3, 30e-6),
)
"""One kernel an operation; logits stay in bf16 and their gradient overwrites them."""

LOOKUP = Operation(
    (Kernel("rows of the table", 2, 2, _of("lookup", 4)),),
    # The 26 bytes of three kernels, measured as one.
    (
        Kernel("to float32", 2, 4, _of("lookup backward", 26, 6 / 26)),
        Kernel("mask", 4, 4, _of("lookup backward", 26, 8 / 26)),
        Kernel("add to the rows", 8, 4, _of("lookup backward", 26, 12 / 26)),
    ),
)
"""Embedding, per hidden element."""


@dataclass(frozen=True, slots=True)
class Update:
    """Passes over parameters and gradients outside the layers."""

    optimizer: tuple[Kernel, ...]
    """Per parameter of a rank's shard, once a step."""
    gather: Copies
    """Sharded weights, each time they are gathered."""
    scatter: Copies
    """Sharded gradients, each time they are reduced."""


_SQUARE, _SUM = Kernel("square", 4, 4), Kernel("sum of squares", 4, 0)
_PUBLISH = Kernel("publish in bf16", 4, 2)
_GATHER = Copies(shard=moved((Kernel("master to bf16", 4, 2),)))
_SCATTER = Copies(whole=moved((Kernel("zeros", 0, 4),)), shard=moved((Kernel("add to the shard", 8, 4),)))

CLIP_APART = Update(
    (_SQUARE, _SUM, Kernel("clip", 4, 4), Kernel("AdamW: gradient, master, two moments", 16, 12), _PUBLISH),
    _GATHER,
    _SCATTER,
)
"""Gradients are scaled in a pass of their own."""

CLIP_INSIDE = Update(
    (
        Kernel("norm, row by row", 4, 0, _of("norm of gradients", 4)),
        Kernel("AdamW and the weights in bf16, gradients divided while they are read", 16, 14, _of("adamw", 30)),
    ),
    _GATHER,
    _SCATTER,
)
"""One pass updates masters and moments and writes the weights."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which communication runs beside computation."""

    piece_tokens: int = 0
    """Tensor parallel: sequence-parallel products are done in pieces of at least so many tokens, each travelling while
    another is multiplied; 0 where a product waits for its whole input and a sum for its whole product."""
    pipeline: bool = True
    """Messages between stages travel while the stage computes."""
    data_parallel: float = 0.0
    """Share of gradient reductions and weight gathers that may hide where there is room."""
    zeroes: bool = True
    """Whether a step fills its whole gradient sums with zeros."""
    slowdown: float = 0.12
    """What a collective takes from the compute beside it; 0 for copy engines."""


def trainer_stack(name: str, kernels: Kernels, update: Update, overlap: Overlap) -> Stack:
    """The trainer with one set of kernels, passes and overlaps."""
    return Stack(
        name,
        norm=kernels.norm.bytes,
        residual=kernels.residual.bytes,
        rotary=kernels.rotary.bytes,
        heads=kernels.heads.bytes,
        activation=kernels.swiglu.bytes,
        loss=kernels.loss.bytes,
        lookup=LOOKUP.bytes,
        host=kernels.host,
        optimizer=moved(update.optimizer),
        optimizer_measured=known(update.optimizer),
        gather_copies=update.gather,
        scatter_copies=update.scatter,
        piece_tokens=overlap.piece_tokens,
        overlap_pp=overlap.pipeline,
        overlap_dp=overlap.data_parallel,
        slowdown=overlap.slowdown,
        # Without sequence parallelism the stream between stages is whole on every rank, and so are the messages.
        sends_slices=False,
        links=0.7,
        own=True,
        zeroes=overlap.zeroes,
    )


TRIWEAVE_EAGER = trainer_stack("triweave eager", EAGER, CLIP_APART, Overlap())
"""Plain kernels, communication exposed: what the runs of `bench/results/2026-11-30-speed-2xh200.md` were."""

TRIWEAVE_FUSED = trainer_stack("triweave fused", FUSED, CLIP_INSIDE, Overlap(2048, data_parallel=1.0, zeroes=False))
"""Fused kernels and every axis overlapped."""

TRIWEAVE = TRIWEAVE_FUSED
"""The trainer as it is; the stack that `predict_step` takes by default."""

_SMALLER = (CLIP_INSIDE.optimizer[0], Kernel("AdamW, moments in bfloat16", 12, 10, _of("adamw", 22)))

TRIWEAVE_BFLOAT16_MOMENTS = replace(
    TRIWEAVE,
    name="triweave, moments in bfloat16",
    optimizer=moved(_SMALLER),
    optimizer_measured=known(_SMALLER),
)
"""The same, whose optimizer moves 22 bytes a parameter in place of 30: at the rate that a profile has for those."""


def trainer_with(moments: MomentsDtype) -> Stack:
    """The trainer as it is, with Adam's moments stored so."""
    return TRIWEAVE if moments == "float32" else TRIWEAVE_BFLOAT16_MOMENTS
