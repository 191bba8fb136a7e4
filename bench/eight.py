"""Four or eight GPUs of one host: layouts proved, timed beside the peers and beside what was told before; one table.

    python bench/eight.py --gpus 8 --only check                 # ahead, on any machine without a GPU: minutes
    python bench/eight.py --gpus 8 --only probe,tell,verify,70b --budget-s 560      # about eight minutes
    python bench/eight.py --gpus 8 --only 8b,overlap --budget-s 560                 # about eight
    python bench/eight.py --gpus 8 --only 70b,8b,overlap --budget-s 560    # if the page names what was left
    python bench/eight.py --gpus 8 --only table                            # any machine

`--gpus 4` and `--gpus 2` run the halves and the quarters; `--shape tiny` rehearses on CPU processes.

Parts, in their order. `check`: memory of every case by `triweave check`. `probe`: a profile of this host, collectives
and layers over 2, 4 and 8 GPUs. `tell`: the planner's seconds of every case, with that profile and with a shipped one.
`verify`: each layout on a small model, bf16, against transformers. `70b`: stages of Llama-3-70B's TP 8 x PP 4 with real
collectives, each alone under 80 GB; then all of it at TP 8 alone, with moments in bfloat16 (on fewer GPUs as many
layers as fit). `8b`: Llama-3-8B at 8,192 in every layout, then torchtitan and Megatron-Core, the same tokens a step.
`overlap`: single layers, and whether the copy engines' results are right (`bench/overlap.py`). The page follows every
call.

Minutes expected on eight GPUs, from what two took: probe 2.7 (115 s on two; layers and host of two more groups), verify
1.2 (start, reference, 6 layouts), stages 2.5 (7 of 15 to 25 s), all of 70B 1.8 (2 of 55 s); ours of 8B 2.7 (start, 6
cases of 20 to 25 s), torchtitan and Megatron-Core 4.5 (5 cases of 50 s), overlap 1.

A row is one JSON file in `--out`; what has an answer there is not run again, and what failed or hung is tried by the
next call. Every rank has a limit of its own (`--limit-s`), and none outlives this command. A case that the rules
refuse, that does not fit, fails or hangs, and a peer that is not installed, are rows that say so. Nothing is timed of
which nothing was told: `tell` comes before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from eight_cases import SIZES, own_cases, peer_cases, stage_cases, verify_cases, whole_cases
from eight_table import Found, page
from eight_told import SHIPPED, seal, tell_memory, tell_times, write
from throughput import ROOT, run
from triweave_case import refusal_of
from workload import REFERENCE_IS_THERE, VERIFY_FOLDER, Case

PROBE_MINUTES, OVERLAP_S, REFERENCE_S = 4.0, 150.0, 180.0
"""The most that these take."""
OURS = ("triweave", "stage", "verify")
ANSWERS = ("ok", "out of memory", "not installed")
"""Outcomes that another try would not change."""


@dataclass(frozen=True)
class Bench:
    """One call: what is wanted, and where everything lies."""

    gpus: int
    tiny: bool
    out: Path
    limit_s: float
    end: float
    named: tuple[str, ...] = ("",)
    """Cases whose name holds one of these."""

    @property
    def rows(self) -> Path:
        return self.out / "rows"

    @property
    def profile(self) -> Path:
        return self.out / f"profile-x{self.gpus}.yaml"

    @property
    def memory(self) -> Path:
        return self.out / "check.json"

    @property
    def times(self) -> Path:
        return self.out / "times.json"

    def cases(self, part: str) -> list[Case]:
        """The cases of a part that are asked for, those that are refused among them."""
        return [case for case in self.all_cases(part) if any(word in case.name for word in self.named)]

    def all_cases(self, part: str) -> list[Case]:
        """The cases of a part."""
        made = {
            "verify": lambda: verify_cases(self.gpus),
            "70b": lambda: stage_cases(self.gpus, tiny=self.tiny) + whole_cases(self.gpus, tiny=self.tiny),
            "8b": lambda: own_cases(self.gpus, tiny=self.tiny) + peer_cases(self.gpus, tiny=self.tiny),
        }
        return made[part]() if part in made else []

    def priced(self) -> list[Case]:
        """Our cases that run and are told of before."""
        cases = self.all_cases("8b") + self.all_cases("70b")
        return [case for case in cases if case.system in OURS and not refusal_of(case)]

    def told_by(self) -> dict[str, str]:
        """Hashes of what was told; an empty one where nothing was."""
        files = {"check": self.memory, "times": self.times}
        return {name: seal(path) if path.exists() else "" for name, path in files.items()}


def check(bench: Bench) -> None:
    """Write what `check` says, once."""
    if not bench.memory.exists():
        write(bench.memory, tell_memory(bench.priced()), gpus=bench.gpus)


def probe(bench: Bench) -> None:
    """Measure this host; goes on with a profile that was begun."""
    minutes = min(PROBE_MINUTES, (bench.end - time.monotonic()) / 60)
    if minutes <= 0:
        return
    words = ["-m", "triweave", "probe", "--out", str(bench.profile), "--nproc", str(bench.gpus)]
    words += ["--minutes", f"{minutes:.2f}"]
    parts = "links" if bench.tiny else "gemm,attention,memory,links,copies,overlap,layers,host"
    words += ["--only", parts, *(["--device", "cpu"] if bench.tiny else [])]
    call(words, 60 * minutes + 60, bench.out / "probe.log")


def tell(bench: Bench) -> None:
    """Write the planner's seconds, unless a row was run after those that are there."""
    hash_ = bench.told_by()["times"]
    rows = [json.loads(path.read_text()) for path in bench.rows.glob("*.json")]
    if not hash_ or all(row["told_by"]["times"] != hash_ for row in rows):
        write(bench.times, tell_times(bench.priced(), bench.profile), gpus=bench.gpus, shipped=SHIPPED)


def verify(bench: Bench) -> None:
    """Write transformers' answer in a process of its own, then let every layout be held against it."""
    folder = bench.out / "verify"
    if not (folder / REFERENCE_IS_THERE).exists():
        folder.mkdir(exist_ok=True)
        script = ROOT / "bench" / "peers" / "verify_run.py"
        if not call([str(script), str(folder)], REFERENCE_S, bench.out / "reference.log"):
            return
    os.environ[VERIFY_FOLDER] = str(folder.resolve())
    measure(bench, "verify")


def measure(bench: Bench, part: str) -> None:
    """Run the cases of a part that have no answer yet."""
    waiting = [case for case in bench.cases(part) if not answered(row_path(bench, case)) and not refused(case)]
    bench.rows.mkdir(exist_ok=True)
    run(waiting, bench.rows, bench.limit_s, bench.end, {"told_by": bench.told_by()})


def overlap(bench: Bench) -> None:
    """Single layers over all GPUs."""
    path, seconds = bench.out / "overlap.json", min(OVERLAP_S, bench.end - time.monotonic())
    if seconds <= 0 or (path.exists() and any(row["section"] == "layers" for row in json.loads(path.read_text()))):
        return
    words = [str(ROOT / "bench" / "overlap.py"), "--out", str(path), "--ranks", str(bench.gpus)]
    words += ["--sections", "right,layers", *(["--small"] if bench.tiny else [])]
    call(words, seconds, bench.out / "overlap.log")


def table(bench: Bench) -> bool:
    """Write and print the page of everything that is there; returns whether no layout was found wrong."""
    cases = [case for part in PARTS for case in bench.cases(part)]
    rows, left = [], []
    for case in cases:
        path = row_path(bench, case)
        if path.exists():
            rows.append(json.loads(path.read_text()))
        elif why := refused(case):
            rows.append({"case": asdict(case), "outcome": f"refused: {why}", "log_tail": []})
        else:
            left.append(case.name)
    overlapped = bench.out / "overlap.json"
    found = Found(
        bench.gpus,
        rows,
        told_of(bench.memory),
        told_of(bench.times),
        bench.told_by(),
        json.loads(overlapped.read_text()) if overlapped.exists() else (),
        left,
    )
    lines = page(found, head_of(bench, rows))
    (bench.out / "eight.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (bench.out / "rows.json").write_text(json.dumps(rows, indent=1))
    print("\n".join(lines))
    return not any(row.get("pass") is False for row in rows)


def head_of(bench: Bench, rows: list[Any]) -> str:
    """When, on what, and what was told when."""
    ran = next((row for row in rows if "device" in row), {"device": "nothing", "torch": torch.__version__})
    told = [
        f"{name} `{hash_}` of {json.loads(path.read_text())['written_at']}" if hash_ else f"{name}: nothing was told"
        for (name, hash_), path in zip(bench.told_by().items(), (bench.memory, bench.times), strict=True)
    ]
    rehearsal = (
        " A rehearsal on processes of a CPU: every part runs, and no figure means anything." if bench.tiny else ""
    )
    where = f"{datetime.now(UTC).date().isoformat()}. {bench.gpus} x {ran['device']}, torch {ran['torch']}.{rehearsal}"
    return f"{where} Command: `python bench/eight.py --gpus {bench.gpus}`. Predictions: {'; '.join(told)}."


def told_of(path: Path) -> Any:
    """What a file of predictions says, by the names of cases."""
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def row_path(bench: Bench, case: Case) -> Path:
    """Where a case's row is kept."""
    return bench.rows / f"{case.name}.json"


def answered(path: Path) -> bool:
    """Whether there is a row, and it is no accident's."""
    return path.exists() and json.loads(path.read_text())["outcome"] in ANSWERS


def refused(case: Case) -> str:
    """Why a case of ours is not run by the rules of this version."""
    return refusal_of(case) if case.system in OURS else ""


def call(words: list[str], limit_s: float, log: Path) -> bool:
    """Run a Python command that may take so long, and return whether it succeeded.

    What it says goes to a file, and how it ended is told. It has no child that outlives it but in its own session.
    """
    begin, code = time.monotonic(), -1
    folders = [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            code = child.wait(limit_s)
            outcome = f"exit code {code}, {log}" if code else "done"
        except subprocess.TimeoutExpired:
            outcome = f"ended after its {limit_s:.0f} s, {log}"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    print(f"{log.stem}: {outcome}, {time.monotonic() - begin:.1f} s", flush=True)
    return code == 0


PARTS: dict[str, Callable[[Bench], None]] = {
    "check": check,
    "probe": probe,
    "tell": tell,
    "verify": verify,
    "70b": lambda bench: measure(bench, "70b"),
    "8b": lambda bench: measure(bench, "8b"),
    "overlap": overlap,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=SIZES, required=True)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, between commas; the table always follows")
    parser.add_argument("--shape", default="full", choices=("full", "tiny"), help="tiny: CPU processes, a rehearsal")
    parser.add_argument("--out", type=Path, help="results; what is there is not rerun")
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one case, after which its ranks end")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="no case goes on beyond this")
    parser.add_argument("--cases", default="", help="those whose name holds one of these, between commas")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {*PARTS, "table"}:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such part; there are {', '.join(PARTS)}, table")
    tiny, gpus = options.shape == "tiny", options.gpus
    out = options.out or Path(f"runs/{'tiny-' if tiny else ''}x{gpus}")
    bench = Bench(
        gpus, tiny, out, options.limit_s, time.monotonic() + options.budget_s, tuple(options.cases.split(","))
    )
    if options.list:
        print("\n".join(case.name for part in PARTS for case in bench.cases(part) if part in wanted))
        return 0
    on_gpus = set(wanted) - {"check", "tell", "table"}
    if on_gpus and not tiny and torch.cuda.device_count() < gpus:
        parser.error(f"--gpus {gpus}: this host has {torch.cuda.device_count()}; --shape tiny rehearses without")
    if {"8b", "70b"} & set(wanted) and not bench.times.exists() and "tell" not in wanted:
        parser.error(f"no predictions in {bench.times}: nothing is run that was not predicted; --only tell writes them")
    if tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # What starts without these would take multicast, which needs the fabric manager to grant it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    bench.out.mkdir(parents=True, exist_ok=True)
    try:
        for name, part in PARTS.items():
            if name in wanted:
                print(f"--- {name}", flush=True)
                part(bench)
    except KeyboardInterrupt:
        table(bench)
        return 130
    return 0 if table(bench) else 1


if __name__ == "__main__":
    sys.exit(main())
