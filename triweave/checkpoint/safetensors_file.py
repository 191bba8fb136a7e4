"""Writes one safetensors file tensor by tensor, in any order, holding one tensor in memory.

The safetensors library writes a file from tensors that are all in memory. The format itself asks for less: once
names, shapes and type are known, every tensor's place is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from triweave.checkpoint.file_bytes import bytes_of
from triweave.model_spec import TensorSpec

_FORMAT_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_ALIGNMENT = 8


class SafetensorsFile:
    """A safetensors file of known tensors, all of one type, that is filled in place.

    Byte for byte what the safetensors library writes: 8 bytes of header length, the JSON header padded with spaces
    to 8 bytes, then the tensors in the order of their names, little-endian and row-major.

    Args:
        path: file to create.
        tensors: names and shapes of everything it will hold.
        dtype: bfloat16, float16 or float32.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        self.path = path
        self._dtype = dtype
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._begins: dict[str, int] = {}
        self._rows = dict.fromkeys(self._shapes, 0)
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.name):
            begin, end = end, end + tensor.numel * dtype.itemsize
            self._begins[tensor.name] = begin
            entries[tensor.name] = {
                "dtype": _FORMAT_NAMES[dtype],
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        self._data = 8 + len(header)
        with path.open("xb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            file.truncate(self._data + end)

    @property
    def missing(self) -> frozenset[str]:
        """Names of the tensors not written yet."""
        return frozenset(name for name, rows in self._rows.items() if rows < self._shapes[name][0])

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a whole tensor in its place, converted to the file's type.

        Raises:
            ValueError: not a tensor of this file, or of another shape, or written before.
        """
        if name in self._shapes and tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name} is {list(tensor.shape)} and was announced as {list(self._shapes[name])}")
        self.write_rows(name, tensor)

    def write_rows(self, name: str, rows: Tensor) -> None:
        """Put the next rows of a tensor in their place, converted to the file's type.

        Raises:
            ValueError: not a tensor of this file, or rows of another length, or more of them than it has.
        """
        if name not in self._shapes:
            raise ValueError(f"{name} was not announced")
        shape, done = self._shapes[name], self._rows[name]
        if done == shape[0]:
            raise ValueError(f"{name} was written before")
        if tuple(rows.shape[1:]) != shape[1:] or done + len(rows) > shape[0]:
            raise ValueError(f"{name} gets {list(rows.shape)} after {done} rows and was announced as {list(shape)}")
        stored = rows.detach().to("cpu", self._dtype).contiguous()
        with self.path.open("r+b") as file:
            file.seek(self._data + self._begins[name] + done * stored[:1].nbytes)
            file.write(bytes_of(stored))
        self._rows[name] += len(rows)
