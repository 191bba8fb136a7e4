"""Files made to run code, to lead elsewhere, or to take all time and memory: nothing runs, and each is refused.

Each is read in a child process with 2 GiB of memory and 20 s of a processor; a bait that runs makes a folder, and an
audit hook sees every file that is opened and every program that is started. A file is good if what reads it refuses it
with an error of ours, or reads around the bait.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from fault_cases.hostile_case import BESIDE, Case
from fault_cases.hostile_checkpoints import checkpoint_cases
from fault_cases.hostile_inputs import run_file_cases, template_cases, weight_cases
from fault_cases.rows import Row
from fault_cases.small_checkpoints import CONFIG, save_small, set_state, small_engine

from triweave.errors import TriweaveError

TIME_S = 20.0
MEMORY_BYTES = 2 * 2**30
STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen"}


def run(quick: bool, out: Path) -> list[Row]:
    """Read every hostile file; `quick` reads every third."""
    torch.set_num_threads(1)
    engine = small_engine(out / "model")
    set_state(engine, 1)
    good = out / "good"
    save_small(good, engine, 1)
    (out / BESIDE).mkdir()
    shutil.copytree(good / "step-1", out / BESIDE / "step-1")
    kinds: dict[str, list[Case]] = {
        "checkpoints": checkpoint_cases(engine),
        "weights": weight_cases(),
        "run files": run_file_cases(),
        "chat templates": template_cases(),
    }
    rows = []
    for kind, cases in kinds.items():
        verdicts, longest, most = [], 0.0, 0
        chosen = cases[:: 3 if quick else 1]
        for case in chosen:
            folder = out / "case"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
            case.make(folder)
            verdict, seconds, memory = judged(case, folder)
            longest, most = max(longest, seconds), max(most, memory)
            verdicts.append(verdict and f"{case.name}: {verdict}")
        wrong = [verdict for verdict in verdicts if verdict]
        detail = f"at most {longest:.1f} s and {most / 2**20:.0f} MiB" + "".join(f"; {verdict}" for verdict in wrong)
        rows.append(Row(f"hostile {kind}", len(chosen), len(chosen) - len(wrong), detail))
    return rows


# --- one case in a child ----------------------------------------------------------------------------------------------


def judged(case: Case, folder: Path) -> tuple[str, float, int]:
    """What was wrong (empty: nothing), seconds of a processor, and bytes of memory beyond those before."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.write(theirs, json.dumps(outcome(case, folder)).encode()[:60_000])
        os._exit(0)
    os.close(theirs)
    # The clock on the wall only ends what waits for ever: a busy machine is no reason to call a file hostile.
    ready, _, _ = select.select([ours], [], [], 10 * TIME_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    answer = os.read(ours, 60_000)
    os.close(ours)
    _, _, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime
    if not answer:
        return ("waited for ever" if not ready else "took more time or memory than it had"), seconds, 0
    told = json.loads(answer)
    if (folder / "bait").exists():
        told["wrong"] = "ran what was in the file"
    return told["wrong"], seconds, told["memory"]


def outcome(case: Case, folder: Path) -> dict[str, Any]:
    """Read the hostile folder in this process, which is thrown away."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIME_S), int(TIME_S)))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    seen: list[str] = []
    outside = str(folder.parent / BESIDE)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in STARTS or (event == "open" and str(args[0]).startswith((outside, "/etc/passwd"))):
            seen.append(f"{event} {args[0]}")

    sys.addaudithook(hook)
    wrong = ""
    try:
        case.read(folder)
    except TriweaveError:
        pass
    except BaseException:
        wrong = "no error of ours: " + traceback.format_exc().strip().splitlines()[-1][:200]
    return {"wrong": f"did {seen[0]}" if seen else wrong, "memory": peak_bytes() - before}


def peak_bytes() -> int:
    """Largest resident size so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
