"""Reads and maps bytes of files into tensors, all that were asked for or an error."""

from __future__ import annotations

import os
from typing import BinaryIO

import torch
from torch import Tensor


def read_into(file: BinaryIO, position: int, target: Tensor) -> None:
    """Fill `target`, a contiguous tensor on the CPU, with the bytes of `file` from `position` on.

    Raises:
        OSError: the file ends before.
    """
    memory = memoryview(bytes_of(target))
    done = 0
    while done < len(memory):
        count = os.preadv(file.fileno(), [memory[done:]], position + done)
        if not count:
            raise OSError(f"ends at byte {position + done}, before {position + len(memory)}")
        done += count


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
