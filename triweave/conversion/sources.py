"""Weights read row by row, whatever folder they lie in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from triweave.checkpoint.archive_read import ArchiveReader
from triweave.checkpoint.file_bytes import read_into
from triweave.checkpoint.manifest import check_file, check_sizes, read_manifest
from triweave.checkpoint.places import locate
from triweave.checkpoint.store import DamagedCheckpoint
from triweave.conversion.megatron_names import EMBEDDING, HEAD, place_of
from triweave.errors import InputError, Problem
from triweave.model_spec import ModelSpec, TensorSpec
from triweave.weights_index import TensorEntry, index_problems, some_names, weights_index

WEIGHT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Source(Protocol):
    """Where weights come from."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """How each tensor of the model is stored."""

    @property
    def dropped(self) -> tuple[str, ...]:
        """What is there beside the weights, in words."""

    def read(self, tensor: TensorSpec, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` as they are stored, on the CPU.

        Raises:
            InputError: the source is damaged.
        """

    def close(self) -> None:
        """Close every file."""


class HuggingFaceSource:
    """The safetensors of a Hugging Face folder.

    Raises:
        InputError: they are missing, damaged or another model's.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._entries: dict[str, TensorEntry] = weights_index(folder)
        if problems := index_problems(self._entries, spec, folder):
            raise InputError(problems)
        names = {tensor.name for tensor in spec.tensors()}
        self.dtypes = {name: WEIGHT_DTYPES[self._entries[name].dtype] for name in names}
        left = sorted(self._entries.keys() - names)
        self.dropped = (f"{some_names(left)}: the model computes or shares them",) if left else ()
        self._file: BinaryIO | None = None

    def read(self, tensor: TensorSpec, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a tensor."""
        entry = self._entries[tensor.name]
        rows = torch.empty((stop - start, *tensor.shape[1:]), dtype=self.dtypes[tensor.name])
        try:
            if self._file is None or self._file.name != str(entry.file):
                self.close()
                self._file = entry.file.open("rb")
            read_into(self._file, entry.begin + start * rows[:1].nbytes, rows)
        except OSError as error:
            raise InputError(Problem("SRC", entry.file, f"cannot give {tensor.name} any more: it {error}")) from None
        return rows

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


class CheckpointSource:
    """The master weights of a checkpoint of triweave.

    Raises:
        InputError: it is damaged, or another model's.
    """

    PREFIX = "weight."

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        _check_manifest(folder)
        self._archive = ArchiveReader(folder)
        found = self._archive.tensors
        wanted = {f"{self.PREFIX}{tensor.name}": tensor.shape for tensor in spec.tensors()}
        _check_shapes(folder, wanted, {name: found[name].shape for name in wanted if name in found})
        unknown = [name for name in found if name.startswith(self.PREFIX) and name not in wanted]
        if unknown:
            raise InputError(
                Problem("SRC", folder, f"holds another model: {some_names(unknown)} is no part of config.json's")
            )
        self.dtypes = {name.removeprefix(self.PREFIX): found[name].dtype for name in wanted}
        left = sum(name not in wanted for name in found)
        self.dropped = (f"{left} tensors of AdamW's moments (exp_avg, exp_avg_sq)",) if left else ()

    def read(self, tensor: TensorSpec, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a tensor."""
        rest = tensor.shape[1:]
        return self._archive.read(f"{self.PREFIX}{tensor.name}", (start, *(0 for _ in rest)), (stop - start, *rest))

    def close(self) -> None:
        """Close every file."""
        self._archive.close()


class MegatronSource:
    """The model of a torch_dist checkpoint of Megatron-Core.

    Raises:
        InputError: it is damaged, or another model's.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._archive = ArchiveReader(folder)
        found = self._archive.tensors
        self._places = {tensor.name: place_of(spec, tensor, found) for tensor in spec.tensors()}
        wanted = {place.key: place.shape for place in self._places.values()}
        shapes = {}
        for key in wanted:
            if key in found:
                shape = found[key].shape
                # Megatron pads the vocabulary; rows past the model's own mean nothing.
                padded = key in (EMBEDDING, HEAD) and shape[0] >= spec.vocab_size
                shapes[key] = (spec.vocab_size, *shape[1:]) if padded else shape
        _check_shapes(folder, wanted, shapes)
        model = [name for name in found if name.startswith(("decoder.", "embedding.", "output_layer."))]
        unknown = [name for name in model if name not in wanted]
        if spec.tie_word_embeddings:
            unknown = [name for name in unknown if name != HEAD]
        if unknown:
            rule = f"holds another model: {some_names(unknown)} is no part of config.json's"
            raise InputError(Problem("SRC", folder, rule))
        self.dtypes = {name: found[place.key].dtype for name, place in self._places.items()}
        states = sum(name not in wanted for name in found)
        self.dropped = (f"{states} tensors of optimizer and other states",) if states else ()

    def read(self, tensor: TensorSpec, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a tensor."""
        place = self._places[tensor.name]
        rows = torch.empty((stop - start, *tensor.shape[1:]), dtype=self.dtypes[tensor.name])
        for block in place.blocks:
            first, last = max(start, block.start), min(stop, block.stop)
            if first < last:
                sizes = (last - first, *tensor.shape[1:])
                leading = () if place.layer is None else (1,)
                part = self._archive.read(place.key, place.offsets(block.at + first - block.start), (*leading, *sizes))
                rows[first - start : last - start] = part.view(sizes)
        return rows

    def close(self) -> None:
        """Close every file."""
        self._archive.close()


def _check_manifest(folder: Path) -> None:
    """Read every file and compare it with the manifest: files of equal size may have changed places, too."""
    store, name = locate(folder)
    try:
        manifest = read_manifest(store, name)
        check_sizes(store, name, manifest)
        for file, record in manifest.files.items():
            check_file(store, name, file, record)
    except DamagedCheckpoint as damage:
        raise InputError(Problem("SRC", folder, f"is a damaged checkpoint ({damage})")) from None


def _check_shapes(folder: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in wanted if name not in found]
    other = [
        f"{name} is {list(found[name])} and must be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    rules = []
    if missing:
        rules.append(
            f"lacks {len(missing)} of the {len(wanted)} tensors that config.json asks for: {some_names(missing)}"
        )
    if other:
        rules.append(f"has weights of another shape than config.json says: {some_names(other)}")
    if rules:
        raise InputError([Problem("SRC", folder, rule) for rule in rules])
