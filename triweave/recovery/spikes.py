"""Whether a loss is out of all proportion to those before it. Pure."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64
"""Steps that a loss is held against."""

LEAST = 16
"""Steps below which nothing is said: the loss of a new run falls too fast."""

FLOOR = 0.01
"""Least deviation, as a part of the median: a loss that hardly moves must not make every breath a spike."""


class Spikes:
    """The losses of the last steps."""

    def __init__(self, factor: float) -> None:
        """Take the deviations above the median that make a spike."""
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def take(self, loss: float) -> str:
        """Take the next step's loss; returns what makes it a spike, or nothing.

        The deviation is 1.4826 times the median absolute deviation, which is the standard deviation of normal noise and
        is not moved by the spikes themselves (Hampel, 1974). A spike enters the window too: a level that lasts is soon
        the median.
        """
        found = ""
        if len(self._losses) >= LEAST:
            median = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(one - median) for one in self._losses)
            spread = max(spread, FLOOR * abs(median))
            if loss > median + self.factor * spread:
                times = (loss - median) / spread if spread else float("inf")
                before = f"{median:.4f}, the median of {len(self._losses)} steps"
                found = f"the loss {loss:.4f} is {times:.0f} deviations above {before}"
        self._losses.append(loss)
        return found
