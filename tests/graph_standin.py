"""What captures where there is no CUDA: a replay does the work again, and puts what it gives where it was at first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import parity
import torch
from torch import Tensor


@dataclass
class Pool:
    """Of one slot."""

    parent: Rerun
    replays: int = 0
    used_up: list[Tensor] = field(default_factory=list)

    def capture(self, work: Callable[[], Tensor | None]) -> tuple[Tensor | None, Callable[[], None]]:
        """Does the work for real: whatever it leaves behind is to be forgotten, as a capture leaves nothing."""
        # A capture repeats what was decided on the host while it was made: to overwrite a sum would be wrong next time.
        assert not any(getattr(parameter, "main_grad_is_former", False) for parameter in self.parent.parameters)
        made = work()

        def replay() -> None:
            self.replays += 1
            with torch.enable_grad():
                fresh = work()
            for tensor in self.used_up:
                tensor.fill_(torch.nan)
            self.used_up.clear()
            if made is not None and fresh is not None:
                made.detach().copy_(fresh.detach())
                # What forward gives is kept until its own backward; a gradient is gone when the next pass is over.
                self.used_up += [made] if self.parent.reuses and not made.requires_grad else []

        return made, replay

    def address(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass
class Rerun:
    """A capture for tests."""

    reuses: bool = True
    """Whether memory that a backward has used up is given to what comes next, as CUDA's pools do; a weight half that
    comes later reads it still."""
    parameters: list[Tensor] = field(default_factory=list)
    """Of the layers that are captured."""
    pools: list[Pool] = field(default_factory=list)
    num_bytes: int = 0

    def pool(self) -> Pool:
        """A new one."""
        self.pools.append(Pool(self))
        return self.pools[-1]

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do it."""
        work()

    def finish(self) -> None:
        """Nothing."""


@contextmanager
def graphs(capture: Rerun) -> Iterator[None]:
    """Inside, `parity.engine_for` builds engines that capture their layers by `capture`."""
    make = parity.build_engine

    def build(resolved: SimpleNamespace, *rest: Any) -> Any:
        layout = replace(resolved.layout, cuda_graphs=True)
        resolved = SimpleNamespace(**{**vars(resolved), "layout": layout})
        engine = make(resolved, *rest, capture_for=lambda device, transport: capture)
        for stage in engine.stages.values():
            capture.parameters += [parameter for layer in stage.graphs.layers for parameter in layer.parameters()]
        return engine

    with patch.object(parity, "build_engine", build):
        yield
