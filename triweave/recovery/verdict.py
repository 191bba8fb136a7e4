"""Which rank the others wait for, from what each says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triweave.recovery.statement import Collective, Statement


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is guilty, and why."""

    guilty: tuple[int, ...]
    """Empty where no rank stands out."""
    reason: str


def judge(statements: Mapping[int, Statement], world_size: int) -> Verdict:
    """Find the rank that the others wait for.

    In this order: a rank that does not answer; one that does something else than wait; groups in which ranks are in
    different collectives of the same number; the rank that has called fewest collectives on a group; the one that
    has passed fewest marks.
    """
    silent = tuple(rank for rank in range(world_size) if rank not in statements)
    if silent:
        return Verdict(silent, "does not answer: it was stopped, has ended, or its Python is held by a call into C")
    if world_size == 1:
        return Verdict((), "Its one rank stands still")
    busy = tuple(rank for rank, one in statements.items() if not one.waits)
    if busy:
        return Verdict(busy, "waits for no other rank")
    return _of_collectives(statements) or _of_progress(statements)


def describe_alone(mine: Statement, store_keeper: str, waited_s: float) -> str:
    """The message of a rank that cannot reach the others."""
    keeper = f"The store, kept by {store_keeper}, does not answer: its process was stopped, or has ended"
    return "\n".join([f"the run hangs: no progress for {waited_s:.0f} s. {keeper}", *_in_full(mine)])


def describe(verdict: Verdict, statements: Mapping[int, Statement], waited_s: float) -> str:
    """The one message of a hang."""
    lines = [f"the run hangs: no progress for {waited_s:.0f} s. {_spell(verdict.guilty)}{verdict.reason}"]
    shown = sorted(verdict.guilty) or sorted(statements)[:1]
    lines += [line for rank in shown if rank in statements for line in _in_full(statements[rank])]
    others = [one for rank, one in sorted(statements.items()) if rank not in shown]
    lines += [f"  rank {one.rank}: {one.where}; {_last(one)}; at {one.stack[-1]}" for one in others]
    return "\n".join(lines)


def _of_collectives(statements: Mapping[int, Statement]) -> Verdict | None:
    """Ranks that are behind the other members of a group, or in another collective than they."""
    groups = sorted({group for one in statements.values() for group in one.collectives})
    by_group = {
        group: {rank: one.collectives[group] for rank, one in statements.items() if group in one.collectives}
        for group in groups
    }
    for group, members in by_group.items():
        different = _odd_ones({rank: (c.name, c.sizes, c.dtypes) for rank, c in _at_the_same(members).items()})
        if different:
            return Verdict(different, f"is in another collective on group {group} than its other ranks")
    for group, members in by_group.items():
        furthest = max(one.sequence for one in members.values())
        behind = tuple(rank for rank, one in members.items() if one.sequence < furthest)
        if behind:
            return Verdict(behind, f"has not called collective {furthest} on group {group}")
    return None


def _at_the_same(members: Mapping[int, Collective]) -> dict[int, Collective]:
    """Members that are in the collective with the highest number and not through it."""
    furthest = max(one.sequence for one in members.values())
    return {rank: one for rank, one in members.items() if one.sequence == furthest and not one.is_done}


def _odd_ones(said: Mapping[int, object]) -> tuple[int, ...]:
    """Ranks that do not say what most say; all of them, where no answer is that of most."""
    answers = list(said.values())
    if len(set(answers)) < 2:
        return ()
    usual = max(answers, key=answers.count)
    is_usual = 2 * answers.count(usual) > len(answers)
    return tuple(rank for rank, answer in said.items() if not is_usual or answer != usual)


def _of_progress(statements: Mapping[int, Statement]) -> Verdict:
    least = min(one.progress for one in statements.values())
    behind = tuple(rank for rank, one in statements.items() if one.progress == least)
    if len(behind) < len(statements):
        return Verdict(behind, "is furthest behind, though it waits too")
    return Verdict((), "Every rank waits for another at the same place: the network, or a message that was never sent")


def _in_full(one: Statement) -> list[str]:
    return [f"  rank {one.rank}: {one.where}; {_last(one)}", *(f"    {frame}" for frame in one.stack)]


def _last(one: Statement) -> str:
    pending = [f"{c} on group {group}" for group, c in one.collectives.items() if not c.is_done]
    if pending:
        return f"in {', '.join(pending)}"
    if not one.collectives:
        return "no collective yet"
    group, last = max(one.collectives.items(), key=lambda item: item[1].sequence)
    return f"last {last} on group {group}"


def _spell(ranks: Sequence[int]) -> str:
    named = [str(rank) for rank in sorted(ranks)]
    return f"Rank{'s' * (len(named) > 1)} {', '.join(named)}: " if named else ""
