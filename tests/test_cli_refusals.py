"""Every mistake of a user is answered with one message and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_line import (
    environment,
    errors,
    linked_workspace,
    made_once,
    make_workspace,
    torchrun,
    triweave,
    write_lines,
)

TORCHRUN_S = 30.0
"""In which torchrun lets ranks end before it kills them."""

PLAN = "plan --model llama-3-8b --cluster 1x8xh200-141gb --global-batch 64"

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def replace_line(old: str, new: str) -> Callable[[Path], None]:
    """Changes the run file."""

    def change(folder: Path) -> None:
        text = (folder / "run.yaml").read_text()
        assert old in text
        (folder / "run.yaml").unlink()
        (folder / "run.yaml").write_text(text.replace(old, new))

    return change


def copied_model(folder: Path) -> Path:
    """Replace the link to the model by a copy that may be spoilt."""
    source = (folder / "model").resolve()
    (folder / "model").unlink()
    (folder / "model").mkdir()
    for file in source.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    return folder / "model"


def cut_weights_short(folder: Path) -> None:
    """As if a download had been broken off."""
    weights = copied_model(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def change_config(**values: object) -> Callable[[Path], None]:
    """Changes the model's config.json, and not its weights."""

    def change(folder: Path) -> None:
        file = copied_model(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def lines(name: str, *records: dict[str, object]) -> Callable[[Path], None]:
    """Writes a data file."""
    return lambda folder: write_lines(folder / name, list(records))


def long_conversation() -> dict[str, object]:
    """More than 64 tokens."""
    roles = ("user", "assistant")
    return {"messages": [{"role": role, "content": "zyx " * 50} for role in roles]}


def empty_folder(name: str) -> Callable[[Path], None]:
    """Makes a folder."""
    return lambda folder: (folder / name).mkdir()


@dataclass(frozen=True)
class Mistake:
    """What a user does, and what must stand in the answer."""

    words: str
    answer: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda folder: None
    env: dict[str, str] = field(default_factory=dict)
    problems: int = 1
    """Lines of the message."""


MISTAKES = {
    "unknown verb": Mistake("trian run.yaml", ('"trian"', '"train"')),
    "no verb": Mistake("", ("verb", "train", "--help")),
    "no run file": Mistake("train", ("RUN_FILE",)),
    "run file missing": Mistake("train rum.yaml", ("rum.yaml", "does not exist", "nearest: run.yaml")),
    "wrong option": Mistake("schema --pretty", ("--pretty",)),
    "option before the run file": Mistake(
        "train --layout.tp 2 run.yaml", ("--layout.tp", "come after it", "RUN_FILE --KEY VALUE")
    ),
    "option without a value": Mistake("train run.yaml --nproc", ("--nproc",)),
    "option that is no number": Mistake("train run.yaml --nproc four", ("--nproc", '"four"', "int")),
    "no ranks": Mistake("train run.yaml --nproc 0", ("--nproc = 0", "at least 1")),
    "key misspelt": Mistake(
        "train run.yaml", ("run.yaml:2: layout.tpp", "nearest: layout.tp"), replace_line("tp: 2", "tpp: 2")
    ),
    "key misspelt on the command line": Mistake(
        "train run.yaml --optimizer.learning-rate 1", ("optimizer.learning-rate", "nearest: optimizer.learning_rate")
    ),
    "foreign key": Mistake(
        "train run.yaml",
        ("run.yaml:2: layout.tensor_model_parallel_size", "layout.tp"),
        replace_line("tp: 2", "tensor_model_parallel_size: 2"),
    ),
    "key twice": Mistake("train run.yaml", ("run.yaml:2: layout.tp", "twice"), replace_line("tp: 2,", "tp: 2, tp: 4,")),
    "model missing": Mistake("train run.yaml --model.path modle", ("model.path = modle", "nearest: model")),
    "data missing": Mistake(
        "train run.yaml --data.train chats.jsonl", ("data.train = chats.jsonl", "does not exist", "nearest: chat.jsonl")
    ),
    "weights cut short": Mistake("train run.yaml", ("model.safetensors", "bytes"), cut_weights_short),
    "weights of another shape": Mistake(
        "train run.yaml", ("mlp.down_proj.weight", "64, 96", "64, 128"), change_config(intermediate_size=128)
    ),
    "more ranks than layers": Mistake(
        "train run.yaml --layout.pp 8",
        ("layout.pp = 8", "4 layers", "nearest: 4"),
        problems=2,  # and the batch is too small for so many stages
    ),
    "ranks that are too few": Mistake("train run.yaml --nproc 3", ("2 x 2", "= 4", "3 ranks", "nearest")),
    "ranks that are not the product": Mistake(
        "train run.yaml --nproc 6",
        ("2 x 2", "= 4", "6 ranks", "nearest"),
    ),
    "dp that is not the rest": Mistake(
        "train run.yaml --nproc 8 --layout.dp 3",
        ("layout.dp = 3", "= 12", "8 ranks", "nearest: 2"),
    ),
    "micro-batch that does not divide": Mistake(
        "train run.yaml --layout.micro_batch 3",
        ("train.global_batch = 4", "3 x 1 = 3", "nearest"),
    ),
    "fewer micro-batches than stages": Mistake(
        "train run.yaml --layout.micro_batch 4",
        ("train.global_batch = 4", "1 micro-batches", "pp = 2", "nearest: 8"),
    ),
    "heads that TP does not divide": Mistake(
        "train run.yaml --layout.tp 3 --layout.sequence_parallel false",
        ("layout.tp = 3", "8 attention heads", "4 key/value heads", "nearest: 2"),
        problems=2,
    ),
    "sequence that TP does not divide": Mistake(
        "train run.yaml --data.seq_len 63", ("data.seq_len = 63", "tp = 2", "nearest: 62")
    ),
    "sequence beyond the model": Mistake(
        "train run.yaml --data.seq_len 512", ("data.seq_len = 512", "max_position_embeddings = 256", "nearest: 256")
    ),
    "TP across nodes": Mistake(
        "train run.yaml --cluster 2x2xcpu --nproc 4 --layout.tp 4 --layout.pp 1",
        ("layout.tp = 4", "node of 2 GPUs", "layout.tp_across_nodes", "nearest: 2"),
    ),
    "two nodes from one": Mistake("train run.yaml --cluster 2x2xcpu", ("2x2xcpu", "torchrun --nnodes 2")),
    "another number of GPUs": Mistake("train run.yaml --cluster 1x8xcpu --nproc 4", ("1x8xcpu", "8", "4", "1x4xcpu")),
    "empty data set": Mistake(
        "train run.yaml --data.train empty.jsonl", ("data.train", "holds no records"), lines("empty.jsonl")
    ),
    "text longer than the sequence": Mistake(
        "train run.yaml --data.train long.jsonl",
        ("data.too_long", "seq_len = 64", "long.jsonl:1", "nearest: truncate"),
        lines("long.jsonl", long_conversation()),
    ),
    "token outside the vocabulary": Mistake(
        "train run.yaml --data.train ids.jsonl --data.validation 0",
        ("ids.jsonl:2", "token id 384", "vocabulary has 384", "0 to 383"),
        lines("ids.jsonl", {"input_ids": [1, 2, 383]}, {"input_ids": [1, 384]}),
    ),
    "checkpoint that is not there": Mistake(
        "train run.yaml --resume out/checkpoints/step-3", ("resume = out/checkpoints/step-3", "auto, never")
    ),
    "folder that is no checkpoint": Mistake(
        "train run.yaml --resume other", ("resume = other", "no checkpoint"), empty_folder("other")
    ),
    "two launchers": Mistake("train run.yaml --nproc 4", ("--nproc = 4", "4 ranks already"), env=LAUNCHED),
    "half a launcher": Mistake(
        "train run.yaml", ("RANK", "WORLD_SIZE", "torchrun"), env={"RANK": "0", "LOCAL_RANK": "0"}
    ),
    "rank that is none": Mistake("train run.yaml", ("RANK = 4", "below the 4"), env={**LAUNCHED, "RANK": "4"}),
    "GPUs that are not there": Mistake(
        "train run.yaml --runtime.device cuda",
        ("runtime.device = cuda", "4 ranks", "has 0", "nearest: cpu"),
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "several at once": Mistake(
        "train run.yaml --layout.micro_batch 0 --data.train chats.jsonl --seed -1",
        ("layout.micro_batch = 0", "data.train = chats.jsonl", "seed = -1"),
        problems=3,
    ),
    "example that is not there": Mistake("data run.yaml --example 99", ("example = 99", "0 to 39", "nearest: 39")),
    "ranks of nothing": Mistake("check run.yaml --ranks ,", ('--ranks = ""', "must be first, middle, last, all")),
    "rank of many digits": Mistake(f"check run.yaml --ranks {'9' * 5000}", ("--ranks = 9", "must be first, middle")),
    "half a rank": Mistake("check run.yaml --rank 1.5", ("--rank", '"1.5"')),
    "rank and ranks": Mistake("check run.yaml --rank 0 --ranks all", ("--rank = 0", "--ranks", "all")),
    "device without a name": Mistake("check run.yaml --on-gpu --device=", ('--device = ""', "nearest: cuda")),
    "half a token": Mistake(f"{PLAN} --seq 4096.6", ("--seq", '"4096.6"')),
    "profile that is a folder": Mistake(f"{PLAN} --seq 4096 --profile .", ("error: --profile = .: is a folder",)),
    "profile without an end": Mistake(
        f"{PLAN} --seq 4096 --profile /dev/zero",
        ("--profile = /dev/zero", "more than 1048576 bytes; a profile has at most 1048576"),
    ),
    "profile that is none": Mistake(
        f"{PLAN} --seq 4096 --profile p.yaml",
        ("p.yaml:1: seeed = 1: is not a key of a profile", "version: is missing"),
        lines("p.yaml", {"seeed": 1}),
        problems=6,
    ),
    "time that is no number": Mistake(
        "probe --device cpu --minutes nan", ("--minutes = nan", "above 0", "nearest: 10")
    ),
    "part without a name": Mistake("probe --device cpu --only ,", ("--only = ,", "names no part")),
    "name of no GPU": Mistake("probe --device cpu --name h200", ("--name = h200", "h200-141gb", "nearest: h200-141gb")),
    "no profile to go on with": Mistake(
        "probe --device cpu --out run.yaml", ("--out = run.yaml", "holds no profile", "run.yaml:1", "--force")
    ),
    "profile on a device": Mistake("probe --device cpu --out /dev/null", ("--out = /dev/null", "no ordinary file")),
    "place without a package": Mistake(
        "train run.yaml --checkpoint.path s3://bucket/run",
        ("checkpoint.path = s3://bucket/run", "needs a package that is not installed", "s3fs"),
    ),
    "place of no kind": Mistake(
        "train run.yaml --checkpoint.path memroy://run",
        ("checkpoint.path = memroy://run", "fsspec", "nearest: memory://run"),
    ),
    "place with one slash": Mistake(
        "train run.yaml --checkpoint.path s3:/bucket/run", ("has one slash", "nearest: s3://bucket/run")
    ),
    "place without a name": Mistake("train run.yaml --checkpoint.path s3://", ("checkpoint.path = s3://", "a place")),
    "resumed from nowhere": Mistake(
        "train run.yaml --resume=memory://run/step-3", ("resume = memory://run/step-3", "is no checkpoint")
    ),
    "verify without data": Mistake(
        "verify run.yaml --json --data.train empty.jsonl", ("data.train", "holds no records"), lines("empty.jsonl")
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that is only read."""
    return made_once(tmp_path_factory, "inputs", make_workspace)


def everything_in(folder: Path) -> set[str]:
    """All that is below a folder, but for prepared data: that is found again, not half-written."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return {name for name in found if name != "out" and not name.startswith("out/data")}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_answered(source: Path, tmp_path: Path, mistake: Mistake) -> None:
    """The message names key, value, rule and nearest legal value; nothing else is printed or written."""
    folder = linked_workspace(source, tmp_path / "here")
    mistake.prepare(folder)
    before = everything_in(folder)
    done = triweave(*mistake.words.split(), cwd=folder, env=mistake.env)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    message = done.stderr[done.stderr.index("error: ") :]
    missing = [part for part in mistake.answer if part not in message]
    assert not missing, message
    assert len(errors(done.stderr)) == 1
    assert len(message.splitlines()) == mistake.problems
    assert everything_in(folder) == before


def test_tp_across_nodes_runs_if_insisted(source: Path, tmp_path: Path) -> None:
    """Two ranks that a launcher, here this test, has started as two nodes: TP 2 is refused, and done if insisted."""
    folder = linked_workspace(source, tmp_path / "here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    words = (
        *("train", "run.yaml", "--layout.tp=2", "--layout.pp=1", "--data.validation=0"),
        *("--train.steps=1", "--optimizer.warmup_steps=0", "--checkpoint.export=false"),
    )

    def rank(number: int, *more: str) -> subprocess.CompletedProcess[str]:
        return triweave(*words, *more, cwd=folder, env={**nodes, "RANK": str(number), "MASTER_PORT": port})

    refused = rank(0)
    assert refused.returncode == 2
    assert "node of 1 GPUs" in refused.stderr
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda number: rank(number, "--layout.tp_across_nodes=true"), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "ranks 0-1, nodes 0-1" in first.stdout
    assert second.stdout == ""


@pytest.mark.parametrize(
    ("words", "answer", "prepare"),
    [
        ("trian run.yaml", '"train"', lines("unused.jsonl")),
        ("train run.yaml --layout.pp=1 --seeed 3", "nearest: seed", lines("unused.jsonl")),
        (
            "train run.yaml --layout.pp=1 --data.train=long.jsonl",
            "data.too_long",
            lines("long.jsonl", long_conversation()),
        ),
        ("train run.yaml --layout.pp=1 --resume other", "no checkpoint", empty_folder("other")),
    ],
    ids=["verb", "key", "data", "checkpoint"],
)
def test_launched_ranks_speak_with_one_voice(
    source: Path, tmp_path: Path, words: str, answer: str, prepare: Callable[[Path], None]
) -> None:
    """Under torchrun all ranks meet the same mistake, or hear of it; one tells it, and none is waited for."""
    folder = linked_workspace(source, tmp_path / "here")
    prepare(folder)
    begun = time.monotonic()
    done = torchrun(2, *words.split(), cwd=folder)
    assert time.monotonic() - begun < TORCHRUN_S
    assert done.returncode != 0
    (message,) = errors(done.stderr)
    assert answer in message
    assert done.stderr.count("exitcode  : 2") == 1  # torchrun's list of causes
    assert everything_in(folder) == everything_in(linked_workspace(source, tmp_path / "untouched")) | {
        path.name for path in folder.iterdir() if path.name in ("unused.jsonl", "long.jsonl", "other")
    }


def test_progress_line_is_cleared_before_the_message(source: Path, tmp_path: Path) -> None:
    """On a terminal the message does not stand at the end of a half-finished progress line."""
    folder = linked_workspace(source, tmp_path / "here")
    write_lines(folder / "long.jsonl", [long_conversation()])
    ours, theirs = pty.openpty()
    words = ("-m", "triweave", "train", "run.yaml", "--data.validation", "long.jsonl")
    with subprocess.Popen((sys.executable, *words), cwd=folder, env=environment(), stderr=theirs) as process:
        assert process.wait(timeout=60) == 2
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert shown.startswith("\rpreparing data: tokenised 40\x1b[K\r\x1b[Kerror: ")
