"""Which machine this is: what a profile says of where it was measured."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from collections.abc import Sequence

import torch

from triweave.cluster import CATALOGUE, GIB, nearest_gpu
from triweave.errors import InputError, Problem
from triweave.planner.profile import Profile

ON_CPU = "cpu"


def identify(device: torch.device, num_gpus: int, name: str | None) -> Profile:
    """A profile that holds no measurement yet.

    Raises:
        InputError: the GPU is none of the catalogue, and `name` does not say which it is to count as.
    """
    if name is not None and name not in CATALOGUE:
        raise InputError(Problem("--name", name or '""', f"is not one of {', '.join(CATALOGUE)}", nearest_gpu(name)))
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    if device.type != "cuda":
        source = "Measured by `triweave probe --device cpu` on a CPU: a rehearsal, which says nothing of a GPU."
        return Profile(2, ON_CPU, torch.__version__, today, source, gpu_model="CPU", num_gpus=num_gpus)
    model = torch.cuda.get_device_name(device)
    gpu = catalogue_name(model, torch.cuda.get_device_properties(device).total_memory) if name is None else name
    if gpu is None:
        rule = f"is not one of {', '.join(CATALOGUE)}; --name says which of them it is to count as"
        raise InputError(Problem("--name", model, rule, nearest_gpu(model.lower())))
    driver, power, clock = asked_of_driver(device.index or 0, ("driver_version", "power.limit", "clocks.max.sm"))
    return Profile(
        2,
        gpu,
        torch.__version__,
        today,
        f"Measured by `triweave probe` on {num_gpus} GPU{'s' * (num_gpus > 1)} of one node: medians on the slowest"
        " rank, products, attention and operations in the mixture of a training step.",
        gpu_model=model,
        num_gpus=num_gpus,
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "",
        driver=driver,
        power_limit_watts=number_in(power),
        max_sm_clock_mhz=number_in(clock),
    )


def catalogue_name(model: str, memory_bytes: int) -> str | None:
    """The GPU of the catalogue that the driver calls `model`: the same chip, the same slot, about as much memory."""
    words = model.lower().replace("-", " ").split()
    alike = [
        gpu
        for gpu in CATALOGUE.values()
        if gpu.name.partition("-")[0] in words and ("pcie" in gpu.name) == ("pcie" in words)
    ]
    near = [gpu for gpu in alike if abs(gpu.usable_bytes - memory_bytes) < 8 * GIB]
    return min(near, key=lambda gpu: abs(gpu.usable_bytes - memory_bytes)).name if near else None


def asked_of_driver(index: int, figures: Sequence[str]) -> tuple[str, ...]:
    """What `nvidia-smi` says of a GPU, empty words where it is missing or does not know. Nothing is changed."""
    nothing = ("",) * len(figures)
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return nothing
    command = (tool, f"--query-gpu={','.join(figures)}", "--format=csv,noheader,nounits", f"--id={index}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603 (fixed words)
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    words = tuple(word.strip() for word in done.stdout.strip().split(","))
    return words if done.returncode == 0 and len(words) == len(figures) else nothing


def sm_clock_mhz(device: torch.device) -> float | None:
    """The clock now, while kernels run."""
    if device.type != "cuda":
        return None
    return number_in(asked_of_driver(device.index or 0, ("clocks.sm",))[0])


def number_in(word: str) -> float | None:
    """A figure of the driver; None where it is no number (`[N/A]`)."""
    try:
        return float(word)
    except ValueError:
        return None
