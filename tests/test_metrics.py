"""What a step is measured by: the numbers against their formulas, the line, and the file that survives a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.training.metrics import (
    GIB,
    TENSORBOARD_NAMES,
    JsonLines,
    Meter,
    StepMetrics,
    device_capacity,
    device_peak_flops,
    duration,
    peak_memory,
)

LLAMA_70B = ModelSpec(128256, 8192, 28672, 80, 64, 8, 128)
GRID = Layout(tp=8, pp=4, dp=2)
METER = Meter(LLAMA_70B, GRID, seq_len=8192, global_batch=128, peak_flops=989e12, capacity_bytes=80 * GIB)
CPU = torch.device("cpu")


def measured(step: int = 3, step_s: float = 16.0, meter: Meter = METER) -> StepMetrics:
    """A step of Llama-3-70B on 64 GPUs."""
    return meter.measure(step, 1.25, 0.5, 1e-5, step_s, (70.5 * GIB, 75.0 * GIB))


def test_speed_is_tokens_times_flops() -> None:
    """A step of 2^20 tokens in 16 s on 64 GPUs is 1024 tokens/s each: 460 TFLOP/s and 46.5 % causal, 49.8 % full.

    449.2 and 481.4 GFLOPs a token are the figures that Megatron and torchtitan divide for this model.
    """
    metrics = measured()
    assert METER.tokens_per_step == 2**20
    assert metrics.tokens == 3 * 2**20
    assert metrics.tokens_per_s_per_gpu == 1024
    assert metrics.tflops_per_gpu == pytest.approx(1024 * 449.2e9 / 1e12, rel=1e-3)
    assert metrics.mfu_causal == pytest.approx(1024 * 449.2e9 / 989e12, rel=1e-3)
    assert metrics.mfu_full == pytest.approx(1024 * 481.4e9 / 989e12, rel=1e-3)
    assert (metrics.peak_allocated_gib, metrics.peak_reserved_gib) == (70.5, 75.0)
    assert (metrics.step, metrics.loss, metrics.grad_norm, metrics.lr, metrics.step_s) == (3, 1.25, 0.5, 1e-5, 16.0)


def test_no_peak_no_share() -> None:
    """Where the peak is not known, as on the CPU, there is a speed and no share of the peak."""
    metrics = measured(meter=replace(METER, peak_flops=device_peak_flops(CPU)))
    assert metrics.mfu_causal is None
    assert metrics.mfu_full is None
    assert metrics.tflops_per_gpu == pytest.approx(460, rel=1e-3)
    assert "MFU     - %" in METER.line(metrics, 100, 0)


def test_line_has_units_and_fixed_columns() -> None:
    """The line names each number and its unit, and lines of one run stand in columns."""
    lines = [METER.line(measured(step), 1000, left_s) for step, left_s in ((3, 3723.4), (999, 5.0))]
    assert lines[0] == (
        "step    3/1000 | loss   1.2500 | grad norm    0.500 |    1024 tokens/s/GPU | MFU  46.5 %"
        " | memory  70.5/80 GiB | left 1:02:03"
    )
    assert [line.index("left") for line in lines] == [lines[0].index("left")] * 2
    assert METER.line(replace(measured(), val_loss=2.0), 1000, 0.0).endswith("left 0:00:00 | held-out loss 2.0000")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0:00:00"), (0.4, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (360000, "100:00:00")],
)
def test_duration(seconds: float, text: str) -> None:
    """Time is hours, minutes and seconds, rounded, and never negative."""
    assert duration(seconds) == text


def test_json_line() -> None:
    """A line of metrics.jsonl has exactly the documented keys, and a validation loss only where it was measured."""
    keys = ["step", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s_per_gpu", "tflops_per_gpu"]
    keys += ["mfu_causal", "mfu_full", "peak_allocated_gib", "peak_reserved_gib", "goodput"]
    assert list(json.loads(measured().to_json())) == keys
    with_loss = json.loads(replace(measured(), val_loss=2.0).to_json())
    assert list(with_loss) == [*keys, "val_loss"]
    assert with_loss.keys() - {"step"} == TENSORBOARD_NAMES.keys()


def steps_in(path: Path) -> list[int]:
    """Steps whose lines a file holds."""
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_resumed_file_has_every_step_once(tmp_path: Path) -> None:
    """Steps after the checkpoint, and the line that was being written at the stop, go; each line is there at once."""
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, after_step=0)
    for step in range(1, 6):
        first.write(measured(step))
        assert steps_in(path) == list(range(1, step + 1))
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')
    resumed = JsonLines(path, after_step=3)
    assert steps_in(path) == [1, 2, 3]
    resumed.write(measured(4))
    resumed.close()
    assert steps_in(path) == [1, 2, 3, 4]


def test_memory_of_the_host() -> None:
    """On the CPU memory is the process's own, and capacity the host's."""
    allocated, reserved = peak_memory(CPU)
    assert 10 * 2**20 < allocated == reserved < device_capacity(CPU)
    ballast = torch.ones(2**26)
    assert peak_memory(CPU)[0] >= ballast.nbytes
