"""Memory of the host that is pinned: what is told when there is not as much, and what is left behind then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triweave import pinned

GPU = torch.device("cuda")


def test_memory_that_the_host_does_not_give_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused mapping is the same kind of error as pages that CUDA cannot pin, for who goes on without."""

    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned.mmap, "mmap", refuse)
    with pytest.raises(RuntimeError, match="does not give 4,096 bytes"):
        pinned.host_memory(4096, torch.device("cpu"))


def test_an_error_of_pinning_is_not_left_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's runtime keeps a failed call's error until somebody asks: torch would, after whatever kernel comes next."""
    pending: list[int] = []

    def register(*_: int) -> int:
        pending.append(2)
        return 2

    def launch(*_: int, device: torch.device) -> None:
        if pending:
            raise torch.AcceleratorError(f"CUDA error {pending.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", launch)
    with pytest.raises(RuntimeError, match="CUDA cannot pin 4,096 bytes of this host"):
        pinned.host_memory(4096, GPU)
    assert not pending
