"""What a step is measured by, the line it prints and the files it is written to."""

from __future__ import annotations

import json
import math
import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from triweave.cluster import peak_flops_of
from triweave.layout import Layout
from triweave.model_spec import ModelSpec

GIB = 2**30


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of `metrics.jsonl`."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Mean over the trained tokens of the global batch; the same on every layout. Null where the step was skipped."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    tokens: int
    """Tokens since the start of the run, padding included."""
    step_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs with causal attention, in 10^12 a second."""
    mfu_causal: float | None
    """Share of the peak, attention counted causal; None where the peak is not known (the CPU)."""
    mfu_full: float | None
    """Share of the peak, attention counted in full (PaLM, torchtitan)."""
    peak_allocated_gib: float
    """Largest over the ranks. On the CPU: resident memory of the process."""
    peak_reserved_gib: float
    goodput: float = 0.0
    """Share of the time since the run's first start that went into steps that count (`recovery.goodput`)."""
    val_loss: float | None = None
    failed_saves: int = 0
    """Checkpoints that could not be saved since the start of this process."""

    def to_json(self) -> str:
        """The line, without what was not measured and did not fail; JSON knows no numbers that are none."""
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }
        if self.val_loss is None:
            del values["val_loss"]
        if not self.failed_saves:
            del values["failed_saves"]
        return json.dumps(values)


@dataclass(frozen=True, slots=True)
class Meter:
    """Turns a step's time into speed."""

    spec: ModelSpec
    layout: Layout
    seq_len: int
    global_batch: int
    peak_flops: float | None
    """FLOP/s that MFU divides by; None where it is not known."""
    capacity_bytes: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step."""
        return self.seq_len * self.global_batch

    def measure(
        self, step: int, loss: float, grad_norm: float, lr: float, step_s: float, peak: tuple[float, float]
    ) -> StepMetrics:
        """Metrics of one step; `peak` is allocated and reserved bytes."""
        per_gpu = self.tokens_per_step / step_s / self.layout.world_size
        causal, full = (per_gpu * self.spec.flops_per_token(self.seq_len, causal=c) for c in (True, False))
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=step * self.tokens_per_step,
            step_s=step_s,
            tokens_per_s_per_gpu=per_gpu,
            tflops_per_gpu=causal / 1e12,
            mfu_causal=causal / self.peak_flops if self.peak_flops else None,
            mfu_full=full / self.peak_flops if self.peak_flops else None,
            peak_allocated_gib=peak[0] / GIB,
            peak_reserved_gib=peak[1] / GIB,
        )

    def line(self, metrics: StepMetrics, num_steps: int, left_s: float) -> str:
        """The log line: fixed columns, units, memory as a part of capacity, time left."""
        mfu = "    -" if metrics.mfu_causal is None else f"{100 * metrics.mfu_causal:5.1f}"
        width = len(str(num_steps))
        validation = "" if metrics.val_loss is None else f" | held-out loss {metrics.val_loss:.4f}"
        return (
            f"step {metrics.step:{width}}/{num_steps} | loss {metrics.loss:8.4f} | grad norm {metrics.grad_norm:8.3f}"
            f" | {metrics.tokens_per_s_per_gpu:7.0f} tokens/s/GPU | MFU {mfu} %"
            f" | memory {metrics.peak_allocated_gib:5.1f}/{self.capacity_bytes / GIB:.0f} GiB"
            f" | left {duration(left_s)}{validation}"
        )


def duration(seconds: float) -> str:
    """Seconds as `1:02:03`."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def device_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device, from its name."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def device_capacity(device: torch.device) -> int:
    """Bytes of the GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()


def host_memory_bytes() -> int:
    """Bytes of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(device: torch.device, unseen_bytes: int = 0, graph_bytes: int = 0) -> tuple[float, float]:
    """Peak bytes allocated and reserved so far; on the CPU the process's largest resident size, twice.

    Args:
        device: whose memory.
        unseen_bytes: what stands beside what the caching allocator counts (`Engine.unseen_bytes`).
        graph_bytes: what it counts as reserved alone (`Engine.graph_bytes`).
    """
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return float(peaks[0] + unseen_bytes + graph_bytes), float(peaks[1] + unseen_bytes)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return resident, resident


class Sink(Protocol):
    """Somewhere metrics are written to."""

    def write(self, metrics: StepMetrics) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Write what is still held."""


class JsonLines:
    """`metrics.jsonl`: a line a step, on disk at once."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Appends; lines of steps after `after_step` (from a run that is resumed before its end) are dropped."""
        drop_lines(path, after_step=after_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append the step's line and hand it to the disk."""
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drop_lines(path: Path, *, after_step: int) -> None:
    """Drop what a file of JSON lines says of steps after `after_step`, and what was cut off in being written."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= after_step]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    partial.replace(path)


def _step_of(line: str) -> float:
    """The step that a line is about; infinite if the line is not whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


TENSORBOARD_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "tokens": "train/tokens",
    "step_s": "perf/step_seconds",
    "tokens_per_s_per_gpu": "perf/tokens_per_second_per_gpu",
    "tflops_per_gpu": "perf/tflops_per_gpu",
    "mfu_causal": "perf/mfu_causal",
    "mfu_full": "perf/mfu_full",
    "goodput": "perf/goodput",
    "peak_allocated_gib": "memory/peak_allocated_gib",
    "peak_reserved_gib": "memory/peak_reserved_gib",
    "val_loss": "eval/loss",
}
"""Hugging Face's rule for trackers, so that existing dashboards read them."""


class TensorBoard:
    """TensorBoard event files."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, metrics: StepMetrics) -> None:
        """Add what was measured under TensorBoard's customary names."""
        for name, value in asdict(metrics).items():
            if name in TENSORBOARD_NAMES and value is not None:
                self._writer.add_scalar(TENSORBOARD_NAMES[name], value, metrics.step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()
