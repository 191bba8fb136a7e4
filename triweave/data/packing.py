"""Puts examples into sequences of equal length: best-fit decreasing.

The longest example first, each into the fullest sequence that still has room for it: at most 11/9 of the fewest
sequences possible, plus 4 (Johnson et al. 1974). Examples are never cut here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Packing:
    """Which examples each sequence holds."""

    sequences: tuple[tuple[int, ...], ...]
    """Example numbers of each sequence, longest first."""
    used: int
    """Tokens of all examples."""
    slots: int
    """Tokens that the sequences have room for."""

    @property
    def efficiency(self) -> float:
        """Share of the slots that holds a token; 1.0 without any sequence."""
        return self.used / self.slots if self.slots else 1.0


def pack(lengths: Sequence[int], seq_len: int) -> Packing:
    """Pack examples of `lengths` tokens by best-fit decreasing. The same lengths always give the same packing.

    O(n log n) for the order, and for each example one search in a word of `seq_len` bits.

    Raises:
        ValueError: a length is not between 1 and `seq_len`.
    """
    sequences: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    """Free tokens: the sequences that have just that many."""
    rooms = 0
    """Bit `n` is set while a sequence with `n` free tokens exists: the lowest bit from a length on is its best fit."""
    for example in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[example]
        if not 1 <= length <= seq_len:
            raise ValueError(f"example {example} has {length} tokens, not between 1 and {seq_len}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence = seq_len, len(sequences)
            sequences.append([])
        sequences[sequence].append(example)
        if room > length:
            with_room[room - length].append(sequence)
            rooms |= 1 << (room - length)
    return Packing(tuple(map(tuple, sequences)), sum(lengths), len(sequences) * seq_len)


def one_each(lengths: Sequence[int], seq_len: int) -> Packing:
    """One example a sequence, in their order: what `data.packing: false` asks for."""
    return Packing(tuple((example,) for example in range(len(lengths))), sum(lengths), len(lengths) * seq_len)
