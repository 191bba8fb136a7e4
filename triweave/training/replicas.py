"""Whether data-parallel replicas hold the same numbers, bit for bit: weights, and the optimizer's where kept twice.

A bit that flips in a GPU's memory, in its arithmetic or on a link raises no error and makes no number infinite:
replicas drift apart, and what is trained is no one model. Each rank adds up the bits of what others hold too, as whole
numbers modulo 2**64, where they lie: one wrong bit always changes the sum. Two could cancel only as the same bit of
two numbers, flipped opposite ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triweave.collectives import all_gather
from triweave.groups import Group
from triweave.layout import Layout
from triweave.training.engine import Engine
from triweave.training.not_finite import NOTHING, over_ranks

KINDS = ("weight", "master weight", "first moment", "second moment")
"""What is compared of a parameter: what layers compute with, and the optimizer's own."""

_PIECE = 2**20
"""Elements that are turned into int64 at once where they cannot be read as such."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Held(NamedTuple):
    """Numbers of this rank that its replicas hold too."""

    name: str
    """Hugging Face name of the parameter."""
    kind: int
    values: Tensor


def has_replicas(layout: Layout) -> bool:
    """Whether data-parallel ranks keep anything that others keep too: at `full` only several shard groups do."""
    return layout.replicas > 1 and (layout.shard != "full" or layout.uses_shard_groups)


def compare_replicas(engine: Engine) -> str | None:
    """Which ranks hold other numbers than their replicas, and of which parameter; None if all agree.

    All ranks call it together, between two steps, and get the same answer: the first parameter in the model's order.
    """
    names = [tensor.name for tensor in engine.spec.tensors()]
    place = {name: number for number, name in enumerate(names)}
    shards, across = engine.groups.shards, engine.groups.across
    keeps_all = any(unit.shard == "none" for unit in engine.sharding.units)
    said = min(
        _first_difference(list(_weights(engine)), (shards, across), place),
        _first_difference(list(_states(engine)), (shards, across) if keeps_all else (across,), place),
    )
    return describe(names, over_ranks(engine, said))


def describe(names: Sequence[str], said: Sequence[int]) -> str | None:
    """What the ranks' answers come to, in words; `names` are the model's parameters, `said` is by rank."""
    first = min(said) // 2
    if first == NOTHING // 2:
        return None
    number, kind = divmod(first, len(KINDS))
    odd, usual = ([rank for rank, one in enumerate(said) if one == 2 * first + other] for other in (0, 1))
    what = f"{KINDS[kind]} of {names[number]}"
    if not usual:
        alike = f"ranks {_spell(odd)} must hold the same"
        return f"{alike}, and the {what} differs between them; which is wrong cannot be told"
    return f"rank {_spell(odd)} holds another {what} than its replicas on rank {_spell(usual)}"


def checksum(values: Tensor) -> Tensor:
    """The bits of a run of a buffer, added up as int64 modulo 2**64; made of nothing of the buffer's size."""
    size = values.element_size()
    if (values.storage_offset() * size) % 8 == 0 and (values.numel() * size) % 8 == 0:
        return values.view(torch.int64).sum()
    pieces = values.view(_INTEGERS[size]).split(_PIECE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def _weights(engine: Engine) -> Iterator[Held]:
    """Whole weights, which all replicas hold; none where they are freed between uses."""
    for unit in engine.sharding.units:
        if unit.shard != "full":
            unit.finish_gather()
            for segment in unit.segments():
                yield Held(segment.piece.name, 0, unit.weight[segment.start : segment.stop])


def _states(engine: Engine) -> Iterator[Held]:
    """Master weights and moments, which the ranks hold that keep the same part."""
    for part, moments in engine.optimizer.states():
        first, last = (part.unit.shard_start + edge for edge in (part.inside.start, part.inside.stop))
        for segment in part.unit.segments():
            start, stop = max(segment.start, first), min(segment.stop, last)
            if start < stop:
                flats = (part.parameter.data, moments["exp_avg"], moments["exp_avg_sq"])
                for kind, flat in enumerate(flats, start=1):
                    yield Held(segment.piece.name, kind, flat[start - first : stop - first])


def _first_difference(held: Sequence[Held], groups: Sequence[Group], place: dict[str, int]) -> int:
    """The first of what a rank holds in which its replicas differ, as one integer; even if this rank is the odd one."""
    if not held or all(group.size == 1 for group in groups):
        return NOTHING
    table = torch.stack([checksum(one.values) for one in held]).unsqueeze(0)
    row = 0
    for group in groups:
        row += group.rank * table.shape[0]
        table = all_gather(table, group)
    differing: list[int] = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return NOTHING
    first = min(differing, key=lambda column: (place[held[column].name], held[column].kind))
    sums = table[:, first].tolist()
    (_, most), *others = Counter(sums).most_common(2)
    is_usual = sums.count(sums[row]) == most and all(count < most for _, count in others)
    return 2 * (len(KINDS) * place[held[first].name] + held[first].kind) + is_usual


def _spell(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
