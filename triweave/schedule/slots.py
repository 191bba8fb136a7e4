"""How many micro-batches a rank has in flight: as many slots as its graphs need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from triweave.schedule.actions import Action, Kind


def most_in_flight(actions: Sequence[Action]) -> Mapping[int, int]:
    """Of each stage, the most micro-batches at once between their forward and the end of their backward."""
    ends = Kind.BACKWARD_WEIGHT if any(action.kind is Kind.BACKWARD_WEIGHT for action in actions) else Kind.BACKWARD
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in actions:
        now[action.stage] += (action.kind is Kind.FORWARD) - (action.kind is ends)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return most
