"""Reads rectangles of the tensors in torch's distributed checkpoint: no process group, and little memory.

torch's own loader fills tensors that are there already, and reads every piece that they touch whole. This one
fetches the bytes of a rectangle and nothing else. All that the table of contents says is checked against the files
before it is used: names, places, sizes, and that the pieces of a tensor are the tensor.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from triweave.checkpoint.file_bytes import read_into
from triweave.checkpoint.metadata_file import CheckpointReader
from triweave.checkpoint.saved_tensor import SavedTensor, find_saved_tensor
from triweave.errors import InputError, Problem

MAX_OPEN_FILES = 8
MAX_CONTENTS_BYTES = 2**28
"""Of `.metadata`. Four thousand ranks' checkpoint of 70B has about 100 MB."""

_SCRATCH_BYTES = 2**24

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangle: offsets and sizes, along each dimension."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint as its table of contents tells it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Piece:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


class ArchiveReader:
    """The tensors of one checkpoint folder. A context manager; leaving it closes the files.

    Args:
        folder: holds `.metadata` and the files that it names.

    Raises:
        InputError: the table of contents is missing, damaged, or does not fit the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        contents = folder / ".metadata"
        if contents.is_file() and contents.stat().st_size > MAX_CONTENTS_BYTES:
            raise _wrong(contents, f"has {contents.stat().st_size} bytes; the limit is {MAX_CONTENTS_BYTES}")
        metadata = CheckpointReader(folder).read_metadata()
        tables = metadata.state_dict_metadata, metadata.storage_data
        if not all(isinstance(table, dict) for table in tables):
            raise _wrong(contents, "is no table of contents of a checkpoint")
        self._sizes: dict[str, int] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        """Every tensor by its name in the checkpoint."""
        self.others: list[str] = []
        """Names of what is stored and is no tensor."""
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                self.others.append(str(name))
                continue
            try:
                self.tensors[name] = _described(entry)
                self._pieces[name] = [
                    self._piece(name, _numbers(chunk.offsets), _numbers(chunk.sizes), metadata.storage_data)
                    for chunk in entry.chunks
                ]
                _check_pieces(self.tensors[name].shape, self._pieces[name])
            # An entry may be anything that its classes can be made to hold.
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _wrong(contents, f"tells {name} wrongly: {error}") from None
        self._found: dict[_Piece, SavedTensor] = {}
        self._open: OrderedDict[Path, BinaryIO] = OrderedDict()

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """One rectangle of a tensor, on the CPU and as it is stored.

        Raises:
            KeyError: there is no such tensor.
            IndexError: the rectangle leaves it.
            InputError: a file is damaged, or was changed, or lacks a part of the rectangle.
        """
        stored = self.tensors[name]
        wanted = tuple(offsets), tuple(sizes)
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(*wanted, stored.shape, strict=True)):
            raise IndexError(f"{name}: {list(offsets)} + {list(sizes)} leaves {list(stored.shape)}")
        result = torch.empty(wanted[1], dtype=stored.dtype)
        filled: list[Window] = []
        first, last = (wanted[0][0], wanted[0][0] + wanted[1][0]) if stored.shape else (0, 1)
        for piece in self._pieces[name]:
            # A stacked tensor has thousands of pieces, and most are of another layer.
            if stored.shape and not (piece.offsets[0] < last and first < piece.offsets[0] + piece.sizes[0]):
                continue
            common = _intersection(wanted, (piece.offsets, piece.sizes))
            if common is not None:
                self._fill(name, stored, piece, common, result, wanted[0])
                filled.append(common)
        # As many elements as were asked for, none of them twice: so all of them.
        count = sum(prod(sizes) for _, sizes in filled)
        if count != result.numel() or any(_intersection(*pair) for pair in itertools.combinations(filled, 2)):
            raise _wrong(self.folder, f"does not hold every element of {name} once")
        return result

    def close(self) -> None:
        """Close every file; `read` opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _piece(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], places: Mapping[MetadataIndex, object]
    ) -> _Piece:
        place = places[MetadataIndex(name, torch.Size(offsets))]
        file, offset, length = (getattr(place, key) for key in ("relative_path", "offset", "length"))
        if getattr(place, "transform_descriptors", None):
            raise ValueError("it is stored compressed or encrypted, which is not read here")
        if not isinstance(file, str) or not file or any(character in file for character in "/\\\0"):
            raise ValueError(f"it may only name files that lie beside it, not {file!r}")
        if file not in self._sizes:
            path = self.folder / file
            if not path.is_file() or path.is_symlink():
                raise ValueError(f"its file {file} is not there")
            self._sizes[file] = path.stat().st_size
        if not (type(offset) is int and type(length) is int and 0 <= offset <= offset + length <= self._sizes[file]):
            raise ValueError(
                f"its bytes {offset} to {offset + length} leave the {self._sizes[file]} of {file}, which is cut short"
            )
        return _Piece(offsets, sizes, self.folder / file, offset, length)

    def _fill(
        self, name: str, stored: StoredTensor, piece: _Piece, common: Window, result: Tensor, origin: tuple[int, ...]
    ) -> None:
        """Copy the part `common` of a piece into `result`, whose first element is `origin` of the whole tensor."""
        try:
            file = self._file(piece.file)
            if piece not in self._found:
                saved = find_saved_tensor(file, piece.offset, piece.length)
                if (saved.shape, saved.dtype) != (piece.sizes, stored.dtype):
                    told = f"{stored.dtype} {list(piece.sizes)}"
                    raise ValueError(f"is {saved.dtype} {list(saved.shape)} where the table of contents says {told}")
                self._found[piece] = saved
            target = result
            for dim, (start, size) in enumerate(zip(*common, strict=True)):
                target = target.narrow(dim, start - origin[dim], size)
            inside = tuple(o - p for o, p in zip(common[0], piece.offsets, strict=True))
            _copy(file, self._found[piece], inside, target)
        except (OSError, ValueError) as error:
            raise _wrong(piece.file, f"holds {name}, and that part {error}") from None

    def _file(self, path: Path) -> BinaryIO:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) == MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        self._open[path] = path.open("rb")
        return self._open[path]


def _copy(file: BinaryIO, saved: SavedTensor, start: tuple[int, ...], target: Tensor) -> None:
    """Fill `target` with the rectangle of `saved` that begins at `start`, reading whole rows of it."""
    columns = saved.shape[-1]
    width = saved.dtype.itemsize
    for leading in itertools.product(*(range(size) for size in target.shape[:-2])):
        rows = target[leading] if leading else target
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        first = 0
        for index, size in zip((a + b for a, b in zip(leading, start, strict=False)), saved.shape[:-2], strict=True):
            first = first * size + index
        first = first * saved.shape[-2] + start[-2] if len(saved.shape) > 1 else 0
        position = saved.begin + first * columns * width
        if rows.shape[1] == columns and rows.is_contiguous():
            read_into(file, position, rows)
            continue
        step = max(1, _SCRATCH_BYTES // (columns * width))
        for row in range(0, rows.shape[0], step):
            count = min(step, rows.shape[0] - row)
            scratch = torch.empty((count, columns), dtype=saved.dtype)
            read_into(file, position + row * columns * width, scratch)
            rows[row : row + count].copy_(scratch[:, start[-1] : start[-1] + rows.shape[1]])


def _intersection(one: Window, other: Window) -> Window | None:
    starts = tuple(map(max, one[0], other[0]))
    stops = (min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _described(entry: TensorStorageMetadata) -> StoredTensor:
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has no type")
    return StoredTensor(_numbers(entry.size), dtype)


def _numbers(values: object) -> tuple[int, ...]:
    if (
        not isinstance(values, tuple)
        or len(values) > 8
        or any(type(n) is not int or not 0 <= n < 2**48 for n in values)
    ):
        raise ValueError(f"{values!r} is no shape")
    return tuple(values)


def _check_pieces(shape: tuple[int, ...], pieces: list[_Piece]) -> None:
    """Pieces inside the tensor, of its volume, and with no more elements than their bytes can hold."""
    for piece in pieces:
        inside = all(o + s <= n for o, s, n in zip(piece.offsets, piece.sizes, shape, strict=True))
        if not inside:
            raise ValueError(f"a part at {list(piece.offsets)} of {list(piece.sizes)} leaves {list(shape)}")
        if prod(piece.sizes) > piece.length:
            raise ValueError(f"a part of {list(piece.sizes)} has only {piece.length} bytes")
    volume = sum(prod(piece.sizes) for piece in pieces)
    if volume != prod(shape):
        raise ValueError(f"its parts have {volume} elements, and {list(shape)} has {prod(shape)}")


def _wrong(path: Path, rule: str) -> InputError:
    return InputError(Problem("SRC", path, rule))
