"""bench/throughput.py: cases, ranks that cannot outlive their time, and the table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
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


@pytest.fixture
def launch(bench: ModuleType) -> ModuleType:
    """`bench/peers/launch.py`."""
    return sys.modules["launch"]


@pytest.fixture
def hurried(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same for ranks that would not end by themselves: it waits half a second for them, and gives no time to start.

    Ranks that do end are up to seconds apart on a busy machine: for those the usual time is right, and is not waited.
    """
    monkeypatch.setattr(launch, "SETTLE_S", 0.5)
    monkeypatch.setattr(launch, "START_S", 0.0)
    return launch


def run_script(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, limit_s: int, count: int = 1
) -> list[Any]:
    """The rows of cases whose ranks run `code`."""
    script = folder / "rank.py"
    script.write_text(code)
    monkeypatch.setattr(launch, "SYSTEMS", {"triweave": str(script)})
    cases = [launch.Case("triweave", "tiny", tp=2, micro_batch=number + 1) for number in range(count)]
    return list(launch.run_session(cases, folder / "session", limit_s, float("inf")))


def measuring(body: str) -> str:
    """A rank that answers each case by `body`, an expression of `case`."""
    return (
        f"import os, sys; sys.path[:0] = [{str(PEERS)!r}]\n"
        "from session import measure_all\n"
        "def fail(message): raise RuntimeError(message)\n"
        "told = {'step_s': [1.0], 'peak_allocated_gib': 0.0, 'pid': os.getpid()}\n"
        f"measure_all(lambda case: {body})\n"
    )


# --- cases ------------------------------------------------------------------------------------------------------------


def test_cases_are_told_apart_and_fill_their_step(bench: ModuleType, workload: ModuleType) -> None:
    """No two cases share a name, and the micro-batches of all ranks are the step's sequences, neither more nor less."""
    cases = bench.cases_of("all", list(bench.SHAPES))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.num_micro_batches * case.micro_batch * case.dp == case.sequences, case.name
        assert case.system in workload.SYSTEMS


def test_every_layout_is_compared_early(bench: ModuleType) -> None:
    """Ours, torchtitan's and Megatron's best of each layout come before any other setting, on the first shape first."""
    first = bench.cases_of("all", ["8b-8k", "8b-4k"])[:11]
    assert {(case.layout, case.system) for case in first if case.system != "transformers"} == {
        (layout, system) for layout in ("dp2", "tp2", "pp2") for system in ("triweave", "torchtitan", "megatron-core")
    }
    assert {case.shape for case in first} == {"8b-8k"}


def test_a_system_starts_once_for_a_shape(bench: ModuleType) -> None:
    """Cases of one system are neighbours, and ours alone are one session whatever the shapes."""
    assert len(bench.sessions(bench.cases_of("best", ["8b-8k"]))) == 4
    ours = [case for case in bench.cases_of("all", ["8b-8k", "8b-4k", "70b-4k"]) if case.system == "triweave"]
    assert bench.sessions(ours) == [ours]


def test_cases_survive_their_file(
    bench: ModuleType, workload: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads the cases that were written for it."""
    session = sys.modules["session"]
    cases = [workload.Case("torchtitan", "tiny", pp=2, micro_batch=2, options={"recompute": "op"})]
    session.write_cases(cases, tmp_path)
    monkeypatch.setenv(session.FOLDER, str(tmp_path))
    assert session.read_cases() == cases


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
    assert [each["--training.global_batch_size"] for each in (dp, tp, pp)] == ["8", "8", "8"]
    assert [each["--training.local_batch_size"] for each in (dp, tp, pp)] == ["1", "2", "8"]


def test_torchtitan_log_is_read(launch: ModuleType) -> None:
    """The speed is read from torchtitan's log as it prints it, colours and all, and without the warm-up."""
    text = (
        "[titan] - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1  \x1b[34mtps: 1,012  \x1b[39m\n"
        "[titan] 2026-11-30 09:25:57,988 - root - INFO - \x1b[31mstep:  9  \x1b[32mloss:  7.44356  "
        "\x1b[38;2;180;60;0mgrad_norm:  0.5113  \x1b[38;2;54;234;195mmemory: 98.60GiB(70.13%)  "
        "\x1b[34mtps: 9,412  \x1b[36mtflops: 545.10  \x1b[35mmfu: 55.12%\x1b[39m\n"
        "[titan] 2026-11-30 09:25:57,990 - root - INFO - Training completed\n"
    )
    assert launch.logged_tokens_per_s(text, after_step=3) == 9412
    assert launch.logged_tokens_per_s(text, after_step=9) is None


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_own_steps_are_measured_in_one_pair_of_processes(launch: ModuleType, tmp_path: Path) -> None:
    """triweave runs two small cases on two processes and leaves each's step times and what it computed in."""
    cases = [
        launch.Case("triweave", "tiny", dp=2, options={"shard": "full", "recompute": "norm,swiglu"}),
        launch.Case("triweave", "tiny", tp=2),
    ]
    rows = list(launch.run_session(cases, tmp_path, 120, time.monotonic() + 240))
    assert [row["outcome"] for row in rows] == ["ok", "ok"], rows
    for row in rows:
        assert len(row["step_s"]) == 4
        assert min(row["step_s"]) > 0
        assert "float32 masters" in row["notes"]


def test_rank_ends_with_its_time(hurried: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hang are ended by their own limit, with the processes that they started."""
    code = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK']).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    begin = time.monotonic()
    (row,) = run_script(hurried, monkeypatch, tmp_path, code, 2)
    assert row["outcome"] == "timed out"
    assert time.monotonic() - begin < 15
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pid{rank}").read_text().split()]
    assert len(pids) == 4
    assert all(gone(pid) for pid in pids)


def test_failed_rank_is_told_and_ends_the_others(
    hurried: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a case quotes the rank that failed, and the rank that would wait for it is ended."""
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('no such kernel')\n"
        "print('waiting', flush=True)\n"
        "time.sleep(60)\n"
    )
    (row,) = run_script(hurried, monkeypatch, tmp_path, code, 30)
    assert row["outcome"] == "failed"
    assert row["log_tail"][-1] == "RuntimeError: no such kernel"


def test_processes_that_begin_no_case_fail_all(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a system is not installed each of its cases has a row that says so, after one start."""
    rows = run_script(launch, monkeypatch, tmp_path, "import no_such_system\n", 30, count=3)
    assert [row["outcome"] for row in rows] == ["not installed"] * 3
    assert "no_such_system" in rows[2]["log_tail"][-1]


def test_failed_case_leaves_those_before_and_after_it(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three cases fails: the first has its result, though a rank is late; the third is left."""
    late = "import os, time; time.sleep(2 * int(os.environ['RANK']))\n"
    code = late + measuring("fail('not this one') if case.micro_batch == 2 else told")
    rows = run_script(launch, monkeypatch, tmp_path, code, 30, count=3)
    assert [row["outcome"] for row in rows] == ["ok", "failed"]
    assert rows[1]["case"]["micro_batch"] == 2
    assert rows[1]["log_tail"][-1] == "RuntimeError: not this one"


def test_rank_that_keeps_memory_is_started_anew(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot give a case's memory back leaves the next one undone, and without a row."""
    code = measuring("told").replace("told =", "import session; session._give_memory_back = lambda: 10**11\ntold =")
    (row,) = run_script(launch, monkeypatch, tmp_path, code, 30, count=2)
    assert (row["outcome"], row["case"]["micro_batch"]) == ("ok", 1)


def test_out_of_memory_is_an_answer(launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose GPU is full makes a row that says so."""
    code = "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8.00 GiB')\n"
    (row,) = run_script(launch, monkeypatch, tmp_path, code, 60)
    assert row["outcome"] == "out of memory"


def test_result_of_half_the_ranks_is_none(launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of which one rank leaves no result has failed, even if all exit with 0."""
    (row,) = run_script(launch, monkeypatch, tmp_path, "print('done')\n", 30)
    assert row["outcome"] == "failed"
    assert row["log_tail"] == ["done"]


@pytest.mark.parametrize(("losses", "outcome"), [((5.0, None), "ok"), ((5.0, float("nan")), "loss is no number")])
def test_speed_on_no_numbers_is_none(launch: ModuleType, losses: tuple[float | None, ...], outcome: str) -> None:
    """A rank whose loss is no number fails its case; one that knows of no loss does not."""
    ranks = [{"step_s": [1.0], "peak_allocated_gib": 1.0, "loss": loss} for loss in losses]
    assert launch._merge(ranks)["outcome"] == outcome


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
    """A row as `run_session` gives it."""
    said = {"notes": "n", "torch": "2.11", "device": "H200", "peak_allocated_gib": 70.25}
    return {"case": asdict(case), "outcome": "ok"} | said | result


def test_table_compares_with_the_fastest_peer(bench: ModuleType) -> None:
    """Ours is set against the fastest peer of its shape and layout by median, and a failure keeps its place."""
    rows = [
        row_of(bench, bench.Case("triweave", "8b-8k", tp=2), step_s=[2.0, 18.0, 4.0]),
        row_of(bench, bench.Case("torchtitan", "8b-8k", tp=2), step_s=[3.6, 3.6, 3.6]),
        row_of(bench, bench.Case("megatron-core", "8b-8k", tp=2), step_s=[6.0, 6.0, 6.0]),
        row_of(bench, bench.Case("torchtitan", "8b-8k", dp=2), step_s=[0.2, 0.2, 0.2]),
        row_of(bench, bench.Case("transformers", "8b-8k", tp=2), outcome="out of memory"),
    ]
    text = bench.table(rows)
    ours = next(line for line in text.splitlines() if line.startswith("| triweave"))
    assert "| 8,192 |" in ours
    assert "| 4.000 (2.000 to 18.000) | 0.900 |" in ours
    assert "| transformers | tp2 | micro-batch 1 | out of memory |" in text
    assert text.count("### 8b-8k") == 2


def test_best_of_all_layouts_is_compared(bench: ModuleType) -> None:
    """On a shape, ours is set against each peer's fastest layout, by tokens a second of a GPU."""
    rows = [
        row_of(bench, bench.Case("triweave", "8b-8k", dp=2), step_s=[3.0]),
        row_of(bench, bench.Case("triweave", "8b-8k", tp=2), step_s=[3.2]),
        row_of(bench, bench.Case("torchtitan", "8b-8k", dp=2), step_s=[3.6]),
        # Twice the sequences of the others: its step is the fastest of torchtitan's.
        row_of(bench, bench.Case("torchtitan", "8b-8k", pp=2), step_s=[3.3]),
    ]
    assert "| 8b-8k | torchtitan | 9,930 | pp2, micro-batch 1 | 1.100 |" in bench.ahead(rows)


@pytest.fixture
def call(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Calls the command with words and gives the sessions that it ran, of which each case's outcome is scripted."""

    def call(*arguments: str, outcomes: dict[str, list[str]] | None = None) -> list[list[str]]:
        ran: list[list[str]] = []

        def run_session(cases: list[Any], folder: Path, limit_s: float, end: float) -> Iterator[dict[str, Any]]:
            ran.append([case.name for case in cases])
            for case in cases:
                scripted = (outcomes or {}).get(case.name, [])
                outcome = scripted.pop(0) if scripted else "ok"
                more = {"step_s": [1.0]} if outcome == "ok" else {"log_tail": []}
                yield row_of(bench, case, **more, wall_s=1.0) | {"outcome": outcome}
                if outcome != "ok":
                    return

        monkeypatch.setattr(bench, "run_session", run_session)
        monkeypatch.setattr(sys, "argv", ["throughput.py", "--shape", "tiny", "--out", str(tmp_path), *arguments])
        assert bench.main() == 0
        return ran

    return call


def test_what_is_there_is_not_run_again(
    bench: ModuleType, tmp_path: Path, call: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call runs only the cases without a result, stops at its budget, and tables all that is there."""
    assert call("--budget-s", "0") == []
    ((ours,),) = call("--only", "triweave_tiny_tp2")
    assert "triweave | tp2" in capsys.readouterr().out
    assert ours not in [name for session in call() for name in session]
    assert call() == []
    (tmp_path / f"{ours}.json").unlink()
    assert call() == [[ours]]


def test_case_that_fails_after_others_is_tried_alone(bench: ModuleType, tmp_path: Path, call: Any) -> None:
    """A failure is a case's own only in new processes; what does not fit is an answer at once; the rest goes on."""
    one, two, three = (case.name for case in bench.cases_of("best", ["tiny"])[:3])
    fails = {two: ["failed", "failed"]}
    assert call("--only", "triweave", outcomes=fails) == [[one, two, three], [two, three], [three]]
    assert json.loads((tmp_path / f"{two}.json").read_text())["outcome"] == "failed"
    for path in tmp_path.glob("*.json"):
        path.unlink()
    assert call("--only", "triweave", outcomes={two: ["out of memory"]}) == [[one, two, three], [three]]


def test_case_that_the_budget_cut_is_left_for_the_next_call(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that ended with the call's budget, and not with its own limit, leaves no row."""
    script = tmp_path / "rank.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(launch, "SYSTEMS", {"triweave": str(script)})
    cases = [launch.Case("triweave", "tiny", tp=2)]
    assert list(launch.run_session(cases, tmp_path / "session", 30, time.monotonic() + 1)) == []


def test_cases_are_listed_without_torch(tmp_path: Path) -> None:
    """`--list` names the cases and loads no torch."""
    command = [sys.executable, "-X", "importtime", str(SCRIPT), "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("triweave_8b-8k_dp2")
    assert not [line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]
    assert json.dumps(list(tmp_path.iterdir())) == "[]"
