"""triweave on ranks whose matrix products last as long as a machine profile says, whatever else the host does.

python -m torch.distributed.run ... bench/engines/card.py PROFILE.yaml train run.yaml

Eight ranks on two cores take each other's time, which eight GPUs do not. So everything is computed, and a rank then
waits as if a GPU did it: a product begins when the one before has ended and what other ranks send for it has come, and
lasts as long as the profile says; what is between products costs nothing as long as the host keeps up. Schedule,
messages and collectives are the trainer's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triweave.cli import main as triweave
from triweave.planner.profile import Profile, read_profile
from triweave.planner.time_matmul import Operands

Product = tuple[Operands, int, int, int]
"""Order of operands, and `[m, k] x [k, n]` as m, n, k."""


class Card(TorchDispatchMode):
    """Makes matrix products last."""

    def __init__(self, seconds: Mapping[Product, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.free_s = 0.0
        """When the card has ended what it was given, by `time.monotonic`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation as it is; of a product the end is put off."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.free_s += self.seconds[product_of(*args[:2])]
            time.sleep(max(0.0, self.free_s - time.monotonic()))
        return result

    def follow_messages(self) -> None:
        """What comes from another rank is there when the wait for it ends, and not before."""
        wait = dist.Work.wait

        def waited(work: dist.Work, *args: Any) -> bool:
            arrived = wait(work, *args)
            self.free_s = max(self.free_s, time.monotonic())
            return arrived

        dist.Work.wait = waited  # type: ignore[method-assign]


def go_first() -> None:
    """Before whatever else this machine does: a GPU has no other users. Root alone may ask for that."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def product_of(a: Tensor, b: Tensor) -> Product:
    """Which product of a linear layer `a b` is: the weight gradient has its first factor turned, forward the second."""
    operands: Operands = "TN" if not a.is_contiguous() else "NN" if b.is_contiguous() else "NT"
    return operands, a.shape[0], b.shape[1], a.shape[1]


def seconds_of(profile: Profile) -> dict[Product, float]:
    """The profile's products."""
    return {(table.operands, m, n, k): seconds for table in profile.matmul for m, n, k, seconds in table.m_n_k_seconds}


if __name__ == "__main__":
    go_first()
    with Card(seconds_of(read_profile(Path(sys.argv[1])))) as card:
        card.follow_messages()
        triweave(sys.argv[2:])
