"""Runs that survive, on this machine's GPUs: everything about recovery that a CPU cannot show, in one call.

    python bench/survive.py --out runs/survive.md   # two GPUs, NCCL; about four minutes
    python bench/survive.py --device cpu            # a rehearsal with gloo

With deterministic kernels, for a layout that shares tensors and for one that shares data: a run is stopped by
SIGTERM, goes on, saves because a file asks it to, loses a rank to SIGKILL, and goes on to its end. Loss and gradient
norm of every step, the exported weights and every data file of the last checkpoint are compared with those of a run
that was never stopped, bit for bit.

Then faults are planted. Hangs: the watch must name the rank within its limit and 2 s, and nobody may be left. A NaN:
the optimizer's kernel must leave weights and moments as they were. The end of memory: the message names rank and
place, and a snapshot is written (GPUs). Collectives as torch's flight recorder has them (NCCL's on GPUs) are held
against one another after the first step: those of a good run must agree, on every layout of two ranks, and an int32
sum among float32 ones must be named. `train` does that with gloo alone until this part (`--only collectives`) has been
good on GPUs.

Last, what it costs: `bench/save.py` and `bench/watch_cost.py`. The table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fault_cases import hangs
from fault_cases.kills import bits, newest
from fault_cases.public import not_a_number, other_type, stop_at
from fault_cases.rows import Row
from fault_cases.stops import stopped_at
from fault_cases.workshop import Outcome, Plant, course, make_run, note_when, start
from result_file import result_file

from triweave.recovery.agreement import calls_from_json, calls_to_json, differing_collectives
from triweave.recovery.statement import recorded_collectives
from triweave.recovery.stop import STOPPED
from triweave.recovery.watch import Watch
from triweave.run_folder import SAVE_NOW_FILE
from triweave.training import rank as rank_module
from triweave.training.process import Process

BENCH = Path(__file__).resolve().parent
STEPS = 16
STOP_IN, ASK_IN, KILL_IN = 4, 7, 12
"""Steps in which a run is stopped, asked for a checkpoint, and loses a rank."""
NAN_IN = 3
LATE_S = 2.0
SIZES = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 4096},
    "cpu": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96},
}
SEQ = {"cuda": 512, "cpu": 16}
LIMIT_S = {"cuda": 8, "cpu": 3}
"""Of a hang. A process's first step on a GPU loads kernels: some seconds."""
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"layout.tp": 2}, "dp2": {"layout.dp": 2}, "pp2": {"layout.pp": 2}}
COMPARED: dict[str, dict[str, Any]] = LAYOUTS | {
    "cp2": {"layout.cp": 2},
    "dp2 full": {"layout.dp": 2, "layout.shard": "full"},
}
"""Layouts whose collectives are compared."""


def main() -> int:
    """Try everything; returns 1 if anything came out as it must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.device_count() > 1 else "cpu")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=["tp2", "dp2"])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="parts")
    parser.add_argument("--out", type=result_file, help="the table goes here too")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="triweave-survive-") as name:
        folder = Path(name)
        make_files(folder, options.device)
        for part in options.only:
            begun = time.monotonic()
            try:
                found = list(PARTS[part](folder, options.device, options.layouts))
            # What one part meets must not keep the others from being measured: the machine is there now.
            except Exception:
                found = [Row(part, 1, 0, traceback.format_exc()[-600:])]
            for row in found:
                print(f"{time.monotonic() - begun:6.1f} s  {row}", flush=True)
            rows += found
    what = torch.cuda.get_device_name(0) if options.device == "cuda" else f"CPU of {os.cpu_count()} cores"
    lines = [
        f"`python bench/survive.py --device {options.device}`, two ranks on {what}, torch {torch.__version__}.",
        "",
        "| what | tried | good | detail |",
        "|---|---|---|---|",
        *(
            f"| {row.test} | {row.tried} | {row.good} | {' '.join(row.detail.split()).replace('|', '/')} |"
            for row in rows
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(f"# Runs that survive\n\n{text}", encoding="utf-8")
    return 0 if all(row.good == row.tried for row in rows) else 1


def make_files(folder: Path, device: str) -> None:
    """Model and data of a size that suits the device."""
    model = folder / "model"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.1,
        **SIZES[device],
    }
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw = random.Random(1)  # noqa: S311
    longest = SEQ[device]

    def line() -> str:
        return json.dumps({"input_ids": [draw.randrange(96) for _ in range(draw.randrange(longest // 2, longest))]})

    (folder / "data.jsonl").write_text("\n".join(line() for _ in range(80)), encoding="utf-8")


def keys_for(device: str, layout: str, **more: Any) -> dict[str, Any]:
    """Of a run file, for `make_run`."""
    return {
        **COMPARED[layout],
        "runtime.device": device,
        "runtime.deterministic": "true",
        "runtime.timeout_s": 90,
        "model.dtype": "bfloat16" if device == "cuda" else "float32",
        "data.seq_len": SEQ[device],
        "train.steps": STEPS,
        "checkpoint.every_steps": 5,
        "checkpoint.keep": 9,
        "checkpoint.export": "true",
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def ask_and_kill(folder: Path, process: Process) -> None:
    """Ask for a checkpoint in a step; be killed in a later one, on rank 1."""
    real = Watch.enter

    def enter(self: Watch, section: str, at: int, **keys: Any) -> None:
        real(self, section, at, **keys)
        if section == "computing" and at == ASK_IN and process.rank == 0:
            (folder / SAVE_NOW_FILE).touch()
            time.sleep(1.1)  # rank 0 looks once a second
        if section == "computing" and at == KILL_IN and process.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Watch.enter = enter  # type: ignore[method-assign]


def resumed(folder: Path, device: str, layouts: list[str]) -> Iterator[Row]:
    """Stopped, asked to save, killed, resumed: the course and the end of a run never stopped."""
    for layout in layouts:
        keys = keys_for(device, layout)
        reference, prepared = make_run(folder, f"never-stopped-{layout}", keys)
        first = start(reference, prepared)
        resolved, prepared = make_run(folder, f"stopped-{layout}", keys)
        output, expected = Path(resolved.run.output_dir), Path(reference.run.output_dir)
        stopped = start(resolved, prepared, partial(stop_at, STOP_IN))
        at = stopped_at(output)
        killed = start(resolved, prepared, ask_and_kill)
        kept = newest(output)
        saved = sorted(int(one.name.partition("-")[2]) for one in (output / "checkpoints").glob("step-*"))
        last = start(resolved, prepared)
        wrong = []
        if (first.code, stopped.code, killed.code, last.code) != (0, STOPPED, 1, 0):
            wrong.append(f"codes {[one.code for one in (first, stopped, killed, last)]}")
            wrong += [one.said[-300:] for one in (first, stopped, killed, last)]
        if at != STOP_IN:
            wrong.append(f"stopped at {at}")
        on_demand = [step for step in saved if step % 5 and step != STOP_IN]
        if not on_demand or (output / SAVE_NOW_FILE).exists():
            wrong.append(f"asked in step {ASK_IN}, saved {saved}")
        if "rank 1 was ended by SIGKILL" not in killed.said:
            wrong.append(killed.said[-300:])
        if not wrong and course(output) != course(expected):
            pairs = zip(course(output), course(expected), strict=False)
            wrong.append(f"another course: {next(([a, b] for a, b in pairs if a != b), 'other steps')}")
        if not wrong and bits(output) != bits(expected):
            wrong.append("other weights or moments")
        detail = (
            f"SIGTERM in {at}, on demand {on_demand}, SIGKILL in {KILL_IN}, on from {kept}; {STEPS} steps bit for bit"
        )
        yield Row(f"stopped, killed, resumed: {layout}", 1, int(not wrong), "; ".join(wrong) or detail)
        shutil.rmtree(expected)
        shutil.rmtree(output)


HANGS: tuple[tuple[str, str, Plant, str, tuple[str, ...]], ...] = (
    ("dp2", "in another collective", partial(hangs.in_third_sum, hangs.gather_too), "off", ("Rank", "collective")),
    ("tp2", "stopped by SIGSTOP", partial(hangs.in_action, hangs.stop_oneself), "auto", ("Rank 1", "does not answer")),
    ("tp2", "sleeps in an action", partial(hangs.in_action, hangs.forever), "auto", ("Rank 1", "micro-batch 1")),
)
"""Layout, name, fault, `overlap_tp` and `overlap_dp`, words of the message. With `auto` the peer waits for a copy, of
which no collective of NCCL knows."""


def hung(folder: Path, device: str, layouts: list[str]) -> Iterator[Row]:
    """The watch names the rank in time, and nobody and no memory of a GPU is left."""
    before = used_mib()
    for layout, name, plant, overlap, words in HANGS:
        more = {"runtime__overlap_tp": overlap, "runtime__overlap_dp": overlap, "checkpoint__every_steps": 0}
        keys = keys_for(device, layout, runtime__hang_timeout_s=LIMIT_S[device], **more)
        resolved, prepared = make_run(folder, "hangs", keys)
        outcome = start(resolved, prepared, plant)
        late_s = outcome.ended_after_s - LIMIT_S[device]
        left = used_mib() - before
        good = outcome.code == 1 and all(word in outcome.said for word in words) and late_s < LATE_S and left < 200
        said = outcome.said.strip().splitlines() or [""]
        detail = f"all gone {outcome.ended_after_s:.1f} s after it, limit {LIMIT_S[device]} s; {said[0][:160]}"
        if not good:
            detail += f"; code {outcome.code}, {left} MiB of GPU memory left; {outcome.said[-900:]}"
        yield Row(f"hang: {name} ({layout}, overlap {overlap})", 1, int(good), detail)
        shutil.rmtree(resolved.run.output_dir)


def used_mib() -> int:
    """Memory that is taken on all GPUs of this host; 0 without any."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return sum(int(line) for line in done.stdout.split() if line.isdecimal())


def skipped(folder: Path, device: str, layouts: list[str]) -> Iterator[Row]:
    """A NaN in the middle of a step leaves weights and moments as they were, on every rank, and the run goes on."""
    more = {
        "train__on_not_finite": "skip",
        "checkpoint__every_steps": 1,
        "train__steps": 6,
        "checkpoint__export": "false",
    }
    resolved, prepared = make_run(folder, "nan", keys_for(device, "dp2", **more))
    outcome = start(resolved, prepared, partial(not_a_number, (NAN_IN,)))
    output = Path(resolved.run.output_dir)
    losses = [line["loss"] for line in course(output)]

    def states(step: int) -> list[bytes]:
        files = sorted((output / "checkpoints" / f"step-{step}").glob("*.distcp"))
        return [file.read_bytes() for file in files]

    same, moved = states(NAN_IN) == states(NAN_IN - 1), states(NAN_IN + 1) != states(NAN_IN)
    kept = (output / "not-finite" / f"step-{NAN_IN}.npz").exists()
    good = outcome.code == 0 and losses[NAN_IN - 1] is None and None not in losses[NAN_IN:] and same and moved and kept
    detail = f"weights and moments as before: {same}; moved again in the next step: {moved}; batch kept: {kept}"
    yield Row("NaN in step 3, skipped", 1, int(good), detail if good else f"{detail}; {losses}; {outcome.said[-500:]}")
    shutil.rmtree(output)


def take_all_memory(folder: Path, process: Process) -> None:
    """Ask for more memory than there is, on rank 1 in step 3."""
    real = Watch.mark

    def mark(self: Watch, action: Any) -> None:
        real(self, action)
        if process.rank == 1 and self.step == 3 and action is not None:
            note_when(folder)
            device = torch.device("cuda", process.local_rank) if torch.cuda.is_initialized() else torch.device("cpu")
            torch.empty(2**46, dtype=torch.uint8, device=device)

    Watch.mark = mark  # type: ignore[method-assign]


def out_of_memory(folder: Path, device: str, layouts: list[str]) -> Iterator[Row]:
    """One message that names rank and place, and on a GPU what the allocator held."""
    resolved, prepared = make_run(folder, "memory", keys_for(device, "dp2", checkpoint__every_steps=0))
    outcome = start(resolved, prepared, take_all_memory)
    snapshot = Path(resolved.run.output_dir) / "out-of-memory-rank-1.json"
    held = len(json.loads(snapshot.read_text())["segments"]) if snapshot.exists() else 0
    good = outcome.code == 1 and "rank 1 is out of memory in step 3" in outcome.said and (device == "cpu" or held > 0)
    detail = f"{outcome.said.strip()[:140]}; {held} segments in the snapshot"
    yield Row("out of memory", 1, int(good), detail if good else f"{detail}; {outcome.said[-500:]}")
    shutil.rmtree(resolved.run.output_dir)


def compare_collectives(plant: Callable[[], None] | None, folder: Path, process: Process) -> None:
    """Compare after the first step on GPUs too, as `train` does with gloo, and write down what the records held."""
    if plant is not None and process.rank == 1:
        plant()

    def compare(self: rank_module.Rank) -> None:
        begun = time.monotonic()
        text = calls_to_json(recorded_collectives())
        read_s = time.monotonic() - begun
        (folder / f"collectives-{process.rank}.json").write_text(text, encoding="utf-8")
        (folder / f"seconds-{process.rank}").write_text(str(read_s), encoding="utf-8")
        rank_module.check_collectives(self.meeting, process.rank, process.world_size, self.timeout_s)

    rank_module.Rank.check_collectives = compare  # type: ignore[method-assign]


def compared(folder: Path, device: str, layouts: list[str]) -> Iterator[Row]:
    """The comparison passes a good run of every layout; an int32 sum among float32 ones is named, and ends the run.

    On GPUs the records must be NCCL's: those of gloo's control group alone would pass too.
    """
    off = {"runtime__overlap_tp": "off", "runtime__overlap_dp": "off", "checkpoint__every_steps": 0, "train__steps": 2}
    off["checkpoint__export"] = "false"
    tried = [(layout, overlap, None) for layout in COMPARED for overlap in ("off", "auto")]
    for layout, overlap, plant in [*tried, ("dp2", "off", other_type)]:
        keys = keys_for(device, layout, **{**off, "runtime__overlap_tp": overlap, "runtime__overlap_dp": overlap})
        resolved, prepared = make_run(folder, "collectives", keys)
        outcome: Outcome = start(resolved, prepared, partial(compare_collectives, plant))
        output = Path(resolved.run.output_dir)
        by_rank = [
            calls_from_json(file.read_text(encoding="utf-8")) for file in sorted(output.glob("collectives-*.json"))
        ]
        seconds = [float(file.read_text(encoding="utf-8")) for file in output.glob("seconds-*")]
        held = sum(len(calls) for rank in by_rank for calls in rank.values())
        called = sum(max(calls) for rank in by_rank for calls in rank.values())
        groups = sorted({group for rank in by_rank for group in rank})
        problems = differing_collectives(by_rank) if by_rank else []
        good = len(by_rank) == 2 and held > 0 and bool(problems) == (plant is not None)
        good = good and (device == "cpu" or any(group.endswith("(nccl)") for group in groups))
        good = good and outcome.code == (0 if plant is None else 1)
        good = good and (plant is None or "rank 1: called" in outcome.said)
        what = "; ".join(problems)[:200] or "no difference"
        detail = (
            f"{held} of {called} collectives held, groups {groups}, read in {max(seconds, default=0):.3f} s; {what}"
        )
        name = f"collectives: {'int32 among float32, ' if plant else ''}{layout}, overlap {overlap}"
        yield Row(name, 1, int(good), detail if good else f"{detail}; code {outcome.code}: {outcome.said[-400:]}")
        shutil.rmtree(output)


def costs(folder: Path, device: str, layouts: list[str]) -> Iterator[Row]:
    """What a save keeps training waiting, and what the watch costs."""
    small = ["--small"] if device == "cpu" else []
    told = folder / "save.json"
    command = [sys.executable, str(BENCH / "save.py"), "--folder", str(folder), "--out", str(told), *small]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(told.read_text()) if told.exists() else {}
    shown = ", ".join(f"{name} {value:g}" for name, value in found.items() if isinstance(value, int | float))
    good = done.returncode == 0 and "step_beside_a_save" in found
    yield Row("bench/save.py", 1, int(good), shown if good else f"{shown}; {done.stderr[-400:]}")
    done = subprocess.run([sys.executable, str(BENCH / "watch_cost.py")], capture_output=True, text=True, check=False)
    yield Row("bench/watch_cost.py", 1, int(done.returncode == 0), done.stdout or done.stderr[-400:])


PARTS: dict[str, Callable[[Path, str, list[str]], Iterator[Row]]] = {
    "resumed": resumed,
    "hung": hung,
    "skipped": skipped,
    "memory": out_of_memory,
    "collectives": compared,
    "costs": costs,
}

if __name__ == "__main__":
    sys.exit(main())
