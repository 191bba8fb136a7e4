"""Packed documents: which positions of a micro-batch see which, as attention needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triweave.layout import context_slices

Edges = tuple[Tensor, Tensor, int, int]
"""Where each document's queries begin and where its keys do, int32 `[documents + 1]` each, and the most of each."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Which positions of a micro-batch may see which: each sees its own document up to itself."""

    ids: Tensor
    """`[seq, batch]`: document of each position."""
    cu_seqlens: Tensor
    """int32 `[documents + 1]`: where each document starts in the sequences laid end to end."""
    max_seqlen: int
    """Tokens of the longest document."""

    @property
    def count(self) -> int:
        """How many there are."""
        return self.cu_seqlens.numel() - 1

    def to(self, device: torch.device) -> Documents:
        """The same on `device`."""
        return replace(self, ids=_move(self.ids, device), cu_seqlens=_move(self.cu_seqlens, device))

    def with_room(self, count: int) -> Documents:
        """The same with empty documents after the last one, `count` in all, each of which may be a whole sequence."""
        edges = self.cu_seqlens.new_empty(count + 1)
        roomy = Documents(torch.empty_like(self.ids), edges, self.ids.shape[0])
        roomy.become(self)
        return roomy

    def become(self, other: Documents) -> None:
        """Take over another's documents, in the memory that is here; there are no more of them than here."""
        self.ids.copy_(other.ids)
        self.cu_seqlens[: other.count + 1].copy_(other.cu_seqlens)
        self.cu_seqlens[other.count + 1 :].fill_(other.ids.numel())


def block_causal_mask(documents: Documents) -> Tensor:
    """Boolean `[batch, 1, seq, seq]`, true where a query may see a key."""
    ids = documents.ids.t()  # [batch, seq]
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    return same.tril().unsqueeze(1)


@dataclass(frozen=True, slots=True)
class SliceDocuments:
    """The documents of one slice of a context-parallel rank's queries, each cut off where the slice ends."""

    rows: Tensor
    """int32: where their keys lie, document by document, among the `seq x batch` rows of all keys."""
    edges: Edges
    """The slice's queries are laid end to end, sequence by sequence, and so are `rows`."""

    def to(self, device: torch.device) -> SliceDocuments:
        """The same on `device`."""
        queries, keys, most_queries, most_keys = self.edges
        return SliceDocuments(
            _move(self.rows, device), (_move(queries, device), _move(keys, device), most_queries, most_keys)
        )


@dataclass(frozen=True, slots=True)
class ContextDocuments:
    """Packed documents for a context-parallel rank, which has the queries of two slices and gathers all keys.

    The keys lie rank after rank, of each the slice of the first half and then that of the second.
    """

    key_ids: Tensor
    """`[seq, batch]`: document of each key."""
    key_places: Tensor
    """`[seq]`: place of each key in its sequence."""
    queries: slice
    """This rank's own among the rows of all."""
    slices: tuple[SliceDocuments, SliceDocuments]

    def mask(self) -> Tensor:
        """Boolean `[batch, 1, queries, seq]`, true where a query of this rank sees a key."""
        ids, places = self.key_ids.t(), self.key_places
        same = ids[:, self.queries].unsqueeze(2) == ids.unsqueeze(1)
        return (same & (places <= places[self.queries].unsqueeze(1))).unsqueeze(1)

    def to(self, device: torch.device) -> ContextDocuments:
        """The same on `device`."""
        first, second = self.slices
        return replace(
            self,
            key_ids=_move(self.key_ids, device),
            key_places=_move(self.key_places, device),
            slices=(first.to(device), second.to(device)),
        )


Packed = Documents | ContextDocuments
"""What was packed together: of whole sequences, or for a context-parallel rank."""


def own_slices(x: Tensor, cp_rank: int, cp: int) -> Tensor:
    """The two slices of a context-parallel rank, of something with the sequence as dim 0: replicate -> shard(0)."""
    return torch.cat([x.chunk(2 * cp)[number] for number in context_slices(cp_rank, cp)])


def documents_in_context(documents: Documents, cp_rank: int, cp: int) -> ContextDocuments:
    """What a context-parallel rank needs of `documents`, which are those of whole sequences, on the CPU."""
    seq, batch = documents.ids.shape
    places = torch.cat([own_slices(torch.arange(seq), rank, cp) for rank in range(cp)])
    rows = places.argsort() * batch
    own = seq // cp
    first, second = (
        _slice_documents(documents, rows, number * own // 2, (number + 1) * own // 2)
        for number in context_slices(cp_rank, cp)
    )
    return ContextDocuments(documents.ids[places], places, slice(cp_rank * own, (cp_rank + 1) * own), (first, second))


def _slice_documents(documents: Documents, rows: Tensor, start: int, stop: int) -> SliceDocuments:
    """Of the queries at `[start, stop)` of every sequence; `rows` says where the key at each place lies."""
    seq, batch = documents.ids.shape
    edges = documents.cu_seqlens.tolist()
    keys: list[Tensor] = []
    num_queries, num_keys = [0], [0]
    for number in range(batch):
        inside = [edge - number * seq for edge in edges if number * seq <= edge < (number + 1) * seq]
        begins = [edge for edge in inside if edge < stop]
        ends = [*begins[1:], stop]
        for begin, end in zip(begins, ends, strict=True):
            if end > start:
                keys.append(rows[begin:end] + number)
                num_queries.append(end - max(begin, start))
                num_keys.append(end - begin)
    queries_at, keys_at = (torch.tensor(counts).cumsum(0).int() for counts in (num_queries, num_keys))
    return SliceDocuments(torch.cat(keys).int(), (queries_at, keys_at, max(num_queries), max(num_keys)))


def _move(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=True)
