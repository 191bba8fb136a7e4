"""Memory of this host that a GPU copies from and to at the speed of the bus, beside what it computes."""

from __future__ import annotations

import mmap
from contextlib import suppress

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
        RuntimeError: this host has not so much, or CUDA cannot pin it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        block = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    except OSError as refused:
        raise RuntimeError(f"this host does not give {num_bytes:,} bytes ({refused.strerror})") from None
    if device.type == "cuda":
        error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
        if error:
            _forget_error(device)
            raise RuntimeError(f"CUDA cannot pin {num_bytes:,} bytes of this host (error {error})")
    return block


def give_back(block: Tensor, device: torch.device) -> None:
    """Let CUDA forget memory that `host_memory` gave for `device`; nothing may be copying."""
    if device.type == "cuda" and block.numel():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _forget_error(device: torch.device) -> None:
    """Take what the runtime keeps of a call that failed: torch asks for it after each kernel, and would blame that.

    torch has no name for cudaGetLastError (2.13): a kernel is launched for its sake.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
