"""What data-parallel ranks of one host keep where the others can read it, and the memory that this takes.

Their GPUs copy weights and gradient sums out of each other's memory (`transport/shared_memory.py`). Buffers that stand
all through a run lie there; those that come and go with a unit's passes (whole gradients under `gradients`, whole
weights under `full`) do not, and travel by collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from triweave.layout import Shard
from triweave.overlap import FLAG_BYTES

MOST_RANKS = 8
"""GPUs of a host that reach each other; a larger data-parallel group spans hosts."""
SLOTS = 2
"""Pieces of peers' gradient sums that are here at once: one is added while the next arrives."""
SLOT_BYTES = 256 * 2**20
"""The most that one piece takes, the parts of all peers together: 0.75 ms of NVLink (4th generation)."""

_PART_ALIGNMENT = 64
_FLOAT32 = 4


def shares_weights(shard: Shard) -> bool:
    """Whether whole weights stand all through a run, each rank bringing its shard of them up to date."""
    return shard in ("optimizer", "gradients")


def shares_sums(shard: Shard) -> bool:
    """Whether whole gradient sums stand all through a run."""
    return shard in ("none", "optimizer")


def buffer_sizes(shard: Shard, numel: int, weight_bytes: int) -> tuple[int, ...]:
    """Bytes of the buffers of one unit that peers read.

    Args:
        shard: the level.
        numel: elements of the unit's flat buffer.
        weight_bytes: of one weight.
    """
    return (numel * weight_bytes,) * shares_weights(shard) + (numel * _FLOAT32,) * shares_sums(shard)


def shared_bytes(sizes: Iterable[int]) -> int:
    """The one allocation that holds buffers of these bytes, each behind its flags."""
    return sum(FLAG_BYTES + size for size in sizes)


def part_numel(shard: Shard, numels: Iterable[int], dp: int) -> int:
    """Elements of one peer's part of a piece: a shard of the largest unit, or what fits into a slot.

    Args:
        shard: the level; 0 where no sums are shared.
        numels: elements of each unit's flat buffer.
        dp: ranks of the group, 2 or more.
    """
    if not shares_sums(shard):
        return 0
    fits = SLOT_BYTES // (_FLOAT32 * (dp - 1)) // _PART_ALIGNMENT * _PART_ALIGNMENT
    return min(fits, max((numel // dp for numel in numels), default=0))


def staging_bytes(part: int, dp: int) -> int:
    """What all slots take, for parts of `part` elements."""
    return SLOTS * (dp - 1) * part * _FLOAT32


def beside_bytes(shard: Shard, numels: Sequence[int], dp: int) -> int:
    """What a rank takes to copy from its peers, beside the buffers: their flags, and slots for parts of sums.

    Args:
        shard: the level.
        numels: elements of each unit's flat buffer.
        dp: ranks of the group; nothing is copied alone, nor among more than `MOST_RANKS`.
    """
    if not 1 < dp <= MOST_RANKS:
        return 0
    num_buffers = len(numels) * (shares_weights(shard) + shares_sums(shard))
    return FLAG_BYTES * num_buffers + staging_bytes(part_numel(shard, numels, dp), dp)
