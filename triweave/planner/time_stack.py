"""What software computes a step: which kernels, what they move through memory, what overlaps what.

The same layout on the same GPUs differs by a factor of two between software; each published group of measurements is
one of these, and our own trainer is another. Bytes are counted from the operations, not fitted; the one fitted number
of a stack is `efficiency`, and a stack says on which measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from triweave.planner.time_attention import AttentionName

Split = Literal["layers", "modules"]


class Measured(NamedTuple):
    """A share of an operation that a machine profile may hold (`profile.Operation`)."""

    operation: str
    bytes: float
    """Per element, of the whole of what was measured."""
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes moved per element of the operation's input, forward and backward."""

    forward: float
    backward: float
    measured: tuple[tuple[Measured, ...], tuple[Measured, ...]] = ((), ())
    """What a profile may know of it, forward and backward."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes per parameter that a collective of sharded weights or gradients costs beside itself."""

    whole: float = 0.0
    """Per parameter of the layer."""
    shard: float = 0.0
    """Per parameter of this rank's shard."""

    def of(self, parameters: float, ranks: int) -> float:
        """Bytes for a layer of `parameters` sharded over `ranks`."""
        return parameters * (self.whole + self.shard / ranks)


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that the host needs to launch a layer: where the GPU is faster, it waits for this."""

    forward: float
    backward: float
    collective: float
    """For each tensor-parallel collective, on top."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """Shares of a layer's forward that a stack's own selective recomputation repeats in backward."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """One software stack; compared by identity, being a key under which costs are remembered."""

    name: str
    attention: AttentionName = "cudnn"
    norm: Bytes = Bytes(4, 8)
    """Each of a layer's two norms, per hidden element."""
    residual: Bytes = Bytes(6, 6)
    """Each of a layer's two residual additions, dropout included where there is one, per hidden element."""
    rotary: Bytes = Bytes(4, 4)
    """Per element of queries and keys."""
    heads: Bytes = Bytes(0, 0)
    """Copies and transpositions around attention, per element of queries, keys, values."""
    activation: Bytes = Bytes(6, 10)
    """Per element of the MLP's inner width."""
    loss: Bytes = Bytes(8, 6)
    """Per logit, beyond the head's product."""
    lookup: Bytes = Bytes(4, 12)
    """Per hidden element of the embedding: a row read and written; backward read, and added to a float32 row."""
    host: Host = Host(0.25e-3, 0.5e-3, 30e-6)
    accumulate: float = 0.0
    """Bytes per parameter that adding one micro-batch's weight gradient moves beyond the product's bf16 output."""
    gradient_size: int = 4
    """Bytes of a gradient on the wire between data-parallel ranks."""
    reduces_whole: bool = False
    """Whether gradients are summed whole on every rank although each keeps only its shard of them."""
    optimizer: float = 34.0
    """Bytes per parameter of the shard: Adam reads and writes two moments and the master (24), reads the gradient for
    the norm and for the update (8), writes the weight (2)."""
    gather_copies: Copies = Copies()
    """ZeRO-3: what each gather of weights costs beside the collective, forward and backward of every micro-batch."""
    scatter_copies: Copies = Copies()
    """ZeRO-2 and 3: what each reduction of a micro-batch's gradients costs beside the collective."""
    overlap_dp: float = 0.0
    """Share of the data-parallel communication that the stack hides under compute where there is room."""
    overlap_tp: bool = True
    """Whether the input gradient's reduction runs beside the weight gradient's product."""
    reductions: int = 2
    """All-reduces of a layer's backward without sequence parallelism; one a column-parallel product."""
    gathers_again: bool = True
    """Whether sequence parallelism keeps the sharded input and gathers it again in backward."""
    fused_gate: bool = True
    """Whether gate and up are one product."""
    pipelined: float = 1.0
    """Share of a tensor-parallel collective that stays exposed: below 1 where it is cut in pieces with its product."""
    piece_tokens: int = 0
    """Tokens that a piece has at least where sequence-parallel products are cut so that one piece travels while another
    is multiplied, ranks' slices of the sequence being what is cut; 0 where they are not."""
    links: float = 1.0
    """Share of the measured speed of tensor-parallel collectives that training reaches."""
    overlap_pp: bool = True
    """Whether a stage computes while its messages travel."""
    rings: bool = False
    """Whether a sum over nodes goes round all ranks (gloo), not from node to node (NCCL's trees)."""
    sends_slices: bool = True
    """Whether tensor-parallel ranks each send their slice of an activation to the next stage, or all send the whole."""
    cast: float = 4.0
    """fp8: bytes per element of a product's input for scaling, casting and transposing it."""
    slowdown: float = 0.12
    """What a collective takes from the compute that it runs beside."""
    rerun: Rerun = Rerun()
    """Beside what the layout recomputes."""
    sequence_parallel: bool = True
    """What the stack does where a measurement does not say."""
    split: Split = "layers"
    """How the stack cuts a pipeline: equal layers, or equal modules, embedding, norm and head counting as one each."""
    own: bool = False
    """Whether it is this package's trainer, whose parts a machine profile measures (`machine.Trainer`)."""
    zeroes: bool = True
    """Whether whole gradient sums are filled with zeros before a step, not overwritten by its first products."""
    optimizer_measured: tuple[Measured, ...] = ()
    """What a profile may know of `optimizer`, per parameter of the shard."""
    efficiency: float = 1.0
    """Modelled over measured compute time of the measurements that the stack was calibrated on."""


EAGER_NORM = Bytes(36, 80)
"""RMSNorm of plain PyTorch: to float32 (6), square (8), mean (4), scale (8), to bf16 (6), weight (4); twice back."""
EAGER_ROTARY = Bytes(20, 20)
"""x cos (4), negate and concatenate (6), sin (4), add (6)."""
EAGER_ACTIVATION = Bytes(10, 16)
"""silu (4) and product (6); backward two products (8 + 2) and silu (6)."""
EAGER_LOSS = Bytes(26, 20)
"""To float32 (6), maximum (4), subtract and exponential (8 + 8); backward divide (8), to bf16 (6), scale (6)."""

FSDP2_GATHER, FSDP2_SCATTER = Copies(whole=4.0), Copies(whole=10.0)
"""A gather unpacked, read and written; gradients packed in float32."""

COMPILED = Stack(
    "compiled",
    gather_copies=FSDP2_GATHER,
    scatter_copies=FSDP2_SCATTER,
    cast=10.0,
    links=0.7,
    heads=Bytes(2, 2),
    loss=Bytes(10, 8),
    host=Host(0.1e-3, 0.2e-3, 20e-6),
    overlap_dp=1.0,
)
"""torch.compile (torchtitan): element-wise chains fused."""

EAGER_TITAN = Stack(
    "eager",
    gather_copies=FSDP2_GATHER,
    scatter_copies=FSDP2_SCATTER,
    norm=Bytes(4, 10),
    rotary=Bytes(24, 24),
    activation=EAGER_ACTIVATION,
    loss=EAGER_LOSS,
    overlap_dp=1.0,
)
"""torchtitan without torch.compile."""

TRANSFORMER_ENGINE = Stack(
    "megatron-te", loss=Bytes(8, 6), pipelined=0.25, host=Host(0.2e-3, 0.4e-3, 20e-6), overlap_dp=1.0
)
"""Megatron-Core with Transformer Engine kernels, as NeMo and Megatron-Bridge run it."""

MEGATRON_2021 = Stack(
    "megatron-2021",
    attention="fused-softmax",
    norm=Bytes(4, 8),
    residual=Bytes(7, 8),
    rotary=Bytes(0, 0),
    heads=Bytes(4, 4),
    activation=Bytes(4, 6),
    loss=EAGER_LOSS,
    gradient_size=2,
    accumulate=6.0,
    overlap_tp=False,
    overlap_pp=False,
    efficiency=0.95,
    host=Host(1.2e-3, 0.9e-3, 60e-6),
)
"""Megatron-LM and Megatron-DeepSpeed before FlashAttention: fused softmax, bias-gelu and bias-dropout-add."""

SCALING_RMS = Stack(
    "scaling flash2+rms",
    attention="flash2",
    norm=Bytes(4, 8),
    rotary=EAGER_ROTARY,
    heads=Bytes(4, 4),
    activation=EAGER_ACTIVATION,
    loss=EAGER_LOSS,
    gradient_size=4,
    reduces_whole=True,
    accumulate=6.0,
    overlap_tp=False,
    overlap_pp=False,
    sends_slices=False,
    reductions=3,
    gathers_again=False,
    fused_gate=False,
    links=0.6,
    split="modules",
)
"""The stack of Hagemann et al. (2311.05610) with FlashAttention 2 and its RMSNorm kernel."""

FSDP_MPT = Stack(
    "fsdp mpt",
    attention="triton",
    norm=Bytes(4, 8),
    residual=Bytes(6, 6),
    rotary=Bytes(0, 0),
    heads=Bytes(4, 4),
    activation=Bytes(4, 6),
    loss=Bytes(6, 6),
    gradient_size=2,
    overlap_dp=1.0,
    efficiency=0.97,
)
"""MosaicML's LLM Foundry: FSDP with prefetch, Triton FlashAttention, fused cross entropy, eager PyTorch."""
