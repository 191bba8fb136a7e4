"""Memory of this host that a GPU copies from and to at the speed of the bus, beside what it computes."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """`num_bytes` of this host, pinned where `device` is a GPU; `give_back` them.

    They are registered with CUDA as they are: torch's allocator of pinned memory rounds each request up to a power of
    two (torch 2.13), which would take up to twice the memory. Two registrations may not share a page, so each has its
    own. It takes a second for a few GB.

    Returns:
        uint8 `[num_bytes]`.

    Raises:
        RuntimeError: CUDA cannot pin so much.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    block = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    if device.type == "cuda":
        error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
        if error:
            raise RuntimeError(f"CUDA cannot pin {num_bytes:,} bytes of this host (error {error})")
    return block


def give_back(block: Tensor, device: torch.device) -> None:
    """Let CUDA forget memory that `host_memory` gave for `device`; nothing may be copying."""
    if device.type == "cuda" and block.numel():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
