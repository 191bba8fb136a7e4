"""Whether ranks that were started sit where the plan has them, in numbers and under a real launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from command_line import make_workspace
from hypothesis import given
from hypothesis import strategies as st
from launching import resolved_run

from triweave.errors import Refused
from triweave.launch.placement import describe_node, misplaced, node_ranks
from triweave.launch.variables import NODE_RANK
from triweave.layout import Layout
from triweave.recovery.agreement import refuse
from triweave.training.process import Process
from triweave.training.rank_order import WHAT, check_rank_order

PLAN = Layout(tp=2, pp=4)
HOSTS = [f"h{rank // 2}" for rank in range(8)]
UNTOLD = [None] * 8


def test_planned_order_is_fine() -> None:
    """Ranks that fill host after host are as planned, whatever the hosts are called."""
    assert misplaced(PLAN, 2, HOSTS, UNTOLD) == []
    assert misplaced(PLAN, 2, [f"node{10 - rank // 2}" for rank in range(8)], UNTOLD) == []
    assert misplaced(PLAN, 2, HOSTS, [rank // 2 for rank in range(8)]) == []


def test_nodes_that_share_a_host_are_fine() -> None:
    """Nodes of the plan on one host are nearer than planned."""
    assert misplaced(PLAN, 2, ["h"] * 8, UNTOLD) == []


def test_round_robin_is_refused() -> None:
    """Ranks dealt out one host after the other tear every tensor-parallel group apart: both maps are shown."""
    shown = misplaced(PLAN, 2, [f"h{rank % 4}" for rank in range(8)], UNTOLD)
    assert "the plan" in shown[0]
    assert "what was started" in shown[0]
    assert "node 0: ranks 0-1: pp 0, dp 0, tp 0-1" in shown[1]
    assert "h0: ranks 0, 4: pp 0, 2, dp 0, tp 0" in shown[1]


def test_nodes_in_another_order_than_the_launch_file_are_refused() -> None:
    """c10d sorts hosts as text, so that node10 comes before node2: ranks then are on other nodes than the file says."""
    told = [0, 0, 3, 3, 1, 1, 2, 2]
    shown = misplaced(PLAN, 2, HOSTS, told)
    assert "h1 (node 3 of the launch file)" in shown[2]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 8))
def test_nodes_hold_every_rank_once(tp: int, pp: int, dp: int, per_node: int) -> None:
    """The nodes of a plan hold each rank once and in order, and each can be described."""
    layout = Layout(tp=tp, pp=pp, dp=dp)
    nodes = node_ranks(layout, per_node)
    assert [rank for node in nodes for rank in node] == list(range(layout.world_size))
    assert all(describe_node(layout, node).startswith("ranks ") for node in nodes)


def test_a_refusal_of_rank_0_is_heard() -> None:
    """A rank that waits for rank 0, which does not begin, hears it at once and not after its time-out."""
    store = dist.HashStore()
    refuse(store, WHAT, "resume = there: is no checkpoint")
    with pytest.raises(Refused, match="is no checkpoint"):
        check_rank_order(store, Process(1, 2, 1, 2), resolved_run())


TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nnodes=2",
    "--nproc-per-node=1",
    "--master-addr=127.0.0.1",
]


@pytest.mark.parametrize(("told", "code"), [(("0", "1"), 0), (("1", "0"), 1)])
def test_train_refuses_another_order(told: tuple[str, str], code: int, tmp_path: Path) -> None:
    """Under a launcher of two nodes, `train` goes on where nodes have their numbers, and refuses others."""
    folder = make_workspace(tmp_path / "work")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        free_port = one.getsockname()[1]
    words = [
        "-m",
        "triweave",
        "train",
        "run.yaml",
        "--layout.tp",
        "1",
        "--train.steps",
        "3",
        "--checkpoint.export",
        "false",
    ]
    started = []
    for rank in range(2):
        command = [*TORCHRUN, f"--node-rank={rank}", f"--master-port={free_port}", *words]
        environment = {**os.environ, NODE_RANK: told[rank], "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=-1, stderr=-2, text=True))
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [code, code], said
    assert ("the ranks are not where the plan has them" in said[0]) == bool(code)
