"""What was said of a run before it began, held against its second step: memory by part, and the pipeline in time.

forecast.json   before the first step: memory by stage and part, step time (`planner.forecast`)
memory.json     after the second: each stage's peak as measured, and by part where the parts can be told
pipeline.json   of the third: when every action began and ended on one rank of each stage
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triweave.cluster import GIB
from triweave.collectives import all_reduce
from triweave.config.validate import ResolvedRun
from triweave.layout import Coordinates
from triweave.planner.forecast import FORECAST_FILE, cluster_seen, forecast, run_identity
from triweave.training.clock import Clock
from triweave.training.engine import Engine
from triweave.training.metrics import peak_memory

MEMORY_FILE, PIPELINE_FILE, CHECK_FILE = "memory.json", "pipeline.json", "check.json"
WARN_BEYOND = 0.01
"""Share of the measured peak by which a prediction may be off."""
REST = "activations and the rest"
PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "master weights": ("master weights",),
    "optimizer moments": ("optimizer moments", "moments"),
}
"""What a rank can tell of its peak, by the names that the check and the closed form have for it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest rank of a stage. Bytes."""

    allocated: int
    """What tensors took at most, what peers read included."""
    reserved: int
    parts: Mapping[str, int]
    """They add up to what is allocated."""


class Foretold:
    """One rank's part in it; every method is called on all ranks, at the same steps."""

    def __init__(self, resolved: ResolvedRun, engine: Engine, folder: Path, *, speaks: bool) -> None:
        """Write the forecast, on the rank that `speaks`."""
        self.resolved, self.engine, self.folder, self.speaks = resolved, engine, folder, speaks
        device = engine.groups.device
        self.clock = Clock(device)
        self.leave: Callable[[], None] = lambda: None
        cluster = resolved.cluster
        if cluster is None and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            cluster = cluster_seen(name, resolved.gpus_per_node, resolved.layout.world_size)
        self.said = forecast(resolved, cluster if device.type == "cuda" else None)
        if speaks:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / FORECAST_FILE, self.said)

    def opening(self) -> list[str]:
        """What is said before the first step: memory of every stage, and time where the machine is known."""
        return list(forecast_lines(self.said))

    def before(self, number: int) -> None:
        """Step `number` of this process, from 1, begins."""
        if number == 3:
            self.leave = self.clock.follow(self.engine.pipeline)
            self.clock.start()

    def after(self, number: int) -> list[str]:
        """The step is over; returns what there is to say."""
        if number == 3:
            self.leave()
            self._write_pipeline()
        if number != 2 or self.engine.groups.device.type != "cuda":
            return []  # on a CPU nobody counts what tensors take
        measured = measure(self.engine)
        source, told = told_peaks(self.resolved, self.said, self.folder)
        if self.speaks:
            pairs = [(_told(one), _told(real)) for one, real in zip(told, measured, strict=True)]
            rows = [{"stage": stage, "told": one, "measured": real} for stage, (one, real) in enumerate(pairs)]
            _write(self.folder / MEMORY_FILE, {"source": source, "stages": rows})
        return list(compare(told, measured, source))

    def _write_pipeline(self) -> None:
        """Gather the actions of one rank of every stage."""
        _, spans = self.clock.stop()
        groups, schedule = self.engine.groups, self.engine.schedule
        # Held-out data may have been measured after the step: its forwards came after.
        spans = spans[: len(schedule.ranks[groups.at.pp])]
        mine = [(span.action.kind.value, span.action.stage, span.action.micro_batch, *span[1:]) for span in spans]
        every: list[Any] = [mine] * groups.world.size
        if groups.world.size > 1:
            dist.all_gather_object(every, mine, group=groups.world.handle)
        if self.speaks:
            ranks = [every[groups.layout.rank(Coordinates(0, 0, 0, stage))] for stage in range(groups.layout.pp)]
            told = {"schedule": schedule.name, "pp": groups.layout.pp, "vpp": groups.layout.vpp}
            count = schedule.num_micro_batches
            _write(self.folder / PIPELINE_FILE, {**told, "micro_batches": count, "ranks": ranks})


def measure(engine: Engine) -> list[Peak]:
    """The peak of every stage, largest over its ranks. All ranks call it together."""
    groups = engine.groups
    units = engine.sharding.units
    allocated, reserved = peak_memory(groups.device, engine.unseen_bytes, engine.graph_bytes)
    parts = (
        sum(unit.weight.untyped_storage().size() and unit.weight.nbytes for unit in units),
        sum(unit.gradient.nbytes for unit in units),
        sum(unit.master.nbytes for unit in units if unit.master.data_ptr() != unit.weight.data_ptr()),
        sum(state[name].nbytes for _, state in engine.optimizer.states() for name in ("exp_avg", "exp_avg_sq")),
    )
    table = torch.zeros(groups.layout.pp, 2 + len(parts), dtype=torch.float64, device=groups.device)
    table[groups.at.pp] = torch.tensor([allocated, reserved, *parts], dtype=torch.float64)
    table = all_reduce(table, groups.world, dist.ReduceOp.MAX)
    return [_peak(*(int(number) for number in row)) for row in table.tolist()]


def _peak(allocated: int, reserved: int, *parts: int) -> Peak:
    named = dict(zip(PARTS, parts, strict=True))
    return Peak(allocated, reserved, {**named, REST: allocated - sum(parts)})


def told_peaks(resolved: ResolvedRun, said: Mapping[str, Any], folder: Path) -> tuple[str, list[Peak]]:
    """What was said of each stage and by whom: the check, if the folder has its answer for this very run."""
    checked = _checked(folder / CHECK_FILE, resolved)
    if checked is not None:
        return "triweave check", checked
    found = []
    for stage in said["stages"]:
        parts = [sum(stage["components"].get(name, 0) for name in names) for names in PARTS.values()]
        found.append(_peak(stage["allocated_bytes"], stage["reserved_bytes"], *parts))
    return "the planner's closed form", found


def _checked(path: Path, resolved: ResolvedRun) -> list[Peak] | None:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        if answer["run"] != run_identity(resolved):
            return None
        found = {}
        for row in answer["ranks"]:
            parts = [sum(row["components"].get(name, 0.0) for name in names) * GIB for names in PARTS.values()]
            beside = row["beside_gib"]["copies between ranks"]
            sizes = ((row[key] + beside) * GIB for key in ("peak_gib", "reserved_gib"))
            found[row["stage"]] = _peak(*(round(size) for size in (*sizes, *parts)))
        return [found[stage] for stage in range(resolved.layout.pp)]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def compare(told: list[Peak], measured: list[Peak], source: str) -> Iterator[str]:
    """A line a stage, and a warning for each that is off by more than `WARN_BEYOND`."""
    for stage, (one, real) in enumerate(zip(told, measured, strict=True)):
        off = one.allocated / real.allocated - 1
        yield (
            f"memory    stage {stage}: {real.allocated / GIB:.2f} GiB at most, {one.allocated / GIB:.2f} predicted"
            f" ({off:+.2%}, {source}); reserved {real.reserved / GIB:.2f}, {one.reserved / GIB:.2f} predicted"
        )
        if abs(off) > WARN_BEYOND:
            by_part = {name: one.parts[name] - size for name, size in real.parts.items()}
            name = max(by_part, key=lambda part: abs(by_part[part]))
            yield (
                f"warning   memory of stage {stage} was predicted {abs(off):.1%} too {'high' if off > 0 else 'low'}"
                f", most of it in {name}: {one.parts[name] / GIB:.2f} GiB for {real.parts[name] / GIB:.2f}"
            )


def forecast_lines(said: Mapping[str, Any]) -> Iterator[str]:
    """The forecast in two lines, and one for host memory where that is used."""
    peaks = [stage["allocated_bytes"] / GIB for stage in said["stages"]]
    capacity = f" of {said['capacity_bytes'] / GIB:.1f}" if said["capacity_bytes"] else ""
    stages = ", ".join(f"{peak:.2f}" for peak in peaks)
    yield f"predicted {stages} GiB at most on a rank of each stage{capacity}"
    pinned = [stage["host_bytes"] / GIB for stage in said["stages"]]
    if any(pinned):
        yield f"          offload pins {', '.join(f'{size:.2f}' for size in pinned)} GiB at most of its host, likewise"
    step = said["step"]
    if step is not None:
        low, high = step["range_s"]
        yield (
            f"          step {step['step_s']:.3g} s ({low:.3g} to {high:.3g}), {step['tokens_per_s_per_gpu']:,.0f}"
            f" tokens/s/GPU, MFU {100 * step['mfu_causal']:.1f} %, bubble {100 * step['bubble']:.1f} %"
        )


def _told(peak: Peak) -> dict[str, Any]:
    return {"allocated_bytes": peak.allocated, "reserved_bytes": peak.reserved, "parts": dict(peak.parts)}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
