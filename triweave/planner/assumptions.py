"""Everything that a memory prediction takes for granted, in one place, printed with every answer."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Literal

from triweave.moments import MomentsDtype

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Assumptions:
    """How the training program keeps its tensors, and what lies in the card's memory beside them.

    The defaults are this package's own trainer. `MEGATRON` is Megatron-Core with Transformer Engine as its recipes
    run it. Other programs that published rows come from are variations of the latter (`memory_programs`).
    """

    bookkeeping: Literal["ours", "megatron"] = "ours"
    """Whose tensors are followed: this package's trainer, or Megatron-Core's layers."""
    gpus_per_node: int | None = None
    """Ours: GPUs of a host, whose memory ranks may copy from; groups that span hosts do without and need no room for
    it. None is one host of all ranks."""
    gradient_bytes: int = 4
    """Bytes of one element of the gradient sums: 4 in float32, 2 where they are summed in bf16."""
    gradients_of_autograd: bool = False
    """Gradients are autograd's own (`.grad`), made by the first backward of a step and gone after it, and the
    optimizer copies its slice to float32. Otherwise they are one buffer that stands from the start."""
    weight_bytes: int | None = None
    """Bytes of one weight as it is stored; None takes the dtype's."""
    moments: MomentsDtype = "float32"
    """How both moments of Adam are stored."""
    master_weights: bool = True
    """Whether the optimizer keeps float32 weights of its own beside 16-bit ones."""
    prefetched_units: int = 1
    """Megatron's bookkeeping, `shard: full`. Layers whose whole weights are there at once: FSDP fetches the next while
    one computes. Ours fetches and reduces as many units as `layout.py` says."""
    fused_norm: bool = True
    """RMSNorm keeps its input alone. A norm written in PyTorch operations keeps its normalised input as well."""
    fused_swiglu: bool = True
    """SwiGLU keeps gate and up. Written as `silu(gate) * up` it keeps `silu(gate)` as well."""
    attention: Literal["flash", "softmax", "masked-softmax", "recomputed-softmax"] = "flash"
    """`flash` keeps queries, keys, values, output and one float32 a row. `softmax` keeps seq x seq probabilities;
    `masked-softmax` a boolean mask of that shape for every layer as well; `recomputed-softmax` makes them again in
    backward (Megatron's selective recompute)."""
    fp8_inputs: bool = False
    """Transformer Engine in fp8 keeps what its products read in one byte an element (`_Linear.forward` saves the
    quantised input); attention keeps its own 16-bit tensors."""
    fp8: bool = False
    """Ours: products of the layers in fp8, whose operands are cast (`layers/fp8_linear.py`)."""
    whole_qkv: bool = False
    """Values are a view, so that the whole query-key-value product stays until backward."""
    rotary_tables_per_layer: bool = False
    """Every layer looks up its own cosines and sines and keeps them (4 tables of `[seq, batch, head_dim]`)."""
    keeps_gathered_input: bool = False
    """Under sequence parallelism products keep their gathered input; otherwise their slice, gathered again."""
    selective_ops: bool = False
    """torchtitan's per-operation checkpointing: a layer keeps its input, attention's output and every second product
    (queries, values, gate, down), and computes the rest again."""
    loss: Literal["vocab-parallel", "fused", "compiled", "gathered"] = "vocab-parallel"
    """`vocab-parallel`: float32 probabilities of each rank's vocabulary slice. `fused`: Transformer Engine's kernel,
    which writes the gradient over the logits. `compiled`: logits and their gradient, nothing in float32. `gathered`:
    every rank gathers all logits, and PyTorch's `cross_entropy` works on float32 copies of them."""
    logits_held_over: int = 0
    """Micro-batches whose logits the pipeline's output buffers still hold when the next one is computed."""
    collectives_hold: bool = False
    """What a collective has read or written is not given out again before the host waits for the device: PyTorch's
    `recordStream`, the default before TORCH_NCCL_AVOID_RECORD_STREAMS."""
    keeps_stage_output: bool = False
    """What a stage sends on stays in its buffer until the gradient comes back; others free it once it is sent."""
    weight_gradient_cache: bool = False
    """Transformer Engine keeps one dummy weight gradient for every distinct weight shape."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this times tp (Megatron's make-vocab-size-divisible-by is 128)."""
    extra_tokens: int = 0
    """Tokens that the tokenizer adds to the vocabulary before padding (Megatron's NullTokenizer adds 1)."""
    workspace_bytes: int = 64 * MIB
    """cuBLAS: 32 MiB on Hopper for each pair of handle and stream (`parseChosenWorkspaceSize`); handles belong to
    threads, and backward runs in one of autograd's. Attention's own scratch is counted with its layer."""
    context_bytes: int = 500 * MIB
    """A CUDA context with PyTorch's kernels loaded."""
    nccl_bytes_per_group: int = 350 * MIB
    """Buffers that NCCL takes for one communicator of more than two ranks (planning notes 2.5: a few hundred MiB)."""
    nccl_bytes_per_channel: int = 20 * MIB
    """The same for a communicator of two ranks that only send and receive."""
    expandable_segments: bool = True
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: pages are joined, so free memory is hardly ever scattered."""
    fragmentation: float = 0.05
    """Reserved over allocated, less 1, without expandable segments: median of 19 published runs (notes 2.5)."""
    fragmentation_expandable: float = 0.015
    """The same with expandable segments: what rounding to 2 MiB pages and late frees leave."""
    uncertainty: float = 0.025
    """Standard deviation of the prediction of the tensors, as a share of the peak; `fits` leaves one of it to spare."""
    allocator_uncertainty: float = 0.0
    """The same of what an allocator without expandable segments takes beside them. Set by eye on the 13B rows of the
    A100 sweeps (docs/planner-memory.md); it widens the probability of running out and moves no answer of `fits`."""

    @property
    def fragmentation_share(self) -> float:
        """Reserved over allocated, less 1."""
        return self.fragmentation_expandable if self.expandable_segments else self.fragmentation

    @property
    def spread(self) -> float:
        """Standard deviation of what a card uses, as a share of it: tensors and allocator together."""
        return hypot(self.uncertainty, self.allocator_uncertainty)


OURS = Assumptions()

MEGATRON = Assumptions(
    bookkeeping="megatron",
    loss="fused",
    weight_gradient_cache=True,
    vocab_multiple=128,
    expandable_segments=False,
    allocator_uncertainty=0.04,
)
"""Megatron-Core with Transformer Engine: fused norm-linear, flash attention, distributed optimizer, fused loss."""
