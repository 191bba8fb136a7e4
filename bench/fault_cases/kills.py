"""A random rank is killed at a random moment, again and again; the run must end bit for bit as if nobody had been."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fault_cases.rows import Row
from fault_cases.workshop import Plant, course, make_files, make_run, start

from triweave.checkpoint.kept import found
from triweave.checkpoint.places import open_store
from triweave.recovery.goodput import FILE, read_events
from triweave.training.process import Process

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"layout.tp": 2},
    "pp2, 1f1b": {"layout.pp": 2},
    "pp2, zero-bubble": {"layout.pp": 2, "layout.schedule": "zero-bubble"},
    "pp2 vpp2, interleaved": {"layout.pp": 2, "layout.vpp": 2, "layout.schedule": "interleaved"},
    "dp2, shard none": {"layout.dp": 2, "layout.shard": "none"},
    "dp2, shard optimizer": {"layout.dp": 2},
    "dp2, shard gradients": {"layout.dp": 2, "layout.shard": "gradients"},
    "dp2, shard full": {"layout.dp": 2, "layout.shard": "full"},
    "tp2 pp2": {"layout.tp": 2, "layout.pp": 2},
}
KILLS, QUICK_KILLS = 23, 2
"""Of each layout."""

CALLS = ("fsync", "rename", "replace", "unlink", "open", "rmdir")
"""Of the module `os`: what saving, renaming, deleting and loading go through."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Where the kill is planted: after so many seconds, or at the n-th call of a name in the checkpoints' folder."""

    rank: int
    after_s: float = 0.0
    call: str = ""
    number: int = 0


def kill_oneself(kill: Kill, folder: Path, process: Process) -> None:
    """SIGKILL at the moment that was drawn."""
    if process.rank != kill.rank:
        return
    if not kill.call:
        later = threading.Timer(kill.after_s, os.kill, (os.getpid(), signal.SIGKILL))
        later.daemon = True
        later.start()
        return
    real, calls = getattr(os, kill.call), [0]

    def call(*args: Any, **keys: Any) -> Any:
        where = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
        calls[0] += "checkpoints" in str(where)
        if calls[0] == kill.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **keys)

    setattr(os, kill.call, call)


def bits(output: Path) -> str:
    """Hash of the exported weights and of every data file of the last checkpoint."""
    total = hashlib.sha256((output / "hf" / "model.safetensors").read_bytes())
    last = output / "checkpoints" / f"step-{newest(output)}"
    for digest in sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in last.glob("*.distcp")):
        total.update(digest.encode())
    return total.hexdigest()


def draw_kill(draw: random.Random, world_size: int, typical_s: float) -> Kill:
    """Half at any moment of an attempt, half at a call that touches the checkpoints."""
    rank = draw.randrange(world_size)
    if draw.random() < 0.5:
        return Kill(rank, after_s=draw.uniform(0.0, typical_s))
    return Kill(rank, call=draw.choice(CALLS), number=draw.randrange(1, 6))


def newest(output: Path) -> int:
    """Step of the newest checkpoint, 0 without one."""
    names = found(open_store(output / "checkpoints"))
    return int(names[0].removeprefix("step-")) if names else 0


def first_step(output: Path, since: float) -> int | None:
    """The first step that was done since a moment (seconds since the epoch); None if there was none."""
    done = [event.step for event in read_events(output / FILE) if event.what == "step" and event.at > since]
    return done[0] if done else None


def campaign(name: str, keys: dict[str, Any], kills: int, out: Path, draw: random.Random) -> Row:
    """Kill the ranks of one layout so often, over as many runs as it takes."""
    keys = {**keys, "checkpoint.export": "true", "checkpoint.keep": 2}
    reference, prepared = make_run(out, "reference", keys)
    begun = time.monotonic()
    first = start(reference, prepared)
    typical_s = time.monotonic() - begun
    expected = Path(reference.run.output_dir)
    if first.code:
        return Row(f"kill: {name}", kills, 0, f"the run without a kill failed: {first.said}")
    killed = resumed = ended = good_ends = 0
    wrong: list[str] = []
    resolved, prepared = make_run(out, "killed", keys)
    output = Path(resolved.run.output_dir)
    while killed < kills or (output / "metrics.jsonl").exists():
        before, begun_at = newest(output), time.time()
        plant: Plant = partial(kill_oneself, draw_kill(draw, resolved.layout.world_size, typical_s))
        outcome = start(resolved, prepared, plant) if killed < kills else start(resolved, prepared)
        first = first_step(output, begun_at)
        if first is not None and first != before + 1:
            wrong.append(f"went on with step {first} where {before} was saved")
        if newest(output) < before:
            wrong.append(f"step {before} was lost")
        if outcome.code == 0:
            ended += 1
            same = course(output) == course(expected) and bits(output) == bits(expected)
            good_ends += same
            if not same:
                wrong.append("ended otherwise than the run never stopped")
            shutil.rmtree(output)
        elif "SIGKILL" in outcome.said or "failed" in outcome.said:
            killed += 1
            resumed += 1
        else:
            wrong.append(f"code {outcome.code}: {outcome.said[:300]}")
            if len(wrong) > 3:
                break
    shutil.rmtree(expected)
    detail = f"{ended} runs to their end, {good_ends} bit for bit the one never stopped; {'; '.join(wrong)}"
    return Row(f"kill: {name}", killed, resumed - len(wrong), detail)


def run(quick: bool, out: Path) -> list[Row]:
    """Kill ranks of every layout (`quick`: of one)."""
    make_files(out, quick=quick)
    draw = random.Random(2026)  # noqa: S311
    chosen = list(LAYOUTS.items())[5:6] if quick else list(LAYOUTS.items())
    rows = []
    for name, keys in chosen:
        rows.append(campaign(name, keys, QUICK_KILLS if quick else KILLS, out, draw))
        print(rows[-1], file=sys.stderr, flush=True)  # the whole takes half an hour
    return rows
