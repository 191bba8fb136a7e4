"""Where a loss or a gradient that is no number came from: the batch is computed again, one micro-batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from triweave.config.schema import Run
from triweave.data.dataset import Dataset
from triweave.data.sampler import rank_slice, sequence_ids
from triweave.errors import RunFailed
from triweave.layout import Layout
from triweave.recovery.spikes import Spikes
from triweave.schedule.actions import PipelineSchedule
from triweave.training.engine import Engine
from triweave.training.step import Batch, loss_of

NOTHING = 2**62
"""What a rank that has found nothing says: more than any finding."""

_PHASES = ("holds", "makes", "gets a gradient that is", "has a gradient sum that is")
"""What was seen of a parameter, in the order in which a step comes to it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing in a step that is no number."""

    parameter: str
    """Hugging Face name."""
    phase: str
    micro_batch: int
    dp_rank: int
    rank: int

    def describe(self, layout: Layout, ids: Sequence[int]) -> str:
        """In words; `ids` are the sequences of the global batch."""
        samples = rank_slice(ids, self.dp_rank, layout.dp, layout.micro_batch)[self.micro_batch]
        return (
            f"{self.parameter} is the first that {self.phase} no number: micro-batch {self.micro_batch} of"
            f" data-parallel rank {self.dp_rank} (sequences {', '.join(map(str, samples))}), seen on rank {self.rank}"
        )


def find_not_finite(engine: Engine, batch: Batch) -> Finding | None:
    """Compute a batch again until something is no number. All ranks call it together, with weights unchanged.

    Returns:
        The first finding, the same on all ranks; None if all numbers are numbers this time.
    """
    names = in_order_of_use(tensor.name for tensor in engine.spec.tensors())
    for micro_batch in range(engine.schedule.num_micro_batches):
        found = over_ranks(engine, _look(engine, batch, micro_batch, names))
        if min(found) < NOTHING:
            rank = found.index(min(found))
            phase, order = divmod(found[rank], len(names))
            # A backward comes to the last parameter first.
            name = names[len(names) - 1 - order] if phase == 2 else names[order]
            return Finding(name, _PHASES[phase], micro_batch, engine.layout.coordinates(rank).dp, rank)
    return None


def keep_batch(path: Path, dataset: Dataset, ids: Sequence[int]) -> None:
    """Write the sequences `ids` as arrays of numpy (.npz, no pickle): tokens one after the other, and their lengths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    edges = [dataset.boundaries(number) for number in ids]
    tokens = [dataset.tokens[int(edge[0]) : int(edge[-1])] for edge in edges]
    np.savez(
        path,
        ids=np.asarray(ids, dtype=np.int64),
        lengths=np.asarray([len(one) for one in tokens], dtype=np.int64),
        tokens=np.concatenate(tokens),
        document_starts=np.concatenate([edge[:-1] - edge[0] for edge in edges]),
    )


_ORDER_IN_LAYER = ("input_layernorm", "self_attn.q", "self_attn.k", "self_attn.v", "o_proj", "post_", "gate", "up_", "")


def in_order_of_use(names: Iterable[str]) -> list[str]:
    """Parameter names of a model in the order in which a forward comes to them, given in the order of its layers."""
    place = {name: number for number, name in enumerate(names)}

    def key(name: str) -> tuple[str, int, int]:
        layer, dot, inside = name.partition(".layers.")[2].partition(".")
        if not dot:
            return ("0" if "embed" in name else "2", 0, place[name])
        return ("1", int(layer), next(i for i, word in enumerate(_ORDER_IN_LAYER) if word in inside))

    return sorted(place, key=key)


def _look(engine: Engine, batch: Batch, micro_batch: int, names: Sequence[str]) -> int:
    """Phase and place of the first thing on this rank that is no number, as one integer."""
    place = {name: number for number, name in enumerate(names)}
    found = [NOTHING]

    def see(phase: int, name: str, values: Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            number = len(names) - 1 - place[name] if phase == 2 else place[name]
            found.append(phase * len(names) + number)

    for unit in engine.sharding.units:
        unit.own()
        for segment in unit.segments():
            if (inside := unit.in_shard(segment.start, segment.stop)) is not None:
                see(0, segment.piece.name, unit.master[inside])
    engine.sharding.zero_gradients()
    with engine.pipeline.graphs.paused(), _seeing(engine, see):
        engine.pipeline.train(
            only(engine.schedule, micro_batch), batch.inputs, loss_of(engine, batch), 1 / batch.trained_tokens
        )
    engine.sharding.reduce_gradients()
    for unit in engine.sharding.units:
        for segment in unit.segments():
            if (inside := unit.in_shard(segment.start, segment.stop)) is not None:
                see(3, segment.piece.name, unit.gradient[inside])
    return min(found)


def only(schedule: PipelineSchedule, micro_batch: int) -> PipelineSchedule:
    """The actions of one micro-batch, in their order."""
    ranks = tuple(tuple(action for action in rank if action.micro_batch == micro_batch) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


@contextmanager
def _seeing(engine: Engine, see: Any) -> Iterator[None]:
    """Look at what every module with parameters makes, and at the gradient that comes back to it."""
    handles = []
    hugging_face = {p.name: p.pieces[0].name for unit in engine.sharding.units for p in unit.parameters}

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                see(1, name, tensor.detach())
                if tensor.requires_grad:
                    tensor.register_hook(partial(see, 2, name))

    for stage in engine.stages.values():
        for path, module in stage.named_modules():
            for name, _ in list(module.named_parameters(recurse=False))[:1]:
                if f"{path}.{name}" in hugging_face:
                    handles.append(module.register_forward_hook(partial(look, hugging_face[f"{path}.{name}"])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def over_ranks(engine: Engine, mine: int) -> list[int]:
    """What every rank says, by rank; all of them call it together."""
    world = engine.groups.world
    if world.size == 1:
        return [mine]
    said = [torch.zeros(1, dtype=torch.int64, device=engine.groups.device) for _ in range(world.size)]
    dist.all_gather(said, torch.tensor([mine], device=engine.groups.device), group=world.handle)
    return [int(one) for one in said]


class NumberGuard:
    """Looks at every step's loss and gradient norm, which the host has anyway. All ranks see the same ones."""

    def __init__(self, engine: Engine, run: Run, dataset: Dataset, folder: Path) -> None:
        """Take the run and its folder."""
        self.engine, self.run, self.dataset, self.folder = engine, run, dataset, folder
        self.spikes = Spikes(run.train.spike_factor)
        self.skipped = 0
        """Steps in a row without an update."""

    def look(self, step: int, batch: Batch, loss: float, grad_norm: float) -> str:
        """Look at step `step` (from 0); returns a warning, or nothing.

        Raises:
            RunFailed: the loss or the gradient is no number and steps are not to be skipped, or not so many; or the
                loss is a spike and the run is to stop for it. All ranks raise the same.
        """
        train = self.run.train
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.skipped += 1
            said = self._explain(step, batch, loss, grad_norm)
            if train.on_not_finite == "stop":
                raise RunFailed(f"{said}\nnothing was updated and nothing saved; train.on_not_finite: skip would go on")
            if self.skipped >= train.max_skipped_steps:
                raise RunFailed(
                    f"{said}\n{self.skipped} steps in a row were skipped: train.max_skipped_steps is reached"
                )
            return f"{said}; the step is skipped"
        self.skipped = 0
        spike = self.spikes.take(loss) if train.on_spike != "ignore" else ""
        if spike and train.on_spike == "stop":
            raise RunFailed(f"step {step + 1}: {spike}; train.on_spike: stop asks to end before it is saved")
        return spike

    def _explain(self, step: int, batch: Batch, loss: float, grad_norm: float) -> str:
        ids = sequence_ids(self.run.seed, step, self.run.train.global_batch, self.dataset.num_sequences)
        found = find_not_finite(self.engine, batch)
        kept = self.folder / "not-finite" / f"step-{step + 1}.npz"
        if self.engine.groups.rank == 0:
            keep_batch(kept, self.dataset, ids)
        where = (
            found.describe(self.engine.layout, ids)
            if found
            else "computed again, every number is one: a fault of the hardware, or of timing"
        )
        return f"step {step + 1}: the loss is {loss} and the gradient norm {grad_norm}. {where}. The batch is in {kept}"
