"""What is measured: the shapes, one *case* for each system, layout and setting, and named sets of cases.

Imports no torch: the command that starts the ranks reads it, and so does every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from triweave.catalogue import find_model
from triweave.model_spec import ModelSpec

WARM_UP, TIMED = 3, 6
"""Steps of a case."""

PEAK_FLOPS = 989e12
"""Dense bf16 of one H100 or H200 SXM, from NVIDIA's data sheet; what torchtitan divides by as well."""

SYSTEMS = MappingProxyType(
    {
        "triweave": "triweave_run.py",
        "torchtitan": "torchtitan_run.py",
        "megatron-core": "megatron_run.py",
        "transformers": "transformers_run.py",
    }
)
"""The script that is one rank of each system."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, its sequence length, and the sequences of one optimizer step."""

    spec: ModelSpec
    seq_len: int
    sequences: int
    pipeline_sequences: int
    """The same for pipeline layouts, which need more micro-batches to fill."""


@dataclass(frozen=True, slots=True)
class Case:
    """One system on one shape, layout and set of options: one row of the table."""

    system: str
    shape: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    """Sequences in one forward pass of one data-parallel rank."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What is set otherwise than the system's runner sets it, by the runner's own names."""

    @property
    def world_size(self) -> int:
        """Number of ranks, one a GPU."""
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """The axes that are split, as `tp2`."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"

    @property
    def sequences(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        shape = shapes()[self.shape]
        return shape.pipeline_sequences if self.pp > 1 else shape.sequences

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one step."""
        return self.sequences // (self.dp * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.sequences * shapes()[self.shape].seq_len

    @property
    def settings(self) -> str:
        """Micro-batch and options in one line."""
        return ", ".join([f"micro-batch {self.micro_batch}", *(f"{k} {v}" for k, v in self.options.items())])

    @property
    def name(self) -> str:
        """A name that no other case has, fit for a file."""
        words = [self.system, self.shape, self.layout, f"mb{self.micro_batch}"]
        words += [f"{key}-{value}" for key, value in self.options.items()]
        return "_".join(words).replace(" ", "-").replace(",", "-")

    def option(self, key: str, default: str) -> str:
        """The value of an option, or what the runner takes without it."""
        return self.options.get(key, default)


def read_case() -> Case:
    """The case that this rank was started for."""
    case: Case = Case(**json.loads(Path(os.environ["BENCH_CASE"]).read_text()))
    return case


def write_case(case: Case, path: Path) -> None:
    """Write what `read_case` reads, when `BENCH_CASE` names `path`."""
    path.write_text(json.dumps(asdict(case)))


def model_flops_utilization(case: Case, step_s: float, *, causal: bool) -> float:
    """Share of the GPUs' peak that a step's model FLOPs take: one formula for every system, recomputation uncounted."""
    shape = shapes()[case.shape]
    flops = case.tokens * shape.spec.flops_per_token(shape.seq_len, causal=causal)
    return flops / (step_s * case.world_size * PEAK_FLOPS)


def shapes() -> dict[str, Shape]:
    """Every shape by name."""
    eight = replace(find_model("meta-llama/Meta-Llama-3-8B"), max_position_embeddings=8192)
    layers = replace(find_model("meta-llama/Meta-Llama-3-70B"), num_hidden_layers=8, vocab_size=32000)
    tiny = ModelSpec(1024, 128, 384, 4, 4, 2, 32, max_position_embeddings=8192)
    return {
        "8b-8k": Shape(eight, 8192, 4, 8),
        "8b-4k": Shape(eight, 4096, 8, 8),
        "70b-4k": Shape(layers, 4096, 8, 8),
        "tiny": Shape(tiny, 128, 4, 8),
    }


def case_sets(shape: str) -> dict[str, list[Case]]:
    """Named lists of cases on one shape, the most telling first.

    `best` holds, for each layout, ours and each peer at a setting that is expected to be its fastest; `sweep` the
    settings around it, so that the fastest is found and not assumed; `fp8` ours, each in bf16 and in fp8. What does not
    fit stays: a row that says so is an answer.
    """
    # As many sequences in a micro-batch as make 16,384 tokens, where the GPU has its products at full speed.
    many = 4 if shapes()[shape].seq_len == 4096 else 2
    # The wide layers of 70B are few enough here to keep all activations.
    fits = shape == "70b-4k"
    ours = {} if fits else {"recompute": "norm,swiglu"}
    theirs = {} if fits else {"recompute": "op"}

    def row(system: str, layout: str, micro_batch: int = 1, **options: str) -> Case:
        axis, size = layout[:2], int(layout[2:])
        return Case(system, shape, micro_batch=micro_batch, options=options, **{axis: size})

    dp = [
        row("triweave", "dp2", many // 2, shard="optimizer"),
        row("torchtitan", "dp2", many, recompute="op"),
        row("transformers", "dp2", 1, recompute="layer"),
        row("megatron-core", "dp2", 1, recompute="layer"),
    ]
    tp = [
        row("triweave", "tp2", many),
        row("torchtitan", "tp2", many),
        row("megatron-core", "tp2", 1),
    ]
    pp = [
        row("triweave", "pp2", schedule="zero-bubble"),
        row("torchtitan", "pp2", **theirs),
        row("megatron-core", "pp2"),
    ]
    more = [
        row("triweave", "pp2", schedule="1f1b"),
        row("triweave", "pp2", schedule="interleaved"),
        row("triweave", "dp2", 1, shard="full"),
        row("triweave", "dp2", 1, shard="gradients"),
        row("triweave", "dp2", many, shard="full", **ours),
        row("triweave", "dp2", 1, shard="optimizer", recompute="norm,swiglu"),
        row("triweave", "dp2", many, shard="full", recompute="layer"),
        row("triweave", "dp2", 1, shard="none", recompute="layer"),
        row("triweave", "tp2", 1),
        row("triweave", "tp2", many, recompute="norm,swiglu"),
        row("torchtitan", "dp2", 1),
        row("torchtitan", "dp2", 1, recompute="op"),
        row("torchtitan", "dp2", 1, recompute="op", compile="off"),
        row("torchtitan", "tp2", 1),
        row("torchtitan", "tp2", many, recompute="op"),
        row("torchtitan", "tp2", many, compile="off"),
        row("torchtitan", "pp2", **({"recompute": "op"} if fits else {})),
        row("torchtitan", "pp2", recompute="op", compile="off"),
        row("torchtitan", "pp2", recompute="op", schedule="Interleaved1F1B"),
        row("megatron-core", "tp2", 2),
        row("megatron-core", "tp2", 1, attention="unfused"),
        row("megatron-core", "pp2", schedule="interleaved"),
        row("megatron-core", "pp2", recompute="layer"),
        row("megatron-core", "dp2", 1),
        row("transformers", "dp2", 1),
        row("transformers", "dp2", 2, recompute="layer"),
        row("transformers", "dp2", 1, recompute="layer", compile="on"),
    ]
    rows = [*dp, *tp, *pp, *more]
    pairs = [case for case in rows if case.system == "triweave" for case in (case, _in_fp8(case))]
    # Round by round, so that a budget that ends early leaves no layout without a comparison.
    best = [case for part in (slice(2), slice(2, None)) for group in (dp, tp, pp) for case in group[part]]
    return {"best": best, "dp": dp, "tp": tp, "pp": pp, "sweep": more, "fp8": pairs, "all": best + more}


def _in_fp8(case: Case) -> Case:
    return replace(case, options={**case.options, "fp8": "on"})
