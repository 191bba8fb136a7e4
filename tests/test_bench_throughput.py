"""bench/throughput.py: cases, ranks that cannot outlive their time, and the table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "throughput.py"
PEERS = ROOT / "bench" / "peers"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """`bench/throughput.py` as a module, with its neighbours importable as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec = importlib.util.spec_from_file_location("throughput", SCRIPT)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def workload(bench: ModuleType) -> ModuleType:
    """`bench/peers/workload.py`."""
    return sys.modules["workload"]


@pytest.fixture
def titan(bench: ModuleType) -> ModuleType:
    """`bench/peers/torchtitan_run.py`; it imports torchtitan only to run."""
    return importlib.import_module("torchtitan_run")


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds (one that nobody has waited for counts as ended)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def run_script(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, limit_s: int) -> Any:
    """The row of a case whose ranks run `code`."""
    script = folder / "rank.py"
    script.write_text(code)
    monkeypatch.setattr(bench, "SYSTEMS", {"triweave": str(script)})
    monkeypatch.setattr(bench, "SETTLE_S", 0.5)
    return bench.run_case(bench.Case("triweave", "tiny", tp=2), folder / "case", limit_s)


# --- cases ------------------------------------------------------------------------------------------------------------


def test_cases_are_told_apart_and_fill_their_step(workload: ModuleType) -> None:
    """No two cases share a name, and the micro-batches of all ranks are the step's sequences, neither more nor less."""
    cases = [case for shape in workload.shapes() for case in workload.case_sets(shape)["all"]]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.num_micro_batches * case.micro_batch * case.dp == case.sequences, case.name
        assert case.system in workload.SYSTEMS


def test_every_layout_is_compared_early(workload: ModuleType) -> None:
    """The first six cases hold ours and a peer for each of the three layouts."""
    first = workload.case_sets("8b-8k")["best"][:6]
    assert {(case.layout, case.system) for case in first} == {
        (layout, system) for layout in ("dp2", "tp2", "pp2") for system in ("triweave", "torchtitan")
    }


def test_case_survives_its_file(workload: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads the case that was written for it."""
    case = workload.Case("torchtitan", "tiny", pp=2, micro_batch=2, options={"recompute": "op"})
    workload.write_case(case, tmp_path / "case.json")
    monkeypatch.setenv("BENCH_CASE", str(tmp_path / "case.json"))
    assert workload.read_case() == case


@pytest.mark.parametrize(("tokens_per_s", "percent"), [(9300, 54.4), (9470, 55.5), (9710, 56.9), (8370, 49.0)])
def test_utilization_is_torchtitans(workload: ModuleType, tokens_per_s: float, percent: float) -> None:
    """At full attention, Llama-3-8B at 8,192 has the utilization that torchtitan logs for the same tokens a second."""
    case = workload.Case("torchtitan", "8b-8k", dp=2, micro_batch=2)
    step_s = case.tokens / case.world_size / tokens_per_s
    assert 100 * workload.model_flops_utilization(case, step_s, causal=False) == pytest.approx(percent, abs=0.1)


def test_torchtitan_computes_in_bf16_and_takes_the_step(titan: ModuleType, workload: ModuleType) -> None:
    """Its command line asks for bf16 weights only where FSDP does not cast them, and for the step's sequences."""

    def arguments(**case: Any) -> dict[str, str]:
        words = titan.arguments(workload.Case("torchtitan", "8b-8k", **case))
        return dict(zip(words[:-1:2], words[1::2], strict=True))

    dp, tp, pp = arguments(dp=2), arguments(tp=2, micro_batch=2), arguments(pp=2)
    assert [each["--training.dtype"] for each in (dp, tp, pp)] == ["float32", "bfloat16", "bfloat16"]
    assert [each["--training.global_batch_size"] for each in (dp, tp, pp)] == ["4", "4", "8"]
    assert [each["--training.local_batch_size"] for each in (dp, tp, pp)] == ["1", "2", "8"]


def test_torchtitan_log_is_read(bench: ModuleType) -> None:
    """The speed is read from torchtitan's log as it prints it, colours and all, and without the warm-up."""
    text = (
        "[titan] - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1  \x1b[34mtps: 1,012  \x1b[39m\n"
        "[titan] 2026-11-30 09:25:57,988 - root - INFO - \x1b[31mstep:  9  \x1b[32mloss:  7.44356  "
        "\x1b[38;2;180;60;0mgrad_norm:  0.5113  \x1b[38;2;54;234;195mmemory: 98.60GiB(70.13%)  "
        "\x1b[34mtps: 9,412  \x1b[36mtflops: 545.10  \x1b[35mmfu: 55.12%\x1b[39m\n"
        "[titan] 2026-11-30 09:25:57,990 - root - INFO - Training completed\n"
    )
    assert bench.logged_tokens_per_s(text, after_step=3) == 9412
    assert bench.logged_tokens_per_s(text, after_step=9) is None


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_own_step_is_measured(bench: ModuleType, tmp_path: Path) -> None:
    """triweave runs a small case on two processes and leaves six step times and what it computed in."""
    case = bench.Case("triweave", "tiny", dp=2, options={"shard": "full", "recompute": "norm,swiglu"})
    row = bench.run_case(case, tmp_path, 120)
    assert row["outcome"] == "ok", row
    assert len(row["step_s"]) == 6
    assert min(row["step_s"]) > 0
    assert "float32 masters" in row["notes"]


def test_rank_ends_with_its_time(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hang are ended by their own limit, with the processes that they started."""
    code = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK']).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    begin = time.monotonic()
    row = run_script(bench, monkeypatch, tmp_path, code, 2)
    assert row["outcome"] == "timed out"
    assert time.monotonic() - begin < 15
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pid{rank}").read_text().split()]
    assert len(pids) == 4
    assert all(gone(pid) for pid in pids)


def test_failed_rank_is_told_and_ends_the_others(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a case quotes the rank that failed, and the rank that would wait for it is ended."""
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('no such kernel')\n"
        "print('waiting', flush=True)\n"
        "time.sleep(60)\n"
    )
    row = run_script(bench, monkeypatch, tmp_path, code, 30)
    assert row["outcome"] == "failed"
    assert row["log_tail"][-1] == "RuntimeError: no such kernel"


def test_out_of_memory_is_an_answer(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose GPU is full makes a row that says so."""
    code = "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8.00 GiB')\n"
    row = run_script(bench, monkeypatch, tmp_path, code, 60)
    assert row["outcome"] == "out of memory"


def test_result_of_half_the_ranks_is_none(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of which one rank leaves no result has failed, even if all exit with 0."""
    row = run_script(bench, monkeypatch, tmp_path, "print('done')\n", 30)
    assert row["outcome"] == "failed"
    assert row["log_tail"] == ["done"]


def test_rank_does_not_outlive_its_parent() -> None:
    """A rank whose parent is killed, so that nobody is left to end it, ends at once."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"rank = subprocess.Popen([sys.executable, {str(PEERS / 'guarded.py')!r}, '60', 'sleep', '60'])\n"
            "while b'sleep' not in open(f'/proc/{rank.pid}/cmdline', 'rb').read().split(b'\\0')[:1]:\n"
            "    time.sleep(0.02)\n"
            "print(rank.pid, flush=True)\n"
            "time.sleep(60)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone(pid)


# --- the table --------------------------------------------------------------------------------------------------------


def row_of(bench: ModuleType, case: Any, **result: Any) -> dict[str, Any]:
    """A row as `run_case` gives it."""
    said = {"notes": "n", "torch": "2.11", "device": "H200", "peak_allocated_gib": 70.25}
    return {"case": bench.asdict(case), "outcome": "ok"} | said | result


def test_table_compares_with_the_fastest_peer(bench: ModuleType) -> None:
    """Ours is set against the fastest peer of its shape and layout by median, and a failure keeps its place."""
    rows = [
        row_of(bench, bench.Case("triweave", "8b-8k", tp=2), step_s=[1.0, 9.0, 2.0]),
        row_of(bench, bench.Case("torchtitan", "8b-8k", tp=2), step_s=[1.8, 1.8, 1.8]),
        row_of(bench, bench.Case("megatron-core", "8b-8k", tp=2), step_s=[3.0, 3.0, 3.0]),
        row_of(bench, bench.Case("torchtitan", "8b-8k", dp=2), step_s=[0.1, 0.1, 0.1]),
        row_of(bench, bench.Case("transformers", "8b-8k", tp=2), outcome="out of memory"),
    ]
    text = bench.table(rows)
    ours = next(line for line in text.splitlines() if line.startswith("| triweave"))
    assert "| 8,192 |" in ours
    assert "| 2.000 (1.000 to 9.000) | 0.900 |" in ours
    assert "| transformers | tp2 | micro-batch 1 | out of memory |" in text
    assert text.count("### 8b-8k") == 2


def test_what_is_there_is_not_run_again(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call runs only the cases without a result, stops at its budget, and tables all that is there."""
    ran = []

    def run_case(case: Any, folder: Path, limit_s: float) -> dict[str, Any]:
        ran.append(case.name)
        return row_of(bench, case, step_s=[1.0], wall_s=1.0)

    def call(*arguments: str) -> list[str]:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["throughput.py", "--shape", "tiny", "--out", str(tmp_path), *arguments])
        assert bench.main() == 0
        return list(ran)

    monkeypatch.setattr(bench, "run_case", run_case)
    assert call("--budget-s", "0") == []
    (ours,) = call("--set", "tp", "--only", "triweave")
    assert "triweave | tp2" in capsys.readouterr().out
    assert ours not in call("--set", "tp")
    assert call("--set", "tp") == []
    (tmp_path / f"{ours}.json").unlink()
    assert call("--set", "tp") == [ours]


def test_case_that_the_budget_cut_is_left_for_the_next_call(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that ended with the call's budget, and not with its own limit, leaves no result."""
    row = {"outcome": "timed out", "wall_s": 5.0, "log_tail": []}
    monkeypatch.setattr(bench, "run_case", lambda case, *rest: row | {"case": bench.asdict(case)})
    words = ["throughput.py", "--shape", "tiny", "--set", "tp", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--budget-s", "100"])
    bench.main()
    assert list(tmp_path.glob("*.json")) == []
    monkeypatch.setattr(sys, "argv", [*words, "--budget-s", "1000"])
    bench.main()
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_cases_are_listed_without_torch(tmp_path: Path) -> None:
    """`--list` names the cases and loads no torch."""
    command = [sys.executable, "-X", "importtime", str(SCRIPT), "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("triweave_8b-8k_dp2")
    assert not [line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]
    assert json.dumps(list(tmp_path.iterdir())) == "[]"
