"""`triweave plan` as scripts use it: its JSON, its exit codes, and what it says of wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_configs import tiny_config
from tiny_models import tiny_llama, tiny_tokenizer

from triweave.cli import main
from triweave.config.load import load_run
from triweave.config.validate import validate
from triweave.errors import InputError

PROBLEM = {
    "model": "meta-llama/Llama-3-70B",
    "cluster": "4x8xh100-80gb",
    "seq": "4096",
    "global-batch": "128",
}
FSDP = "dp=32,shard=full"
MEGATRON = "tp=8,pp=4"

LAYOUT_KEYS = {
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
    "micro_batch",
    "shard",
    "shard_group",
    "schedule",
    "recompute",
    "sequence_parallel",
    "keep_gathered",
    "cuda_graphs",
    "offload",
    "layers",
}
CANDIDATE_KEYS = {
    "layout",
    "fits",
    "oom_probability",
    "peak_gib",
    "peak_allocated_gib",
    "host_gib",
    "capacity_gib",
    "step_s",
    "step_s_range",
    "tokens_per_s_per_gpu",
    "mfu",
    "bubble",
    "why",
}


class Answer:
    """Runs `triweave plan` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, **options: str) -> tuple[int, str, str]:
        """Exit code, output and messages for the problem of the design with some `options` changed."""
        asked = PROBLEM | {name.replace("_", "-"): value for name, value in options.items()}
        given = [word for name, value in asked.items() for word in (f"--{name}", value)]
        with pytest.raises(SystemExit) as ended:
            main(["plan", *given, *words])
        output, errors = self.capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output, errors

    def json(self, **options: str) -> tuple[int, dict[str, Any]]:
        """Exit code and the JSON document."""
        code, output, errors = self("--json", **options)
        assert errors == ""
        document: dict[str, Any] = json.loads(output)
        return code, document

    def only(self, layout: str, **options: str) -> dict[str, Any]:
        """The answer for one layout."""
        code, document = self.json(layout=layout, **options)
        (candidate,) = document["candidates"]
        assert code == (0 if candidate["fits"] else 1)
        answer: dict[str, Any] = candidate
        return answer


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Answer:
    return Answer(capsys)


def test_the_documented_json(plan: Answer) -> None:
    """The keys of the contract, and numbers that agree with each other."""
    code, document = plan.json(top="2")
    assert code == 0
    assert set(document) == {"assumptions", "candidates", "rejected"}
    assert document["assumptions"]["parameters"] == 70_553_706_496
    assert document["assumptions"]["gpus"] == 32
    assert len(document["candidates"]) == 2
    for one in document["candidates"]:
        layout = one["layout"]
        assert set(one) == CANDIDATE_KEYS
        assert set(layout) == LAYOUT_KEYS
        assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 32
        assert len(one["peak_gib"]) == layout["pp"]
        assert one["fits"] is True
        assert max(one["peak_gib"]) < one["capacity_gib"] < 80
        assert one["step_s_range"][0] < one["step_s"] < one["step_s_range"][1]
        assert one["tokens_per_s_per_gpu"] == pytest.approx(128 * 4096 / 32 / one["step_s"])
        assert 0 < one["mfu"]["causal"] < one["mfu"]["full"] < 1
        assert 0 <= one["bubble"] < 1
        assert all(isinstance(line, str) for line in one["why"])
    for one in document["rejected"]:
        assert set(one) == {"layout", "reason"}
        assert set(one["layout"]) == LAYOUT_KEYS


def test_the_story_of_the_problem(plan: Answer) -> None:
    """Plain FSDP does not fit, recomputing whole layers or TP 8 x PP 4 does, and the best is faster than either."""
    fsdp, recomputed, grid = plan.only(FSDP), plan.only(f"{FSDP},recompute=[layer]"), plan.only(MEGATRON)
    assert (fsdp["fits"], recomputed["fits"], grid["fits"]) == (False, True, True)
    (memory,) = [line for line in fsdp["why"] if line.startswith("memory")]
    over = max(fsdp["peak_gib"]) - fsdp["capacity_gib"]
    assert f"{over:.1f} GiB too many" in memory
    assert "at the backward" in memory
    assert any(line.startswith("fits with recompute [layer]") for line in fsdp["why"])
    _, document = plan.json(top="1")
    (best,) = document["candidates"]
    assert best["step_s"] < min(recomputed["step_s"], grid["step_s"])


def test_a_layout_given_is_always_answered(plan: Answer) -> None:
    """Eight times more than the card has: still peak, step and reasons, and exit code 1."""
    answer = plan.only("tp=1,pp=1")
    assert max(answer["peak_gib"]) > 400
    assert answer["step_s"] > 0
    assert answer["why"]
    code, output, _ = plan(layout="tp=1,pp=1")
    assert code == 1
    assert "OUT OF MEMORY" in output


def test_nothing_fits(plan: Answer) -> None:
    """Exit code 1 and a reason for every grid."""
    code, document = plan.json(cluster="1x8xh100-80gb", global_batch="64")
    assert code == 1
    assert document["candidates"] == []
    assert all("GiB of 79.1" in one["reason"] for one in document["rejected"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cluster": "4x7xh100"}, ["4x7xh100", "nearest: 4x8xh100-80gb"]),
        ({"cluster": "4x7xh100-80gb"}, ["--cluster = 4x7", "7 GPUs", "1, 2, 4 or 8", "nearest: 4x8xh100-80gb"]),
        ({"cluster": "18x8xgb200-186gb"}, ["8 GPUs", "1, 2 or 4", "72", "nearest: 18x4xgb200-186gb"]),
        ({"cluster": "none.yaml"}, ["none.yaml", "does not exist"]),
        ({"cluster": "4x8"}, ["4x8"]),
        ({"cluster": "1x1xcpu"}, ["has no GPU to plan for"]),
        ({"cluster": "1x8xa100-pcie-80gb"}, ["has no measured speeds"]),
        ({"model": "gpt2"}, ["gpt2", "neither a folder nor one of"]),
        ({"global-batch": "3", "seq": "4095"}, ["--global-batch = 3", "no layout of 32 GPUs", "nearest: 32"]),
        ({"global-batch": "0"}, ["--global-batch = 0", "at least 1"]),
        ({"seq": "0"}, ["--seq = 0", "at least 1"]),
        ({"seq": "9000"}, ["--seq = 9000", "8192"]),
        ({"top": "0"}, ["--top = 0", "at least 1"]),
        ({"layout": "tp=8,pp=4,vpp=32,schedule=interleaved"}, ["--layout vpp = 32", "128", "80 layers", "nearest: 20"]),
        ({"layout": "tp=8,pp=4,vpp=2"}, ["--layout vpp = 2", "interleaved", "nearest: 1"]),
        (
            {"layout": "tp=8,pp=4,micro_batch=64"},
            ["--global-batch = 128", "2 micro-batches", "at least 4", "nearest: 256"],
        ),
        ({"layout": "tp=8,pp=4,micro_batch=3"}, ["multiple of micro_batch x dp = 3 x 1 = 3", "nearest: 129"]),
        ({"layout": "tp=8,pp=4,vpp=3,schedule=interleaved"}, ["--layout vpp = 3", "20 layers", "nearest: 2"]),
        ({"layout": "tp=16,pp=2"}, ["--layout tp = 16", "node of 8 GPUs", "--tp-across-nodes", "nearest: 8"]),
        ({"layout": "dp=16,cp=2,shard_group=3"}, ["--layout shard_group = 3", "16 x 2 = 32", "nearest: 2"]),
        ({"layout": "shard_group=8,shard=none"}, ["--layout shard_group = 8", "shard is none"]),
        ({"layout": "shard_group=0"}, ["--layout shard_group = 0", "at least 1"]),
        ({"profile": "h20"}, ["--profile = h20", "h200", "nearest: h200"]),
        ({"layout": "tp=3,pp=4"}, ["--layout tp = 3", "64 attention heads", "nearest: 2"]),
        ({"layout": "cp=8", "seq": "4100"}, ["--seq = 4100", "2 x 8 = 16", "nearest: 4096"]),
        ({"layout": "tp=8,pp=4,layers=[20,20,20]"}, ["layers of 3 stages", "sums to 60", "80 layers"]),
        ({"layout": "tp=8,pp=5"}, ["= 40", "32 ranks"]),
        ({"layout": "speed=9"}, ["speed"]),
        ({"layout": "tp=fast"}, ["tp = fast", "whole number"]),
        ({"layout": "recompute=[all]"}, ["all", "norm, swiglu, attention, mlp or layer"]),
        ({"layout": ","}, ["names no key"]),
    ],
)
def test_wrong_input_is_one_message(plan: Answer, options: dict[str, str], told: list[str]) -> None:
    """The key, the value, the rule with both numbers and the nearest legal value; nothing on standard output."""
    code, output, errors = plan(**options)
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("error: ") == 1
    for words in told:
        assert words in errors


def test_every_problem_at_once(plan: Answer) -> None:
    """Model, cluster and numbers are all named in one message."""
    code, _, errors = plan(model="gpt2", cluster="4x8", seq="0", global_batch="0")
    assert code == 2
    for word in ("gpt2", "4x8", "--seq", "--global-batch"):
        assert word in errors


def test_a_folder_that_holds_no_llama(plan: Answer, tmp_path: Path) -> None:
    """Another architecture is refused by name."""
    folder = tiny_config(tmp_path, architectures=["GPT2LMHeadModel"])
    code, _, errors = plan(model=str(folder))
    assert code == 2
    assert "GPT2LMHeadModel" in errors


def test_writes_a_run_file_that_validates(plan: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out`: once the data is there, the run file is one that `validate` accepts, with the layout of the answer."""
    monkeypatch.chdir(tmp_path)
    folder = tiny_tokenizer(tiny_llama(tmp_path / "model", num_hidden_layers=8))
    out = tmp_path / "run.yaml"
    options = {"model": str(folder), "cluster": "1x8xh100-80gb", "seq": "256", "global_batch": "32"}
    code, output, errors = plan("--json", "--out", str(out), "--layout", "tp=2,pp=2,shard=full", **options)
    assert code == 0
    assert str(out) in errors
    (candidate,) = json.loads(output)["candidates"]
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n', encoding="utf-8")
    resolved = validate(load_run(out))
    for name in ("tp", "pp", "vpp", "cp", "dp", "micro_batch", "shard", "schedule"):
        assert getattr(resolved.layout, name) == candidate["layout"][name]
    assert list(resolved.layout.layers) == candidate["layout"]["layers"]
    assert resolved.layout.world_size == 8


@pytest.mark.parametrize("layers", [2, 5, 8])
def test_the_best_layout_validates(plan: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    """Whatever the search chooses for a model folder, its run file is accepted."""
    monkeypatch.chdir(tmp_path)
    folder = tiny_tokenizer(tiny_llama(tmp_path / "model", num_hidden_layers=layers))
    out = tmp_path / "run.yaml"
    options = {"model": str(folder), "cluster": "2x4xh100-80gb", "seq": "256", "global_batch": "16"}
    assert plan("--out", str(out), **options)[0] == 0
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n', encoding="utf-8")
    assert validate(load_run(out)).layout.world_size == 8


def test_writes_no_run_file_for_what_does_not_fit(plan: Answer, tmp_path: Path) -> None:
    """`--out` with a layout that runs out of memory writes nothing."""
    out = tmp_path / "run.yaml"
    code, _, _ = plan(layout=FSDP, out=str(out))
    assert code == 1
    assert not out.exists()


def test_the_text_shows_memory_and_time(plan: Answer) -> None:
    """A bar for each stage against the capacity, where the time goes, and the pipeline of the best layout."""
    code, output, _ = plan(top="2")
    assert code == 0
    assert "│" in output
    assert "time: matrix products" in output
    assert "% slower than the first" in output
    assert "F forward; B backward" in output
    assert max(map(len, (line for line in output.splitlines() if "F0" in line or "Fa0" in line))) <= 100


def test_the_picture(plan: Answer, tmp_path: Path) -> None:
    """`--svg` writes one well-formed picture with a title, a bar for every stage and the timeline."""
    picture = tmp_path / "plan.svg"
    assert plan(layout=MEGATRON, svg=str(picture))[0] == 0
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))  # noqa: S314
    assert root.get("role") == "img"
    text = " ".join(root.itertext())
    for words in ("stage 0", "stage 3", "79.1 GiB", "1f1b", "weights"):
        assert words in text


def test_needs_no_torch_and_starts_fast() -> None:
    """70B on 32 GPUs in a process of its own: neither torch nor numpy is imported, and seconds of CPU stay few."""
    words = [word for name, value in PROBLEM.items() for word in (f"--{name}", value)]
    code = f"""
import sys, time
from triweave.cli import main
try:
    main(["plan", "--json", *{words!r}])
finally:
    loaded = [name for name in ("torch", "numpy") if name in sys.modules]
    print(time.process_time(), loaded, file=sys.stderr)
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    seconds, _, loaded = done.stderr.partition(" ")
    assert loaded.strip() == "[]"
    # Less than a second on an idle machine; tests run beside others.
    assert float(seconds) < 3, time.monotonic() - started


def test_messages_name_what_was_typed(plan: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule is told of an option to who typed an option, and of a key to who wrote a run file."""
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(tiny_llama(tmp_path / "model"))
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n', encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\ncluster: 1x8xh100-80gb\nlayout: {tp: 2, micro_batch: 3}\n"
        "data: {train: train.jsonl, seq_len: 256}\ntrain: {global_batch: 64, epochs: 1}\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError) as refused:
        validate(load_run(tmp_path / "run.yaml"))
    (problem,) = refused.value.problems
    assert problem.key == "train.global_batch"
    options = {"model": "model", "cluster": "1x8xh100-80gb", "seq": "256", "global_batch": "64"}
    _, _, errors = plan(layout="tp=2,micro_batch=3", **options)
    assert errors.endswith(f"error: --global-batch = 64: {problem.rule}; nearest: {problem.nearest}\n")


def test_a_cluster_file(plan: Answer, tmp_path: Path) -> None:
    """A file may describe any node, and the run file names the file; what is wrong in it is told with its line."""
    path = tmp_path / "own.yaml"
    path.write_text("nodes: 4\ngpus_per_node: 7\ngpu: {name: h100-80gb}\n", encoding="utf-8")
    out = tmp_path / "run.yaml"
    options = {"model": "llama-3.1-8b", "cluster": str(path), "seq": "4096", "global_batch": "56"}
    code, _, _ = plan("--json", "--out", str(out), layout="dp=28,shard=full", **options)
    assert code == 0
    assert str(path) in out.read_text(encoding="utf-8")
    path.write_text("nodes: 4\ngpus: 7\ngpu: {name: h100-80gb}\n", encoding="utf-8")
    code, _, errors = plan(**options)
    assert code == 2
    assert f"{path}:2: gpus" in errors


def test_context_parallel_and_shard_groups_are_written(plan: Answer, tmp_path: Path) -> None:
    """A run file has both, without a word of what `train` cannot do."""
    out = tmp_path / "run.yaml"
    code, output, errors = plan("--out", str(out), model="llama-3.1-8b", layout="tp=8,cp=2,dp=2,shard_group=2")
    assert code == 0
    assert "not yet trained" not in output
    assert "does not train" not in errors
    layout = load_run(out).layout
    assert (layout.cp, layout.shard_group) == (2, 2)


def test_across_nodes_when_insisted_on(plan: Answer) -> None:
    """A tensor-parallel group of two nodes is answered, beside what the same GPUs do inside nodes."""
    code, output, _ = plan("--tp-across-nodes", layout="tp=16,pp=2")
    assert code == 0
    assert "tensor parallel 16 across nodes of 8" in output
    assert "tp 8 in its place takes" in " ".join(output.split())


def test_the_story_comes_out_of_one_command(plan: Answer) -> None:
    """Beside the best: plain FSDP and by how much it does not fit, FSDP recomputed and TP x PP with their MFU."""
    code, output, _ = plan(top="1")
    told = " ".join(output.split())
    assert code == 0
    plain = re.search(
        r"FSDP over all 32 GPUs: OUT OF MEMORY at the backward of .*?: ([\d.]+) GiB of 79.1, ([\d.]+) too", told
    )
    again = re.search(r"FSDP with whole layers recomputed: fits with ([\d.]+) GiB of 79.1", told)
    assert plain is not None
    assert again is not None
    assert float(plain[1]) - 79.1 == pytest.approx(float(plain[2]), abs=0.11)
    assert float(again[1]) < 0.6 * float(plain[1])
    assert "tensor and sequence parallel 8 inside nodes x pipeline parallel 4 across them: fits with" in told
    assert "% slower than the first" in told


def test_profiles_are_named_in_the_assumptions(plan: Answer) -> None:
    """`--profile` is in the document, with whether it is of this GPU."""
    options = {"model": "llama-3.1-8b", "cluster": "1x2xh100-80gb", "layout": "dp=2,shard=full,recompute=[layer]"}
    _, document = plan.json(profile="h200", **options)
    assert document["assumptions"]["profile"]["of_this_gpu"] is False
    _, output, _ = plan(profile="h200", **options)
    assert "the profile is of h200-141gb, not of h100-80gb" in " ".join(output.split())
