"""A request to stop that comes while a run still starts: noted from its first lines on, and acted on before a step."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Running, environment, make_workspace, wait_until

from triweave.recovery import stop as stop_module
from triweave.recovery.stop import REPEAT_S, StopRequest, noting, stop_requests

ENDLESS = ("--train.steps=1000000", "--checkpoint.every_steps=1000000", "--checkpoint.export=false")
ALONE = ("--layout.tp=1", "--layout.pp=1", "--data.validation=0", *ENDLESS)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """Whoever has listened ignores further warnings; the process of the tests and its children are not to."""
    former = {number: signal.getsignal(number) for number in stop_module.STOP_SIGNALS}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def takes(pid: int, number: int, *masks: str) -> bool:
    """Whether a process has a signal in one of its masks (proc(5): blocked, caught, ignored)."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(rf"^Sig(?:{'|'.join(masks)}):\s*([0-9a-f]+)$", text, re.M)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in found)


def said_of_stop(folder: Path) -> dict[str, object]:
    """What the run left for its launcher."""
    said: dict[str, object] = json.loads((folder / "out" / "stopped.json").read_text())
    return said


@pytest.mark.parametrize(("ranks", "name"), [(1, "SIGTERM"), (2, "SIGUSR1")], ids=["alone", "own ranks"])
def test_signal_before_torch_is_imported_stops_the_run(tmp_path: Path, ranks: int, name: str) -> None:
    """Sent as soon as it does not end the process: the run leaves with 75 and without a step, its word left behind."""
    number, folder = signal.Signals[name], make_workspace(tmp_path)
    with Running("-m", "triweave", "train", "run.yaml", *ALONE, f"--layout.dp={ranks}", cwd=folder) as running:
        pid = running.process.pid
        assert wait_until(lambda: takes(pid, number, "Blk", "Cgt"))
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        running.process.send_signal(number)
        code, out, error = running.end()
        assert (code, error.count("error:")) == (75, 0), error
        assert running.all_gone()
    assert said_of_stop(folder) == {"step": 0, "by": name}
    assert f"stopped   at step 0 by {name}" in out
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_nothing_is_lost_where_one_listener_follows_another() -> None:
    """A signal at any moment between the first note and the end of listening is heard; the two count once."""
    draw, numbers = random.Random(1), (signal.SIGTERM, signal.SIGUSR1)  # noqa: S311
    for turn in range(300):
        number = numbers[turn % 2]
        with noting() as request:
            sender = threading.Timer(draw.random() * 2e-3, os.kill, (os.getpid(), number))
            sender.start()
            while draw.random() < 0.9:
                time.sleep(1e-4)
            with stop_requests(request) as same:
                assert same is request
                sender.join()
                assert wait_until(lambda one=request: one.number != 0, 5.0)
        assert request.number == number


def test_what_was_put_off_is_noted() -> None:
    """Signals that wait in the kernel are there when somebody notes them, and none is blocked from then on."""
    stop_module.put_off()
    # To this thread: the process may have others, which `train` has not yet.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    with noting() as request:
        assert request.number == signal.SIGTERM
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(stop_module.STOP_SIGNALS)


def test_second_request_ends_at_once_and_a_warning_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM a second or more after any first signal ends the process; SIGUSR1 never does, for scripts repeat it."""
    now, codes = [100.0], list[int]()
    monkeypatch.setattr(stop_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stop_module.os, "_exit", codes.append)
    request = StopRequest()
    for _ in range(2):
        request.ask(signal.SIGUSR1)
        now[0] += 10 * REPEAT_S
    assert (request.number, codes) == (signal.SIGUSR1, [])
    request.ask(signal.SIGTERM)
    assert (request.number, codes) == (signal.SIGUSR1, [128 + signal.SIGTERM])


# --- the files of `triweave launch`, with a real torchrun and real ranks -------------------------------------------


def begins(running: Running) -> bool:
    """Whether a rank is there that does not hear yet."""
    return any(takes(pid, signal.SIGUSR1, "Ign") for pid in ranks_of(running))


def ranks_of(running: Running) -> list[int]:
    """Process ids of the ranks that torchrun has started."""
    found = []
    for pid in running.alive():
        try:
            if b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def write_launch_file(folder: Path, engine: str) -> None:
    """Write `out.sh` or `out.sbatch` for two ranks of one host."""
    keys = ("--cluster=1x2xcpu", "--layout.tp=1", "--layout.pp=1", "--layout.dp=2", "--data.validation=0", *ENDLESS)
    words = ("--to", engine, "--workdir", str(folder), "--python", sys.executable, "--time-limit", "01:00:00")
    command = (sys.executable, "-m", "triweave", "launch", "run.yaml", *keys, *words)
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True, timeout=60)


def what_was_done_is_saved(folder: Path) -> bool:
    """A signal is repeated until it is heard, and on a fast machine steps may be done by then."""
    step, metrics = said_of_stop(folder)["step"], folder / "out" / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    return step == done and (step == 0 or (folder / "out" / "checkpoints" / f"step-{step}").is_dir())


def free_port() -> int:
    """A port that the file of a Slurm job takes, by the number of the job."""
    for port in random.SystemRandom().sample(range(20000, 30000), 50):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


def test_stop_of_a_node_whose_ranks_do_not_listen_yet(tmp_path: Path) -> None:
    """SIGTERM to the script while a rank imports stops the run with 75."""
    folder = make_workspace(tmp_path)
    write_launch_file(folder, "torchrun")
    with Running("out.sh", cwd=folder, program="bash", MASTER_PORT=str(free_port())) as running:
        assert wait_until(lambda: begins(running))
        running.process.send_signal(signal.SIGTERM)
        code, out, error = running.end()
        assert code == 75, out + error
    assert said_of_stop(folder)["by"] == "SIGUSR1"
    assert what_was_done_is_saved(folder)


def test_signal_that_was_noted_ends_a_rank_that_has_nothing_to_say() -> None:
    """A launcher ends the ranks beside the one that told the mistake; who noted its signal must not tell it too."""
    code = """
import os, signal, sys
from triweave.errors import InputError, Problem
from triweave.recovery.stop import noting, put_off
from triweave.training.process import let_the_first_rank_speak
put_off()
try:
    with noting():
        os.kill(os.getpid(), signal.SIGTERM)
        raise InputError(Problem("key", 1, "is wrong"))
except InputError:
    let_the_first_rank_speak()
    print("told")
    sys.exit(2)
"""
    for local_rank, expected in (("0", (2, "told\n")), ("1", (-signal.SIGTERM, ""))):
        alike = {**os.environ, "LOCAL_RANK": local_rank}
        done = subprocess.run((sys.executable, "-c", code), env=alike, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == expected, done.stderr


SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec env IN_STEP=1 SLURM_NODEID=0 "$@"
"""
SCANCEL = """\
#!/bin/bash
for process in /proc/[0-9]*; do
  if grep -zqs "^TRIWEAVE_TEST=$TRIWEAVE_TEST" "$process/environ" && grep -zqs '^IN_STEP=1' "$process/environ"; then
    kill -USR1 "${process##*/}" 2>/dev/null
  fi
done
"""
SCONTROL = """\
#!/bin/bash
if [ "$1" = requeue ]; then echo "requeued $2"; else echo 127.0.0.1; fi
"""


def test_slurm_warns_a_job_before_its_ranks_are_there(tmp_path: Path) -> None:
    """The batch script, warned before there is a step, warns until somebody hears it, and has the job requeued.

    Slurm's own commands are stand-ins: a step is what has the step's mark in its environment.
    """
    folder, commands = make_workspace(tmp_path), tmp_path / "bin"
    write_launch_file(folder, "slurm")
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(stat.S_IRWXU)
    slurm = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "h1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
    }
    with Running("out.sbatch", cwd=folder, program="bash", **slurm) as running:
        assert wait_until(lambda: takes(running.process.pid, signal.SIGUSR1, "Cgt"))
        running.process.send_signal(signal.SIGUSR1)
        code, out, error = running.end()
    assert (code, f"requeued {slurm['SLURM_JOB_ID']}" in out) == (0, True), out + error
    assert what_was_done_is_saved(folder)
