"""The sizes, in bytes, of the tensors of one micro-batch on one rank: what both bookkeepings are written in."""

from __future__ import annotations

from dataclasses import dataclass

from triweave.layout import Layout, Offload, Recompute
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import Assumptions

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes. `tokens` are seq/cp x batch; a slice is `tokens/tp` under sequence parallelism, else all of them."""

    tokens: int
    element: int
    """Bytes of one activation."""
    tp: int
    cp: int
    batch: int
    seq: int
    """Tokens of a sequence on this rank."""
    sequence_parallel: bool
    keeps_gathered: bool
    """Whether backward has a gathered copy of a column-parallel product's input, and not the slice."""
    heads: int
    """Query heads of this rank."""
    head_dim: int
    hidden: int
    """`[tokens, hidden]`, gathered."""
    slice: int
    """`[tokens/tp, hidden]` under sequence parallelism."""
    query: int
    """`[tokens, heads/tp x head_dim]`."""
    key_value: int
    """`[tokens, kv_heads/tp x head_dim]`: keys, or values."""
    ffn: int
    """`[tokens, ffn/tp]`."""
    logits: int
    """`[tokens, vocab/tp]`."""
    logsumexp: int
    """float32 `[batch, heads/tp, seq]`."""
    rotary: int
    """Cosines, or sines: `[tokens, head_dim]`."""
    scores: int
    """`[batch, heads/tp, seq, seq]`."""
    recompute: frozenset[Recompute]
    offload: frozenset[Offload]
    gated: bool
    fp8: bool = False
    graphs: bool = False
    """Whether layers run as CUDA graphs, in memory of their own."""

    def in_fp8(self, size: int) -> int:
        """The cast of a tensor of `size` bytes, one way; nothing where products are not in fp8."""
        return size // self.element if self.fp8 else 0

    @property
    def keeps_columns(self) -> bool:
        """Whether backward has a column-parallel product's input as its cast by columns: where no slices travel."""
        return self.fp8 and not self.sequence_parallel

    @property
    def keeps_slice(self) -> bool:
        """Whether backward has this rank's slice of that input, rather than a gathered copy or a cast."""
        return not (self.keeps_gathered or self.keeps_columns)

    @property
    def gathered(self) -> int:
        """A gathered copy of a slice: nothing without sequence parallelism, where the slice is the whole."""
        return self.hidden if self.sequence_parallel else 0

    @property
    def column_input(self) -> int:
        """What backward keeps of a column-parallel product's input."""
        return self.hidden if self.keeps_gathered else self.slice

    @property
    def qkv(self) -> int:
        """The query-key-value product."""
        return self.query + 2 * self.key_value

    @property
    def gate_up(self) -> int:
        """What the activation of the MLP reads: gate and up, or the one product of an MLP without a gate."""
        return (2 if self.gated else 1) * self.ffn


def sizes_of(spec: ModelSpec, layout: Layout, seq_len: int, dtype: str, assumptions: Assumptions) -> Sizes:
    """The sizes of one micro-batch of `layout.micro_batch` sequences of `seq_len` tokens."""
    tp, element = layout.tp, DTYPE_BYTES[dtype]
    seq = seq_len // layout.cp
    tokens = seq * layout.micro_batch
    hidden = tokens * spec.hidden_size * element
    heads = spec.num_attention_heads // tp
    return Sizes(
        tokens=tokens,
        element=element,
        tp=tp,
        cp=layout.cp,
        batch=layout.micro_batch,
        seq=seq,
        sequence_parallel=layout.uses_sequence_parallel,
        keeps_gathered=layout.keeps_gathered,
        heads=heads,
        head_dim=spec.head_dim,
        hidden=hidden,
        slice=hidden // tp if layout.uses_sequence_parallel else hidden,
        query=tokens * heads * spec.head_dim * element,
        key_value=tokens * max(1, spec.num_key_value_heads // tp) * spec.head_dim * element,
        ffn=tokens * (spec.intermediate_size // tp) * element,
        logits=tokens * local_vocabulary(spec.vocab_size, tp, assumptions) * element,
        logsumexp=4 * tokens * heads,
        rotary=tokens * spec.head_dim * element,
        scores=layout.micro_batch * heads * seq * seq_len * element,
        recompute=frozenset(layout.recompute),
        offload=frozenset(layout.offload),
        gated=spec.gated_mlp,
        fp8=assumptions.fp8,
        graphs=_captures(layout, assumptions),
    )


def _captures(layout: Layout, assumptions: Assumptions) -> bool:
    """Whether layers run as CUDA graphs, which hold no collectives: slices go by copy engines, inside a host."""
    host = assumptions.gpus_per_node or layout.world_size
    return layout.cuda_graphs and assumptions.bookkeeping == "ours" and layout.tp <= host


def local_vocabulary(vocab_size: int, tp: int, assumptions: Assumptions) -> int:
    """Vocabulary rows of one tensor-parallel rank, padding included."""
    multiple = assumptions.vocab_multiple * tp
    return -(-(vocab_size + assumptions.extra_tokens) // multiple) * multiple // tp
