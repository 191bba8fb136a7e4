"""`triweave check` as scripts use it: its JSON, its exit codes, and what it says of wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_configs import tiny_config

from triweave.cli import main

RUN_FILE = """\
model: {path: model}
cluster: 1x8xh100-80gb
layout: {tp: 2, pp: 2}
data: {train: not-there.jsonl, seq_len: 128}
train: {steps: 1, global_batch: 8}
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a run file and a model that is only a config."""
    tiny_config(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(RUN_FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def code_of(*words: str) -> int:
    """Exit code of `triweave check run.yaml WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(["check", "run.yaml", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """The document holds the ranks with their stage, peak, moment and components, and whether all fit."""
    assert code_of("--ranks", "first,last", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(rank["rank"], rank["stage"]) for rank in answer["ranks"]] == [(0, 0), (4, 1)]
    assert answer["fits"] is True
    assert 79 < answer["capacity_gib"] < 80
    for rank in answer["ranks"]:
        assert sum(rank["components"].values()) == pytest.approx(rank["peak_gib"])
        assert rank["peak_gib"] <= rank["reserved_gib"] < rank["used_gib"]
        assert rank["used_gib"] == pytest.approx(rank["reserved_gib"] + sum(rank["beside_gib"].values()))
        assert set(rank["beside_gib"]) == {"CUDA context", "NCCL", "copies between ranks"}
        assert rank["components"]["workspace"] > 0
        assert rank["at"]


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A model too large for its card gives exit code 1 and says which rank."""
    huge = ("--model.path", "llama-3.1-8b", "--layout.tp", "1", "--layout.pp", "1", "--layout.dp", "8")
    assert code_of(*huge, "--layout.shard", "none", "--ranks", "0") == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ranks", "8"), "--ranks = 8: is outside the grid of 8 ranks (tp2 pp2 dp2), numbered from 0; nearest: 7"),
        (("--ranks", "fist"), "--ranks = fist: must be first, middle, last, all, or numbers"),
        (("--layout.tp", "3"), "layout.tp = 3"),
        (("--model.path", "llama-3.1-9b"), "nearest: "),
    ],
)
def test_wrong_input(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank outside the grid, a layout that `validate` refuses and an unknown model end with 2 and one message."""
    assert code_of(*words) == 2
    assert told in capsys.readouterr().err


def test_a_gpu_named_on_a_machine_without_one() -> None:
    """`runtime.device: cuda` is what the run will use; the check needs none and does not abort."""
    assert code_of("--ranks", "0", "--runtime.device", "cuda") == 0


def test_all_is_one_rank_of_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that differ only along tensor and data parallel axes are alike, so that one of them speaks for all."""
    assert code_of("--ranks", "all", "--json") == 0
    every = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["rank"] for rank in every] == [0, 4]
    assert code_of("--ranks", "1,3,6,7", "--json") == 0
    for rank in json.loads(capsys.readouterr().out)["ranks"]:
        # Roundings differ: a shard may begin between weights that are decayed and weights that are not.
        assert rank["peak_gib"] == pytest.approx(every[rank["stage"]]["peak_gib"], rel=1e-3)


def test_on_gpu_without_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, --on-gpu is an input error; so is a rank outside the grid."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert code_of("--on-gpu", "--rank", "0") == 2
    assert "--device = cuda: needs a GPU that torch can use" in capsys.readouterr().err
    assert code_of("--on-gpu", "--device", "cuda:1") == 2
    assert "--device = cuda:1: needs a GPU" in capsys.readouterr().err
    assert code_of("--on-gpu", "--device", "gpu") == 2
    assert "--device = gpu: must be cuda, cuda:N or cpu" in capsys.readouterr().err
    assert code_of("--device", "cpu") == 2
    assert "--device = cpu: is where --on-gpu runs" in capsys.readouterr().err
    assert code_of("--on-gpu", "--rank", "8") == 2
    assert "--rank = 8: is outside the grid" in capsys.readouterr().err


def test_fixed_segments_reserve_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Without expandable segments the same tensors take more from the driver; what is allocated is the same."""
    found = {}
    for words in ((), ("--fixed-segments",)):
        assert code_of("--ranks", "first", "--json", *words) == 0
        found[words] = json.loads(capsys.readouterr().out)
    (expandable,), (fixed,) = (answer["ranks"] for answer in found.values())
    assert fixed["peak_gib"] == expandable["peak_gib"]
    assert fixed["reserved_gib"] != expandable["reserved_gib"]
    assert {answer["allocator"].partition(" ")[0] for answer in found.values()} == {"expandable", "fixed"}


def test_a_rehearsal_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """`--device cpu` runs the ranks here: times of every action and the grid's step; no memory is measured."""
    assert code_of("--on-gpu", "--device", "cpu", "--ranks", "first,last", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [sorted(rank["actions_s"]) for rank in told["ranks"]] == [["B0", "F0"], ["B1", "F1"]]
    assert all(rank["peak_gib"] is None and rank["expected_peak_gib"] > 0 for rank in told["ranks"])
    longest = max(sum(rank["actions_s"].values()) for rank in told["ranks"])
    assert told["grid"]["step_s"] >= 4 * longest
    assert told["grid"]["from"] == "the actions of ranks 0, 4"
    assert code_of("--on-gpu", "--device", "cpu", "--rank", "5") == 0
    out = capsys.readouterr().out
    assert "rank 5 (stage 1) on cpu" in out
    assert "as if every stage took as long" in out
