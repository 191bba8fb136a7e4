"""The sum over shard groups: what each group has summed inside itself is summed with what the others have.

The ranks that take part sit in different shard groups, as a rule on different hosts. So this is a collective, whatever
carries sums inside a group; it waits for that sum on a stream of its own, and nothing that computes waits with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triweave.collectives import finish, start_all_reduce
from triweave.groups import Group, Groups
from triweave.transport.buffers import Work


@dataclass(frozen=True, slots=True)
class Across:
    """The way to the ranks that own the same part in the other shard groups."""

    group: Group
    stream: torch.cuda.Stream | None = None
    """Where a sum waits for the one before it; None without a GPU, where only the host could wait."""

    def all_reduce(self, part: Tensor, after: Work | None = None) -> Work | None:
        """Start to sum `part` over the groups, in place, as soon as `after` has filled it: partial -> replicate.

        Returns:
            What to wait for, `after` included. `part` stays where it is until then.
        """
        if self.group.size == 1:
            return after
        if after is None:
            return start_all_reduce(part, self.group)[1]
        if self.stream is None:
            return _Following(after, part, self.group)
        with torch.cuda.stream(self.stream):
            after.wait()
            return start_all_reduce(part, self.group)[1]


@dataclass(frozen=True, slots=True)
class _Following:
    """A sum that begins when it is waited for: begun earlier, the host would stand still until `after` is done."""

    after: Work
    part: Tensor
    group: Group

    def wait(self) -> None:
        """See `Work`."""
        self.after.wait()
        finish(start_all_reduce(self.part, self.group))


def across_of(groups: Groups) -> Across:
    """The way from this rank."""
    on_gpu = groups.device.type == "cuda" and groups.across.size > 1
    return Across(groups.across, torch.cuda.Stream(groups.device) if on_gpu else None)
