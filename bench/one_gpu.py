"""Several ranks on one GPU, with NCCL and copy engines as on several: for results alone, since they take turns.

NCCL refuses two ranks on one GPU of one host. `NCCL_HOSTID` says that each rank is on a host of its own, and they talk
through sockets of the loopback interface. torch's symmetric memory is asked not to mind.
"""

from __future__ import annotations

import os

import torch

from triweave.groups import Group
from triweave.training.process import Process
from triweave.transport import choose


def device_here() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def share_gpu(process: Process) -> torch.device:
    """Have this process, before it meets the others, use the first GPU with them; without a GPU, the CPU.

    Copy engines are taken for granted: that peers are on GPUs of their own, which `choose` asks for, is not so here.
    """
    os.environ["NCCL_HOSTID"] = f"rank-{process.rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    choose._peers_are_reached = _they_are_reached
    return device_here()


def _they_are_reached(group: Group, device: torch.device) -> bool:
    return True
