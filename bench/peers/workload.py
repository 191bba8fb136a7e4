"""What is measured: the shapes, and one *case* for each system, layout and setting.

Imports no torch: the command that starts the ranks reads it, and so does every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from triweave.catalogue import find_model
from triweave.model_spec import ModelSpec

WARM_UP, TIMED = 2, 4
"""Steps of a case."""

PEAK_FLOPS = 989e12
"""Dense bf16 of one H100 or H200 SXM, from NVIDIA's data sheet; what torchtitan divides by as well."""

SYSTEMS = MappingProxyType(
    {
        "triweave": "triweave_run.py",
        "torchtitan": "torchtitan_run.py",
        "megatron-core": "megatron_run.py",
        "transformers": "transformers_run.py",
        "stage": "stage_run.py",
        "verify": "verify_run.py",
    }
)
"""The script that is one rank of each system. `stage` and `verify` are triweave too: one pipeline stage whose
neighbours are not there, and a layout held against transformers on a small model."""


VERIFY_FOLDER, REFERENCE_IS_THERE = "BENCH_VERIFY", "reference-is-there"
"""Variable that names the folder of what layouts are held against, and the file in it that is written last."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, its sequence length, and the sequences of one optimizer step that fall to each GPU."""

    spec: ModelSpec
    seq_len: int
    sequences_per_gpu: int


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
    """What is set otherwise than the system's runner sets it, by the runner's own names; `layers` and `sequences` say
    how deep the model is and how many sequences a step has, where that is not the shape's; `alone` is `on` where one
    rank of the grid is there without the others."""
    cp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def is_alone(self) -> bool:
        """Whether one rank is there, and each collective is a copy on its GPU."""
        return self.option("alone", "off") == "on"

    @property
    def num_processes(self) -> int:
        """Ranks that are there, one a GPU: all, those of one pipeline stage, or one."""
        if self.is_alone:
            return 1
        return self.tp if self.system == "stage" else self.world_size

    @property
    def num_words(self) -> int:
        """Words that random tokens are drawn from: all, or those of the first tensor-parallel rank where it is alone.

        Nobody is there to look up the others' words: they would be rows of zeros, on which a norm's gradient grows
        300-fold a layer until it is no number.
        """
        return self.spec.vocab_size // (self.tp if self.is_alone else 1)

    @property
    def layout(self) -> str:
        """The axes that are split, as `tp2`."""
        sizes = {"cp": self.cp, "tp": self.tp, "pp": self.pp, "dp": self.dp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        spec = shapes()[self.shape].spec
        layers = int(self.option("layers", str(spec.num_hidden_layers)))
        return replace(spec, num_hidden_layers=layers)

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return shapes()[self.shape].seq_len

    @property
    def sequences(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return int(self.option("sequences", str(shapes()[self.shape].sequences_per_gpu * self.world_size)))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one step."""
        return self.sequences // (self.dp * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.sequences * self.seq_len

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


def model_flops_utilization(case: Case, step_s: float, *, causal: bool) -> float:
    """Share of the GPUs' peak that a step's model FLOPs take: one formula for every system, recomputation uncounted."""
    flops = case.tokens * case.spec.flops_per_token(case.seq_len, causal=causal)
    return flops / (step_s * case.world_size * PEAK_FLOPS)


def shapes() -> dict[str, Shape]:
    """Every shape by name."""
    eight = replace(find_model("meta-llama/Meta-Llama-3-8B"), max_position_embeddings=8192)
    seventy = replace(find_model("meta-llama/Meta-Llama-3-70B"), max_position_embeddings=8192)
    layers = replace(seventy, num_hidden_layers=8, vocab_size=32000)
    tiny = ModelSpec(1024, 128, 384, 4, 4, 2, 32, max_position_embeddings=8192)
    # As many heads and layers as the grids of eight ranks ask for.
    deep = ModelSpec(1024, 64, 192, 16, 8, 8, 8, max_position_embeddings=8192)
    return {
        "8b-8k": Shape(eight, 8192, 4),
        "8b-4k": Shape(eight, 4096, 8),
        "70b-4k": Shape(layers, 4096, 8),
        "tiny": Shape(tiny, 128, 4),
        "70b-whole-8k": Shape(seventy, 8192, 1),
        "70b-whole-4k": Shape(seventy, 4096, 1),
        "tiny-deep": Shape(deep, 64, 1),
    }
