"""The command line as its users meet it: `python -m triweave` in a process of its own, on a tiny model and real text.

folder = make_workspace(tmp_path)
done = triweave("train", "run.yaml", cwd=folder)
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import TESTS_PRELOAD
from tiny_models import tiny_llama, tiny_tokenizer

from triweave.__main__ import main
from triweave.training.rank_server import ASKING, start_server

TIMEOUT_S = 120
"""Of one command. Far below `runtime.timeout_s`, after which a rank that waits for a lost one would give up."""

END_S = 60.0
"""In which a failing or interrupted run must be gone on a busy machine; an idle one needs about two seconds."""

RUN_FILE = """\
model: {path: model, dtype: float32}
layout: {tp: 2, pp: 2}
data: {train: chat.jsonl, validation: held_out.jsonl, seq_len: 64}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
train: {steps: 9, global_batch: 4}
checkpoint: {every_steps: 3, keep: 9}
runtime: {device: cpu}
output_dir: out
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def conversation(number: int) -> dict[str, Any]:
    """A question and its answer."""
    question = f"What is {number} plus {number % 7}?"
    answer = f"The answer is {number + number % 7}."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_workspace(folder: Path) -> Path:
    """Fill `folder` with a model, data and the run file that names them by relative paths; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(tiny_llama(folder / "model"))
    write_lines(folder / "chat.jsonl", [conversation(number) for number in range(40)])
    write_lines(folder / "held_out.jsonl", [conversation(number) for number in range(40, 50)])
    (folder / "run.yaml").write_text(RUN_FILE, encoding="utf-8")
    return folder


def linked_workspace(source: Path, folder: Path) -> Path:
    """A workspace with the files of another one, and without what was made there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "chat.jsonl", "held_out.jsonl", "run.yaml"):
        (folder / name).symlink_to(source / name)
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that one of the test processes fills and all of them use."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done = folder / ".made"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def environment(**more: str) -> dict[str, str]:
    """What every command sees of this process's environment, and `more`."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "", **more}


def triweave(*words: str, cwd: Path, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """Run the command `triweave` with `words` and wait for its end.

    It is a process of its own, forked where torch is imported already. `python` starts one anew.
    """
    with tempfile.TemporaryDirectory() as name:
        told = Path(name)
        process = start_server(TESTS_PRELOAD).Process(
            target=_command, args=(words, cwd, environment(**env), told / "out", told / "err")
        )
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(("triweave", *words), TIMEOUT_S)
        output, error = ((told / stream).read_bytes().decode() for stream in ("out", "err"))
        return subprocess.CompletedProcess(("triweave", *words), process.exitcode, output, error)


def _command(words: tuple[str, ...], cwd: Path, variables: dict[str, str], out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["triweave", *words]
    gc.freeze()  # What the server imported is no garbage.
    main()


def python(*words: str, cwd: Path, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with `words`, a process that imports all anew, and wait for its end."""
    command = (sys.executable, "-m", *words)
    done = subprocess.run(command, cwd=cwd, env=environment(**env), capture_output=True, timeout=TIMEOUT_S, check=False)
    # Decoded here: subprocess would turn a carriage return into a new line.
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def torchrun(num_ranks: int, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run triweave under torchrun on one host."""
    return python(*TORCHRUN, str(num_ranks), "-m", "triweave", *words, cwd=cwd)


def errors(text: str) -> list[str]:
    """The messages of triweave on standard error, among what a launcher says."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


class Running:
    """A command that has been started, as from a terminal: in a process group of its own."""

    def __init__(self, *words: str, cwd: Path, program: str = sys.executable, **more: str) -> None:
        self.mark = f"TRIWEAVE_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            (program, *words),
            cwd=cwd,
            env=environment(**{name: value}, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        with self.process:  # closes its pipes
            pass

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, standard output and standard error."""
        output, error = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, output, error

    def alive(self) -> list[int]:
        """Every process that the command has started, and that is still there."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def all_gone(self) -> bool:
        """Whether no process is left after at most `END_S` seconds."""
        return wait_until(lambda: not self.alive(), END_S, pause_s=0.1)


def wait_until(condition: Callable[[], bool], within_s: float = TIMEOUT_S, pause_s: float = 0.01) -> bool:
    """Ask again and again; whether `condition` came true in time. What takes long to ask wants longer pauses."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
