"""Mistakes that other trainers have shipped, planted into a rank. Each is a context manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import parity
import torch
from torch import Tensor

from triweave.checkpoint.hugging_face_read import WeightReader
from triweave.groups import Group
from triweave.layers import context_parallel
from triweave.layers.cross_entropy import IGNORE
from triweave.layers.rotary import Rotation
from triweave.layout import Layout
from triweave.llama import StageInput
from triweave.parameters import Piece
from triweave.sharding import Sharding, Unit
from triweave.training import engine as engine_module
from triweave.training.step import Batch
from triweave.transport.across import Across
from triweave.verify import compare


@contextmanager
def norm_gradients_not_reduced() -> Iterator[None]:
    """Norm weights' partial gradients stay unsummed under sequence parallelism (Megatron-LM issue 1446)."""
    original = Sharding._sum_replicas

    def only_heads(self: Sharding, group: Any, chosen: Callable[[Piece], bool]) -> None:
        original(self, group, lambda piece: chosen(piece) and not piece.name.endswith("norm.weight"))

    with patch.object(Sharding, "_sum_replicas", only_heads):
        yield


@contextmanager
def replicated_heads_not_reduced() -> Iterator[None]:
    """Key/value heads held by several ranks keep each rank's own gradient."""
    original = Sharding._sum_replicas

    def only_norms(self: Sharding, group: Any, chosen: Callable[[Piece], bool]) -> None:
        original(self, group, lambda piece: chosen(piece) and piece.name.endswith("norm.weight"))

    with patch.object(Sharding, "_sum_replicas", only_norms):
        yield


@contextmanager
def gate_and_up_cut_as_one() -> Iterator[None]:
    """Gate and up concatenated before the split: the first ranks get only gates, the last only ups."""
    load = engine_module.load_weights

    def load_wrongly(units: Any, folder: Any, spec: Any) -> None:
        load(units, folder, spec)
        with WeightReader(folder, spec) as reader:
            for unit in units:
                for parameter in unit.parameters:
                    if "gate_up_proj" in parameter.name:
                        names = [piece.name for piece in parameter.pieces]
                        whole = torch.cat([reader.read(name, dtype=unit.weight.dtype) for name in names])
                        rows = parameter.shape[0]
                        rank = parameter.pieces[0].start // (rows // 2)
                        unit.view(unit.weight, parameter).copy_(whole[rank * rows : (rank + 1) * rows])

    with patch.object(engine_module, "load_weights", load_wrongly):
        yield


@contextmanager
def layers_off_by_one_after_the_first_stage() -> Iterator[None]:
    """Later stages read the weights of the layer before (the layer offset of a stage is wrong)."""
    read = WeightReader.read

    def read_wrongly(self: WeightReader, name: str, **how: Any) -> Tensor:
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) >= 2:
            parts[2] = str(int(parts[2]) - 1)
        return read(self, ".".join(parts), **how)

    with patch.object(WeightReader, "read", read_wrongly):
        yield


@contextmanager
def loss_averaged_per_micro_batch() -> Iterator[None]:
    """The mean of the micro-batches' means, which weighs their tokens unequally (torchtitan issue 1842)."""
    right = compare.loss_of

    def averaged(engine: Any, batch: Batch) -> Callable[[int, Tensor], Tensor]:
        def loss(micro_batch: int, logits: Tensor) -> Tensor:
            trained = int((batch.targets[micro_batch] != IGNORE).sum())
            equal_share = batch.trained_tokens / len(batch.targets)
            return right(engine, batch)(micro_batch, logits) * (equal_share / trained)

        return loss

    with patch.object(compare, "loss_of", averaged):
        yield


@contextmanager
def rotary_pairs_interleaved() -> Iterator[None]:
    """Rotary pairs (0, 1), (2, 3) on weights laid out for halves (torchtitan issue 335)."""

    def interleaved(self: Rotation, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        order = torch.arange(2 * half).view(2, half).t().flatten()
        back = torch.empty_like(order)
        back[order] = torch.arange(2 * half)
        permuted = x[..., back]
        first, second = permuted.chunk(2, dim=-1)
        return (permuted * self.cos + torch.cat((-second, first), dim=-1) * self.sin)[..., order]

    with patch.object(Rotation, "__call__", interleaved):
        yield


@contextmanager
def shard_groups_not_summed() -> Iterator[None]:
    """Each shard group trains on the sums of its own ranks alone."""
    with patch.object(Across, "all_reduce", lambda self, part, after=None: after):
        yield


@contextmanager
def one_unit_not_summed_across() -> Iterator[None]:
    """Shard groups leave out the sum of the third layer."""
    start = Unit.start_sum_across
    with patch.object(Unit, "start_sum_across", lambda self: None if self.name == "layers.2" else start(self)):
        yield


@contextmanager
def tied_copies_not_reduced() -> Iterator[None]:
    """Each copy of a tied embedding keeps its own gradient."""
    original = Sharding.reduce_gradients

    def without_tied(self: Sharding) -> None:
        from dataclasses import replace

        from triweave.groups import alone

        self.groups = replace(self.groups, tied=alone())
        original(self)

    with patch.object(Sharding, "reduce_gradients", without_tied):
        yield


@contextmanager
def positions_a_slice_off() -> Iterator[None]:
    """The second slice of a context-parallel rank takes the positions of the one before it."""
    share_of = parity.share_of

    def share_wrongly(inputs: StageInput, targets: Tensor, layout: Layout, cp_rank: int) -> tuple[StageInput, Tensor]:
        mine, wanted = share_of(inputs, targets, layout, cp_rank)
        first, second = mine.positions.chunk(2)
        return replace(mine, positions=torch.cat((first, second - len(second)))), wanted

    with patch.object(parity, "share_of", share_wrongly):
        yield


@contextmanager
def context_gradients_not_reduced() -> Iterator[None]:
    """Gradients of the keys that other context-parallel ranks read stay with those ranks."""

    def keep_own(x: Tensor, group: Group) -> tuple[Tensor, None]:
        return x.chunk(group.size)[group.rank].clone(), None

    with patch.object(context_parallel, "start_reduce_scatter", keep_own):
        yield
