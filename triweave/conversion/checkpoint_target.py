"""Writes a checkpoint of triweave from weights alone: step 0 of a run, with moments that are zero."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from triweave.checkpoint.archive_write import ArchiveWriter
from triweave.checkpoint.staged_folder import staged_folder
from triweave.conversion.targets import Target
from triweave.layout import Layout
from triweave.model_spec import ModelSpec, TensorSpec
from triweave.parameters import stage_parameters
from triweave.training.checkpoints import KINDS, PROGRESS_FILE, RunProgress

COLUMN_TILES = 8
"""Tiles of a band of a row-parallel weight, so that each of 2, 4 or 8 tensor-parallel ranks reads its own alone."""


@contextmanager
def checkpoint_target(folder: Path, spec: ModelSpec, max_file_bytes: int) -> Iterator[Target]:
    """A checkpoint that a run of any layout resumes, at step 0."""
    shapes = {f"{kind}.{tensor.name}": tensor.shape for kind in KINDS for tensor in spec.tensors()}
    with staged_folder(folder) as partial:
        with closing(ArchiveWriter(partial, shapes, torch.float32, max_file_bytes)) as archive:
            yield _CheckpointTarget(archive, spec)
            archive.finish()
        progress = RunProgress(step=0, seed=0, global_batch=0, data="", layout="converted")
        (partial / PROGRESS_FILE).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")


class _CheckpointTarget:
    """Stores bands of rows as they come, and a band of zeros for each moment."""

    def __init__(self, archive: ArchiveWriter, spec: ModelSpec) -> None:
        self._archive = archive
        whole = Layout(layers=(spec.num_hidden_layers,))
        parameters = stage_parameters(spec, whole, stage=0, tp_rank=0)
        self._cut_dim = {piece.name: piece.dim for parameter in parameters for piece in parameter.pieces}

    def write(self, tensor: TensorSpec, start: int, rows: Tensor) -> None:
        """Take the next rows of a tensor."""
        weight, *moments = KINDS
        tiles = [rows]
        if self._cut_dim[tensor.name] == 1 and rows.shape[1] % COLUMN_TILES == 0:
            tiles = list(rows.chunk(COLUMN_TILES, dim=1))
        column = 0
        for tile in tiles:
            offsets = (start, column)[: len(tensor.shape)]
            self._archive.write(f"{weight}.{tensor.name}", offsets, tile)
            for kind in moments:
                self._archive.write_zeros(f"{kind}.{tensor.name}", offsets, tuple(tile.shape))
            column += tile.shape[-1]
