"""What a bench of several ranks needs: timing on the slowest of them, rows that survive a failure, an end to a hang."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.groups import Group

WARM_UP, TIMED, TURNS = 4, 20, 60
DTYPE = torch.bfloat16


def without_gpu() -> None:
    """Keep a process that only checks off the card that is measured, and from the cores that launch its kernels."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def wait(device: torch.device) -> None:
    """Until the GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(functions: Mapping[str, Callable[[], Any]], turns: int, ahead_cycles: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each call on the GPU, one call of each function after the other, `turns` times.

    A card at its power limit is as fast as what it did before lets it be: ways that are measured one after the other,
    each many times, differ by more than what is to be told apart. The GPU waits `ahead_cycles` before each call, in
    which a host that issues more slowly than the GPU computes gets ahead.
    """
    calls = [name for _ in range(turns) for name in functions]
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in calls] for _ in range(2))
    for name, begin, end in zip(calls, begins, ends, strict=True):
        if ahead_cycles:
            torch.cuda._sleep(ahead_cycles)
        begin.record()
        functions[name]()
        end.record()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name, begin, end in zip(calls, begins, ends, strict=True):
        times[name].append(begin.elapsed_time(end))
    return times


@dataclass
class Watchdog:
    """Ends this process when a section takes too long: a GPU that waits for a flag cannot be interrupted."""

    limit_s: float
    section: str = "start"
    deadline: float = float("inf")

    def begin(self, section: str) -> None:
        self.section, self.deadline = section, time.monotonic() + self.limit_s

    def watch(self) -> None:
        while time.monotonic() < self.deadline:
            time.sleep(0.5)
        print(f"HANG in {self.section}: more than {self.limit_s:.0f} s", file=sys.stderr, flush=True)
        os._exit(3)


@dataclass
class Bench:
    """One rank's state: where it is, what it found."""

    group: Group
    device: torch.device
    small: bool
    out: Path
    watchdog: Watchdog
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Keep a row; rank 0 tells it and writes all of them, so that a later failure loses nothing."""
        self.rows.append(row)
        if self.group.rank == 0:
            print(json.dumps(row), flush=True)
            self.out.write_text(json.dumps(self.rows, indent=1))

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self.group.handle, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def worst(self, value: float) -> float:
        """The largest of all ranks' values."""
        worst = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group.handle)
        return float(worst)

    def milliseconds(self, function: Callable[[], Any]) -> float:
        """Median time of `function` on the slowest rank."""
        for _ in range(WARM_UP):
            function()
        self.sync()
        if self.device.type != "cuda":
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                function()
                times.append(1e3 * (time.perf_counter() - begin))
        else:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
            marks[0].record()
            for mark in marks[1:]:
                function()
                mark.record()
            torch.cuda.synchronize()
            times = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
        return self.worst(statistics.median(times))

    def by_turns(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Median time of each on the slowest rank, one call of each after the other: see `in_turn`."""
        if self.device.type != "cuda":
            return {name: self.milliseconds(function) for name, function in functions.items()}
        for function in functions.values():
            for _ in range(WARM_UP):
                function()
        self.sync()
        return {name: self.worst(statistics.median(times)) for name, times in in_turn(functions, TURNS).items()}

    def host_milliseconds(self, function: Callable[[], Any]) -> float:
        """Median time that the host needs to issue `function`, with nothing before it in the GPU's queues."""
        times = []
        for _ in range(5):
            self.sync()
            begin = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - begin))
        self.sync()
        return self.worst(statistics.median(times))

    def random(self, *shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.group.rank)
        return torch.empty(shape, device=self.device, dtype=DTYPE).normal_(0, std, generator=generator)
