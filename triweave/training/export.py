"""Brings the trained weights of any layout back into a Hugging Face folder, one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.checkpoint.hugging_face_write import HuggingFaceWriter
from triweave.collectives import all_gather
from triweave.layout import Coordinates, Layout
from triweave.model_spec import ModelSpec
from triweave.parameters import LocalParameter, Piece, stage_parameters
from triweave.sharding import Unit
from triweave.training.engine import Engine


def export_hugging_face(
    engine: Engine,
    folder: Path,
    source: Path,
    dtype: torch.dtype,
    *,
    tokenizer: Path | None = None,
    chat_template: str | None = None,
) -> None:
    """Write the weights as they are now to `folder`, replacing it. All ranks call it together; rank 0 writes.

    No rank ever holds more than one whole tensor beside its own parameters.

    Args:
        engine: this rank's part of the model.
        folder: destination.
        source: the Hugging Face folder that the model came from; its config.json goes along.
        dtype: of the written weights.
        tokenizer: folder whose tokenizer files go along; None is `source`.
        chat_template: the template that was trained with, where it is not the tokenizer's own.
    """
    first = engine.groups.rank == 0
    writer = None
    if first:
        writer = HuggingFaceWriter(
            folder, engine.spec, source, dtype, tokenizer=tokenizer, chat_template=chat_template, replace=True
        )
    units = {unit.name: unit for unit in engine.sharding.units}
    with writer or nullcontext():
        for pp_rank in range(engine.layout.pp):
            for parameter, piece in _pieces(engine.spec, engine.layout, pp_rank):
                whole = _bring_to_first(engine, units, pp_rank, parameter, piece)
                if writer is not None and whole is not None:
                    writer.write(piece.name, whole)


def _pieces(spec: ModelSpec, layout: Layout, pp_rank: int) -> Iterator[tuple[LocalParameter, Piece]]:
    """Every tensor of a pipeline rank, once: the copy of a tied embedding on the last stage is left out."""
    for stage in layout.stages_of(pp_rank):
        for parameter in stage_parameters(spec, layout, stage, tp_rank=0):
            if stage > 0 and parameter.unit == "embed":
                continue
            for piece in parameter.pieces:
                yield parameter, piece


def _bring_to_first(
    engine: Engine, units: dict[str, Unit], pp_rank: int, parameter: LocalParameter, piece: Piece
) -> Tensor | None:
    """The whole tensor on rank 0, None elsewhere."""
    at = engine.groups.at
    owner = engine.layout.rank(Coordinates(0, 0, 0, pp_rank))
    whole = None
    if at.pp == pp_rank:
        unit = units[parameter.unit]
        unit.gather()  # over the ranks that hold the same part of the model, where weights are sharded too
        if at.dp == at.cp == 0:
            whole = _whole(engine, unit, parameter, piece)
        unit.release()
    if owner == 0:
        return whole if engine.groups.rank == 0 else None
    if engine.groups.rank == owner and whole is not None:
        dist.send(whole, dst=0)
    elif engine.groups.rank == 0:
        whole = torch.empty(piece.shape, dtype=_dtype(units), device=engine.groups.device)
        dist.recv(whole, src=owner)
        return whole
    return None


def _whole(engine: Engine, unit: Unit, parameter: LocalParameter, piece: Piece) -> Tensor:
    """The whole Hugging Face tensor from the slices of the tensor-parallel ranks."""
    # Slices are equally large on all ranks: the vocabulary's with their padding, which is cut off at the end.
    rows = parameter.shape[0] if parameter.unit in ("embed", "head") else piece.local_shape[0]
    mine = unit.view(unit.weight, parameter)[piece.offset : piece.offset + rows]
    if piece.replicas == engine.tp.size:
        # A copy: the buffer may be freed before the tensor is written.
        return mine.clone()
    slices = all_gather(mine.unsqueeze(0), engine.groups.tp)[:: piece.replicas]
    whole = torch.cat(tuple(slices), dim=piece.dim)
    return whole.narrow(piece.dim, 0, piece.shape[piece.dim]).contiguous()


def _dtype(units: dict[str, Unit]) -> torch.dtype:
    return next(iter(units.values())).weight.dtype
