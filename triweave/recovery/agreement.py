"""Whether all ranks are about to do, and then do, the same: compared through the store, where nothing is unpickled.

A collective cannot tell. gloo adds int32 to float32 without a word, aborts the process where sizes differ, and waits
for its timeout where operations do.

Two ways to exchange JSON, this one and `checkpoint.agreement`, since neither can do the other's work. Here there may
be no process group yet, a rank may never come, and the message must name it: the store tells which keys are missing.
But rank 0 reads every rank's key from one server and the keys stay there for the run: right once at the start, wrong
for the five exchanges of every save.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

import triweave
from triweave.config.validate import ResolvedRun
from triweave.errors import Refused, RunFailed
from triweave.recovery.statement import Collective, recorded_collectives

LATER_S = 5.0
"""By which ranks that wait for each other may begin at different times."""

DIFFER = "the ranks do not do the same"
_SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives of which every member must give as much, of the same type (the names begin like this)."""


def facts_of(resolved: ResolvedRun, data: str, device: torch.device) -> dict[str, str]:
    """Everything in which ranks must not differ, by key.

    Args:
        resolved: the run.
        data: fingerprint of the prepared data.
        device: of this rank; its type counts.
    """
    keys = _flat(asdict(resolved.run))
    return {
        **keys,
        "model": _digest(repr((resolved.spec, *resolved.spec.tensors()))),
        "layer map": repr(resolved.layout.layers),
        "layout": str(resolved.layout),
        "training data": data,
        "device": device.type,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__,
        "triweave": triweave.__version__,
        "triweave's code": _digest_of_code(),
    }


def digest_of(facts: Mapping[str, str]) -> str:
    """A short name for all of `facts_of`: another one, another run."""
    return _digest(json.dumps(facts, sort_keys=True))


def check_same(store: Store | None, rank: int, world_size: int, facts: Mapping[str, str], timeout_s: float) -> None:
    """Compare what every rank is about to do; all ranks call it together, before they make a process group.

    Raises:
        RunFailed: a rank differs, or has not come within `timeout_s`; the message names it, and the key.
    """
    if store is None:
        return
    others = exchange(store, "facts", rank, world_size, json.dumps(facts), timeout_s)
    problems = differing_facts([json.loads(text) for text in others]) if rank == 0 else []
    agree(store, "facts", rank, problems, timeout_s)


def check_collectives(store: Store | None, rank: int, world_size: int, timeout_s: float) -> None:
    """Compare the collectives that every rank has called so far; all ranks call it together, after a step.

    Raises:
        RunFailed: a rank has called another one than its peers, or with another size or type; the message names it.
    """
    if store is None:
        return
    others = exchange(store, "collectives", rank, world_size, calls_to_json(recorded_collectives()), timeout_s)
    problems = differing_collectives([calls_from_json(text) for text in others]) if rank == 0 else []
    agree(store, "collectives", rank, problems, timeout_s)


def largest(store: Store | None, what: str, rank: int, world_size: int, mine: int, timeout_s: float) -> int:
    """The largest of the ranks' numbers, on all of them; all ranks call it together.

    Raises:
        RunFailed: a rank has not come within `timeout_s`.
    """
    if store is None:
        return mine
    numbers = exchange(store, what, rank, world_size, str(mine), timeout_s)
    return int(settled(store, what, rank, str(max(map(int, numbers), default=0)), timeout_s))


def differing_facts(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """What ranks differ in: one line a key, with the ranks that do not hold what most do."""
    problems = []
    for key in dict.fromkeys(key for facts in by_rank for key in facts):
        values = [facts.get(key, "missing") for facts in by_rank]
        usual = max(values, key=values.count)
        for value in dict.fromkeys(values):
            if value != usual:
                ranks = ", ".join(str(rank) for rank, one in enumerate(values) if one == value)
                problems.append(f"rank {ranks}: {key} is {value}, and {usual} on most ranks")
    return problems


Calls = Mapping[str, Mapping[int, Collective]]
"""Collectives by group and number."""


def differing_collectives(by_rank: Sequence[Calls]) -> list[str]:
    """The first collective of every group that was not the same on all its ranks."""
    problems = []
    for group in sorted({group for calls in by_rank for group in calls}):
        members = {rank: calls[group] for rank, calls in enumerate(by_rank) if group in calls}
        for number in sorted(set.intersection(*(set(calls) for calls in members.values()))):
            called = {rank: calls[number] for rank, calls in members.items()}
            said = [_signature(one) for one in called.values()]
            usual = max(said, key=said.count)
            odd = [rank for rank, one in called.items() if _signature(one) != usual]
            if odd:
                expected = next(one for one in called.values() if _signature(one) == usual)
                ranks = ", ".join(map(str, odd))
                problems.append(f"rank {ranks}: called {called[odd[0]]} on group {group}, its peers {expected}")
                break
    return problems


def _signature(one: Collective) -> object:
    """What must agree between members."""
    return (one.name, one.sizes, one.dtypes) if one.name.lstrip("_").startswith(_SYMMETRIC) else one.name


def calls_to_json(recorded: Mapping[str, Sequence[Collective]]) -> str:
    """Collectives as text. A step has thousands and few that differ: each kind is written once."""
    kinds: dict[tuple[object, ...], int] = {}
    calls = {
        group: [(one.sequence, kinds.setdefault((one.name, one.sizes, one.dtypes), len(kinds))) for one in ones]
        for group, ones in recorded.items()
    }
    return json.dumps({"kinds": list(kinds), "calls": calls})


def calls_from_json(text: str) -> Calls:
    """What `calls_to_json` wrote."""
    said = json.loads(text)
    kinds = [(name, tuple(map(tuple, sizes)), tuple(dtypes)) for name, sizes, dtypes in said["kinds"]]

    def call(number: int, kind: int) -> Collective:
        name, sizes, dtypes = kinds[kind]
        return Collective(number, name, sizes, dtypes, is_done=True)

    return {group: {number: call(number, kind) for number, kind in calls} for group, calls in said["calls"].items()}


def exchange(store: Store, what: str, rank: int, world_size: int, mine: str, timeout_s: float) -> list[str]:
    """Give this rank's text; rank 0 gets everybody's, the others none.

    Raises:
        RunFailed: on rank 0, a rank has not come within `timeout_s`; who waits for `settled` then hears it too.
    """
    store.set(f"{what}/{rank}", mine)
    if rank:
        return []
    keys = [f"{what}/{number}" for number in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        ranks = ", ".join(map(str, missing))
        message = f"rank {ranks} has not come within {timeout_s:.0f} s (of {world_size} ranks)"
        _let_know(store, what, failure=message)
        raise RunFailed(message) from None
    return [store.get(key).decode() for key in keys]


def settled(store: Store, what: str, rank: int, text: str, timeout_s: float) -> str:
    """What rank 0 makes of an exchange, on all ranks; `text` of the others is not looked at.

    Raises:
        RunFailed: on the others, a rank has not come to the exchange, or rank 0 itself has not.
        Refused: on the others, rank 0 has called `refuse` instead.
    """
    if rank == 0:
        _let_know(store, what, said=text)
        return text
    key = _word_of_rank_0(what)
    try:
        # Rank 0 may have begun to wait for others later than this one.
        store.wait([key], timedelta(seconds=timeout_s + LATER_S))
    except RuntimeError:
        raise RunFailed(f"rank 0 has not come within {timeout_s + LATER_S:.0f} s, or its store is gone") from None
    failure, said, is_refused = json.loads(store.get(key))
    if failure:
        raise (Refused if is_refused else RunFailed)(failure)
    return str(said)


def refuse(store: Store, what: str, message: str) -> None:
    """Let all who wait for what rank 0 makes of an exchange know that it does not come to it."""
    _let_know(store, what, failure=message, is_refused=True)


def _let_know(store: Store, what: str, *, failure: str = "", said: str = "", is_refused: bool = False) -> None:
    """Leave what `settled` reads on the other ranks."""
    store.set(_word_of_rank_0(what), json.dumps([failure, said, is_refused]))


def _word_of_rank_0(what: str) -> str:
    return f"{what}/verdict"


def agree(
    store: Store, what: str, rank: int, problems: Sequence[str], timeout_s: float, headline: str = DIFFER
) -> None:
    """Fail on all ranks if rank 0 has found a problem.

    Raises:
        RunFailed: it has; the message begins with `headline`.
    """
    verdict = settled(store, what, rank, "\n".join(problems), timeout_s)
    if verdict:
        raise RunFailed(f"{headline}:\n{verdict}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Keys of a run file with dots, and their values as text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
    return flat


def _digest_of_code() -> str:
    folder = Path(triweave.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return _digest("".join(f"{path.relative_to(folder)}\n{path.read_text(encoding='utf-8')}" for path in files))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
