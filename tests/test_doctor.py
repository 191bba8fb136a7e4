"""`triweave doctor`: a fault is planted into one of several gloo ranks and found by name; without one nothing is."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import make_workspace, torchrun, triweave
from safetensors.torch import load_file

from triweave.cluster import GIB, parse_cluster
from triweave.doctor.findings import CURES, Finding
from triweave.doctor.judge import chosen_interfaces, judge
from triweave.doctor.judge_measured import judge_groups, judge_links, judge_ranks
from triweave.doctor.look import parse_topology
from triweave.doctor.measure import Between, Sample, Waiting, best_of, rate_of, tournament
from triweave.doctor.run import Options, Report, groups_of, visit
from triweave.doctor.seen import DiskSeen, GpuSeen, Seen, seen_from_json
from triweave.doctor.table import to_json, to_text
from triweave.doctor.wanted import Wanted, wanted_by
from triweave.layout import Layout
from triweave.planner.profile import CollectiveCurve, LinkCurve, Profile
from triweave.training.process import Process
from triweave.training.start_ranks import run_ranks

NOTHING = Wanted()
ROOT = Path(__file__).parent.parent


# --- planted into real ranks ------------------------------------------------------------------------------------------


def on_hosts(process: Process, per_host: int) -> None:
    """Let this rank believe that it is on a host with `per_host` ranks."""
    name = f"h{process.rank // per_host}"
    socket.gethostname = lambda: name
    socket.gethostbyname = lambda host: "192.0.2.1"


def another_torch(process: Process) -> None:
    """Rank 1 has another version."""
    if process.rank == 1:
        torch.__version__ = "2.12.0"  # type: ignore[assignment]


def another_interface(process: Process) -> None:
    """A host's NCCL is told an interface that is not there."""
    os.environ["NCCL_SOCKET_IFNAME"] = "ibs9"


def full_disk(process: Process) -> None:
    """Rank 0 cannot write more than a MiB."""
    if process.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def slow_link(process: Process) -> None:
    """Four hosts, and whatever rank 2 sends takes 20 ms a MiB more."""
    on_hosts(process, 1)
    if process.rank == 2:
        send = dist.send

        def slow_send(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
            time.sleep(20e-3 * tensor.nbytes / 2**20)
            return send(tensor, *args, **more)

        dist.send = slow_send


def nothing(process: Process) -> None:
    """Two hosts, and all is well."""
    on_hosts(process, 2)


def one_a_host(process: Process) -> None:
    """A host a rank, so that each rank's clock is looked at."""
    on_hosts(process, 1)


def slowed(times: int) -> None:
    """A product, `times` times."""
    a = torch.ones(192, 192)
    for _ in range(times):
        a @ a


def planted(
    plant: Callable[[Process], None], out: Path, options: Options, late_s: float, slower: int, process: Process
) -> int:
    """Visit with a fault; rank 0 leaves the report in a file. Rank 1's clock is `late_s` behind."""
    plant(process)

    def keep(report: Report) -> None:
        out.write_text(json.dumps(to_json(report)) + "\n" + "\n".join(to_text(report)))

    odd = process.rank == 1
    work = functools.partial(slowed, 10 + slower * odd)
    return visit(options, keep, process, clock=lambda: time.time() - late_s * odd, work=work)


def found(
    plant: Callable[[Process], None],
    folder: Path,
    ranks: int,
    wanted: Wanted = NOTHING,
    late_s: float = 0.0,
    slower: int = 0,
) -> tuple[int, list[dict[str, str]], str]:
    """Exit code, findings and page of a visit to ranks with a fault."""
    out = folder / "report.json"
    options = Options(folder, "cpu", wanted, timeout_s=60.0)
    code = run_ranks(ranks, functools.partial(planted, plant, out, options, late_s, slower))
    said, _, page = out.read_text().partition("\n")
    findings: list[dict[str, str]] = json.loads(said)["findings"]
    return code, findings, page


def test_groups_of_a_layout_are_measured() -> None:
    """Every axis has its groups; with shard groups those that share and those across stand in place of all replicas."""
    seen = job(1)

    def measured(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
        return dict(groups_of(Wanted(layout), seen))

    every = [tuple(range(8))]
    assert measured(Layout(tp=2, dp=4)) == {
        "tp": Layout(tp=2, dp=4).groups("tp"),
        "dp": [(0, 2, 4, 6), (1, 3, 5, 7)],
        "world": every,
    }
    found = measured(Layout(tp=2, dp=4, shard="full", shard_group=2))
    assert found.keys() == {"tp", "shards", "across", "world"}
    assert found["shards"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert found["across"] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_healthy_job_has_no_findings(tmp_path: Path) -> None:
    """With nothing planted nothing is found, the exit code is 0, and the page shows both hosts and every group."""
    code, findings, page = found(nothing, tmp_path, 4, Wanted(Layout(tp=2, pp=2)))
    assert (code, findings) == (0, [])
    lines = [line.split()[0] for line in page.splitlines()]
    assert lines[:4] == ["job", "gpus", "h0", "h1"]
    assert {"tp", "pp", "world", "in", "over", "alone", "verdict"} <= set(lines)
    assert not list(tmp_path.glob(".triweave-doctor*"))


@pytest.mark.parametrize(
    ("plant", "ranks", "more", "kind", "where", "words"),
    [
        (another_torch, 2, {}, "different-versions", "rank 1 on", "torch is 2.12.0"),
        (another_interface, 2, {}, "wrong-interface", "", "NCCL_SOCKET_IFNAME=ibs9 names none of"),
        (full_disk, 2, {}, "disk-full", "", "32 MiB cannot be written (File too large)"),
        (slow_link, 4, {}, "slow-link", "h2, all that it sends", "from rank 2 to rank"),
        (one_a_host, 4, {"late_s": 3.0}, "clock-skew", "h1", "3.00 s behind"),
        (nothing, 4, {"slower": 2}, "slow-rank", "rank 1 on h0", "% longer than most"),
        (nothing, 4, {"wanted": Wanted(Layout(tp=4))}, "tp-across-hosts", "ranks 0-3", "of 4 is on h0, h1"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_a_planted_fault_is_named(
    plant: Callable[[Process], None], ranks: int, more: Any, kind: str, where: str, words: str, tmp_path: Path
) -> None:
    """The fault alone is found, with its place and its cure, and the exit code is 1."""
    code, findings, page = found(plant, tmp_path, ranks, **more)
    assert code == 1
    assert [one["kind"] for one in findings] == [kind]
    assert where in findings[0]["where"]
    assert words in findings[0]["what"]
    assert f"cure: {CURES[kind]}" in page


def come_late(options: Options, process: Process) -> int:
    """Rank 1 does not come."""
    if process.rank == 1:
        time.sleep(600)
    return visit(options, lambda report: None, process)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The doctor says which rank is missing and waits no longer than it was told."""
    begin = time.monotonic()
    assert run_ranks(3, functools.partial(come_late, Options(tmp_path, "cpu", timeout_s=2.0))) == 1
    assert "rank 1 has not come within 2 s (of 3 ranks)" in capfd.readouterr().err
    assert time.monotonic() - begin < 60


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_verb_reads_a_run_file(tmp_path: Path) -> None:
    """Under torchrun the groups of the run's layout are measured and the page is one JSON document."""
    folder = make_workspace(tmp_path)
    done = torchrun(4, "doctor", "run.yaml", "--device", "cpu", "--json", cwd=folder)
    said = json.loads(done.stdout)
    assert {group["kind"] for group in said["groups"]} == {"tp", "pp", "world"}
    assert said["healthy"] == (done.returncode == 0)
    assert len(said["seen"]) == 4


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    """A number of ranks below 1, a run file and a profile that are not there are input errors."""
    for words in (("--nproc", "0"), ("no.yaml",), ("--profile", "no.yaml"), ("--timeout", "0")):
        assert triweave("doctor", *words, cwd=tmp_path).returncode == 2


def test_a_run_says_what_its_checkpoints_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve bytes a parameter for each kept checkpoint and the one being written, and the exported folder.

    Eight with moments in bfloat16.
    """
    folder = make_workspace(tmp_path)
    monkeypatch.chdir(folder)
    wanted, out = wanted_by(Path("run.yaml"), 4)
    numel = sum(tensor.numel() for tensor in load_file(folder / "model" / "model.safetensors").values())
    assert out == Path("out")
    assert wanted.saved_bytes == numel * (12 * (9 + 1) + 2)
    small = Path("run.yaml").read_text().replace("optimizer: {", "optimizer: {moments: bfloat16, ")
    Path("small.yaml").write_text(small)
    assert wanted_by(Path("small.yaml"), 4)[0].saved_bytes == numel * (8 * (9 + 1) + 2)


# --- planted into what ranks say --------------------------------------------------------------------------------------

H100 = GpuSeen("NVIDIA H100 80GB HBM3", int(79.11 * GIB), int(78.6 * GIB), 1980.0, 1980.0, 41.0, 310.0, 0)


def job(hosts: int = 2, per_host: int = 8, gpu: GpuSeen | None = H100) -> list[Seen]:
    """What the ranks of a healthy job see."""
    return [
        Seen(
            rank=rank,
            local_rank=rank % per_host,
            host=f"node{rank // per_host}",
            address=f"10.0.0.{rank // per_host + 1}",
            device=f"cuda:{rank % per_host}",
            versions={"torch": "2.11.0", "NCCL": "2.28.3"},
            settings={"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "mlx5"},
            interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1"},
            adapters=("mlx5_0", "mlx5_1"),
            memory_bytes=2048 * GIB,
            memory_free_bytes=1900 * GIB,
            shared_memory_bytes=1024 * GIB,
            open_files=65536,
            locked_memory_bytes=None,
            cores=208,
            gpu=gpu,
            topology=ALL_JOINED if rank % per_host == 0 else (),
            disk=DiskSeen("runs", 9000 * GIB, 2e9) if rank % per_host == 0 else None,
        )
        for rank in range(hosts * per_host)
    ]


ALL_JOINED = tuple(tuple("X" if row == column else "NV18" for column in range(8)) for row in range(8))
ONE_LINK_DOWN = (("X", "NV17", *["NV18"] * 6), ("NV17", "X", *["NV18"] * 6), *ALL_JOINED[2:])


@pytest.mark.parametrize(
    ("rank", "change", "kind", "words"),
    [
        (3, {"gpu": replace(H100, model="NVIDIA A100")}, "different-gpus", "has NVIDIA A100"),
        (3, {"gpu": replace(H100, free_bytes=60 * GIB)}, "gpu-memory-taken", "60.0 of 79.1 GiB"),
        (3, {"gpu": replace(H100, slowed_by=("heat",))}, "gpu-slowed", "held down by heat, at 1980 MHz"),
        (3, {"gpu": replace(H100, errors=2)}, "gpu-errors", "2 uncorrected"),
        (8, {"topology": ONE_LINK_DOWN}, "gpu-links", "NV17 between GPU 0 and 1; other pairs have NV18"),
        (8, {"disk": DiskSeen("runs", 3 * GIB, 2e9)}, "disk-full", "3.0 GiB are free"),
        (8, {"disk": DiskSeen("runs", 9000 * GIB, 2e6)}, "disk-slow", "2 MB/s"),
        (8, {"memory_free_bytes": GIB}, "host-memory-low", "1.0 of 2048 GiB"),
        (8, {"shared_memory_bytes": 64 * 2**20}, "small-shm", "64 MiB"),
        (8, {"open_files": 256}, "few-open-files", "256 files"),
        (8, {"locked_memory_bytes": 8 * 2**20}, "locked-memory", "8192 KiB"),
        (8, {"cores": 1}, "few-cores", "8 ranks share 1 cores"),
        (8, {"settings": {"NCCL_SOCKET_IFNAME": "lo"}}, "wrong-interface", "is the loopback"),
        (8, {"settings": {"NCCL_IB_HCA": "=ibp1"}}, "wrong-interface", "NCCL_IB_HCA==ibp1 names none of mlx5_0"),
        (8, {"versions": {"torch": "2.12.0", "NCCL": "2.28.3"}}, "different-versions", "torch is 2.12.0, and 2.11.0"),
    ],
)
def test_what_a_rank_says_is_judged(rank: int, change: dict[str, Any], kind: str, words: str) -> None:
    """One odd thing among sixteen ranks is one finding, at that rank or host, through JSON and back."""
    seen = job()
    seen[rank] = replace(seen[rank], **change)
    wanted = Wanted(Layout(tp=8, dp=2), parse_cluster("2x8xh100-80gb"), saved_bytes=4 * GIB)
    (finding,) = judge([seen_from_json(one.to_json()) for one in seen], wanted)
    assert finding.kind == kind
    assert words in finding.what
    assert (f"rank {rank}" in finding.where) or ("node1" in finding.where)


def test_a_healthy_cluster_is_let_be() -> None:
    """A job in which nothing is odd has no finding."""
    assert judge(job(), Wanted(Layout(tp=8, dp=2), parse_cluster("2x8xh100-80gb"))) == []


def test_another_cluster_and_order_are_named() -> None:
    """Ranks that are dealt out to hosts in turn, and a cluster that has other GPUs and nodes, are each named."""
    seen = [replace(one, host=f"node{one.rank % 2}") for one in job()]
    kinds = [one.kind for one in judge(seen, Wanted(None, parse_cluster("4x8xh200-141gb")))]
    assert kinds == ["rank-order", "rank-order", "other-cluster", "other-cluster"]


def test_gloo_must_not_listen_on_the_loopback() -> None:
    """Without GLOO_SOCKET_IFNAME, a host whose name resolves to 127.0.1.1 is named where there are several hosts."""
    seen = [replace(one, device="cpu", address="127.0.1.1", gpu=None, topology=()) for one in job()]
    assert {one.kind for one in judge(seen, Wanted())} == {"loopback-address"}
    assert judge(seen[:8], Wanted()) == []


@pytest.mark.parametrize(
    ("value", "exact", "chosen"),
    [
        ("eth", False, ["eth0", "eth1"]),
        ("=eth", False, []),
        ("=eth1", False, ["eth1"]),
        ("^lo,docker", False, ["eth0", "eth1"]),
        ("^=eth0,lo", False, ["eth1", "docker0"]),
        ("eth", True, []),
        ("eth0,eth1", True, ["eth0", "eth1"]),
        ("ib0", True, []),
    ],
)
def test_interfaces_are_chosen_as_the_libraries_do(value: str, exact: bool, chosen: list[str]) -> None:
    """NCCL takes prefixes, `=` and `^`; gloo exact names; an interface without an address counts for neither."""
    have = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.1.1", "docker0": "172.17.0.1", "ib0": ""}
    assert chosen_interfaces(value, have, exact=exact) == chosen


def test_topology_is_read() -> None:
    """What nvidia-smi prints of links, with its colours, adapters and legend, becomes the GPUs' rows alone."""
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tPIX\t0-51\nGPU1\tNV18\t X \tSYS\t52-103\n"
        "NIC0\tPIX\tSYS\t X \n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )
    assert parse_topology(text) == (("X", "NV18"), ("NV18", "X"))


def test_everybody_meets_everybody_once() -> None:
    """A tournament has each pair once, and nobody twice in a round."""
    for count in range(1, 10):
        rounds = tournament(count)
        pairs = [frozenset(pair) for round_ in rounds for pair in round_]
        assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
        assert all(len({rank for pair in round_ for rank in pair}) == 2 * len(round_) for round_ in rounds)


def links(*, slow: dict[tuple[int, int], float]) -> list[Between]:
    """Messages between four hosts of one rank at 40 GB/s, but for some."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    return [Between("across", pair, slow.get(pair, 40e9), 1e-5, 2**26) for pair in pairs]


def test_a_slow_host_and_a_slow_pair_are_told_apart() -> None:
    """Where all that a host receives is slow the host is named, where one way of one pair is, the pair."""
    seen = job(4, 1)
    port = links(slow={(a, 3): 4e9 for a in range(3)})
    (finding,) = judge_links(port, seen, on_gpu=True)
    assert finding.where == "node3, all that it receives"
    (finding,) = judge_links(links(slow={(1, 2): 20e9}), seen, on_gpu=True)
    assert finding.where == "rank 1 on node1 to rank 2 on node2"
    assert list(judge_links(links(slow={(1, 2): 30e9}), seen, on_gpu=True)) == []


def test_words_that_waited_do_not_make_a_slow_link_fast() -> None:
    """Words of one pair wait behind another pair's messages; a link of 2.5 MB/s is one whatever they took."""
    size, one_way_s = 262_144, 0.105
    for there_and_back_s in (1e-4, 0.1, 0.2, 0.21, 5.0):
        assert rate_of(size, there_and_back_s, one_way_s + 5e-5) <= 2 * size / one_way_s
    assert rate_of(size, 1e-4, one_way_s + 5e-5) == pytest.approx(size / one_way_s)


def test_a_busy_host_is_no_slow_link() -> None:
    """What is slow because its processes waited for a processor is not named; what is slow beside that is."""
    seen = job(2, 2)
    within = [Between("within", pair, 4e9, 1e-5, 2**21) for pair in ((0, 1), (1, 0), (2, 3), (3, 2))]
    groups = [Between("tp", ranks, 4e9, 1e-5, 2**21) for ranks in ((0, 1), (2, 3))]
    for unhindered, kinds in ((3e9, []), (0.5e9, ["slow-link", "slow-group"])):
        late = {"bytes_per_s": 0.4e9, "unhindered_bytes_per_s": unhindered}
        found = [
            *judge_links([replace(within[0], **late), *within[1:]], seen, on_gpu=False),
            *judge_groups([replace(groups[0], **late), *groups[1:]], seen, on_gpu=False),
        ]
        assert [one.kind for one in found] == kinds


def test_what_was_waited_is_taken_off() -> None:
    """What the best time waited is taken off it, whatever others waited; a hundredth is left of what only waited."""
    samples = [Sample(4e-3, 0.0), Sample(9e-3, 0.0), Sample(5e-3, 0.0)]
    assert best_of(samples, [1e-3, 9e-3, 0.0]) == pytest.approx((4e-3, 3e-3))
    assert best_of(samples[:1], [7e-3]) == pytest.approx((4e-3, 4e-5))


def test_waiting_is_what_the_kernel_says(tmp_path: Path) -> None:
    """Beside another process on its processor, this one waits for as long as it neither runs nor sleeps."""
    code = (
        "import os, time\n"
        "from triweave.doctor.measure import Waiting\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "child = os.fork()\n"
        "while child == 0: pass\n"
        "waiting = Waiting()\n"
        "waited, ran, begin = waiting.seconds(), time.process_time(), time.monotonic()\n"
        "while time.monotonic() < begin + 0.5: pass\n"
        "idle = time.monotonic() - begin - (time.process_time() - ran)\n"
        "print(idle, waiting.seconds() - waited)\n"
        "os.kill(child, 9)\n"
    )
    done = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True)
    idle, waited = map(float, done.stdout.split())
    assert idle > 0.1
    assert waited == pytest.approx(idle, rel=0.2)
    assert Waiting(tmp_path / "no such kernel").seconds() == 0.0


def test_links_and_groups_are_held_against_a_profile() -> None:
    """When all links are equally slow only a profile tells; with one, each is named."""
    profile = Profile(
        2,
        "h100-80gb",
        "2.11.0",
        "2026-12-01",
        "test",
        collectives=(CollectiveCurve("all_reduce", 2, "node", ((2**26, 3e-4),)),),
        point_to_point=(LinkCurve("node", ((2**26, 2**26 / 400e9),)),),
    )
    seen = job(2, 2)
    within = [Between("within", pair, 40e9, 1e-5, 2**26) for pair in ((0, 1), (1, 0), (2, 3), (3, 2))]
    assert list(judge_links(within, seen, on_gpu=True)) == []
    assert [one.kind for one in judge_links(within, seen, on_gpu=True, profile=profile)] == ["slow-link"] * 4
    groups = [Between("tp", (2 * i, 2 * i + 1), 2**26 / 1e-3, 1e-5, 2**26) for i in range(2)]
    assert list(judge_groups(groups, seen, on_gpu=True)) == []
    assert [one.kind for one in judge_groups(groups, seen, on_gpu=True, profile=profile)] == ["slow-group"] * 2


def test_a_rank_that_is_slower_by_a_fifth_is_named() -> None:
    """20 % beyond the median is a finding, the usual 3 % between cards is none."""
    seen = job()
    times = {one.rank: 1.0 + 0.002 * one.rank for one in seen}
    assert list(judge_ranks(times, seen, on_gpu=True)) == []
    (finding,) = judge_ranks(times | {11: 1.2}, seen, on_gpu=True)
    assert finding.where == "rank 11 on node1"


def test_a_large_job_stays_on_a_screen() -> None:
    """Of 64 hosts only the first and those with a finding have a line."""
    report = Report(tuple(job(64, 8)), (Finding("disk-full", "node40", "full"),))
    lines = list(to_text(report))
    assert len(lines) < 24
    assert sum(line.startswith("node") for line in lines) == 2


def test_every_finding_is_explained() -> None:
    """Each kind of finding has its place in the documentation, and the page names no other."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    section = page.partition("## What it finds")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE)) == set(CURES)
