"""Weights written row by row, into a folder that is there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from triweave.checkpoint.archive_write import ArchiveWriter
from triweave.checkpoint.durable import new_file
from triweave.checkpoint.hugging_face_write import HuggingFaceWriter, write_texts
from triweave.checkpoint.staged_folder import staged_folder
from triweave.conversion.kinds import (
    MEGATRON_FORMAT_FILE,
    MEGATRON_RELEASE,
    MEGATRON_TRACKER_FILE,
    MODEL_FOLDER,
)
from triweave.conversion.megatron_names import extra_state_names, place_of
from triweave.conversion.origin import Model
from triweave.model_spec import ModelSpec, TensorSpec


class Target(Protocol):
    """Where weights go. Rows of a tensor come in their order, and every row comes."""

    def write(self, tensor: TensorSpec, start: int, rows: Tensor) -> None:
        """Take rows `[start, start + len(rows))` of a tensor."""


@contextmanager
def hugging_face_target(
    folder: Path, model: Model, dtype: torch.dtype, max_shard_bytes: int, *, replace: bool
) -> Iterator[Target]:
    """A Hugging Face folder that transformers loads."""
    with HuggingFaceWriter(
        folder,
        model.spec,
        model.folder,
        dtype,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        max_shard_bytes=max_shard_bytes,
        replace=replace,
    ) as writer:
        yield _HuggingFaceTarget(writer)


class _HuggingFaceTarget:
    def __init__(self, writer: HuggingFaceWriter) -> None:
        self._writer = writer

    def write(self, tensor: TensorSpec, start: int, rows: Tensor) -> None:
        self._writer.write_rows(tensor.name, rows)


@contextmanager
def megatron_target(folder: Path, model: Model, dtype: torch.dtype, max_file_bytes: int) -> Iterator[Target]:
    """A checkpoint that Megatron-Core loads on any layout: weights only, which it calls a release."""
    spec = model.spec
    with staged_folder(folder) as partial:
        release = partial / MEGATRON_RELEASE
        texts = partial / MODEL_FOLDER
        release.mkdir()
        texts.mkdir()
        write_texts(texts, model.folder, dtype, tokenizer=model.tokenizer, chat_template=model.chat_template)
        places = (place_of(spec, tensor) for tensor in spec.tensors())
        shapes = {place.key: place.shape for place in places}
        with ArchiveWriter(lambda name: new_file(release / name), shapes, dtype, max_file_bytes) as archive:
            for name in extra_state_names(spec):
                archive.write_object(name, [None])
            yield _MegatronTarget(archive, spec)
            archive.finish()
        # What Megatron keeps beside the tensors; this file every version reads.
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, release / "common.pt")
        told = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (release / MEGATRON_FORMAT_FILE).write_text(json.dumps(told), encoding="utf-8")
        (partial / MEGATRON_TRACKER_FILE).write_text(MEGATRON_RELEASE, encoding="utf-8")


class _MegatronTarget:
    def __init__(self, archive: ArchiveWriter, spec: ModelSpec) -> None:
        self._archive, self._spec = archive, spec

    def write(self, tensor: TensorSpec, start: int, rows: Tensor) -> None:
        place = place_of(self._spec, tensor)
        stop = start + len(rows)
        for block in place.blocks:
            first, last = max(start, block.start), min(stop, block.stop)
            if first < last:
                part = rows[first - start : last - start]
                part = part if place.layer is None else part.unsqueeze(0)
                self._archive.write(place.key, place.offsets(block.at + first - block.start), part)
