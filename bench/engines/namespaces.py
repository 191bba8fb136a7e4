"""Four hosts of two ranks made of network namespaces: steps over slow links beside the planner, and the doctor.

python bench/engines/namespaces.py                      # as root; both, about ten minutes on two idle cores
python bench/engines/namespaces.py --only steps         # links at full speed, a tenth and a hundredth (links.py)
python bench/engines/namespaces.py --only doctor        # faults that the doctor must name, and nothing without one
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts import Hosts, obstacle
from job import document, make_files, over_hosts, write_run
from links import HOSTS, PER_HOST, steps

PLANTED = (str(Path(__file__).parent / "planted.py"),)


def main() -> int:
    """Run what was asked for; returns 1 if a fault was not found or a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("steps", "doctor"))
    options = parser.parse_args()
    if reason := obstacle():
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    good = True
    with tempfile.TemporaryDirectory(prefix="triweave-hosts-") as name, Hosts(HOSTS) as hosts:
        folder = Path(name)
        if options.only != "doctor":
            for line in steps(hosts, folder):
                print(line, flush=True)
        if options.only != "steps":
            print("| fault | what the doctor says |\n|---|---|", flush=True)
            for fault in FAULTS:
                found = visit(hosts, folder, fault)
                said = "; ".join(f"{kind}: {what}" for kind, what in found.items())
                as_it_should = fault.kinds[:1] == tuple(found)[:1] and set(found) <= set(fault.kinds)
                print(f"| {fault.name} | {'' if as_it_should else 'WRONG: '}{said or 'nothing'} |", flush=True)
                good &= as_it_should
    return 0 if good else 1


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is planted into hosts or ranks, and what of it must be found."""

    name: str
    kinds: tuple[str, ...] = ()
    """The finding that must come, and those that may come with it."""
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Variables by the number of a host."""
    before: Mapping[int, str] = field(default_factory=dict)
    """A line of shell by the number of a host."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Mbit/s that a host sends at."""
    layout: Mapping[str, Any] = field(default_factory=lambda: {"tp": PER_HOST, "pp": HOSTS})


FAULTS = (
    Fault("nothing planted"),
    Fault("h3 sends at 20 Mbit/s", ("slow-link", "slow-group"), slow={"h3": 20}),
    Fault(
        "a rank of h2 has torch 2.12.0",
        ("different-versions",),
        env={2: {"PLANTED": "torch=2.12.0", "RANK_OF_HOST": "1"}},
    ),
    Fault("tp 4 on hosts of 2", ("tp-across-hosts",), layout={"tp": 4, "pp": 2, "tp_across_nodes": True}),
    Fault("h3's disk has 16 MiB", ("disk-full",), before={3: "mount -t tmpfs -o size=16m tmpfs out"}),
    Fault("h2 has GLOO_SOCKET_IFNAME=ib0", ("wrong-interface",), env={2: {"GLOO_SOCKET_IFNAME": "ib0"}}),
    Fault("h2 has GLOO_SOCKET_IFNAME=lo", ("wrong-interface",), env={2: {"GLOO_SOCKET_IFNAME": "lo"}}),
    Fault("h2 has NCCL_SOCKET_IFNAME=ib", ("wrong-interface",), env={2: {"NCCL_SOCKET_IFNAME": "ib"}}),
    Fault("a rank of h4 takes 20 % longer", ("slow-rank",), env={4: {"PLANTED": "slow=1.2", "RANK_OF_HOST": "1"}}),
    Fault("nothing planted, again"),
)


def visit(hosts: Hosts, folder: Path, fault: Fault) -> dict[str, str]:
    """What the doctor finds, by kind."""
    if not (folder / "model").exists():
        make_files(folder, hidden=64, layers=4, heads=4, seq=64)
    (folder / "out").mkdir(exist_ok=True)
    run = write_run(
        folder,
        "out",
        data={"seq_len": 64, "packing": False},
        layout=fault.layout,
        train={"steps": 1, "global_batch": 8},
    )
    for name, mbit in fault.slow.items():
        hosts.shape(name, mbit)
    words = ("doctor", run.name, "--device", "cpu", "--json", "--timeout", "60")
    _, said = over_hosts(hosts, PER_HOST, words, folder, "doctor", env=fault.env, before=fault.before, program=PLANTED)
    for name in fault.slow:
        hosts.shape(name, None)
    return {one["kind"]: f"{one['where']}: {one['what']}" for one in document(said)["findings"]}


if __name__ == "__main__":
    sys.exit(main())
