"""Storms of restarts: a run that fails in every start stops by itself, whoever starts it again and however it fails."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fault_cases.kills import newest
from fault_cases.restarts import LAUNCHER, Launched, wait_until
from fault_cases.rows import Row
from fault_cases.stops import stopped_at
from fault_cases.workshop import Outcome, Plant, course, make_files, make_run, start

import triweave.training.loop as loop
from triweave.config.document import to_yaml
from triweave.recovery.starts import FILE, read_starts
from triweave.recovery.stop import STOPPED
from triweave.training.process import Process

MOST, QUICK_MOST = 3, 1
"""`runtime.max_starts_without_step` of these runs."""
TOO_MANY = 12
"""Starts after which a storm has not ended by itself."""
STORM_S = 600.0
"""In which torchrun's starts must have come to an end, on a busy machine."""
FAIL_IN = 4
"""Step in which they fail, where they come to steps."""
REFUSED = "starts in a row came to no new step"


@dataclass(frozen=True, slots=True)
class Storm:
    """A way to fail in every start."""

    name: str
    plant: Plant
    words: str
    """What the refusal tells of every start."""
    new_steps_in: int
    """Starts that come to a new step before the storm begins."""
    goes_on: Callable[[Outcome, Path], bool]
    """Whether an engine starts it again, told how a start ended."""


def at_reading(what: Callable[[], None], folder: Path, process: Process) -> None:
    """Do it on rank 1 in the reading of a step's data, in every start."""
    real = loop.training_batch

    def read(*args: Any, **keys: Any) -> Any:
        if process.rank == 1 and keys["step"] == FAIL_IN - 1:
            what()
        return real(*args, **keys)

    loop.training_batch = read


def fail() -> None:
    """An error in one rank."""
    raise RuntimeError("planted")


def be_killed() -> None:
    """The kernel's memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_before_the_first_step(folder: Path, process: Process) -> None:
    """A scheduler's warning that comes sooner than the first step, in every start."""
    real = loop.build_engine

    def build(*args: Any, **keys: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
        return real(*args, **keys)

    if process.rank == 1:
        loop.build_engine = build


def after_a_crash(outcome: Outcome, output: Path) -> bool:
    """An engine that starts again whatever fails."""
    return outcome.code != 0


def after_a_stop(outcome: Outcome, output: Path) -> bool:
    """An engine that requeues what stopped on request: by the exit code, or by the note that the run leaves."""
    return outcome.code == STOPPED or stopped_at(output) is not None


STORMS = (
    Storm("an error in one rank", partial(at_reading, fail), "RuntimeError: planted", 1, after_a_crash),
    Storm("a rank is killed", partial(at_reading, be_killed), "rank 1 was ended by SIGKILL", 1, after_a_crash),
    Storm("stopped before the first step", stop_before_the_first_step, "stopped on request", 0, after_a_stop),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Every storm, started by this process and by torchrun; when `quick`, the first one, in short."""
    make_files(out, quick=quick)
    # Beside training the save of step 2 may or may not be done when the run fails: that would be a new step, or none.
    saving = {"checkpoint.every_steps": 2, "checkpoint.asynchronous": "off"}
    keys = {"layout.dp": 2, "runtime.max_starts_without_step": MOST, **saving}
    if quick:
        return [ridden_out(STORMS[0], {**keys, "runtime.max_starts_without_step": QUICK_MOST}, out)]
    return [*(ridden_out(storm, keys, out) for storm in STORMS), under_torchrun(keys, out), two_hosts(keys, out)]


def ridden_out(storm: Storm, keys: dict[str, Any], out: Path) -> Row:
    """Start the run again as an engine would; it must refuse after so many starts, and the engine must leave it."""
    resolved, prepared = make_run(out, "storm", keys)
    output = Path(resolved.run.output_dir)
    most = keys["runtime.max_starts_without_step"]
    number, outcome = 0, Outcome(1, "", 0.0)
    while number < TOO_MANY and (number == 0 or storm.goes_on(outcome, output)):
        number += 1
        outcome = start(resolved, prepared, storm.plant)
        if REFUSED in outcome.said:
            break
    wrong = []
    if number != storm.new_steps_in + most + 1:
        wrong.append(f"{number} starts")
    if outcome.code in (0, STOPPED) or outcome.said.count("error: ") != 1 or outcome.said.count(storm.words) != most:
        wrong.append(f"code {outcome.code}: {outcome.said[:800]}")
    if stopped_at(output) is not None:
        wrong.append("the note of a stop is still there")
    # What was wrong is mended, and a key changed: the run goes on to its end.
    mended, prepared = make_run(out, "storm", {**keys, "log.every_steps": 2})
    if start(mended, prepared).code != 0:
        wrong.append("did not go on")
    shutil.rmtree(output)
    return Row(f"storm: {storm.name}", 1, int(not wrong), "; ".join(wrong) or f"refused at start {number}")


PLANTED = """\
import sys
sys.path[:0] = {paths!r}
from fault_cases.storms import at_reading, fail
from triweave.training.process import started_by_launcher
from triweave.cli import main
at_reading(fail, None, started_by_launcher())
main()
"""


def under_torchrun(keys: dict[str, Any], out: Path) -> Row:
    """torchrun that would start it 20 times: it ends with the refusal, told once."""
    resolved, _ = make_run(out, "storm", keys)
    run_file = out / "storm.yaml"
    run_file.write_text(to_yaml(resolved.run), encoding="utf-8")
    script = out / "planted.py"
    bench = Path(__file__).resolve().parents[1]
    script.write_text(PLANTED.format(paths=[str(bench), str(bench.parent)]), encoding="utf-8")
    words = (*LAUNCHER, "--max-restarts", "20", str(script))
    launched = Launched(run_file, out / "storm-torchrun", [], {}, words)
    wait_until(lambda: launched.process.poll() is not None, STORM_S)
    code = launched.end()
    text = launched.log.read_text()
    starts = read_starts(launched.output / FILE)
    wrong = []
    if code in (0, -1, STOPPED) or text.count(REFUSED) != 1 or len(starts) != 1 + MOST:
        wrong.append(f"code {code}, {len(starts)} starts: {text[-800:]}")
    if any(one.end is None or "planted" not in one.end.said for one in starts):
        wrong.append(f"ends: {[one.end for one in starts]}")
    return Row("storm: under torchrun --max-restarts 20", 1, int(not wrong), "; ".join(wrong))


def two_hosts(keys: dict[str, Any], out: Path) -> Row:
    """6 (pytorch 67742): of two torchruns the first, which keeps the rendezvous, is killed.

    The second ends by itself, no rank is left, and the next start goes on to the end of a run that was never stopped.
    """
    keys = {**keys, "train.steps": 20}
    reference, prepared = make_run(out, "reference-hosts", keys)
    start(reference, prepared)
    run_file = out / "hosts.yaml"
    run_file.write_text(to_yaml(reference.run), encoding="utf-8")
    output = out / "two-hosts"

    def hosts(port: int) -> list[Launched]:
        said = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
        own = (sys.executable, "-m", "torch.distributed.run", *said)
        tail = ("-m", "triweave")
        return [Launched(run_file, output, [], {}, (*own, "--node-rank", str(node), *tail)) for node in range(2)]

    first, second = hosts(29711)
    first.wait_for_step(5)
    os.kill(first.process.pid, signal.SIGKILL)
    first.end()
    code, saved = second.end(), newest(output)
    again = hosts(29712)
    codes = [one.end() for one in again]
    good = code not in (0, -1) and saved > 0 and codes == [0, 0]
    good = good and course(output) == course(Path(reference.run.output_dir))
    text = "" if good else f"second host's code {code}, saved {saved}, then {codes}: {again[0].log.read_text()[-600:]}"
    return Row("6: the torchrun that keeps the rendezvous is killed", 1, int(good), text)
