"""A copy of device tensors in this host's memory, made again and again into the same place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from triweave.pinned import give_back, host_memory

_ALIGNMENT = 256
"""Bytes between which copies start: what fast transfers ask for."""


class HostCopy:
    """Memory for copies of tensors, one block. On a GPU it is pinned, so that copies run at the speed of the bus."""

    def __init__(self, num_bytes: Sequence[int], device: torch.device) -> None:
        """Make room for tensors of `num_bytes` each; on a GPU this takes a second for a few GB.

        Raises:
            RuntimeError: CUDA cannot pin so much.
        """
        self._starts = [0]
        for size in num_bytes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._block = host_memory(self._starts[-1], device)
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self._block.numel()

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `tensors`, in the order and of the sizes that were announced; done when this returns.

        They are valid until the next call.
        """
        copies = []
        for start, tensor in zip(self._starts, tensors, strict=False):
            copy = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor.detach(), non_blocking=True)
            copies.append(copy)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def close(self) -> None:
        """Give the memory back."""
        give_back(self._block, self._device)
        self._block = torch.empty(0, dtype=torch.uint8)


def host_key() -> str:
    """What is the same for all processes of one host (or container), and for no others."""
    return f"{os.uname().nodename} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
