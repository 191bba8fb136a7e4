"""What a run says and tries before its first step: who is where, what it will take, and that every group works."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import errors, make_workspace, python, triweave

from triweave.errors import RunFailed
from triweave.groups import Groups, make_groups
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.recovery.self_check import check_groups, together
from triweave.schedule.build import build_schedule
from triweave.schedule.dataflow import channels
from triweave.training.foretold import forecast_lines
from triweave.training.grid_map import MOST_HOSTS, Place, grid_map
from triweave.training.process import Process
from triweave.training.processes import meet, process_group
from triweave.training.start_ranks import run_ranks

CPU = torch.device("cpu")
SPEC = ModelSpec(64, 32, 64, 4, 4, 4, 8, max_position_embeddings=64)


def made(layout: Layout) -> Groups:
    """All groups of a layout."""
    schedule = build_schedule("1f1b", layout.pp, 1, 4)
    return make_groups(layout, SPEC, channels(schedule), CPU, 30.0)


def checked(fault: str, process: Process) -> int:
    """Check the groups of TP 2 x PP 2; rank 3 does not come to one, or gets another number."""
    store = meet(process, 30.0)
    with process_group(process, CPU, 30.0, store):
        groups = made(Layout(tp=2, pp=2, layers=(2, 2)))
        if process.rank == 3 and fault == "missing":
            time.sleep(600)
        if process.rank == 3 and fault == "wrong":
            reduced = dist.all_reduce

            def off_by_one(tensor: torch.Tensor, **more: object) -> object:
                tensor += 1
                return reduced(tensor, **more)  # type: ignore[arg-type]

            dist.all_reduce = off_by_one  # type: ignore[assignment]
        count = check_groups(groups, store, 3.0)
    return 0 if count >= 4 else 7


def checked_groups(left_out: str, process: Process) -> int:
    """Check the groups of DP 4 in shard groups of 2; one kind of group is not summed."""
    store = meet(process, 30.0)
    with process_group(process, CPU, 30.0, store):
        groups = made(Layout(dp=4, shard="full", shard_group=2, layers=(4,)))
        careless = getattr(groups, left_out, None)
        reduced = dist.all_reduce

        def sum_all_but_one(tensor: torch.Tensor, **more: Any) -> object:
            if careless is not None and more["group"] is careless.handle:
                tensor = torch.zeros_like(tensor)
            return reduced(tensor, **more)

        dist.all_reduce = sum_all_but_one  # type: ignore[assignment]
        count = check_groups(groups, store, 3.0)
    return 0 if count == 3 else 7


def test_shard_groups_are_tried() -> None:
    """World, the ranks that share and those that sum across: the group over all replicas, which nobody uses, is not."""
    assert run_ranks(4, functools.partial(checked_groups, "")) == 0


@pytest.mark.parametrize(("kind", "of_ranks"), [("shards", "0, 1|2, 3"), ("across", "0, 2|1, 3")])
def test_a_shard_group_that_fails_is_named(kind: str, of_ranks: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A sum that is not made, inside a group or across, is told with the group's ranks."""
    assert run_ranks(4, functools.partial(checked_groups, kind)) == 1
    said = capfd.readouterr().err
    assert any(f"all_reduce on the {kind} group of ranks {ranks} gave" in said for ranks in of_ranks.split("|"))


def test_all_groups_work() -> None:
    """World, tensor-parallel and pipeline groups of four healthy ranks are each tried."""
    assert run_ranks(4, functools.partial(checked, "")) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "all_reduce on the world group of ranks 0, 1, 2, 3 failed; rank 3 has not come to it"),
        ("wrong", "all_reduce on the world group of ranks 0, 1, 2, 3 gave 11, and 10 is right"),
    ],
)
def test_a_group_that_fails_is_named(fault: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Operation, group and the rank that is missing, or the wrong number, are told within the limit."""
    assert run_ranks(4, functools.partial(checked, fault)) == 1
    assert message in capfd.readouterr().err


def absent(process: Process) -> int:
    """Rank 2 does not come to the process group."""
    store = meet(process, 30.0)
    if process.rank == 2:
        time.sleep(600)
    with process_group(process, CPU, 2.0, store):
        return 0


def test_who_is_missing_from_a_process_group_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Making the group of all ranks ends with its time-out, and with the rank that did not come."""
    assert run_ranks(3, absent) == 1
    assert "making the process group of all ranks failed; rank 2 has not come to it" in capfd.readouterr().err


def test_other_errors_pass() -> None:
    """An error that no other rank can be the cause of stays what it is."""
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="sizes differ"), together(store, "building", 0, 2):
        raise RuntimeError("sizes differ")
    with pytest.raises(RunFailed, match="rank 1 has not come to it"), together(store, "building", 0, 2):
        raise RuntimeError("wait timeout after 10ms")


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A rank that cannot reach rank 0 says its host and the address, and leaves when its time is over."""
    folder = make_workspace(tmp_path)
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = triweave("train", "run.yaml", "--runtime.timeout_s", "2", cwd=folder, env=env)
    assert done.returncode == 1
    (message,) = errors(done.stderr)
    assert f"rank 1 on {os.uname().nodename} has not reached the store of rank 0 at 127.0.0.1:9 within 2 s" in message


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run of two steps, of which every process lists what it imports on standard error."""
    folder = make_workspace(tmp_path_factory.mktemp("opened") / "work")
    return python(
        "triweave", "train", "run.yaml", "--train.steps", "2", cwd=folder, env={"PYTHONPROFILEIMPORTTIME": "1"}
    )


def test_nothing_heavy_is_imported_twice(opened: subprocess.CompletedProcess[str]) -> None:
    """Who starts the ranks does without torch, ranks find it imported, and nobody imports torch's compiler."""
    assert opened.returncode == 0, opened.stderr[-2000:]
    imports = Counter(line.rpartition("|")[2].strip() for line in opened.stderr.splitlines() if "|" in line)
    heavy = ("torch", "triweave.training.loop", "torch.distributed.checkpoint", "torch._dynamo")
    assert [imports[name] for name in heavy] == [1, 1, 1, 0]


def test_the_opening_tells_grid_forecast_and_check(opened: subprocess.CompletedProcess[str]) -> None:
    """Before the first step a run tells its layer map, its hosts, its memory and that its groups were tried."""
    lines = [line for line in opened.stdout.splitlines() if line.strip()]
    before = lines[: next(number for number, line in enumerate(lines) if line.startswith("step "))]
    begins = [line.split()[0] for line in before]
    words = ("model", "grid", "stage", "host", "predicted", "checked")
    assert [begins.count(word) for word in words] == [1, 1, 2, 1, 1, 1]
    assert len(begins) <= 24
    assert f"host      {os.uname().nodename}: ranks 0-3: pp 0-1, dp 0, tp 0-1; cpu" in before


def places(hosts: int, per_host: int, names: str = "node{}") -> list[Place]:
    """GPUs of equal hosts, numbered host by host."""
    count = hosts * per_host
    return [Place(r, names.format(r // per_host), f"cuda:{r % per_host}", "NVIDIA H100") for r in range(count)]


def test_the_map_says_what_each_host_does() -> None:
    """A line a host has its ranks, GPUs, stage and tensor-parallel ranks."""
    lines = grid_map(Layout(tp=8, pp=4), places(4, 8))
    assert lines[1] == "host      node1: ranks 8-15: pp 1, dp 0, tp 0-7; cuda:0 to cuda:7, NVIDIA H100"
    assert len(lines) == 4


def test_a_large_map_is_cut() -> None:
    """Of 128 hosts the first and last are shown, and how many are between."""
    lines = grid_map(Layout(tp=8, pp=16, dp=8), places(128, 8))
    assert len(lines) == MOST_HOSTS + 1
    assert lines[MOST_HOSTS // 2].strip() == "... 116 hosts more"


def test_tensor_parallelism_over_hosts_is_warned_of() -> None:
    """Ranks that are dealt out in turn put every tensor-parallel group on two hosts: the map says so."""
    dealt = [Place(rank, f"node{rank % 2}", "cpu", "") for rank in range(4)]
    assert (
        "2 of 2 tensor-parallel groups cross hosts, the first on node0, node1"
        in grid_map(Layout(tp=2, pp=2), dealt)[-1]
    )


def test_shard_groups_over_hosts_are_warned_of() -> None:
    """The map says which shard groups a host holds, and warns where one crosses hosts that have room for it."""
    layout = Layout(dp=4, shard="full", shard_group=2)
    lines = grid_map(layout, places(2, 2))
    assert len(lines) == 2
    assert "ranks 2-3: pp 0, dp 2-3, tp 0, shard group 1" in lines[1]
    dealt = [Place(rank, f"node{rank % 2}", "cpu", "") for rank in range(4)]
    assert "2 of 2 shard groups cross hosts, the first on node0, node1" in grid_map(layout, dealt)[-1]
    # A group that no host has room for is meant to cross.
    assert len(grid_map(replace(layout, shard_group=2, dp=8), places(8, 1))) == 8


def test_the_forecast_is_two_lines() -> None:
    """Every stage's peak beside the card, and the step with its range."""
    step = {"step_s": 2.0, "range_s": [1.8, 2.2], "tokens_per_s_per_gpu": 640.0, "mfu_causal": 0.41, "bubble": 0.03}
    stages = [{"allocated_bytes": 2**30, "host_bytes": 0}, {"allocated_bytes": 2**31, "host_bytes": 0}]
    said = {"stages": stages, "capacity_bytes": 2**32, "step": step}
    first, second = forecast_lines(said)
    assert first == "predicted 1.00, 2.00 GiB at most on a rank of each stage of 4.0"
    assert second.split() == [
        "step",
        "2",
        "s",
        "(1.8",
        "to",
        "2.2),",
        "640",
        "tokens/s/GPU,",
        "MFU",
        "41.0",
        "%,",
        "bubble",
        "3.0",
        "%",
    ]
