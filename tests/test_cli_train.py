"""`triweave train` from a run file to a folder that transformers loads, and on from any checkpoint on the way."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import (
    Running,
    errors,
    linked_workspace,
    made_once,
    make_workspace,
    read_lines,
    torchrun,
    triweave,
    wait_until,
)
from on_disk import flip
from transformers import AutoModelForCausalLM, AutoTokenizer

from triweave.checkpoint.damaged import damage
from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.manifest import manifest_of
from triweave.config.load import load_run
from triweave.groups import alone
from triweave.schedule.build import build_schedule

NUM_STEPS = 9
CONTRACT = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu_causal",
    "mfu_full",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "goodput",
]
SAME_ON_EVERY_RUN = ("step", "loss", "grad_norm", "lr", "tokens")
LOG_LINE = re.compile(
    r"step +(\d+)/9 \| loss +(\d+\.\d{4}) \| grad norm +\d+\.\d{3} \| +\d+ tokens/s/GPU \| MFU +- %"
    r" \| memory +\d+\.\d/\d+ GiB \| left \d+:\d\d:\d\d(?: \| held-out loss \d+\.\d{4})?"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which `train` ran to its end on TP 2 x PP 2; what it printed is in log.txt and errors.txt."""

    def run(folder: Path) -> None:
        done = triweave("train", "run.yaml", cwd=make_workspace(folder))
        assert done.returncode == 0, done.stderr
        (folder / "log.txt").write_bytes(done.stdout.encode())
        (folder / "errors.txt").write_bytes(done.stderr.encode())

    return made_once(tmp_path_factory, "finished", run)


def course(output: Path) -> list[dict[str, Any]]:
    """Of every step of a run what does not depend on the machine's mood."""
    return [{key: line[key] for key in SAME_ON_EVERY_RUN} for line in read_lines(output / "metrics.jsonl")]


def held_out_loss(model_folder: Path, data: Path) -> float:
    """transformers' mean loss over what the assistant says, conversation by conversation."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    total, count = 0.0, 0
    for record in read_lines(data):
        *before, answer = record["messages"]
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{answer['content']}")]
        tokens = torch.tensor([[*ids[0], *ids[1], tokenizer.eos_token_id]])
        labels = tokens.clone()
        labels[:, : len(ids[0])] = -100
        trained = len(ids[1]) + 1
        with torch.no_grad():
            total += float(model(tokens, labels=labels).loss) * trained
        count += trained
    return total / count


class TestFinishedRun:
    """What one run leaves behind."""

    def test_metrics_have_the_keys_of_the_contract(self, finished: Path) -> None:
        """There is a line a step with exactly the documented keys, and the held-out loss where it was measured."""
        lines = read_lines(finished / "out" / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
        assert [list(line) for line in lines[:-1]] == [CONTRACT] * (NUM_STEPS - 1)
        assert list(lines[-1]) == [*CONTRACT, "val_loss"]
        assert all(line["mfu_causal"] is None and line["step_s"] > 0 for line in lines)

    def test_loss_falls(self, finished: Path) -> None:
        """Training on a repetitive text makes the loss fall from that of random weights to less than half."""
        losses = [line["loss"] for line in course(finished / "out")]
        assert losses[0] > math.log(384)
        assert losses[-1] < losses[0] / 2

    def test_log_has_a_fixed_form(self, finished: Path) -> None:
        """Without a terminal there is a line a step, all of one form, and neither colour nor carriage return."""
        log = (finished / "log.txt").read_bytes().decode()
        lines = [LOG_LINE.fullmatch(line) for line in log.split("\n") if line.startswith("step ")]
        metrics = read_lines(finished / "out" / "metrics.jsonl")
        assert all(lines)
        assert [(int(line[1]), line[2]) for line in lines] == [(m["step"], f"{m['loss']:.4f}") for m in metrics]
        assert not {"\r", "\x1b"} & set(log)
        assert (finished / "errors.txt").read_bytes() == (
            b"preparing data: tokenised 40\npreparing data: tokenised 10\n"
        )

    def test_checkpoints_stand_where_the_contract_says(self, finished: Path) -> None:
        """Every third step has a whole checkpoint, and nothing half-written lies beside them."""
        kept = finished / "out" / "checkpoints"
        assert {path.name for path in kept.iterdir()} == {"latest", "step-3", "step-6", "step-9"}
        assert (kept / "latest").read_text() == "step-9\n"
        assert {path.name for path in (finished / "out").iterdir()} == {
            *("checkpoints", "data", "hf", "metrics.jsonl", "run.yaml", "timeline.jsonl", "validation.jsonl"),
            *("forecast.json", "pipeline.json", "starts.jsonl", "identity.json"),
        }

    def test_the_third_step_is_kept_in_time(self, finished: Path) -> None:
        """Every action of each stage, in the schedule's order, none before the one ahead of it has ended."""
        told = json.loads((finished / "out" / "pipeline.json").read_text())
        schedule = build_schedule("1f1b", 2, 1, told["micro_batches"])
        for spans, actions in zip(told["ranks"], schedule.ranks, strict=True):
            assert [f"{kind}{stage}.{batch}" for kind, stage, batch, _, _ in spans] == [str(one) for one in actions]
            edges = [edge for *_, begin, end in spans for edge in (begin, end)]
            assert edges == sorted(edges)

    def test_the_report_of_it(self, finished: Path) -> None:
        """`report` reads what `train` left: a page, its pipeline as measured, its plan by stage."""
        done = triweave("report", "out", "--out", "page.html", cwd=finished)
        assert done.returncode == 0, done.stderr
        page = (finished / "page.html").read_text()
        assert "The pipeline of one step" in page
        assert "stage 1, predicted" in page
        assert "9 steps are done" in page.replace("\u00a0", " ")

    def test_export_has_the_loss_that_was_told(self, finished: Path) -> None:
        """transformers, with the exported folder alone, finds the held-out loss of the last step."""
        told = read_lines(finished / "out" / "metrics.jsonl")[-1]["val_loss"]
        assert held_out_loss(finished / "out" / "hf", finished / "held_out.jsonl") == pytest.approx(told, rel=1e-5)
        before, after = read_lines(finished / "out" / "validation.jsonl")
        assert held_out_loss(finished / "model", finished / "held_out.jsonl") == pytest.approx(
            before["val_loss"], rel=1e-5
        )
        assert (before["step"], after) == (0, {"step": NUM_STEPS, "val_loss": told})

    def test_resolved_copy_is_the_run(self, finished: Path) -> None:
        """The run directory's copy, with every key written out, reads as the run that was given."""
        assert load_run(finished / "out" / "run.yaml") == load_run(finished / "run.yaml")


def test_torchrun_trains_the_resolved_copy_alike(finished: Path, tmp_path: Path) -> None:
    """The copy that the run directory keeps, started by torchrun, takes the same course bit for bit."""
    folder = linked_workspace(finished, tmp_path / "other")
    done = torchrun(4, "train", str(finished / "out" / "run.yaml"), "--checkpoint.export=false", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert course(folder / "out") == course(finished / "out")


def test_interrupted_run_goes_on_as_if_nothing_had_been(finished: Path, tmp_path: Path) -> None:
    """Ctrl-C ends every process at once without a traceback; the next start takes the same course to the same end."""
    folder = linked_workspace(finished, tmp_path / "other")
    with Running("-m", "triweave", "train", "run.yaml", cwd=folder) as running:
        assert wait_until((folder / "out" / "checkpoints" / "step-3").exists)
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.all_gone()
        code, log, error = running.end()
    assert code == 130
    assert "done" not in log
    assert "Traceback" not in error
    assert not (folder / "out" / "hf").exists()
    with (folder / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 0.0}\n{"step": 9, "lo')  # as if it had been stopped later, in writing a line

    done = triweave("train", "run.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^resumed   at step [36]$", done.stdout, re.MULTILINE)
    assert course(folder / "out") == course(finished / "out")
    ends = [read_lines(output / "out" / "validation.jsonl")[-1] for output in (folder, finished)]
    assert ends[0] == ends[1]
    for file in ("model.safetensors", "config.json"):
        assert (folder / "out" / "hf" / file).read_bytes() == (finished / "out" / "hf" / file).read_bytes()


def test_resume_with_other_moments(finished: Path, tmp_path: Path) -> None:
    """A run whose moments are of another type than its checkpoint's says what it did to them, and goes on nearby."""
    folder = linked_workspace(finished, tmp_path / "other")
    words = ("--optimizer.moments=bfloat16", "--checkpoint.export=false")
    source = finished / "out" / "checkpoints" / "step-6"
    done = triweave("train", "run.yaml", *words, "--resume", str(source), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "\nresumed   at step 6\nmoments   float32 in the checkpoint, rounded to bfloat16\n" in done.stdout
    resumed, whole = course(folder / "out"), course(finished / "out")[6:]
    assert resumed[0]["loss"] == whole[0]["loss"], "weights are not rounded"
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole], rel=0.01)


def test_resume_on_another_layout(finished: Path, tmp_path: Path) -> None:
    """A checkpoint of TP 2 x PP 2 goes on with DP 2: the same losses, but for the order of float32 sums."""
    folder = linked_workspace(finished, tmp_path / "other")
    words = ("--layout.tp=1", "--layout.pp=1", "--layout.dp=2", "--layout.shard=full", "--checkpoint.export=false")
    source = finished / "out" / "checkpoints" / "step-6"
    done = triweave("train", "run.yaml", *words, "--resume", str(source), cwd=folder)
    assert done.returncode == 0, done.stderr
    resumed, whole = course(folder / "out"), course(finished / "out")[6:]
    assert [line["step"] for line in resumed] == [7, 8, 9]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in resumed] == pytest.approx([line[key] for line in whole], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "saved", "message"),
    [
        (
            ["--seed=7"],
            {"data": "of another seed, with other examples held out"},
            "seed = 7: differs from the 42 of the checkpoint step-6; nearest: 42",
        ),
        (
            ["--train.global_batch=8"],
            {},
            "train.global_batch = 8: differs from the 4 of the checkpoint step-6; nearest: 4",
        ),
        (
            ["--data.train=held_out.jsonl"],
            {},
            "data.train = held_out.jsonl: gives other training sequences than those of the checkpoint step-6;"
            " nearest: the former data, or another output_dir",
        ),
    ],
    ids=["seed", "batch", "data"],
)
def test_resume_as_another_run_is_refused(
    finished: Path, tmp_path: Path, words: list[str], saved: dict[str, str], message: str
) -> None:
    """Samples would be lost or repeated without a word: one message says what must not change."""
    folder = linked_workspace(finished, tmp_path / "other")
    progress = json.loads((finished / "out" / "checkpoints" / "step-6" / "progress.json").read_text())
    (folder / "step-6").mkdir()
    (folder / "step-6" / "progress.json").write_text(json.dumps(progress | saved))
    seal(folder / "step-6")
    done = triweave("train", "run.yaml", *words, "--resume=step-6", cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr[done.stderr.index("error: ") :] == f"error: {message}\n"
    assert [path.name for path in (folder / "out").iterdir()] == ["data"]


def test_run_does_not_write_below_later_checkpoints(finished: Path, tmp_path: Path) -> None:
    """Starting anew in a finished run's folder would leave the old checkpoints as the newest: it is refused."""
    folder = linked_workspace(finished, tmp_path / "again")
    saved = folder / "out" / "checkpoints" / "step-6"
    shutil.copytree(finished / "out" / "checkpoints" / "step-6", saved)
    before = everything_in(saved)
    done = triweave("train", "run.yaml", "--resume=never", cwd=folder)
    assert done.returncode == 2
    assert "output_dir = out: holds step-6 of an earlier run, and this one starts from step 0" in done.stderr
    assert everything_in(saved) == before


def everything_in(folder: Path) -> dict[str, bytes]:
    """Every file's content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_damaged_newest_is_passed_over(finished: Path, tmp_path: Path) -> None:
    """A checkpoint with one changed bit is named, the one before is used, and the run comes to the same end."""
    folder = linked_workspace(finished, tmp_path / "other")
    shutil.copytree(finished / "out", folder / "out", ignore=shutil.ignore_patterns("hf", "step-9", "latest"))
    store = LocalStore(folder / "out" / "checkpoints")
    flip(folder / "out" / "checkpoints" / "step-6" / "__1_0.distcp")
    assert damage(store, "step-6", alone()) is not None
    done = triweave("train", "run.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("DAMAGED")]
    assert line.split(maxsplit=1)[1].startswith("step-6: __1_0.distcp has changed since it was written")
    assert "resumed   at step 3\n" in done.stdout
    assert course(folder / "out") == course(finished / "out")
    assert [damage(store, name, alone()) for name in ("step-6", "step-9")] == [None, None]  # saved again


def test_no_whole_checkpoint_stops_the_run(finished: Path, tmp_path: Path) -> None:
    """Where there are checkpoints and all are damaged, the run ends with one message and begins nothing anew."""
    folder = linked_workspace(finished, tmp_path / "other")
    shutil.copytree(finished / "out", folder / "out", ignore=shutil.ignore_patterns("hf", "step-9", "latest"))
    for step in (3, 6):
        flip(folder / "out" / "checkpoints" / f"step-{step}" / "__0_0.distcp")
    done = triweave("train", "run.yaml", cwd=folder)
    assert done.returncode == 2
    (message,) = errors(done.stderr)
    assert message.startswith(
        "error: resume = auto: finds no whole checkpoint among the 2 in out/checkpoints (step-6: __0"
    )
    assert not (folder / "out" / "checkpoints" / "step-9").exists()


def test_directory_in_use_is_refused(finished: Path, tmp_path: Path) -> None:
    """A second job in a run's directory is refused with who is there; after a kill the next one goes on at once."""
    folder = linked_workspace(finished, tmp_path / "other")
    alone = ("--layout.tp=1", "--layout.pp=1", "--checkpoint.export=false", "--data.validation=0")
    with Running("-m", "triweave", "train", "run.yaml", *alone, "--train.steps=100000", cwd=folder) as running:
        metrics = folder / "out" / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        second = triweave("train", "run.yaml", *alone, cwd=folder)
        running.process.kill()
        assert running.all_gone()
    assert second.returncode == 2
    (message,) = errors(second.stderr)
    assert re.match(r"error: output_dir = out: is in use by process \d+ on \S+ since 20", message)
    assert str(running.process.pid) in message
    last = max(line["step"] for line in read_lines(folder / "out" / "metrics.jsonl")[:-1])
    third = triweave("train", "run.yaml", *alone, f"--train.steps={last + 3}", cwd=folder)
    assert third.returncode == 0, third.stderr
    assert not (folder / "out" / "lock.json").exists()


def seal(folder: Path) -> None:
    """Give a folder a manifest of what is in it."""
    manifest = manifest_of(LocalStore(folder.parent), folder.name)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
