"""One rank of a probe: its device, its peers, how it tells time and how far it is."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.groups import Group
from triweave.training.engine import FP8_CAPABILITY

Tell = Callable[[str, float], None]
"""What is measured now, and how much of it is done, 0 to 1."""


def tell_nothing(what: str, done: float) -> None:
    """For ranks that do not speak."""


@dataclass(slots=True)
class Session:
    """What every part needs."""

    group: Group
    """All ranks."""
    device: torch.device
    small: bool
    """Whether this is a rehearsal: few shapes, and small ones."""
    deadline_s: float = float("inf")
    """By `time.monotonic`; a part that has enough stops there."""
    tell: Tell = tell_nothing
    groups: dict[int, Group] = field(default_factory=dict)
    """The first 2, 4, ... ranks, by their number; only those that hold this rank."""

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run beside the host."""
        return self.device.type == "cuda"

    @property
    def has_fp8(self) -> bool:
        """Whether products in fp8 can be measured: on GPUs that have it, and on CPUs, which are slow at everything."""
        return not self.on_gpu or torch.cuda.get_device_capability(self.device) >= FP8_CAPABILITY

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16

    def in_order(self) -> list[Group]:
        """The groups that hold this rank, the smallest first: all ranks come to the same one at the same time."""
        return [group for _, group in sorted(self.groups.items())]

    def wait(self) -> None:
        """Until this rank's device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def meet(self, group: Group | None = None) -> None:
        """Until every rank of the group has."""
        group = group or self.group
        self.wait()
        if group.size > 1:
            dist.barrier(group.handle, device_ids=[self.device.index] if self.on_gpu else None)

    def worst(self, values: Sequence[float], group: Group | None = None) -> list[float]:
        """The largest of the ranks' values, one by one: a step waits for the slowest rank."""
        group = group or self.group
        if group.size == 1 or not values:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group.handle)
        return [float(value) for value in together.tolist()]

    def is_late(self) -> bool:
        """Whether the time is over, which all ranks answer alike."""
        return bool(self.worst([float(time.monotonic() > self.deadline_s)])[0])

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """Now, in the order of the stream."""
        if not self.on_gpu:
            return Mark(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return Mark(event, 0.0)

    def seconds(self, function: Callable[[], object], group: Group | None = None, repeats: int = 12) -> float:
        """Median time of `function` called again and again, on the slowest rank."""
        repeats = min(repeats, 3) if self.small else repeats
        for _ in range(2):
            function()
        self.meet(group)
        marks = [self.mark()]
        for _ in range(repeats):
            function()
            marks.append(self.mark())
        self.wait()
        times = [before.until(after) for before, after in itertools.pairwise(marks)]
        return self.worst([statistics.median(times)], group)[0]

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers: how many bits change from one to the next decides what power a product takes."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: an event of a GPU, or the host's own time."""

    event: torch.cuda.Event | None
    host_s: float

    def until(self, later: Mark) -> float:
        """Seconds from this moment to a later one, both of which have passed."""
        if self.event is None or later.event is None:
            return max(later.host_s - self.host_s, 1e-9)
        return max(1e-3 * float(self.event.elapsed_time(later.event)), 1e-9)
