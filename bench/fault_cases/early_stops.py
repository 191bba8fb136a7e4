"""Stop signals at random moments of a start, also before torch is imported: 75 each time, and nothing is lost.

Real processes: `triweave train` with one rank and with two of its own, torchrun with the request given to one rank, and
the script that `triweave launch --to torchrun` writes.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fault_cases.kills import newest
from fault_cases.restarts import LAUNCHER, RANKS, end_of, marked, steps_done, wait_until
from fault_cases.rows import Row
from fault_cases.stops import stopped_at
from fault_cases.workshop import course, make_files, make_run, start

from triweave.config.document import to_yaml
from triweave.recovery.stop import STOPPED

TRIES = 10
KEYS = {"train.steps": 400, "checkpoint.every_steps": 200, "cluster": f"1x{RANKS}xcpu"}
"""Steps for longer than the `AGAIN_S` after which the script of `launch` repeats a warning that no rank has heard."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to start the run, and who is told to stop it."""

    name: str
    words: tuple[str, ...]
    codes: tuple[int, ...] = (STOPPED,)
    """With which it may leave."""
    to_a_rank: bool = False
    """Whether a rank is told, and not what was started."""


class Started:
    """A run that has been started, in a session of its own."""

    def __init__(self, words: tuple[str, ...], log: Path) -> None:
        self.mark = f"TRIWEAVE_FAULTS={uuid.uuid4()}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words,
                env={**os.environ, **dict([self.mark.split("=")])},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def processes(self, *, ranks: bool = False) -> list[int]:
        """Process ids of all of it, or of its ranks under torchrun."""
        return marked(self.mark, b"LOCAL_RANK=" if ranks else b"")

    def end(self) -> int:
        """Wait for its end; its exit code, -1 if it or a process of it does not end."""
        return end_of(self.process, self.processes)


def is_ready(pid: int) -> bool:
    """Whether a process would not end by SIGUSR1 and SIGTERM, as the interpreter does until it runs our first line."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Blk|Cgt):\s*([0-9a-f]+)$", text, re.M)]
    return all(any(mask >> (number - 1) & 1 for mask in masks) for number in (signal.SIGTERM, signal.SIGUSR1))


def ways(run_file: Path, output: Path, script: Path) -> list[Way]:
    """All ways."""
    train = ("-m", "triweave", "train", str(run_file), "--output_dir", str(output))
    return [
        Way("one rank", (sys.executable, *train, "--layout.dp=1", "--cluster=1x1xcpu")),
        Way("ranks of its own", (sys.executable, *train)),
        # torchrun leaves with 1 whatever its ranks say.
        Way("torchrun, one rank told", (*LAUNCHER, *train), codes=(1,), to_a_rank=True),
        Way("script of `launch`", ("bash", str(script))),
    ]


def stop_at_random(way: Way, output: Path, moments_s: float, draw: random.Random, number: int) -> str:
    """Start it, ask it to stop at a random moment; what is wrong with its end, empty if nothing is."""
    started = Started(way.words, output.with_suffix(".log"))
    told = started.process.pid
    if way.to_a_rank:
        wait_until(lambda: any(is_ready(pid) for pid in started.processes(ranks=True)))
        told = draw.choice([pid for pid in started.processes(ranks=True) if is_ready(pid)])
    else:
        wait_until(lambda: is_ready(told))
    wait_s = draw.random() * moments_s
    time.sleep(wait_s)
    before = steps_done(output)
    with suppress(ProcessLookupError):
        os.kill(told, number)
    code = started.end()
    at, saved = stopped_at(output), newest(output)
    if code in way.codes and at is not None and at == saved:
        return ""
    if code == 0 and before:
        return ""  # the signal came with the last step
    said = started.log.read_text()[-400:]
    return f"{signal.Signals(number).name} after {wait_s:.2f} s: code {code}, note {at}, saved {saved}: {said}"


def run(quick: bool, out: Path) -> list[Row]:
    """Every way, `TRIES` times; nothing when `quick`: torch is imported anew each time."""
    if quick:
        return []
    make_files(out)
    reference, prepared = make_run(out, "reference", {**KEYS, "layout.dp": RANKS})
    start(reference, prepared)
    expected = course(Path(reference.run.output_dir))
    run_file, output = out / "resolved.yaml", out / "stopped"
    run_file.write_text(to_yaml(reference.run), encoding="utf-8")
    launch = (sys.executable, "-m", "triweave", "launch", str(run_file), "--output_dir", str(output))
    to = ("--to", "torchrun", "--workdir", str(out), "--python", sys.executable, "--out", str(out))
    subprocess.run((*launch, *to), check=True, capture_output=True)
    draw = random.Random(3)  # noqa: S311
    return [row_of(way, out, expected, draw) for way in ways(run_file, output, out / "stopped.sh")]


def row_of(way: Way, out: Path, expected: object, draw: random.Random) -> Row:
    """Stop one way of starting again and again."""
    output = out / "stopped"
    shutil.rmtree(output, ignore_errors=True)
    whole = Started(way.words, out / "whole.log")
    begun = time.monotonic()
    wait_until(lambda: steps_done(output) > 0 or whole.process.poll() is not None)
    moments_s = time.monotonic() - begun
    whole.end()
    wrong: list[str] = []
    early = 0
    for turn in range(TRIES):
        shutil.rmtree(output, ignore_errors=True)
        number = (signal.SIGTERM, signal.SIGUSR1)[turn % 2]
        wrong += filter(None, [stop_at_random(way, output, moments_s, draw, number)])
        early += not steps_done(output)
    again = Started(way.words, out / "again.log")
    if again.end() or (way.name != "one rank" and course(output) != expected):
        wrong.append(f"did not go on: {again.log.read_text()[-300:]}")
    detail = f"{early} before the first step, of which one comes after {moments_s:.1f} s; {'; '.join(wrong)}"
    return Row(f"stop signal at a random moment of a start: {way.name}", TRIES, max(0, TRIES - len(wrong)), detail)
