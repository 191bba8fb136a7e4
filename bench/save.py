"""How long training waits for a save, and what the save costs beside it: one rank's states of Llama-3-70B on 32 GPUs.

    python bench/save.py --folder /scratch/save    # a GPU with more than 80 GB; under a minute; writes runs/save.json
    python bench/save.py --small                   # a CPU, a rehearsal

The rank of TP 8 x PP 4: 20 layers of the 80, an eighth of each, float32 masters and both moments, 26 GB. All of it is
copied to pinned host memory, beside what one plain copy of 1 GiB reaches on this machine. Then a fifth of it is saved
to the disk through `Saver`, beside matrix products that stand for training, and beside what a plain write and fsync
of 1 GiB reaches. The memory is pinned once, when a run starts: that is a line of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from result_file import result_file

from triweave.catalogue import find_model
from triweave.checkpoint.damaged import damage
from triweave.checkpoint.host_copy import HostCopy
from triweave.checkpoint.local_store import LocalStore
from triweave.config.schema import DataConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.on_gpu import fill_on_device
from triweave.groups import alone
from triweave.layout import Layout
from triweave.training.checkpoints import snapshot_bytes, take_snapshot
from triweave.training.engine import Engine, build_engine
from triweave.training.run_progress import RunProgress
from triweave.training.saver import Saver

GB = 1e9
PROGRESS = RunProgress(1, 0, 1, "bench", "a rank")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured; left out, a temporary one")
    parser.add_argument("--out", type=result_file, default="runs/save.json")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.small else torch.device("cpu")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    rows: dict[str, float | str] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }

    def add(**found: float) -> None:
        rows.update({name: round(value, 4) for name, value in found.items()})
        print(json.dumps(found), flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    try:
        block_bytes = 2**26 if options.small else 2**30
        add(plain_copy_gb_s=copy_speed(device, block_bytes), plain_disk_gb_s=disk_speed(folder, block_bytes))
        engine = rank_engine(device, layers=4 if options.small else 20, small=options.small)
        add(**staging(engine))
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()
        engine = rank_engine(device, layers=2 if options.small else 4, small=options.small)
        add(**saving(engine, folder, device))
    finally:
        shutil.rmtree(folder)
    return 0


def rank_engine(device: torch.device, layers: int, *, small: bool) -> Engine:
    """A model of the size of the rank's part, with its optimizer's states, on one device."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 28672 // 8, "vocab_size": 256}
    if small:
        sizes |= {"hidden_size": 512, "head_dim": 64, "intermediate_size": 1024}
    spec = replace(find_model("llama-3-70b"), num_hidden_layers=layers, **sizes)
    run = Run(
        model=ModelConfig(path="llama-3-70b", weights="random"),
        data=DataConfig(train=("unused",), seq_len=128),
        train=TrainConfig(global_batch=1),
    )
    resolved = ResolvedRun(run, spec, Layout(layers=(layers,)), None, 1, 1)
    engine = build_engine(resolved, device, lambda units: fill_on_device(units, spec))
    for _, moments in engine.optimizer.states():
        moments["exp_avg"].normal_()
        moments["exp_avg_sq"].uniform_()
    return engine


def staging(engine: Engine) -> dict[str, float]:
    """Copies of everything, again and again into the same memory."""
    sizes = snapshot_bytes(engine)
    begin = time.monotonic()
    copy = HostCopy(sizes, engine.groups.device)
    pinned_s = time.monotonic() - begin
    times = [timed(lambda: take_snapshot(engine, PROGRESS, "", copy)) for _ in range(4)]
    copy.close()
    best = statistics.median(times[1:])
    size = sum(sizes) / GB
    return {
        "staged_gb": size,
        "pin_once_s": pinned_s,
        "first_stall_s": times[0],
        "stall_s": best,
        "staging_gb_s": size / best,
    }


def saving(engine: Engine, folder: Path, device: torch.device) -> dict[str, float]:
    """One save beside matrix products, and what it does to their time."""
    side = 4096 if device.type == "cuda" else 256
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(20):
            torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    saver = Saver(LocalStore(folder), engine, 1, "auto")
    saver.save(PROGRESS, "")
    while not saver.news():
        step()
    alone_s = statistics.median(timed(step) for _ in range(50))
    saver.save(replace(PROGRESS, step=2), "")
    beside = []
    while not (news := saver.news()):
        beside.append(timed(step))
    saver.finish()
    (saved,) = news
    if saved.problem is not None:
        raise RuntimeError(saved.problem)
    begin = time.monotonic()
    problem = damage(LocalStore(folder), "step-2", alone())
    verify_s = time.monotonic() - begin
    if problem is not None:
        raise RuntimeError(problem)
    size = sum(snapshot_bytes(engine)) / GB
    return {
        "saved_gb": size,
        "saved_stall_s": saved.stall_s,
        "durable_s": saved.total_s,
        # Written, flushed, read back and hashed twice.
        "saved_gb_s": size / saved.total_s,
        "verified_gb_s": size / verify_s,
        "step_beside_a_save": statistics.median(beside or [alone_s]) / alone_s,
    }


def copy_speed(device: torch.device, num_bytes: int) -> float:
    """GB/s of one plain copy to pinned memory (on a CPU: to memory)."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return num_bytes / GB / statistics.median([timed(copy) for _ in range(6)][1:])


def disk_speed(folder: Path, num_bytes: int) -> float:
    """GB/s of a plain write and fsync."""
    content = memoryview(os.urandom(2**24))

    def write() -> None:
        handle = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(num_bytes // len(content)):
            os.write(handle, content)
        os.fsync(handle)
        os.close(handle)

    seconds = timed(write)
    (folder / "plain").unlink()
    return num_bytes / GB / seconds


def timed(work: Callable[[], object]) -> float:
    """Seconds that it took."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


if __name__ == "__main__":
    raise SystemExit(main())
