"""triweave on a rank with a fault: what the variable PLANTED says, on the rank of this host that RANK_OF_HOST names.

torch=2.12.0 lets it say that it has that version; slow=1.2 makes its products take that much longer.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triweave.cli import main as triweave


class Slower(TorchDispatchMode):
    """Makes matrix products take longer, of the processor's own time."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation as it is; after a product the processor goes on for a while."""
        begin = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            end = begin + self.factor * (time.thread_time() - begin)
            while time.thread_time() < end:
                pass
        return result


def main() -> None:
    """The doctor, or any other verb, on this rank."""
    here = os.environ["LOCAL_RANK"] == os.environ.get("RANK_OF_HOST", "0")
    kind, _, value = os.environ.get("PLANTED", "").partition("=") if here else ("", "", "")
    if kind == "torch":
        torch.__version__ = value  # type: ignore[assignment]
    if kind == "slow":
        with Slower(float(value)):
            triweave()
    triweave()


if __name__ == "__main__":
    main()
