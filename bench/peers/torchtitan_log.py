"""What torchtitan itself logs of its speed: the check that a case was measured as its authors would."""

from __future__ import annotations

import re
import statistics

LOG_LINE = re.compile(r"step:\s*(\d+) .*?tps:\s*([\d,]+)")


def logged_tokens_per_s(text: str, *, after_step: int) -> float | None:
    """Median tokens a second of one GPU over the steps after a warm-up; None if the log tells of none."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    found = [int(tokens.replace(",", "")) for step, tokens in LOG_LINE.findall(plain) if int(step) > after_step]
    return statistics.median(found) if found else None
