"""What a doctor finds: one sentence of what is wrong, one of what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

CURES: Mapping[str, str] = MappingProxyType(
    {
        "different-versions": "install the same environment on every host; in a container, the same image",
        "different-gpus": "ask the scheduler for one kind of GPU, or name this kind in the run's `cluster`",
        "gpu-memory-taken": "end what else runs on that card (`nvidia-smi` lists it), or take another host",
        "gpu-slowed": "the card is too hot or short of power: have its cooling and supply looked at; take a spare host",
        "gpu-errors": "uncorrected memory errors: drain the host and have the card reset or replaced",
        "gpu-links": "an NVLink is down: drain the host; `nvidia-smi nvlink -s` shows which",
        "slow-rank": "compare its clocks and temperature above; see what else runs on that host; take a spare host",
        "slow-link": "look at that host's cable, port and switch; for NCCL see that NCCL_IB_HCA names every port",
        "slow-group": "compare with the pairs above; NCCL_DEBUG=INFO says which network NCCL took",
        "group-failed": "see the findings above; otherwise a firewall, or an interface that the hosts do not share",
        "tp-across-hosts": "let layout.tp divide the ranks of a host: tensor parallelism talks in every layer",
        "rank-order": "number ranks host by host: torchrun's static rendezvous with --node-rank, not c10d",
        "wrong-interface": "name an interface that this host has, or leave the variable unset",
        "loopback-address": "name the interface in GLOO_SOCKET_IFNAME, or give the host's name its real address",
        "disk-full": "free that disk, keep fewer checkpoints (checkpoint.keep) or set output_dir to another one",
        "disk-slow": "save seldom (checkpoint.every_steps), or set output_dir to a faster disk",
        "host-memory-low": "end what else runs on that host: checkpoints and data are staged in host memory",
        "small-shm": "give the container a larger /dev/shm (docker --shm-size, a memory emptyDir in Kubernetes)",
        "few-open-files": "raise it: ulimit -n 65536",
        "locked-memory": "ulimit -l unlimited in the job; LimitMEMLOCK=infinity for the scheduler's daemon",
        "few-cores": "the scheduler binds ranks too tightly: ask for more --cpus-per-task and repeat it on srun",
        "clock-skew": "start chrony or ntpd on that host: logs and timelines of the hosts do not line up",
        "other-cluster": "correct the run's `cluster`, or start as many ranks as it has GPUs",
    }
)
"""What to do for each kind of finding; docs/doctor.md has them at length."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong."""

    kind: str
    """A key of `CURES`."""
    where: str
    """Which hosts, ranks or groups."""
    what: str
    """What is wrong there, with the numbers."""

    @property
    def cure(self) -> str:
        """What to do."""
        return CURES[self.kind]


FATAL = frozenset({"different-versions", "wrong-interface", "loopback-address"})
"""With these no process group is made: it would hang or fail for a reason that is known already."""


def spell_ranks(ranks: Sequence[int]) -> str:
    """Ranks in few words.

    >>> spell_ranks([0, 1, 2, 3]), spell_ranks([5]), spell_ranks([0, 4, 8]), spell_ranks([0, 1, 5])
    ('ranks 0-3', 'rank 5', 'ranks 0, 4, 8', 'ranks 0, 1, 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and all(after == before + 1 for before, after in pairwise(ranks)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
