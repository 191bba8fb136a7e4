"""The device of a rank, and the process group of all ranks: where they meet, once each is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from triweave.config.schema import RuntimeConfig
from triweave.errors import InputError, Problem, RunFailed
from triweave.recovery.self_check import together
from triweave.training.process import Process


def choose_device(config: RuntimeConfig, process: Process) -> torch.device:
    """The device of this rank.

    Raises:
        InputError: GPUs are asked for and this host has fewer than its ranks.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and gpus < process.local_world_size:
        rule = f"needs a GPU for each of the {process.local_world_size} ranks of this host, which has {gpus}"
        raise InputError(Problem("runtime.device", "cuda", rule, "cpu"))
    if gpus < process.local_world_size or gpus == 0:
        return torch.device("cpu")
    return torch.device("cuda", process.local_rank)


def meet(process: Process, timeout_s: float) -> Store | None:
    """The store at which the ranks of a run find each other; None for a single process.

    Raises:
        RunFailed: it is not to be reached.
    """
    if process.world_size == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    # What a collective was, to which group and how large, is kept of the last so many: for whoever asks after a hang.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if process.store_port is not None:
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return TCPStore("127.0.0.1", process.store_port, is_master=False, timeout=timeout)
    store: Store
    try:
        store, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunFailed(
            f"rank {process.rank} on {socket.gethostname()} has not reached the store of rank 0 at {address} within"
            f" {timeout_s:.0f} s: that name must resolve here, the port be open, and the first host be running"
            f" ({str(error).splitlines()[0]})"
        ) from None
    if process.local_world_size == process.world_size:
        # torchrun keeps one store for all attempts, and a new rank would read where a dead one listened (pytorch issue
        # 135712). The attempts of several hosts may be numbered differently: there torchrun must be told, see docs.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


@contextmanager
def process_group(
    process: Process, device: torch.device, timeout_s: float, store: Store | None = None
) -> Iterator[None]:
    """The default process group of a run: NCCL on GPUs, gloo on the CPU; none for a single process.

    After an error the group stays: leaving it would make the other ranks fail too, before this one has told why.

    Args:
        process: this rank.
        device: its device.
        timeout_s: seconds after which a collective gives up.
        store: where the ranks have met already; None lets them meet now.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if process.world_size == 1:
        yield
        return
    store = store or meet(process, timeout_s)
    with together(store, "making the process group of all ranks", process.rank, process.world_size):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    yield
    if device.type == "cuda":
        # What peers copy out of this rank's memory, and it out of theirs, is done before anyone is gone.
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()
