"""The numbers of a tensor that `torch.save` wrote, without its pickle."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from math import prod

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<4s22x2H")
"""Of a zip record: signature, and the lengths of its name and of what stands between name and data."""


def numbers_of(archive: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a known shape and type in an archive of `torch.save`: the record `data/0`, as it stands there.

    It is held against the checksum that torch wrote beside it and never looks at (pytorch issue 28858, torch 2.13).

    Raises:
        ValueError: the archive is damaged, compressed, or holds something else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as records:
            record = next(entry for entry in records.infolist() if entry.filename.endswith("/data/0"))
        _, *lengths = _LOCAL_HEADER.unpack_from(archive, record.header_offset)
    except (zipfile.BadZipFile, StopIteration, struct.error, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"a part of a tensor is damaged ({error})") from None
    size = prod(shape) * dtype.itemsize
    start = record.header_offset + _LOCAL_HEADER.size + sum(lengths)
    data = memoryview(archive)[start : start + size]
    as_is = record.compress_type == zipfile.ZIP_STORED and record.file_size == data.nbytes == size
    if not as_is or zlib.crc32(data) != record.CRC:
        raise ValueError("a part of a tensor is damaged (its size or its checksum is wrong)")
    # A copy: torch wants memory that it may write to, aligned.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
