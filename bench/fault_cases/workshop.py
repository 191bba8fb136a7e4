"""Tiny runs, and ranks into which a fault is planted: what the campaign's cases share."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from triweave.config.load import load_run
from triweave.config.validate import ResolvedRun, validate
from triweave.data.cache import PreparedData, prepare
from triweave.recovery.stop import StopRequest
from triweave.training.endings import heard
from triweave.training.loop import train
from triweave.training.process import Process
from triweave.training.resume_check import check_resume
from triweave.training.start_ranks import run_ranks

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
SAME_ON_EVERY_RUN = ("step", "loss", "grad_norm", "lr", "tokens")
WHEN_FILE = "planted-at"
"""Holds when the fault began, in seconds since the epoch."""

Plant = Callable[[Path, Process], None]
"""Puts a fault into this rank before it begins; `Path` is the run's folder."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run with a fault ended."""

    code: int
    said: str
    """What the one that started the ranks said of it."""
    ended_after_s: float
    """From the fault to the end of the last rank."""


def processor_s() -> float:
    """Seconds that processors have worked for this process, for what it has waited for, and for the ranks.

    On a machine that others keep busy this says more than the clock. The server that forks the ranks waits for them, so
    that the kernel counts them as its children.
    """
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        # Behind the name in parentheses: user and system time of the server, and of its children, in ticks.
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def make_files(folder: Path, *, quick: bool = False) -> Path:
    """Model and data that need no tokenizer; returns the folder. `quick`: half of the layers, for no virtual stage."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(
        json.dumps(CONFIG | ({"num_hidden_layers": 2} if quick else {})), encoding="utf-8"
    )
    draw = random.Random(1)  # noqa: S311
    lines = [json.dumps({"input_ids": [draw.randrange(96) for _ in range(draw.randrange(8, 16))]}) for _ in range(96)]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def make_run(folder: Path, output: str, keys: Mapping[str, Any]) -> tuple[ResolvedRun, PreparedData]:
    """A run in `folder`, ready to start; `keys` are those of a run file, with dots."""
    usual: dict[str, Any] = {
        "model.path": folder / "model",
        "model.weights": "random",
        "model.dtype": "float32",
        "data.train": folder / "data.jsonl",
        "data.format": "tokens",
        "data.validation": 0,
        "data.seq_len": 16,
        "train.steps": 6,
        "train.global_batch": 4,
        "checkpoint.every_steps": 2,
        "checkpoint.export": "false",
        "optimizer.learning_rate": 0.003,
        "runtime.device": "cpu",
        "output_dir": folder / output,
    }
    empty = folder / "run.yaml"
    empty.write_text("{}", encoding="utf-8")
    words = [f"--{key}={value}" for key, value in (usual | dict(keys)).items()]
    resolved = validate(load_run(empty, words))
    return resolved, prepare(resolved.run, resolved.spec.vocab_size, cache_dir=folder / "prepared")


def no_fault(folder: Path, process: Process) -> None:
    """Plant nothing."""


def start(resolved: ResolvedRun, prepared: PreparedData, plant: Plant = no_fault) -> Outcome:
    """Start the run's ranks, with a fault planted in them, and wait for their end."""
    folder = Path(resolved.run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WHEN_FILE).unlink(missing_ok=True)
    said = io.StringIO()
    begun = time.time()
    check_resume(resolved, prepared)
    with contextlib.redirect_stderr(said):
        rank = functools.partial(rank_with_fault, plant, resolved, prepared)
        told = functools.partial(heard, resolved)
        code = run_ranks(resolved.layout.world_size, rank, stop=StopRequest(), heard=told)
    when = folder / WHEN_FILE
    return Outcome(code, said.getvalue(), time.time() - (float(when.read_text()) if when.exists() else begun))


def rank_with_fault(plant: Plant, resolved: ResolvedRun, prepared: PreparedData, process: Process) -> int:
    """One rank: its output goes to a file, the fault in, and then it trains."""
    folder = Path(resolved.run.output_dir)
    log = os.open(folder / f"rank-{process.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if resolved.layout.world_size > 1:
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.close(log)
    plant(folder, process)
    return train(resolved, prepared, process)


def note_when(folder: Path) -> None:
    """Note that the fault begins now."""
    (folder / WHEN_FILE).write_text(str(time.time()), encoding="utf-8")


def course(output: Path) -> list[dict[str, Any]]:
    """Of every step of a run what does not depend on the machine's mood."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: line[key] for key in SAME_ON_EVERY_RUN} for line in lines]
