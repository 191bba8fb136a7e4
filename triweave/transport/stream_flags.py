"""Flags that one GPU raises in another's memory and waits for in its own, as steps of a stream.

They are the driver's stream memory operations (CUDA driver API, "Stream Memory Operations"): the GPU's front end
carries them out, where torch's `put_signal` and `wait_signal` are kernels. A matrix product that holds every
multiprocessor keeps such a kernel, and with it the transfer behind it, waiting until the product is done; that is
the time the transfer was to be hidden in. ByteDance's Flux (2406.06858) signals in the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
WRITE_AFTER_ALL_BEFORE = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT: a fence over the whole system precedes the write."""

StreamOperation = Callable[[int, int, int, int], int]
"""Stream, address, value, flags; gives a CUresult."""


class Flag(IntEnum):
    """What a peer tells this rank. A rank has one of each for each peer."""

    STAGED = 0
    """The peer's slice lies ready to be taken."""
    TAKEN = 1
    """The peer has taken this rank's slice: another may be staged."""
    ARRIVED = 2
    """The peer's part of a sum lies in this rank's memory."""
    FREE = 3
    """The peer has summed this rank's part: another may be put there."""


RAISED_AT_FIRST = (Flag.TAKEN, Flag.FREE)
"""Nothing lies anywhere yet, so that the first transfer need not wait."""


@dataclass(frozen=True, slots=True)
class StreamFlags:
    """Flags of a group. A flag is one or zero; whoever waits for it lowers it.

    A flag that is raised twice before it is lowered once would be lost. It never is: STAGED and TAKEN are raised by
    turns, as are ARRIVED and FREE, each only after the other was waited for and lowered.

    There is no counter and no state on the host: the same steps can be captured in a CUDA graph and repeated.
    """

    write_value: StreamOperation
    wait_value: StreamOperation
    addresses: tuple[int, ...]
    """Where each rank's flags lie, as this process sees them."""
    rank: int

    def raise_at(self, peer: int, flag: Flag, stream: torch.cuda.Stream) -> None:
        """Tell `peer`, after everything that `stream` has done before."""
        self._write(self._address(peer, flag, self.rank), 1, stream)

    def await_from(self, peer: int, flag: Flag, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait until `peer` has told this rank, and lower the flag."""
        address = self._address(self.rank, flag, peer)
        _check("cuStreamWaitValue32", self.wait_value(stream.cuda_stream, address, 1, WAIT_EQUAL))
        self._write(address, 0, stream)

    def _write(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        _check("cuStreamWriteValue32", self.write_value(stream.cuda_stream, address, value, WRITE_AFTER_ALL_BEFORE))

    def _address(self, holder: int, flag: Flag, teller: int) -> int:
        return self.addresses[holder] + 4 * (flag * len(self.addresses) + teller)


def first_values(tp: int) -> list[int]:
    """A rank's flags before anything was moved, in the order in which they lie in memory."""
    return [int(flag in RAISED_AT_FIRST) for flag in Flag for _ in range(tp)]


def driver_flags(addresses: tuple[int, ...], rank: int) -> StreamFlags:
    """The flags of a group, with the functions of the driver that is loaded.

    Raises:
        OSError: there is no CUDA driver here.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    write, wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    for function in (write, wait):
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return StreamFlags(write, wait, addresses, rank)


def _check(name: str, result: int) -> None:
    if result:
        raise RuntimeError(f"{name} failed with CUDA driver error {result}")
