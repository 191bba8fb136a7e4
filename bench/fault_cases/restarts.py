"""torchrun: a killed rank is restarted and goes on by itself; signals come through it, and without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fault_cases.kills import newest
from fault_cases.rows import Row
from fault_cases.stops import stopped_at
from fault_cases.workshop import course, make_files, make_run, start

from triweave.config.document import to_yaml

TRIES = 10
END_S = 120.0
HANG_S = 5
TORCHRUN_S = 30.0
"""In which torchrun lets ranks end before it kills them."""
RANKS = 2
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


class Launched:
    """A run under torchrun, in a session of its own."""

    def __init__(
        self,
        run_file: Path,
        output: Path,
        options: Iterable[str],
        environment: dict[str, str],
        launcher: Sequence[str] = (),
        words: Sequence[str] = (),
    ) -> None:
        """`launcher` comes before triweave's words; left out, it is that of one host. `words` are added to them."""
        self.output = output
        self.mark = f"TRIWEAVE_FAULTS={uuid.uuid4()}"
        marked = dict([self.mark.split("=")])
        launcher = launcher or (*LAUNCHER, *options, "-m", "triweave")
        command = (*launcher, "train", str(run_file), "--output_dir", str(output), *words)
        self.log = run_file.parent / f"{output.name}-{self.mark[-6:]}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment, **marked}, stdout=log, stderr=log, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """Process ids of the ranks: torchrun puts each into a session of its own, and their environment stays."""
        return marked(self.mark, b"LOCAL_RANK=")

    def rank_0(self) -> int | None:
        """Process id of the host's first rank."""
        for pid in self.ranks():
            if b"LOCAL_RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        return None

    def wait_for_step(self, step: int) -> bool:
        """Wait until the run has done a step; whether it came to it."""
        return wait_until(lambda: steps_done(self.output) >= step or self.process.poll() is not None)

    def end(self) -> int:
        """Wait for torchrun's end, and see that no rank is left after it; returns its exit code, -1 if one is."""
        code = end_of(self.process, self.ranks)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        return code


def marked(mark: str, also: bytes = b"") -> list[int]:
    """Process ids of all that have `mark` in their environment, and `also`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment and also in environment:
            found.append(int(folder.name))
    return sorted(found)


def end_of(process: subprocess.Popen[bytes], others: Callable[[], list[int]]) -> int:
    """Wait for the end of a process and of `others`; its exit code, -1 if it or one of them does not end."""
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        code = -1
    if not wait_until(lambda: not others(), 30.0):
        code = -1
    for pid in others():
        os.kill(pid, signal.SIGKILL)
    return code


def wait_until(condition: Callable[[], bool], within_s: float = END_S) -> bool:
    """Ask again and again; whether `condition` came true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def steps_done(output: Path) -> int:
    """Lines of `metrics.jsonl`."""
    path = output / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def run(quick: bool, out: Path) -> list[Row]:
    """Restart, stop and orphan runs under torchrun; nothing when `quick`: it imports torch anew for every rank."""
    if quick:
        return []
    make_files(out)
    # Long enough that a signal meets it at work.
    keys = {"layout.dp": RANKS, "train.steps": 40, "checkpoint.every_steps": 4}
    reference, prepared = make_run(out, "reference", keys)
    start(reference, prepared)
    expected = course(Path(reference.run.output_dir))
    run_file = out / "resolved.yaml"
    run_file.write_text(to_yaml(reference.run), encoding="utf-8")
    return [
        restarts(run_file, out, expected, TRIES, {}),
        restarts(run_file, out, expected, TRIES, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        stops(run_file, out, expected),
        stopped_keeper(run_file, out),
    ]


def restarts(run_file: Path, out: Path, expected: object, tries: int, environment: dict[str, str]) -> Row:
    """SIGKILL one rank; torchrun starts all again, and they end as the run never stopped."""
    wrong = []
    for number in range(tries):
        output = out / f"restarted-{len(environment)}-{number}"
        launched = Launched(run_file, output, ["--max-restarts", "2"], environment)
        launched.wait_for_step(6 + number)
        ranks = launched.ranks()
        if ranks:
            os.kill(ranks[number % len(ranks)], signal.SIGKILL)
        code = launched.end()
        if code or not ranks or course(launched.output) != expected:
            wrong.append(f"try {number}: code {code}: {launched.log.read_text()[-400:]}")
    name = ", ".join(f"{key}={value}" for key, value in environment.items()) or "nothing set"
    return Row(f"torchrun --max-restarts, {name}", tries, tries - len(wrong), "; ".join(wrong))


def stops(run_file: Path, out: Path, expected: object) -> Row:
    """Signals to torchrun, forwarded or not, and its death: saved and gone, and the next start goes on."""
    forwarding = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    cases = {
        "SIGTERM": ("SIGTERM", []),
        "SIGUSR1 forwarded": ("SIGUSR1", forwarding),
        "SIGUSR1 not forwarded": ("SIGUSR1", []),
        "SIGKILL of torchrun": ("SIGKILL", []),
    }
    wrong = []
    for number, (name, (signal_name, options)) in enumerate(cases.items()):
        launched = Launched(run_file, out / f"stopped-{number}", options, {})
        launched.wait_for_step(6)
        os.kill(launched.process.pid, getattr(signal, signal_name))
        code = launched.end()
        at, saved = stopped_at(launched.output), newest(launched.output)
        if (code in (-1, 0) and signal_name != "SIGKILL") or at is None or at != saved:
            wrong.append(f"{name}: code {code}, stopped at {at}, saved {saved}: {launched.log.read_text()[-300:]}")
            continue
        again = Launched(run_file, launched.output, [], {})
        if again.end() or course(again.output) != expected:
            wrong.append(f"{name}: did not go on: {again.log.read_text()[-300:]}")
    return Row("torchrun: SIGTERM, SIGUSR1, its own death", len(cases), len(cases) - len(wrong), "; ".join(wrong))


def stopped_keeper(run_file: Path, out: Path) -> Row:
    """SIGSTOP to the rank that keeps the store: another one tells, ends it, and torchrun need not wait for it."""
    limit = ("--runtime.hang_timeout_s", str(HANG_S), "--train.steps", "1000000")
    launched = Launched(run_file, out / "keeper", [], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, words=limit)
    launched.wait_for_step(6)
    keeper = launched.rank_0()
    if keeper is None:
        return Row("torchrun: a stopped rank 0 that keeps the store", 1, 0, "it was gone")
    os.kill(keeper, signal.SIGSTOP)
    begun = time.monotonic()
    code = launched.end()
    taken_s = time.monotonic() - begun
    said = "kept by rank 0, does not answer" in launched.log.read_text()
    good = code == 1 and said and taken_s < TORCHRUN_S
    detail = f"torchrun gone {taken_s:.1f} s after it, limit {HANG_S} s" if good else launched.log.read_text()[-300:]
    return Row("torchrun: a stopped rank 0 that keeps the store", 1, int(good), detail)
