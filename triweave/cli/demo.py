"""`triweave demo`."""

from __future__ import annotations

from pathlib import Path


def demo(*, cache: Path = Path(".cache"), out: Path = Path("runs/demo")) -> int:
    """Fine-tune a real checkpoint on a grid of processes of this machine, from nothing to an answer.

    SmolLM2-135M on TP 3 x PP 2 (six processes), trained on real questions and answers; the held-out loss and an
    answer are shown before and after. Needs about 3 GiB of memory and of disk, and five minutes on two cores.

    Example: triweave demo

    Args:
        cache: Where the two packages it needs (checkpoint, questions) are kept.
        out: Where everything else is written.
    """
    from triweave.demo.run import run_demo

    return run_demo(cache, out)
