"""Writes a Hugging Face folder tensor by tensor: the export that transformers and every serving engine load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from triweave.checkpoint.safetensors_file import SafetensorsFile
from triweave.checkpoint.staged_folder import staged_folder
from triweave.errors import InputError, Problem, RunFailed
from triweave.model_spec import ModelSpec, TensorSpec, read_hf_config
from triweave.weights_index import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 5_000_000_000
"""Hugging Face's own customary size of one weight file."""

CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE_FILE,
    "chat_template.json",
)
_COPIED_TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Several model licences ask that they travel with every copy of the weights."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One weight file of an export and what it holds."""

    file: str
    tensors: tuple[TensorSpec, ...]


def plan_shards(
    tensors: Iterable[TensorSpec], bytes_per_element: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[WeightShard, ...]:
    """Which file holds which tensor, before any of them is there.

    The rule of huggingface_hub's `split_state_dict_into_shards`: files are filled in the order of the tensors; one
    that does not fit opens the next file, and one larger than a whole file gets its own. The names are its names
    too, `model-00001-of-0000N.safetensors`, or `model.safetensors` for a single file.
    """
    groups: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel * bytes_per_element
        if size > max_shard_bytes:
            groups.append([tensor])
            continue
        if filled + size > max_shard_bytes:
            groups.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += size
    if current:
        groups.append(current)
    if len(groups) == 1:
        return (WeightShard(SINGLE_FILE, tuple(groups[0])),)
    return tuple(
        WeightShard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    )


def index_json(shards: Sequence[WeightShard], bytes_per_element: int) -> str:
    """The content of `model.safetensors.index.json`, in transformers' own form."""
    elements = sum(tensor.numel for shard in shards for tensor in shard.tensors)
    index = {
        "metadata": {"total_parameters": elements, "total_size": elements * bytes_per_element},
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


class HuggingFaceWriter:
    """Exports a model into a new Hugging Face folder, tensor by tensor and in any order.

    A context manager. Everything is written to a hidden folder beside the destination, flushed to the disk, and
    renamed when the block ends; a block left by an exception leaves nothing. So the destination holds a whole
    model or is not there. A folder that is replaced is renamed first and deleted last. Entering raises `RunFailed`
    when the disk refuses, leaving raises `ValueError` when a tensor was never written.

    Args:
        folder: destination; must not exist, or be empty, unless `replace`.
        spec: the model; says which tensors there are. A tied head is not written: it is the embedding.
        source: folder whose config.json, generation config and licence files are taken over.
        dtype: type of the written weights: bfloat16, float16 or float32.
        tokenizer: folder of the tokenizer's files; None is `source`.
        chat_template: written as `chat_template.jinja`, which goes before the tokenizer's own; None keeps that.
        max_shard_bytes: largest weight file.
        replace: whether a folder that already holds something may be replaced.

    Raises:
        InputError: the destination is taken, its disk is too full, or `source` has no readable config.json.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        source: Path,
        dtype: torch.dtype,
        *,
        tokenizer: Path | None = None,
        chat_template: str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        replace: bool = False,
    ) -> None:
        self._folder = folder.resolve()
        self._texts = source, tokenizer, chat_template
        self._dtype = dtype
        self._shards = plan_shards(spec.tensors(), dtype.itemsize, max_shard_bytes)
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stack = ExitStack()
        read_hf_config(source)
        check_destination(self._folder, spec.num_parameters * dtype.itemsize, replace=replace)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one whole tensor, from any device and of any floating type.

        Raises:
            ValueError: the model has no such tensor, the shape is another, or it was written before.
            RunFailed: the disk refused.
        """
        file = self._file(name)
        try:
            file.write(name, tensor)
        except OSError as error:
            raise RunFailed(f"cannot write {name} to {file.path.parent}: {error.strerror}") from error

    def write_rows(self, name: str, rows: Tensor) -> None:
        """Write the next rows of a tensor, which come in their order.

        Raises:
            ValueError: the model has no such tensor, or these are no more of its rows.
            RunFailed: the disk refused.
        """
        file = self._file(name)
        try:
            file.write_rows(name, rows)
        except OSError as error:
            raise RunFailed(f"cannot write {name} to {file.path.parent}: {error.strerror}") from error

    def __enter__(self) -> Self:
        try:
            partial = self._stack.enter_context(staged_folder(self._folder))
            try:
                self._start(partial)
            except BaseException as error:
                self._stack.__exit__(type(error), error, error.__traceback__)
                raise
        except OSError as error:
            raise RunFailed(f"cannot start the export {self._folder}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        try:
            with self._stack:
                missing = [name for name, file in self._file_of.items() if name in file.missing]
                if missing:
                    first = missing[0]
                    raise ValueError(f"{len(missing)} tensors of the exported model were never written: {first} first")
        except OSError as refused:
            raise RunFailed(f"cannot finish the export {self._folder}: {refused.strerror}") from refused

    def _start(self, partial: Path) -> None:
        source, tokenizer, chat_template = self._texts
        write_texts(partial, source, self._dtype, tokenizer=tokenizer, chat_template=chat_template)
        if len(self._shards) > 1:
            (partial / INDEX_FILE).write_text(index_json(self._shards, self._dtype.itemsize), encoding="utf-8")
        for shard in self._shards:
            file = SafetensorsFile(partial / shard.file, shard.tensors, self._dtype)
            self._file_of.update((tensor.name, file) for tensor in shard.tensors)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise ValueError(f"{name} is no tensor of the exported model")
        return self._file_of[name]


def write_texts(
    folder: Path, source: Path, dtype: torch.dtype, *, tokenizer: Path | None = None, chat_template: str | None = None
) -> None:
    """Write what a Hugging Face folder has beside its weights: config, tokenizer, template, licence.

    Args:
        folder: where to.
        source: folder that they come from.
        dtype: what config.json shall say of the weights.
        tokenizer: folder of the tokenizer's files; None is `source`.
        chat_template: written as `chat_template.jinja`; None keeps the tokenizer's own.

    Raises:
        InputError: `source` has no readable config.json.
        OSError: the disk refuses.
    """
    (folder / "config.json").write_text(_config_with_dtype(source, dtype), encoding="utf-8")
    origins = [source / "generation_config.json"]
    origins += [(tokenizer or source) / name for name in TOKENIZER_FILES]
    origins += [path for pattern in _COPIED_TERMS for path in source.glob(pattern)]
    for origin in origins:
        if origin.is_file():
            shutil.copyfile(origin, folder / origin.name)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")


def _config_with_dtype(source: Path, dtype: torch.dtype) -> str:
    config = read_hf_config(source)
    # transformers renamed torch_dtype to dtype in 4.56 and still reads the old key.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config.update(dict.fromkeys(keys, str(dtype).removeprefix("torch.")))
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def check_destination(folder: Path, needed_bytes: int, *, replace: bool) -> None:
    """Refuse to write a model over something, or onto a disk that has no room for it.

    Raises:
        InputError: `folder` is a file, or holds something and may not be replaced, or its disk is too full.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(Problem("export folder", folder, "is a file"))
    if not replace and folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            Problem("export folder", folder, "is not empty; name a new folder, or ask for it to be replaced")
        )
    nearest_existing = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(nearest_existing).free
    if free < needed_bytes:
        rule = f"has {free} bytes free and the weights take {needed_bytes}"
        raise InputError(Problem("export folder", folder, rule))
