"""bench/eight.py: what runs on four and eight GPUs, what is told before, and the table; a rehearsal on processes."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the bench, importable as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "bench"), str(ROOT / "bench" / "peers"), *sys.path])
        names = ("eight_cases", "eight_told", "eight_table", "triweave_case", "workload", "launch", "session")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


# --- cases ------------------------------------------------------------------------------------------------------------


def all_cases(bench: SimpleNamespace, gpus: int, tiny: bool) -> list[Any]:
    """The cases of every part."""
    made = bench.eight_cases
    sized = (made.own_cases, made.peer_cases, made.stage_cases, made.whole_cases)
    return [*made.verify_cases(gpus), *(case for part in sized for case in part(gpus, tiny=tiny))]


@pytest.mark.parametrize("tiny", [False, True], ids=["full", "tiny"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_cases_take_the_gpus_and_fill_their_steps(bench: SimpleNamespace, gpus: int, tiny: bool) -> None:
    """Every case has a process a GPU, whole micro-batches and its own name; rules refuse at most what has cp."""
    cases = all_cases(bench, gpus, tiny)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.num_processes == gpus, case.name
        assert case.num_micro_batches * case.micro_batch * case.dp == case.sequences, case.name
        if case.cp == 1 and case.system in ("triweave", "verify", "stage"):
            assert not bench.triweave_case.refusal_of(case), case.name


def test_every_layout_that_is_asked_about_is_there(bench: SimpleNamespace) -> None:
    """On eight GPUs ours run in six layouts and more, peers on the same tokens, and each layout is proved."""
    own, peers = (part(8, tiny=False) for part in (bench.eight_cases.own_cases, bench.eight_cases.peer_cases))
    asked = {"tp8", "tp4 pp2", "tp2 pp2 dp2", "pp8", "dp8", "cp2 tp4"}
    assert {case.layout for case in own} == asked
    assert {case.layout for case in bench.eight_cases.verify_cases(8)} == asked
    assert {(case.system, case.layout) for case in peers} == {
        ("torchtitan", "dp8"),
        ("torchtitan", "tp8"),
        ("megatron-core", "tp8"),
    }
    assert {case.tokens for case in (*own, *peers)} == {8 * 32768}


def test_stages_are_those_of_70b(bench: SimpleNamespace) -> None:
    """At TP 8 a stage has twenty of 70B's layers; on fewer GPUs a rank holds as many parameters of layers."""
    for gpus in (2, 4, 8):
        stages = [case for case in bench.eight_cases.stage_cases(gpus, tiny=False) if case.micro_batch == 1]
        assert {case.options["stage"] for case in stages} == {"0", "2", "3"}
        assert {case.seq_len for case in stages} == {4096, 8192}
        layouts = [bench.triweave_case.layout_of(case) for case in stages]
        assert {layers / gpus for layout in layouts for layers in layout.layers} == {20 / 8}


def test_the_deepest_model_is_the_deepest(bench: SimpleNamespace) -> None:
    """It fits by the closed form; one layer more does not on four GPUs, and on eight it is all of 70B."""
    for gpus, recompute in ((4, "layer"), (8, "layer"), (8, "norm,swiglu")):
        case = bench.eight_cases.deepest_whole(gpus, recompute)
        room = bench.eight_cases.FILLED * bench.triweave_case.cluster_of(case).gpu.usable_bytes
        layers = int(case.options["layers"])
        deeper = replace(case, options={**case.options, "layers": str(layers + 1)})
        assert bench.eight_cases.used_bytes(case) <= room
        assert layers == 80 if gpus == 8 else room < bench.eight_cases.used_bytes(deeper)
        plain = replace(case, options={**case.options, "moments": "float32"})
        assert bench.eight_cases.used_bytes(plain) > room
        assert bench.triweave_case.resolved_of(case).run.optimizer.moments == "bfloat16"


def test_rules_decide_what_runs(bench: SimpleNamespace) -> None:
    """A layout that the rules refuse is refused in their words; the others run."""
    (case,) = (case for case in bench.eight_cases.own_cases(8, tiny=False) if case.cp > 1)
    assert bench.triweave_case.refusal_of(case) == ""
    few = replace(case, cp=1, tp=1, pp=8, micro_batch=1, options={"sequences": "4"})
    assert "pp = 8 pipeline ranks need at least 8" in bench.triweave_case.refusal_of(few)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_check(bench: SimpleNamespace) -> None:
    """A stage has one rank to tell of, a pipeline one a stage, and they are not alike."""
    told = bench.eight_told
    (stage,) = (case for case in bench.eight_cases.stage_cases(8, tiny=False)[:1])
    assert told.ranks_of(stage) == [16]
    pipeline = next(case for case in bench.eight_cases.own_cases(4, tiny=True) if case.pp == 2 and case.tp == 2)
    assert told.ranks_of(pipeline) == [0, 2]
    sizes = [told._memory_of((pipeline, rank))["allocated_bytes"] for rank in (0, 2)]
    assert min(sizes) > 0
    assert sizes[0] != sizes[1]


def test_seconds_are_told_with_both_profiles_or_why_not(bench: SimpleNamespace, tmp_path: Path) -> None:
    """A shipped profile prices a step and a stage's micro-batch; where none was probed it says so."""
    cases = [bench.eight_cases.own_cases(8, tiny=False)[0], bench.eight_cases.stage_cases(8, tiny=False)[0]]
    found = bench.eight_told.tell_times(cases, tmp_path / "profile.yaml")
    step, stage = (found[case.name] for case in cases)
    assert "neither a file" in step["probed"]["why_not"]
    assert step["shipped"]["range_s"][0] < step["shipped"]["seconds"] < step["shipped"]["range_s"][1]
    # Alone, without communication, it took 196.5 ms (bench/results/2026-11-30-one-rank-h200.md).
    assert 0.1965 < stage["shipped"]["seconds"] < 1.25 * 0.1965


def test_a_seal_is_of_the_very_predictions(bench: SimpleNamespace, tmp_path: Path) -> None:
    """Another number is another hash."""
    path = tmp_path / "times.json"
    seals = []
    for seconds in (1.0, 1.1):
        bench.eight_told.write(path, {"a": {"seconds": seconds}})
        seals.append(bench.eight_told.seal(path))
    assert seals[0] != seals[1]
    assert json.loads(path.read_text())["cases"] == {"a": {"seconds": 1.1}}


# --- the table --------------------------------------------------------------------------------------------------------

SEALS = {"check": "c", "times": "t"}


def row_of(case: Any, **result: Any) -> dict[str, Any]:
    """A row as it is kept."""
    said = {"notes": "n", "torch": "2.11", "device": "H200", "peak_allocated_gib": 50.0, "told_by": SEALS}
    return {"case": asdict(case), "outcome": "ok", "step_s": [2.0], "log_tail": []} | said | result


def stage_row(case: Any, forward_s: float, backward_s: float, alone_s: float, **result: Any) -> dict[str, Any]:
    """A row of a stage, with a tenth more where collectives are used."""
    stage = case.options["stage"]
    trained = {f"F{stage}": forward_s, f"B{stage}": backward_s}
    more = {name: 1.1 * seconds for name, seconds in trained.items()}
    ways = {"as trained": trained, "collectives": more, "alone": {f"F{stage}": 0.0, f"B{stage}": alone_s}}
    return row_of(case, actions_s=ways, rest_s=0.03, micro_batches=8, **result)


def bar(bench: SimpleNamespace, found: Any, words: str) -> str:
    """The line of a bar."""
    (line,) = (line for line in bench.eight_table.bars(found) if words in line)
    return str(line)


def test_bars_stand_beside_their_figures(bench: SimpleNamespace) -> None:
    """Utilization as a rank alone had it, exposed time against the same without, and the worst stage counts."""
    stages = bench.eight_cases.stage_cases(8, tiny=False)
    middle = next(case for case in stages if case.options["stage"] == "2" and case.seq_len == 8192)
    # The figures of bench/results/2026-11-30-one-rank-h200.md: 63.2 and 133.3 ms, 58.3 % causal.
    found = bench.eight_table.Found(8, [stage_row(middle, 0.0632, 0.1333, 0.18)], told_by=SEALS)
    assert "| 58.3% | met |" in bar(bench, found, "causal MFU")
    assert "| 9.2% | met |" in bar(bench, found, "exposed")
    first = next(case for case in stages if case.options["stage"] == "0" and case.seq_len == 8192)
    slower = stage_row(first, 0.08, 0.16, 0.2)
    found = replace(found, rows=[*found.rows, slower])
    assert "| 20.0% | MISSED |" in bar(bench, found, "exposed")
    assert "| MISSED |" in bar(bench, found, "causal MFU")
    assert bar(bench, found, "over the best peer").endswith("| not run | |")


def test_ours_are_held_against_the_best_peer(bench: SimpleNamespace) -> None:
    """The best of all layouts on each side, and never the deep model of 70B's width."""
    own, peers = (part(8, tiny=False) for part in (bench.eight_cases.own_cases, bench.eight_cases.peer_cases))
    deep, _ = bench.eight_cases.whole_cases(8, tiny=False)
    rows = [row_of(own[0], step_s=[3.0]), row_of(own[1], step_s=[2.0, 2.5, 2.2]), row_of(deep, step_s=[0.1])]
    rows += [row_of(peers[0], step_s=[2.4]), row_of(peers[1], step_s=[9.0])]
    found = bench.eight_table.Found(8, rows, told_by=SEALS)
    assert "| 1.091 | MISSED |" in bar(bench, found, "over the best peer")


def test_only_what_was_told_before_counts(bench: SimpleNamespace) -> None:
    """Rows that ran after other predictions are no evidence, whatever they say."""
    case, other = bench.eight_cases.own_cases(8, tiny=False)[:2]
    times = {one.name: {"probed": {"seconds": 2.1}, "shipped": {"why_not": "no"}} for one in (case, other)}
    memory = {one.name: [{"allocated_bytes": gib * 2**30, "at": "B0"} for gib in (20, 51)] for one in (case, other)}
    rows = [row_of(case), row_of(other, told_by={"check": "old", "times": "old"}, step_s=[1.0])]
    found = bench.eight_table.Found(8, rows, memory, times, SEALS)
    assert "| mean 5.00%, worst +5.00%, bias +5.00%, 1 of them | MISSED |" in bar(bench, found, "was probed")
    assert "not told" in bar(bench, found, "was shipped")
    assert "worst +2.00%" in bar(bench, found, "told by `check`")
    line = next(line for line in bench.eight_table.told(found) if case.name in line)
    assert "| 2.0000 | 2.1000 | +5.00% | - |  | 50.00 | 51.00 | +2.00% | B0 |" in line


def test_page_names_what_did_not_run(bench: SimpleNamespace) -> None:
    """A refusal, a card that was too small, a layout that is wrong and a case that is left are all on it."""
    tp, *_, cp = bench.eight_cases.own_cases(8, tiny=False)
    stage = bench.eight_cases.stage_cases(8, tiny=False)[0]
    right, wrong = bench.eight_cases.verify_cases(8)[:2]
    figures = {"loss_relative": 1e-3, "worst_output": 1e-2, "worst_gradient": 1e-2, "losses": [7.0, 6.0]}
    rows = [
        row_of(tp, outcome="out of memory"),
        row_of(cp, outcome="refused: layout.cp = 2 is not trained"),
        row_of(stage, outcome="timed out", log_tail=["last words"]),
        row_of(right, **figures, **{"pass": True, "first_difference": None}),
        row_of(wrong, **figures, **{"pass": False, "first_difference": "model.norm"}),
    ]
    text = "\n".join(bench.eight_table.page(bench.eight_table.Found(8, rows, told_by=SEALS, left=["a case"]), "head"))
    for words in ("out of memory", "refused: layout.cp", "timed out", "last words", "from model.norm on", "a case"):
        assert words in text
    assert "| 1 of 2 that are trained | MISSED |" in text


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_stage_has_its_own_peers_and_no_others(bench: SimpleNamespace, tmp_path: Path) -> None:
    """The last of four stages at TP 2: both ranks come to one loss, which takes the other's half of the vocabulary."""
    case = next(case for case in bench.eight_cases.stage_cases(2, tiny=True) if case.options["stage"] == "3")
    (row,) = bench.launch.run_session([case], tmp_path, 200, time.monotonic() + 260)
    assert row["outcome"] == "ok", row
    results = [json.loads(bench.session.result_path(tmp_path, case, rank).read_text()) for rank in range(2)]
    assert results[0]["loss"] == results[1]["loss"] > 0
    assert set(row["actions_s"]) == {"as trained", "collectives", "alone"}
    assert set(row["actions_s"]["alone"]) == {"F3", "B3"}
    assert row["micro_batches"] == 8


@pytest.fixture
def call(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, in this process, rehearsing on two others in a folder of its own."""
    eight = importlib.import_module("eight")
    # What it sets for its ranks ends with the test.
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "CUDA_VISIBLE_DEVICES", "BENCH_VERIFY"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))

    def call(*words: str) -> int:
        told = ["--gpus", "2", "--shape", "tiny", "--out", str(tmp_path), "--limit-s", "400", "--budget-s", "500"]
        monkeypatch.setattr(sys, "argv", ["eight.py", *told, *words])
        return int(eight.main())

    return call


def test_nothing_is_timed_that_was_not_predicted(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """Without predictions the parts that time are refused, as is a part that there is not."""
    for words, told in (("70b", "nothing is run that was not predicted"), ("80b", "80b: no such part")):
        with pytest.raises(SystemExit) as ended:
            call("--only", words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


@pytest.mark.timeout(900)
def test_rehearsal_from_end_to_end(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two processes: told first, then a layout proved and timed, and a stage; the page has all, none runs twice."""
    words = ("--only", "tell,verify,70b,8b", "--cases", "verify_tiny-deep_tp2_,triweave_tiny-deep_tp2_,stage-2")
    assert call(*words) == 0
    told = capsys.readouterr().out
    assert told.count(": ok, ") == 3, told
    page = (tmp_path / "eight.md").read_text()
    assert "| 1 of 1 that are trained | met |" in page
    assert "| stage_tiny-deep_tp2-pp4_mb1_stage-2_layers-4_sequences-8 | 0." in page
    assert "| triweave_tiny-deep_tp2_mb1_keep_gathered-on | " in page
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["case"]["system"] for row in rows if row["outcome"] == "ok"} == {"verify", "stage", "triweave"}
    assert all(row["told_by"]["times"] for row in rows)
    assert call(*words) == 0
    assert ": ok, " not in capsys.readouterr().out
