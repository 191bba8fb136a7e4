"""What a pipeline schedule holds at each of its moments: the worst ones of every rank, found once for a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import le

from triweave.layout import Schedule
from triweave.schedule.actions import Action, Kind
from triweave.schedule.build import rank_order

Key = tuple[int, int]
"""Stage and micro-batch."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One action of a rank, and what it finds held for other micro-batches."""

    kind: Kind
    stage: int
    held: tuple[int, ...]
    """Micro-batches of each virtual stage of the rank between their forward and the end of their (input) backward,
    this action's own left out."""
    put_off: tuple[int, ...]
    """The same between the input half and the weight half of a split backward."""
    leaving: int = 0
    """1 where a forward came just before: what its last layer keeps is still on its way to host memory. This action's
    own and what comes back are left out."""
    coming: int = 0
    """1 where a backward follows, not of this action's micro-batch: what it begins with is on its way back."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Everything that is held, in numbers."""
        return (*self.held, *self.put_off, self.leaving, self.coming)


def worst_moments(
    name: Schedule, pp: int, vpp: int, num_micro_batches: int, rank: int, *, offload: bool = False
) -> tuple[Moment, ...]:
    """The moments of a pipeline rank that no other moment of the same action outdoes.

    `offload` tells them apart by what is on its way to host memory or back.

    Raises:
        InputError: the numbers do not fit the schedule.
    """
    return _worst_moments(name, pp, vpp, saturating_micro_batches(name, pp, vpp, num_micro_batches), rank, offload)


@lru_cache(maxsize=4096)
def _worst_moments(
    name: Schedule, pp: int, vpp: int, num_micro_batches: int, rank: int, offload: bool
) -> tuple[Moment, ...]:
    actions = rank_order(name, rank, pp, vpp, num_micro_batches)
    moments = _moments(actions, pp, vpp)
    return _worst(_with_copies(actions, moments) if offload else moments)


def saturating_micro_batches(name: Schedule, pp: int, vpp: int, num_micro_batches: int) -> int:
    """Fewer micro-batches that fill the pipeline as far: more only repeat the steady state."""
    if name == "gpipe":
        return num_micro_batches
    return min(num_micro_batches, 4 * pp)


def _moments(actions: Sequence[Action], pp: int, vpp: int) -> list[Moment]:
    held, put_off = [0] * vpp, [0] * vpp
    moments = []
    for action in actions:
        chunk = action.stage // pp
        if action.kind is Kind.BACKWARD_WEIGHT:
            put_off[chunk] -= 1
        elif action.kind is not Kind.FORWARD:
            held[chunk] -= 1
        moments.append(Moment(action.kind, action.stage, tuple(held), tuple(put_off)))
        if action.kind is Kind.FORWARD:
            held[chunk] += 1
        elif action.kind is Kind.BACKWARD_INPUT:
            put_off[chunk] += 1
    return moments


def _with_copies(actions: Sequence[Action], moments: Sequence[Moment]) -> list[Moment]:
    """The moments with what copies to and from host memory hold at each, in the order of `offload.Offloader`.

    A forward's last layer is let go of at the end of the next pass of a layer; a weight half has none.
    """
    found = []
    leaving: Key | None = None
    for action, moment, following in zip(actions, moments, [*actions[1:], None], strict=True):
        own = action.stage, action.micro_batch
        coming: Key | None = None
        if following is not None and following.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            coming = following.stage, following.micro_batch
        found.append(
            replace(
                moment,
                leaving=int(leaving not in (None, own, coming)),
                coming=int(coming not in (None, own)),
            )
        )
        if action.kind is not Kind.BACKWARD_WEIGHT:
            leaving = own if action.kind is Kind.FORWARD else None
    return found


def _worst(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Moments that are not below another one of the same action in every count."""
    alike: dict[tuple[str, int], dict[tuple[int, ...], Moment]] = {}
    for moment in moments:
        alike.setdefault((moment.kind.value, moment.stage), {}).setdefault(moment.counts, moment)
    return tuple(
        moment
        for group in alike.values()
        for counts, moment in group.items()
        if not any(all(map(le, counts, other)) for other in group if other is not counts)
    )
