"""A rank's shard of a tensor, told to torch's distributed checkpoint as rectangles of the whole tensor.

A shard is a run of a flat buffer; of a matrix it is at most three rectangles (the end of a row, whole rows, the
start of a row). Saved under Hugging Face names and whole shapes, a checkpoint knows nothing of the layout that
wrote it, and any other layout reads the rectangles that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from triweave.parameters import Piece


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Part of a whole tensor, and the memory that holds it on this rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor
    """Shaped as `sizes`; a view, so that loading fills the shard itself."""


def rectangles(piece: Piece, start: int, flat: Tensor) -> Iterator[Rectangle]:
    """Elements `[start, start + len(flat))` of a piece, counted row by row, as rectangles of the whole tensor."""
    stop = start + flat.numel()
    base = [0] * len(piece.shape)
    base[piece.dim] = piece.start
    if len(piece.shape) == 1:
        yield Rectangle((base[0] + start,), (stop - start,), flat)
        return
    columns = piece.local_shape[1]
    at = start
    while at < stop:
        row, column = divmod(at, columns)
        if column == 0 and stop - at >= columns:
            sizes = ((stop - at) // columns, columns)
        else:
            sizes = (1, min(columns - column, stop - at))
        count = sizes[0] * sizes[1]
        values = flat[at - start : at - start + count].view(sizes)
        yield Rectangle((base[0] + row, base[1] + column), sizes, values)
        at += count


class Slices:
    """All rectangles of one tensor that this rank holds, in the form that torch's checkpoint planners ask for."""

    def __init__(self, shape: tuple[int, ...], parts: Iterable[Rectangle]) -> None:
        self.shape = torch.Size(shape)
        self.parts = list(parts)

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.shape

    def part_at(self, index: MetadataIndex) -> Tensor:
        """The memory of the rectangle that `index` names."""
        return next(part.values for part in self.parts if torch.Size(part.offsets) == index.offset)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, part.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
                    properties=TensorProperties.create_from_tensor(part.values),
                    size=self.shape,
                ),
            )
            for number, part in enumerate(self.parts)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in self.parts]


class SlicesSavePlanner(DefaultSavePlanner):
    """torch's planner, which finds the memory of tensors only, taught to find that of `Slices`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The memory to write for `index`."""
        held = self.state_dict[index.fqn]
        return held.part_at(index) if isinstance(held, Slices) else super().lookup_object(index)


class SlicesLoadPlanner(DefaultLoadPlanner):
    """torch's planner, which finds the memory of tensors only, taught to find that of `Slices`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state as it is; torch's own first replaces every entry that is no tensor by None."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory to read into for `index`."""
        held = self.state_dict[index.fqn]
        return held.part_at(index) if isinstance(held, Slices) else super().lookup_tensor(index)
