"""Ranks tell each other how it went, as JSON: nothing that a peer sends is unpickled.

Over a process group, where `recovery.agreement` goes through the store: a save's answers go from all to all again and
again, beside training, on a group of their own, and leave nothing behind. A rank that does not come is not named
here; it is gone for training too, whose watch names it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from triweave.groups import Group


def gather(mine: Any, group: Group) -> list[Any]:
    """What each rank of a group of CPU tensors (gloo) says, in their order; every rank gets it all.

    Args:
        mine: what this rank says: anything that JSON can hold.
        group: all of its ranks call this together.
    """
    said = json.dumps(mine).encode()
    if group.size == 1:
        return [json.loads(said)]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in group.ranks]
    dist.all_gather(lengths, torch.tensor([len(said)]), group=group.handle)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in group.ranks]
    dist.all_gather(texts, padded, group=group.handle)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def from_first(mine: Any, group: Group) -> Any:
    """What the first rank says; the others' `mine` does not matter."""
    return gather(mine if group.rank == 0 else None, group)[0]
