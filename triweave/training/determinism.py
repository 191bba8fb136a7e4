"""Kernels whose result does not depend on timing, for as long as a run wants no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from triweave.config.schema import RuntimeConfig


@contextmanager
def deterministic(runtime: RuntimeConfig) -> Iterator[None]:
    """Inside, torch uses only kernels whose result does not depend on timing, where `runtime.deterministic` says so.

    Everything that computes for a run does it in here: what is checked and verified is then what is trained. Afterwards
    torch is as it was.

    Raises:
        RuntimeError: in the block, by torch: an operation has no such kernel.
    """
    if not runtime.deterministic:
        yield
        return
    # cuBLAS asks for a fixed workspace before it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    former, warns_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(former, warn_only=warns_only)
