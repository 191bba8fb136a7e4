"""What a rank does in the parity tests: build its part of a small Llama and compare it with transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run
from triweave.groups import Group
from triweave.layers.cross_entropy import IGNORE
from triweave.layers.documents import Documents
from triweave.layout import Layout, even_layers
from triweave.llama import StageInput
from triweave.model_spec import spec_from_folder
from triweave.moments import MomentsDtype
from triweave.training.batches import share_of
from triweave.training.engine import Engine, build_engine
from triweave.training.step import Batch, loss_of
from triweave.transport.messages import Messages
from triweave.verify.compare import Tolerance, Verdict, compare_with_reference
from triweave.verify.reference import Reference, Sample, compute_reference

CPU = torch.device("cpu")


def make_samples(num_micro_batches: int, micro_batch: int, seq: int, vocab: int, *, packed: bool) -> list[Sample]:
    """Random micro-batches with unequal numbers of trained tokens, and of packed documents if asked."""
    generator = torch.Generator().manual_seed(1234)
    samples = []
    for number in range(num_micro_batches):
        tokens = torch.randint(0, vocab, (seq, micro_batch), generator=generator)
        targets = torch.randint(0, vocab, (seq, micro_batch), generator=generator)
        share = 0.1 + 0.8 * number / num_micro_batches
        targets[torch.rand(seq, micro_batch, generator=generator) < share] = IGNORE
        positions = torch.arange(seq).unsqueeze(1).expand(seq, micro_batch)
        documents = None
        if packed:
            cut = 3 + (5 * number) % (seq - 4)
            ids = (torch.arange(seq) >= cut).long().unsqueeze(1).expand(seq, micro_batch)
            positions = torch.where(ids == 1, positions - cut, positions)
            starts = [b * seq + offset for b in range(micro_batch) for offset in (0, cut)]
            cu = torch.tensor([*starts, micro_batch * seq], dtype=torch.int32)
            documents = Documents(ids, cu, max(cut, seq - cut))
        samples.append(Sample(StageInput(tokens, positions, documents), targets))
    return samples


def make_reference(folder: Path, samples: list[Sample], file: Path) -> Reference:
    """transformers' answer, in float32."""
    return compute_reference(folder, samples, file, torch.float32)


def engine_for(
    folder: Path, layout: Layout, seq: int, num_micro_batches: int, moments: MomentsDtype = "float32", **model: object
) -> Engine:
    """One rank's engine for a layout, without a run file."""
    spec = spec_from_folder(folder)
    if not layout.layers:
        layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
    config = ModelConfig(path=str(folder), dtype="float32")
    run = Run(
        model=replace(config, **model),
        data=DataConfig(train=("unused",), seq_len=seq),
        optimizer=OptimizerConfig(learning_rate=1e-3, moments=moments),
    )
    resolved = SimpleNamespace(run=run, spec=spec, layout=layout, num_micro_batches=num_micro_batches)
    return build_engine(resolved, CPU)


def local_batch(samples: list[Sample], layout: Layout, dp_rank: int, cp_rank: int = 0) -> Batch:
    """The micro-batches of one data-parallel rank, and of their sequences the slices of one context-parallel rank."""
    count = len(samples) // layout.dp
    mine = samples[dp_rank * count : (dp_rank + 1) * count]
    trained = sum(int((sample.targets != IGNORE).sum()) for sample in samples)
    shares = [share_of(sample.inputs, sample.targets, layout, cp_rank) for sample in mine]
    return Batch([inputs for inputs, _ in shares], [targets for _, targets in shares], trained)


def one_forward(engine: Engine, stage: int, batch: Batch) -> GradientEdge:
    """What backward of the first micro-batch would start from on a stage; nothing else of its forward is held."""
    first, last = stage == 0, stage == engine.layout.num_stages - 1
    x = None if first else torch.zeros(engine.pipeline.activation_shape, dtype=engine.pipeline.dtype)
    output = engine.stages[stage](x if x is None else x.requires_grad_(), batch.inputs[0])
    if last:
        output = loss_of(engine, batch)(0, output)
    return get_gradient_edge(output)


@contextmanager
def in_pieces() -> Iterator[None]:
    """Products in pieces that travel as messages, instead of a collective before or after each."""

    def choose(wanted: str, group: Group, *rest: Any) -> Messages:
        return Messages(group)

    # Not the name that it chooses by: that is a default, which was read when the function was made.
    with patch.object(sys.modules[__name__], "build_engine", partial(build_engine, transport_for=choose)):
        yield


def verify_on_rank(
    rank: int,
    folder: Path,
    layout: Layout,
    samples: list[Sample],
    reference: Reference,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Verdict:
    """The verdict on one layout, with a fault planted if given."""
    with fault():
        seq = samples[0].inputs.tokens.shape[0]
        engine = engine_for(folder, layout, seq, len(samples) // layout.dp)
        batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
        return compare_with_reference(engine, batch, reference, Tolerance())
