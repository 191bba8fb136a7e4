"""Do several systems compute the same loss and gradients, on every layout, as one process of transformers?

    python bench/peers/compare.py                # small random models, every case below
    python bench/peers/compare.py --only tied --faults

Exit status 0: every system is within tolerance in every case, and every planted fault was found.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contract import Batch, Difference, Layout, Result, difference
from megatron_oracle import GRADIENT_TOLERANCE, LOSS_TOLERANCE, megatron_result
from megatron_rank import Fault
from transformers_reference import transformers_result
from triweave_result import triweave_result

System = Callable[[Layout, Path, Batch], Result]
"""Computes one forward and backward over the batch on its own processes, float32, and ends within `TIMEOUT` seconds."""

TIMEOUT = 240.0
SYSTEMS: dict[str, System] = {
    "megatron-core": partial(megatron_result, timeout=TIMEOUT),
    "triweave": triweave_result,
}
"""Every system that is compared."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a random model differs in from the plain one: 8 layers, hidden 64, 8 heads, 4 key/value heads."""

    key_value_heads: int = 4
    vocab_size: int = 256
    tied: bool = False
    llama3_rope: bool = False
    qwen2: bool = False

    def write(self, folder: Path, seed: int) -> None:
        """Save it as a Hugging Face folder, every weight random, the norms' and the biases' too."""
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
        if self.llama3_rope:
            # With heads of 8 and this theta, one frequency is interpolated and one is divided by the factor.
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope |= {"original_max_position_embeddings": 8192}
        classes: tuple[Any, Any] = (Qwen2Config, Qwen2ForCausalLM) if self.qwen2 else (LlamaConfig, LlamaForCausalLM)
        config = classes[0](
            vocab_size=self.vocab_size,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=self.key_value_heads,
            tie_word_embeddings=self.tied,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            max_position_embeddings=131072,
            # Ten times the usual spread of 0.01 to 0.02: attention far from uniform, gradients far from zero.
            initializer_range=0.15,
        )
        torch.manual_seed(seed)
        model = classes[1](config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
        model.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Case:
    """A named model and the layouts it is computed on."""

    name: str
    model: Model
    layouts: tuple[Layout, ...]


CASES = (
    Case(
        "plain",
        Model(),
        (
            Layout(),
            Layout(tp=2, pp=2),
            Layout(tp=2, pp=2, sequence_parallel=False),
            Layout(pp=4),
            Layout(pp=2, vpp=2),
            Layout(tp=2, pp=2, vpp=2),
            Layout(tp=2, pp=2, dp=2),
        ),
    ),
    Case("tp > kv heads", Model(key_value_heads=2), (Layout(tp=4), Layout(tp=4, sequence_parallel=False))),
    Case(
        "tied, odd vocabulary, llama3 rope",
        Model(vocab_size=251, tied=True, llama3_rope=True),
        (Layout(), Layout(tp=2, pp=2), Layout(pp=2, vpp=2), Layout(tp=4)),
    ),
    Case("qwen2", Model(qwen2=True), (Layout(tp=2, pp=2),)),
)

FAULTS: dict[Fault, tuple[Model, Layout]] = {
    "norm-gradients": (Model(), Layout(tp=2)),
    "gate-up": (Model(), Layout(tp=2)),
    "vocabulary-padding": (Model(vocab_size=251), Layout(tp=2)),
}
"""Mistakes planted in Megatron, each with a model and layout where it shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one layout of one case, against transformers."""

    case: str
    layout: str
    system: str
    loss: float
    found: Difference
    seconds: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model on disk, its batch, and what transformers computes."""

    model_dir: Path
    batch: Batch
    result: Result


def compare(name: str, system: System, case: str, layout: Layout, reference: Prepared) -> Row:
    """Run one system and measure its distance from the reference."""
    start = time.monotonic()
    result = system(layout, reference.model_dir, reference.batch)
    found = difference(result, reference.result)
    passed = found.within(loss=LOSS_TOLERANCE, gradient=GRADIENT_TOLERANCE)
    return Row(case, str(layout), name, result["loss"], found, time.monotonic() - start, passed)


def prepare(model: Model, folder: Path, seed: int) -> Prepared:
    """Write the model, draw eight micro-batches with unequal numbers of valid tokens, run transformers."""
    model.write(folder, seed)
    batch = Batch.random(seed + 1, count=8, shape=(2, 32), vocab_size=model.vocab_size)
    return Prepared(folder, batch, transformers_result(folder, batch))


def run_cases(only: str, seed: int) -> Iterator[Row]:
    """Every system on every layout of the cases whose name contains `only`."""
    for case in (case for case in CASES if only in case.name):
        with tempfile.TemporaryDirectory() as folder:
            reference = prepare(case.model, Path(folder), seed)
            for layout in case.layouts:
                for name, system in SYSTEMS.items():
                    yield compare(name, system, case.name, layout, reference)


def run_faults(seed: int) -> Iterator[Row]:
    """Megatron with a mistake in it; a row passes if the comparison finds the mistake."""
    for fault, (model, layout) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            reference = prepare(model, Path(folder), seed)
            system = partial(megatron_result, timeout=TIMEOUT, fault=fault)
            row = compare("megatron-core", system, f"fault: {fault}", layout, reference)
            yield replace(row, passed=not row.passed)


def print_row(row: Row) -> None:
    """One line of the table, as soon as it is known."""
    found = row.found
    print(
        f"{row.case:34}{row.layout:18}{row.system:15}{row.loss:<15.9f}{found.loss:<10.1e}{found.grad_norm:<10.1e}"
        f"{found.gradient:<10.1e}{'ok' if row.passed else 'WRONG':7}{row.seconds:4.0f} s  {found.worst}",
        flush=True,
    )


def main() -> int:
    """Run the comparison, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--faults", action="store_true", help="also plant mistakes, which the comparison must find")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    arguments = parser.parse_args()
    print(
        f"{'case':34}{'layout':18}{'system':15}{'loss':15}{'d loss':10}{'d norm':10}{'d grad':10}{'':7}{'time':6}"
        f"  worst gradient\ntolerances, relative to transformers in float32: loss {LOSS_TOLERANCE:.0e}, "
        f"gradient norm and every gradient {GRADIENT_TOLERANCE:.0e}"
    )
    rows = []
    for row in run_cases(arguments.only, arguments.seed):
        print_row(row)
        rows.append(row)
    for row in run_faults(arguments.seed) if arguments.faults else ():
        print_row(row)
        rows.append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
