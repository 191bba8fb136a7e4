"""Operations between matrix products as the kernels that carry them out: what each reads and writes.

An operation is a list of kernels forward and one backward. Bytes are per element of the tensor that the operation is
named for (hidden elements of a norm, the inner width of SwiGLU, logits of the loss). Where a kernel is fused with the
next one it is one entry; where it is not, each pass over memory is its own.
"""

from __future__ import annotations

from typing import NamedTuple

from triweave.planner.time_stack import Bytes, Measured

STRIDED_SHARE = 0.6
"""Of the bandwidth of contiguous tensors, what PyTorch's element-wise kernels reach on halves of a tensor or with
broadcast operands: they load two bytes at a time there, not sixteen. From what computing SwiGLU again costs on H200
(0.27 ms where its bytes take 0.16), and from the eager less the compiled layer (twice its bytes)."""


class Kernel(NamedTuple):
    """One pass over memory."""

    name: str
    read: float
    """Bytes per element."""
    write: float
    measured: tuple[Measured, ...] = ()
    """What a machine profile may know of it."""
    strided: bool = False
    """Whether an element-wise kernel reads or writes a view that is not contiguous, or broadcasts an operand."""

    @property
    def bytes(self) -> float:
        """What it costs, as bytes moved at the rate of contiguous tensors."""
        moved = self.read + self.write
        return moved / STRIDED_SHARE if self.strided else moved


class Operation(NamedTuple):
    """Kernels in the order in which they run."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...] = ()

    @property
    def bytes(self) -> Bytes:
        """Both directions."""
        measured = (known(self.forward), known(self.backward))
        return Bytes(moved(self.forward), moved(self.backward), measured)


def known(kernels: tuple[Kernel, ...]) -> tuple[Measured, ...]:
    """What a profile may know of several kernels; nothing unless it may of each."""
    if not all(kernel.measured for kernel in kernels):
        return ()
    return tuple(one for kernel in kernels for one in kernel.measured)


def moved(kernels: tuple[Kernel, ...]) -> float:
    """Bytes per element of several kernels."""
    return sum(kernel.bytes for kernel in kernels)
