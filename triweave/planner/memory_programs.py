"""The programs that published rows were run with: how each keeps its tensors, read from its code.

A row says its layout, its model and its source. What it leaves out (the type of gradients, the loss, whether tensor
parallelism splits the sequence) is the program's default, and the program is told by the source's name alone. Nothing
here was chosen by a measurement of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from triweave.layout import Shard
from triweave.planner.assumptions import GIB, MEGATRON, MIB, Assumptions

Metric = Literal["allocated", "reserved", "used"]


@dataclass(frozen=True, slots=True)
class Program:
    """One training program, and what it does where a row does not say."""

    assumptions: Assumptions
    shard: Shard = "optimizer"
    """Where the `zero` column is empty."""
    sequence_parallel: bool = False
    """Whether tensor parallelism splits the sequence where the `sp` column is empty."""
    metric: Metric = "allocated"
    """What its sources print as memory."""
    unit: int = GIB
    """Bytes of the unit that they print it in: GiB or GB."""
    dtype: str = "bfloat16"


SCALING = Program(
    replace(
        MEGATRON,
        gradient_bytes=2,
        gradients_of_autograd=True,
        fused_norm=False,
        fused_swiglu=False,
        whole_qkv=True,
        rotary_tables_per_layer=True,
        keeps_gathered_input=True,
        loss="gathered",
        logits_held_over=1,
        collectives_hold=True,
        keeps_stage_output=True,
        weight_gradient_cache=False,
        vocab_multiple=1,
        workspace_bytes=8 * MIB,
    ),
    metric="used",
)
"""The sweeps of 2311.05610, run with Aleph Alpha's trainer. Read from its published successor, Aleph-Alpha/scaling:

- the head gathers its logits (`parallel_output=False`), so every tensor-parallel rank holds the whole vocabulary,
  and the loss is PyTorch's `cross_entropy` on float32 copies;
- the last pipeline rank's output buffers are overwritten, never emptied: two micro-batches' logits are held;
- another rank's output stays in its buffer until its gradient is received (`_execute_receive_gradients`);
- gradients are bf16 `.grad`; each rank keeps a float32 copy and moments of its data-parallel slice;
- `silu(x) * gate`, RMSNorm and rotary embedding are PyTorch operations (RMSNorm a kernel where the source says so),
  and values stay a view of the query-key-value product;
- embedding, every layer, final norm and head are the items that are spread evenly over the pipeline.
"""

SIMUMAX = Program(replace(MEGATRON, extra_tokens=1))
"""Megatron-Core as SimuMax's launch scripts run it: float32 gradient sums; NullTokenizer adds one token."""

NEMO = Program(replace(MEGATRON, gradient_bytes=2), sequence_parallel=True, unit=10**9)
"""NeMo, Megatron-Bridge and DGX Cloud's recipes: Megatron-Core with the switches of their performance scripts.

- Gradients are summed and reduced in bf16: `+training.model.optim.grad_sync_dtype=bf16` in every script of
  NeMo-Framework-Launcher `examples/training/llama/h100`; `grad_reduce_in_fp32 = False` in the recipes of NeMo 2 in
  performance mode and in `scripts/performance/helpers.py` (`set_precision_configs`).
- `sequence_parallel = bool(tp_size > 1)`, `cross_entropy_fusion_impl = "te"` (`set_primary_perf_configs`).
- No recompute unless the row names it: `recompute_layers` is 0 in `recommended_model_configs`.
- The optimizer that keeps only the low halves of its float32 weights (`store_param_remainders`) is not counted.
"""

TORCHTITAN = Program(
    replace(MEGATRON, prefetched_units=2, vocab_multiple=1, weight_gradient_cache=False, selective_ops=True),
    shard="full",
    sequence_parallel=True,
    metric="reserved",
)
"""FSDP2 with float32 sharded weights; per-operation checkpointing; tensor parallelism always splits the sequence
(`parallelize_llama`); runs print the largest reserved memory."""

LLM_FOUNDRY = Program(
    replace(TORCHTITAN.assumptions, selective_ops=False, loss="compiled", gradient_bytes=2),
    shard="full",
    metric="reserved",
)
"""MosaicML's llm-foundry: FSDP with `mixed_precision: PURE`, so weights are gathered and gradients reduced in bf16.

The loss is `fused_crossentropy` (the default of `ComposerMPTCausalLM`): flash-attn's kernel on bf16 logits, whose
backward makes one bf16 gradient; `low_precision_layernorm` keeps bf16 inputs (`benchmarking/submit_benchmarks.py`).
"""

NANOTRON = Program(
    replace(MEGATRON, loss="vocab-parallel", weight_gradient_cache=False, fused_norm=False, vocab_multiple=1),
    sequence_parallel=True,
    metric="reserved",
    unit=10**9,
)
"""nanotron: float32 gradient sums, ZeRO-1, a vocabulary-parallel loss in float32; `tp_mode: REDUCE_SCATTER` splits
the sequence (`scripts/scaling_benchmarks.py`)."""

INTERNEVO = Program(
    replace(MEGATRON, gradient_bytes=2, loss="vocab-parallel", weight_gradient_cache=False, vocab_multiple=1),
    metric="used",
    unit=10**9,
)
"""InternEvo: bf16 gradients, float32 master weights and moments in data-parallel slices."""

MEGATRON_2021 = Program(
    replace(MEGATRON, attention="softmax", loss="vocab-parallel", weight_gradient_cache=False),
    shard="none",
    dtype="float16",
)
"""Megatron-LM of 2021 and 2022 and vTrain's Megatron-DeepSpeed: float16, attention in PyTorch operations."""

SAILOR = replace(MEGATRON_2021, metric="used")
"""Megatron-DeepSpeed in float16 with attention in PyTorch operations; the rows state neither."""

PROGRAMS: tuple[tuple[str, Program], ...] = (
    ("2311.05610", SCALING),
    ("SimuMax", SIMUMAX),
    ("torchtitan", TORCHTITAN),
    ("torchao", TORCHTITAN),
    ("sailor", SAILOR),
    ("InternEvo", INTERNEVO),
    ("nanotron", NANOTRON),
    ("ultrascale-playbook", NANOTRON),
    ("mosaicml", LLM_FOUNDRY),
    ("vTrain", MEGATRON_2021),
    ("2104.04473", MEGATRON_2021),
    ("2205.05198", MEGATRON_2021),
    ("Megatron-Bridge", NEMO),
    ("NeMo", NEMO),
    ("nemo", NEMO),
    ("dgxc", NEMO),
    ("Primus", replace(NEMO, assumptions=MEGATRON)),
)
"""A word of the source, and the program; the first that is found."""


def program_of(source: str) -> Program | None:
    """The program that a source's rows were run with."""
    return next((program for word, program in PROGRAMS if word in source), None)
