"""Where the bytes of one tensor lie that `torch.save` wrote into a file, without unpickling it.

torch's distributed checkpoint stores each piece of a tensor as a `torch.save` archive: a zip with a pickle that
describes the tensor and one record of raw bytes. torch reads the whole record into memory and does not compare the
checksum that it wrote (2.13). Here the description is read with every name replaced by a note of itself, the
checksum is compared, and the bytes are left for the reader to fetch in parts.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAX_DESCRIPTION_BYTES = 65_536
"""Of the pickle that describes one tensor; torch writes about 500."""
MAX_RECORDS = 16
"""Records of one archive; torch writes 5."""

_BLOCK_BYTES = 2**22
_LOCAL_HEADER_BYTES = 30
_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A row-major tensor in a file: element `[0, ..., 0]` is at byte `begin`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int


def find_saved_tensor(file: BinaryIO, offset: int, length: int) -> SavedTensor:
    """The tensor that `torch.save` wrote into bytes `[offset, offset + length)` of `file`; its checksum is compared.

    Raises:
        ValueError: the bytes are no archive of one plain tensor, or were changed since they were written.
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(_Window(file, offset, length)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(archive.infolist()) > MAX_RECORDS:
                raise ValueError(f"has {len(archive.infolist())} records; a saved tensor has at most {MAX_RECORDS}")
            if "data.pkl" not in records or "data/0" not in records or "data/1" in records:
                raise ValueError("is not the archive of one tensor")
            if records["data.pkl"].file_size > MAX_DESCRIPTION_BYTES:
                raise ValueError(f"has a description of more than {MAX_DESCRIPTION_BYTES} bytes")
            _refuse_compressed(records.values())
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise ValueError("was written on a machine of another byte order")
            described = _describe(archive.read(records["data.pkl"]))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"is damaged ({error})") from None
    record = records["data/0"]
    if record.file_size != prod(described.shape) * described.dtype.itemsize:
        raise ValueError(
            f"holds {record.file_size} bytes, and {described.dtype} of shape {list(described.shape)} takes"
            f" {prod(described.shape) * described.dtype.itemsize}"
        )
    header = _read_at(file, offset + record.header_offset, _LOCAL_HEADER_BYTES)
    names_bytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = offset + record.header_offset + _LOCAL_HEADER_BYTES + names_bytes
    if begin + record.file_size > offset + length:
        raise ValueError("is damaged (its bytes leave the archive)")
    if _checksum(file, begin, record.file_size) != record.CRC:
        raise ValueError("is damaged (its bytes do not match their checksum)")
    return SavedTensor(described.shape, described.dtype, begin)


def numbers_of(archive: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a known shape and type in an archive of `torch.save`, held against its checksum.

    Raises:
        ValueError: the archive is damaged, or holds something else.
    """
    try:
        found = find_saved_tensor(io.BytesIO(archive), 0, len(archive))
    except (ValueError, OSError) as error:
        raise ValueError(f"a part of a tensor {error}") from None
    if (found.shape, found.dtype) != (tuple(shape), dtype):
        raise ValueError(f"a part of a tensor is {found.dtype} {list(found.shape)}, and not {dtype} {list(shape)}")
    # A copy: torch wants memory that it may write to, aligned.
    data = memoryview(archive)[found.begin : found.begin + prod(shape) * dtype.itemsize]
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _read_at(file: BinaryIO, position: int, length: int) -> bytes:
    file.seek(position)
    content = file.read(length)
    if len(content) < length:
        raise OSError(f"ends at byte {position + len(content)}, before {position + length}")
    return content


def _refuse_compressed(records: Any) -> None:
    # torch stores without compression; a compressed record could grow a thousandfold when it is read.
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"has a compressed record {record.filename}")


def _checksum(file: BinaryIO, begin: int, length: int) -> int:
    checksum = 0
    for at in range(begin, begin + length, _BLOCK_BYTES):
        checksum = zlib.crc32(_read_at(file, at, min(_BLOCK_BYTES, begin + length - at)), checksum)
    return checksum


def _describe(pickled: bytes) -> SavedTensor:
    try:
        found = _Notes(io.BytesIO(pickled)).load()
    # Damaged bytes may ask the unpickler for anything, and so raise anything.
    except Exception as error:
        raise ValueError(f"does not describe a tensor ({error})") from None
    if not isinstance(found, SavedTensor):
        raise ValueError("does not describe a tensor")
    return found


class _Notes(pickle.Unpickler):
    """Reads the description of a tensor; the only names that it knows are turned into plain values."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any] | torch.dtype] = {
            ("torch._utils", "_rebuild_tensor_v2"): _noted_tensor,
            ("collections", "OrderedDict"): OrderedDict,
            **{("torch", storage): dtype for storage, dtype in _STORAGES.items()},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> torch.dtype:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or key != "0" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("it does not refer to its own record")
        return dtype


def _noted_tensor(
    dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> SavedTensor:
    shape = tuple(shape)
    if start != 0 or any(type(n) is not int or not 0 <= n < 2**48 for n in shape) or len(shape) > 8:
        raise pickle.UnpicklingError(f"shape {list(shape)} at {start} is no whole tensor")
    row_major = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if any(s != r for s, r, n in zip(strides, row_major, shape, strict=True) if n > 1):
        raise pickle.UnpicklingError(f"strides {list(strides)} are not those of a row-major {list(shape)}")
    return SavedTensor(shape, dtype, 0)


class _Window(io.RawIOBase):
    """Part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + position < 0:
            raise OSError("before the beginning")
        self._at = base + position
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        content = self._file.read(wanted)
        self._at += len(content)
        return content
