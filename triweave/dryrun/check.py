"""`triweave check`: which ranks to play, whether they fit, and the answer in words and in JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triweave.cluster import GIB
from triweave.config.validate import ResolvedRun
from triweave.dryrun.memory import RankMemory, rank_memory
from triweave.errors import InputError, Problem, closest
from triweave.layout import Coordinates, Layout
from triweave.planner.forecast import run_identity

_WORDS = ("first", "middle", "last", "all")
_ALLOCATORS = {
    True: "expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True)",
    False: "fixed segments (PyTorch's default)",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """The memory of some ranks of a run against their cards."""

    resolved: ResolvedRun
    ranks: tuple[RankMemory, ...]
    capacity_bytes: int | None
    """What the driver gives to programs; None where the run names no GPU."""
    expandable: bool = True
    """Whether the caching allocator has expandable segments."""

    def fits(self, one: RankMemory) -> bool:
        """Whether a rank fits on its card."""
        return self.capacity_bytes is None or one.used_bytes <= self.capacity_bytes

    @property
    def all_fit(self) -> bool:
        """Whether every rank that was played fits."""
        return all(self.fits(one) for one in self.ranks)


def check(
    resolved: ResolvedRun,
    ranks: Sequence[int],
    progress: Callable[[int], None] = lambda rank: None,
    *,
    expandable: bool = True,
) -> Checked:
    """Play each of `ranks` in turn."""
    found = []
    for rank in ranks:
        progress(rank)
        found.append(rank_memory(resolved, rank, expandable=expandable))
    return Checked(resolved, tuple(found), capacity_of(resolved), expandable)


def capacity_of(resolved: ResolvedRun) -> int | None:
    """What the driver gives to programs on a card of the run's cluster; None where it names no GPU."""
    gpu = resolved.cluster.gpu if resolved.cluster else None
    return gpu.usable_bytes if gpu and gpu.usable_bytes else None


def chosen_ranks(words: str, layout: Layout) -> tuple[int, ...]:
    """The ranks of `--ranks`, in order and each once.

    `all` is one rank of every pipeline stage: ranks that differ only along tp or dp take the same memory, for every
    split is into equal parts and padded where it does not divide. Along cp the second takes as much as any: the queries
    of the first and of the last see keys in fewer parts.

    Raises:
        InputError: a word that is neither one of these nor a rank of the grid.
    """
    of_stage = [layout.rank(Coordinates(0, min(1, layout.cp - 1), 0, pp)) for pp in range(layout.pp)]
    named = {"first": of_stage[:1], "middle": of_stage[layout.pp // 2 :][:1], "last": of_stage[-1:], "all": of_stage}
    ranks: set[int] = set()
    problems = []
    for word in map(str.strip, words.split(",")):
        if word in named:
            ranks.update(named[word])
        elif not re.fullmatch(r"\d{1,18}", word):
            rule = f"must be {', '.join(_WORDS)}, or numbers of ranks with commas between"
            problems.append(Problem("--ranks", word or '""', rule, closest(word, _WORDS)))
        elif int(word) >= layout.world_size:
            problems.append(outside_grid("--ranks", int(word), layout))
        else:
            ranks.add(int(word))
    if problems:
        raise InputError(dict.fromkeys(problems))
    return tuple(sorted(ranks))


def outside_grid(option: str, rank: int, layout: Layout) -> Problem:
    """What is wrong with a rank that the grid does not have."""
    size = layout.world_size
    rule = f"is outside the grid of {size} rank{'' if size == 1 else 's'} ({layout}), numbered from 0"
    return Problem(option, rank, rule, str(min(max(rank, 0), size - 1)))


def to_json(checked: Checked) -> dict[str, Any]:
    """The contract of `triweave check --json`."""
    return {
        "ranks": [_rank_json(one, checked) for one in checked.ranks],
        "fits": checked.all_fit,
        "capacity_gib": None if checked.capacity_bytes is None else checked.capacity_bytes / GIB,
        "micro_batches": checked.resolved.num_micro_batches,
        "allocator": _ALLOCATORS[checked.expandable],
        "run": run_identity(checked.resolved),
    }


def _rank_json(one: RankMemory, checked: Checked) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "stage": checked.resolved.layout.coordinates(one.rank).pp,
        "virtual_stages": list(one.stages),
        "peak_gib": one.peak_bytes / GIB,
        "reserved_gib": one.reserved_bytes / GIB,
        "used_gib": one.used_bytes / GIB,
        "beside_gib": {name: size / GIB for name, size in _beside(one)},
        "fits": checked.fits(one),
        "at": one.at,
        "components": {name: size / GIB for name, size in _largest_first(one)},
        "micro_batches_run": one.micro_batches,
    }


def _beside(one: RankMemory) -> list[tuple[str, int]]:
    """What makes up the used memory beside what is reserved."""
    return [
        ("CUDA context", one.context_bytes),
        ("NCCL", one.nccl_bytes),
        ("copies between ranks", one.peer_bytes),
    ]


def _largest_first(one: RankMemory) -> list[tuple[str, int]]:
    return sorted(one.components.items(), key=lambda part: -part[1])


def to_text(checked: Checked) -> Iterator[str]:
    """The answer for people."""
    layout, capacity = checked.resolved.layout, checked.capacity_bytes
    for one in checked.ranks:
        held = "" if capacity is None else f" of {capacity / GIB:.1f}"
        verdict = "" if capacity is None else "  fits" if checked.fits(one) else "  DOES NOT FIT"
        yield (
            f"rank {one.rank} (stage {layout.coordinates(one.rank).pp}): allocated {one.peak_bytes / GIB:.2f} GiB, "
            f"reserved {one.reserved_bytes / GIB:.2f}, used on the card {one.used_bytes / GIB:.2f}{held} GiB{verdict}"
        )
        beside = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _beside(one) if size)
        yield f"  used: reserved {one.reserved_bytes / GIB:.2f}, {beside} GiB; {_ALLOCATORS[checked.expandable]}"
        yield f"  allocated: peak at {one.at}"
        for name, size in _largest_first(one):
            yield f"    {size / GIB:8.3f} GiB  {name}"
        if one.micro_batches < checked.resolved.num_micro_batches:
            total = checked.resolved.num_micro_batches
            yield f"  {one.micro_batches} of the {total} micro-batches were run: the rest repeat the steady state"
    if capacity is None:
        yield "no GPU is named, so nothing is said of fitting: add --cluster 4x8xh100-80gb or what you have"
