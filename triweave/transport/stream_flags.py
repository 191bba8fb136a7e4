"""Flags that one GPU raises in another's memory and waits for in its own, and copies, as steps of a stream.

They are the driver's stream memory operations (CUDA driver API, "Stream Memory Operations"): the GPU's front end
carries them out, where torch's `put_signal` and `wait_signal` are kernels. A matrix product that holds every
multiprocessor keeps such a kernel, and with it the transfer behind it, waiting until the product is done; that is
the time the transfer was to be hidden in. ByteDance's Flux (2406.06858) signals in the same way.

What a step costs the host counts as much as what it costs the GPU: flags that follow each other are one call, put
together once and for all, and a copy is one call with two addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32."""
WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
WRITE_AFTER_ALL_BEFORE = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT: a fence over the whole system precedes the write."""


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


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a write, or a wait, of 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


Signal = Any
"""A ctypes array of `MemoryOperation`, done in its order: the stub types of ctypes cannot name its length."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The functions of the CUDA driver that are needed; each gives a CUresult."""

    batch: Callable[[int, int, Signal, int], int]
    """cuStreamBatchMemOp: stream, number of operations, operations, flags."""
    copy: Callable[[int, int, int, int], int]
    """cuMemcpyAsync: where to, where from, bytes, stream."""


@dataclass(frozen=True, slots=True)
class StreamFlags:
    """Flags of a group. A flag is one or zero; whoever waits for it lowers it. At first all are down.

    A flag that is raised twice before it is lowered once would be lost. It never is: STAGED and TAKEN are raised by
    turns, as are ARRIVED and FREE, each only after the other was waited for and lowered.

    There is no counter and no state on the host: the same steps can be captured in a CUDA graph and repeated.
    """

    driver: Driver
    addresses: tuple[int, ...]
    """Where each rank's flags lie, as this process sees them."""
    rank: int

    def raising(self, flag: Flag, peers: Iterable[int]) -> list[MemoryOperation]:
        """Tell `peers`, after everything that the stream has done before."""
        return [self._write(self._address(peer, flag, self.rank), 1) for peer in peers]

    def awaiting(self, flag: Flag, peers: Iterable[int]) -> list[MemoryOperation]:
        """Make the stream wait until each of `peers` has told this rank, and lower the flag."""
        steps = []
        for address in (self._address(self.rank, flag, peer) for peer in peers):
            steps += [MemoryOperation(WAIT, address, 1, WAIT_EQUAL), self._write(address, 0)]
        return steps

    def signal(self, *steps: list[MemoryOperation]) -> Signal:
        """Steps as one call takes them."""
        all_steps = [step for some in steps for step in some]
        return (MemoryOperation * len(all_steps))(*all_steps)

    def run(self, signal: Signal, stream: int) -> None:
        """Let a stream (its handle) do the steps of a signal."""
        _check("cuStreamBatchMemOp", self.driver.batch(stream, len(signal), signal, 0))

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Let a stream (its handle) copy from one address to another, of whichever GPU."""
        _check("cuMemcpyAsync", self.driver.copy(to, source, num_bytes, stream))

    def _write(self, address: int, value: int) -> MemoryOperation:
        return MemoryOperation(WRITE, address, value, WRITE_AFTER_ALL_BEFORE)

    def _address(self, holder: int, flag: Flag, teller: int) -> int:
        return self.addresses[holder] + 4 * (flag * len(self.addresses) + teller)


def flag_bytes(tp: int) -> int:
    """Memory of a rank's flags."""
    return 4 * len(Flag) * tp


def cuda_driver() -> Driver:
    """The driver that is loaded.

    Raises:
        OSError: there is no CUDA driver here.
    """
    library = ctypes.CDLL("libcuda.so.1")
    batch, copy = library.cuStreamBatchMemOp_v2, library.cuMemcpyAsync
    batch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    batch.restype = copy.restype = ctypes.c_int
    return Driver(batch, copy)


def _check(name: str, result: int) -> None:
    if result:
        raise RuntimeError(f"{name} failed with CUDA driver error {result}")
