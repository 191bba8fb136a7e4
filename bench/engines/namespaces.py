"""Four hosts of two ranks made of network namespaces: steps over slow links beside the planner, and the doctor.

python bench/engines/namespaces.py                      # as root; links at full speed, a tenth and a hundredth
python bench/engines/namespaces.py --only doctor

Tensor parallelism inside a host, pipeline stages between hosts. What an action takes is measured once, at full speed;
what a message takes is measured by `triweave doctor` at each speed; the planner's pipeline puts both together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hosts import Hosts, obstacle
from job import document, make_files, over_hosts, write_run

from triweave.planner.time_pipeline import StageCost, pipeline_s

HOSTS, PER_HOST = 4, 2
SEQ, HIDDEN, MICRO_BATCHES, STEPS = 512, 256, 8, 7
SIZE = SEQ // PER_HOST * HIDDEN * 4
"""Bytes of a message: a rank's slice of the sequence in float32."""
SLOWEST_TENTH = (10, 100)


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
        make_files(folder, hidden=HIDDEN, layers=8, heads=4, seq=SEQ, lines=64)
        if options.only != "doctor":
            for line in steps(hosts, folder):
                print(line, flush=True)
        if options.only != "steps":
            for fault, found in faults(hosts, folder):
                print(f"| {fault} | {found or 'NOT FOUND'} |", flush=True)
                good &= bool(found)
    return 0 if good else 1


def run_file(folder: Path, name: str, **layout: Any) -> Path:
    """The run, with its output under `name`."""
    return write_run(
        folder,
        name,
        data={"seq_len": SEQ, "packing": False},
        layout={"tp": PER_HOST, "pp": HOSTS, **layout},
        train={"steps": STEPS, "global_batch": MICRO_BATCHES},
    )


def steps(hosts: Hosts, folder: Path) -> Iterator[str]:
    """A row for each speed of the links."""
    yield "| link, Mbit/s | message, ms | step measured, s | predicted, s | off |"
    yield "|---|---|---|---|---|"
    costs: list[StageCost] = []
    rest_s, rate = 0.0, None
    for divisor in (None, *SLOWEST_TENTH):
        mbit = None if divisor is None or rate is None else max(1, int(rate / divisor))
        for number in range(1, HOSTS + 1):
            hosts.shape(f"h{number}", mbit)
        name = f"at-{mbit or 'full'}"
        run = run_file(folder, name)
        code, said = over_hosts(hosts, PER_HOST, ("doctor", run.name, "--device", "cpu", "--json"), folder, "doctor")
        links = document(said)["links"]
        message_s = statistics.median(message(link) for link in links if link["kind"] == "across")
        code, said = over_hosts(hosts, PER_HOST, ("train", run.name), folder, "train")
        if code != 0:
            yield f"| {mbit or 'full'} | failed: {said[-300:]} |"
            return
        lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        measured = statistics.median(json.loads(line)["step_s"] for line in lines[2:])
        if not costs:
            rate = 8e-6 * statistics.median(link["bytes_per_s"] for link in links if link["kind"] == "within")
            costs, length = stage_costs(folder / name / "pipeline.json")
            third = json.loads(lines[2])["step_s"]
            rest_s = third - length
        predicted = rest_s + pipeline_s("1f1b", HOSTS, 1, MICRO_BATCHES, costs, message_s)
        off = 100 * (predicted / measured - 1)
        yield f"| {mbit or 'full'} | {1e3 * message_s:.1f} | {measured:.3f} | {predicted:.3f} | {off:+.1f} % |"


def message(link: dict[str, Any]) -> float:
    """Seconds of one activation, both ranks of the host sending at once."""
    seconds: float = link["latency_s"] + SIZE / link["bytes_per_s"]
    return seconds


def stage_costs(path: Path) -> tuple[list[StageCost], float]:
    """Median times of each stage's forward and backward in one step, and the length of its pipeline."""
    ranks = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    costs = []
    for spans in ranks:
        of = {
            kind: statistics.median(end - begin for name, _, _, begin, end in spans if name == kind)
            for kind in {span[0] for span in spans}
        }
        forward = next(seconds for kind, seconds in of.items() if kind.lower().startswith("f"))
        backward = next(seconds for kind, seconds in of.items() if kind.lower().startswith("b"))
        costs.append(StageCost(forward, backward, 0.0))
    begins, ends = (pick(span[index] for spans in ranks for span in spans) for pick, index in ((min, 3), (max, 4)))
    return costs, ends - begins


def faults(hosts: Hosts, folder: Path) -> Iterator[tuple[str, str]]:
    """The doctor on planted faults: what it says of each, nothing if it does not find it."""
    run = run_file(folder, "healthy")
    code, said = visit(hosts, folder, run.name)
    yield "nothing planted", "nothing found" if code == 0 else f"found {said}"
    hosts.shape("h3", 20)
    yield "h3 sends at 20 Mbit/s", visit(hosts, folder, run.name)[1].get("slow-link", "")
    hosts.shape("h3", None)
    wrong = {2: {"GLOO_SOCKET_IFNAME": "ib0"}}
    yield "h2 has GLOO_SOCKET_IFNAME=ib0", visit(hosts, folder, run.name, wrong)[1].get("wrong-interface", "")
    wrong = {2: {"NCCL_SOCKET_IFNAME": "lo"}}
    yield "h2 has NCCL_SOCKET_IFNAME=lo", visit(hosts, folder, run.name, wrong)[1].get("wrong-interface", "")
    wide = run_file(folder, "wide", tp=4, pp=2, tp_across_nodes=True)
    yield "tp 4 on hosts of 2", visit(hosts, folder, wide.name)[1].get("tp-across-hosts", "")


def visit(
    hosts: Hosts, folder: Path, run: str, env: dict[int, dict[str, str]] | None = None
) -> tuple[int, dict[str, str]]:
    """Exit code of a visit and its findings by kind."""
    words = ("doctor", run, "--device", "cpu", "--json", "--timeout", "60")
    code, said = over_hosts(hosts, PER_HOST, words, folder, "doctor", env)
    return code, {one["kind"]: f"{one['where']}: {one['what']}" for one in document(said)["findings"]}


if __name__ == "__main__":
    sys.exit(main())
