"""Writes a checkpoint of triweave from weights alone: step 0 of a run, with moments that are zero."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from triweave.checkpoint.archive_write import ArchiveWriter
from triweave.checkpoint.hugging_face_write import write_texts
from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.manifest import Manifest
from triweave.conversion.kinds import MODEL_FOLDER
from triweave.conversion.origin import Model
from triweave.conversion.targets import Target
from triweave.layout import Layout
from triweave.model_spec import ModelSpec, TensorSpec
from triweave.parameters import stage_parameters
from triweave.training.checkpoints import KINDS, RANDOM_FILE
from triweave.training.run_progress import PROGRESS_FILE, RunProgress

COLUMN_TILES = 8
"""Tiles of a band of a row-parallel weight, so that each of 2, 4 or 8 tensor-parallel ranks reads its own alone."""


@contextmanager
def checkpoint_target(folder: Path, model: Model, stored: torch.dtype, max_file_bytes: int) -> Iterator[Target]:
    """A checkpoint that a run of any layout resumes, at step 0.

    Args:
        folder: destination; replaced if it is there.
        model: what goes along in a folder of its own, for the way back.
        stored: how the weights were stored where they come from, for that folder's config.json.
        max_file_bytes: of a file of tensors.
    """
    spec = model.spec
    shapes = {f"{kind}.{tensor.name}": tensor.shape for kind in KINDS for tensor in spec.tensors()}
    progress = RunProgress(step=0, seed=0, global_batch=0, data="", layout="converted", updates=0)
    # No rank's generators: the run draws its own, as at any beginning.
    documents = {PROGRESS_FILE: json.dumps(asdict(progress), indent=2) + "\n", RANDOM_FILE: "[]"}
    store = LocalStore(folder.parent)
    working = store.begin(folder.name)
    try:
        with ArchiveWriter(lambda name: store.create(working, name), shapes, torch.float32, max_file_bytes) as archive:
            yield _CheckpointTarget(archive, spec)
            archive.finish()
        files = dict(archive.records)
        for name, text in documents.items():
            with store.create(working, name) as file:
                file.write(text.encode())
                files[name] = file.finish()
        texts = store.root / working / MODEL_FOLDER
        texts.mkdir()
        write_texts(texts, model.folder, stored, tokenizer=model.tokenizer, chat_template=model.chat_template)
        store.commit(working, folder.name, Manifest(uuid.uuid4().hex, files).to_bytes())
    except BaseException:
        store.delete(working)
        raise


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
