"""Ray: a driver that puts one actor on every host, and each actor runs the script that torchrun's engine writes.

Neither the bundles of a placement group nor a trainer's ranks follow the order of hosts, so that the driver sorts them.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

from triweave.config.validate import ResolvedRun
from triweave.launch.job import Settings, make_job
from triweave.launch.shell import Node, comment, node_script, summary


@dataclass(frozen=True, slots=True)
class _Sizes:
    nodes: int
    gpus_per_node: int
    script: str
    restarts: int


def files(resolved: ResolvedRun, settings: Settings) -> dict[str, str]:
    """The driver, and the script that it runs on every host.

    Raises:
        InputError: as `make_job`.
    """
    job = make_job(resolved, settings)
    script = f"{job.name}.sh"
    head = comment(f"{job.name}.ray.py starts it on every host.")
    sizes = _Sizes(job.num_nodes, job.gpus_per_node if job.gpu else 0, script, settings.restarts)
    constants = "".join(f"{name.upper()} = {value!r}\n" for name, value in asdict(sizes).items())
    intro = "\n".join(
        ['"""Start the ranks of a run on a Ray cluster: one actor a host."""', "", *summary(resolved, job)]
    )
    return {
        f"{job.name}.ray.py": f"{intro}\n{_IMPORTS}\n{constants}{_DRIVER}",
        script: node_script(resolved, job, settings.python, Node(head=head, stop_at_end_of_input=True)),
    }


def command(resolved: ResolvedRun, settings: Settings, folder: str) -> str:
    """What submits the driver, to the cluster that RAY_ADDRESS names."""
    job = make_job(resolved, settings)
    words = ["ray", "job", "submit", "--working-dir", folder, "--", "python", f"{job.name}.ray.py"]
    return shlex.join(words)


_IMPORTS = """
import ipaddress
import os
import pathlib
import signal
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
"""

_DRIVER = '''
STOPPED = 75  # exit code of a run that stopped on request, everything saved


@ray.remote(max_concurrency=2)
class Host:
    """The ranks of one host."""

    def __init__(self):
        self.process = None

    def address(self):
        """Where it is, and a port that is free there."""
        with socket.socket() as one:
            one.bind(("", 0))
            return ray.util.get_node_ip_address(), one.getsockname()[1]

    def run(self, script, node, master, port):
        """Run the script to its end and return its exit code."""
        told = {"NODE_RANK": str(node), "MASTER_ADDR": master, "MASTER_PORT": str(port)}
        # torchrun gives every rank its own GPU: all of the host's are for the script to see.
        environment = {**os.environ, **told}
        # Its input ends when this actor does, be it killed: then the ranks save and leave.
        self.process = subprocess.Popen(
            ["bash", "-c", script], env=environment, stdin=subprocess.PIPE, start_new_session=True
        )
        return self.process.wait()

    def stop(self):
        """Ask the ranks to save and leave."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


def start(hosts, script):
    """Run the script on every host, and return the exit code of the run."""
    # By address, as numbers: neighbours of the pipeline are then neighbours of the network.
    found = zip(ray.get([host.address.remote() for host in hosts]), hosts, strict=True)
    ordered = sorted(found, key=lambda pair: ipaddress.ip_address(pair[0][0]))
    (master, port), _ = ordered[0]
    for node, ((address, _), _) in enumerate(ordered):
        print(f"node {node}: {address}", flush=True)
    runs = [host.run.remote(script, node, master, port) for node, (_, host) in enumerate(ordered)]
    codes = ray.get(runs)
    return STOPPED if STOPPED in codes else max(codes, key=abs)


def main():
    """Place the hosts, run, and start again after a crash as often as was asked for."""
    script = (pathlib.Path(__file__).parent / SCRIPT).read_text()
    ray.init(address="auto")
    # As many processors as one actor needs: the ranks are not Ray's to count, they have the host.
    bundle = {"CPU": 1, **({"GPU": GPUS_PER_NODE} if GPUS_PER_NODE else {})}
    have = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= GPUS_PER_NODE)
    if have < NODES:
        sys.exit(f"error: the plan is for {NODES} hosts of {GPUS_PER_NODE} GPUs, and the cluster has {have}")
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    hosts = [
        Host.options(
            num_cpus=1,
            num_gpus=GPUS_PER_NODE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(NODES)
    ]
    stopping = False

    def stop(number, frame):
        nonlocal stopping
        stopping = True
        for host in hosts:
            host.stop.remote()

    # `ray job stop` kills the driver and its actors a few seconds after this; the ranks end when they have saved.
    signal.signal(signal.SIGTERM, stop)
    code = start(hosts, script)
    for again in range(RESTARTS):
        if code in (0, STOPPED) or stopping:
            break
        print(f"start {again + 1} of {RESTARTS} after a crash (exit code {code})", flush=True)
        code = start(hosts, script)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
'''
