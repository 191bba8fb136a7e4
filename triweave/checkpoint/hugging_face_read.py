"""Reads slices of a Hugging Face folder's weights: a rank takes its own part of every tensor and no more."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triweave.errors import InputError, Problem
from triweave.model_spec import ModelSpec
from triweave.weights_index import index_problems, weights_index

MAX_OPEN_FILES = 8
"""Shards kept mapped at once; Llama-3.1-405B has 191, and a host has many ranks."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class WeightReader:
    """The weights of one folder, checked against a model and read slice by slice.

    Files are memory-mapped: what no slice asks for is never copied into memory. Every tensor that `read` returns
    owns its memory, so the files may change or vanish afterwards. A context manager; leaving it closes the files.

    Args:
        folder: Hugging Face folder with safetensors weights.
        spec: the model that the weights must fit.

    Raises:
        InputError: the weights are missing, damaged or another model's; every problem at once.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        index = weights_index(folder)
        problems = index_problems(index, spec, folder)
        if problems:
            raise InputError(problems)
        self._entries = index
        self._tied = spec.tie_word_embeddings
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype) -> Tensor:
        """`tensor[start:stop]` along `dim`, on the CPU, in `dtype`.

        A wider type holds the stored value exactly; a narrower one rounds to nearest, ties to even. A tied model's
        `lm_head.weight` is its embedding.

        Args:
            name: Hugging Face name of the tensor.
            dim: dimension that is cut.
            start: first row (or column) of the slice.
            stop: end of the slice, exclusive; None is the end of the tensor.
            dtype: type of the result.

        Raises:
            KeyError: the model has no such tensor.
            IndexError: the slice leaves the tensor. Python's own slicing would shorten it in silence.
            InputError: the file changed or vanished since it was checked.
        """
        entry = self._entries[EMBEDDING if self._tied and name == HEAD else name]
        length = entry.shape[dim]
        end = length if stop is None else stop
        if not 0 <= start <= end <= length:
            raise IndexError(f"{name}: [{start}:{end}] along dimension {dim} leaves the {length} that it has")
        window = (slice(None),) * (dim % len(entry.shape)) + (slice(start, end),)
        try:
            tensor: Tensor = self._file(entry.file).get_slice(entry.name)[window]
        except (SafetensorError, OSError) as error:
            raise InputError(Problem("model.path", entry.file, f"can no longer be read ({error})")) from None
        # The library's slices lie in the mapped file: a copy that the caller may write to, and the file be closed.
        return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Unmap every file. `read` maps them again."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, path: Path) -> Any:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) == MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].__exit__(None, None, None)
        self._open[path] = safe_open(path, framework="pt")
        return self._open[path]
