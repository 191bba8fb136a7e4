"""One rank of any grid for real on one GPU: its shapes, kernels and memory; the other ranks are not there.

The time of each action is measured by events on the GPU. Collectives are local copies, so that what is measured is the
rank's computation; messages bring random numbers.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from triweave.config.validate import ResolvedRun
from triweave.dryrun.batch import make_batch
from triweave.dryrun.lone_rank import lone_rank
from triweave.graphs.capture import Capture
from triweave.graphs.cuda import CudaCapture
from triweave.model_spec import ModelSpec
from triweave.schedule.actions import Action, Kind
from triweave.schedule.build import build_schedule
from triweave.schedule.simulate import Timeline, simulate
from triweave.sharding import Unit, filling
from triweave.training.clock import Clock
from triweave.training.determinism import deterministic
from triweave.training.engine import build_engine
from triweave.training.step import train_step
from triweave.transport.interface import Transport

WARM_UP = 1
"""Steps: the first one compiles kernels and makes the optimizer's moments. The second captures graphs, if any."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank took. Seconds and bytes."""

    rank: int
    step_s: float
    """Median step of the micro-batches that were run; not of the whole grid."""
    actions: Mapping[tuple[Kind, int], float]
    """Median time of an action by kind and virtual stage."""
    rest_s: float
    """What a step takes outside its actions: reduction, norm, update, publishing."""
    peak_allocated: int
    peak_reserved: int
    micro_batches: int
    loss: float
    """Of the last step, as the gradient norm. Of no meaning but this: they are finite, so no kernel met a NaN."""
    grad_norm: float


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The card was too small."""

    rank: int
    at: str
    """What the rank was at."""
    allocated: int
    """Bytes that tensors held then."""
    message: str


def measure_rank(
    resolved: ResolvedRun, rank: int, device: torch.device, *, cap_bytes: int | None = None, steps: int = 3
) -> Measured | OutOfMemory:
    """Build rank `rank`, run steps and measure the last `steps` of them.

    Args:
        resolved: the run; its micro-batches are those of a step.
        rank: of its grid.
        device: one GPU; on a CPU the clock is the host's, and there is no memory to measure.
        cap_bytes: the size of the card that this one is to be; None takes all of it.
        steps: measured ones, after one to warm up.
    """
    cuda = device.type == "cuda"
    # What an earlier rank has left, its error's traceback included.
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.empty(1, device=device)  # before its first tensor a process has no statistics to reset
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap_bytes or total) / total), device)
    clock = Clock(device)
    try:
        return _measure(resolved, rank, device, clock, steps)
    except torch.OutOfMemoryError as error:
        message, allocated = ". ".join(str(error).split(". ")[:2]), torch.cuda.memory_allocated(device) if cuda else 0
        return OutOfMemory(rank, clock.at, allocated, message)


def _measure(resolved: ResolvedRun, rank: int, device: torch.device, clock: Clock, steps: int) -> Measured:
    with deterministic(resolved.run.runtime), lone_rank(rank, resolved.layout.world_size):
        clock.at = "building the model"
        engine = build_engine(
            resolved, device, lambda units: fill_on_device(units, resolved.spec), capture_for=capture_local_copies
        )
        clock.follow(engine.pipeline)
        batch = make_batch(resolved, device, engine.tp.rank, engine.groups.cp.rank)
        optimizer = resolved.run.optimizer
        times: list[float] = []
        spans: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
        rests: list[float] = []
        warm_up = WARM_UP + resolved.layout.cuda_graphs
        for step in range(warm_up + steps):
            clock.start()
            loss, grad_norm = train_step(engine, batch, optimizer.learning_rate, optimizer.max_grad_norm)
            whole, actions = clock.stop()
            if step < warm_up:
                continue
            times.append(whole)
            rests.append(whole - (actions[-1].end_s - actions[0].start_s))
            for span in actions:
                spans[span.action.kind, span.action.stage].append(span.duration_s)
        cuda = device.type == "cuda"
        return Measured(
            rank=rank,
            step_s=median(times),
            actions={key: median(found) for key, found in spans.items()},
            rest_s=median(rests),
            peak_allocated=torch.cuda.max_memory_allocated(device) + engine.graph_bytes if cuda else 0,
            peak_reserved=torch.cuda.max_memory_reserved(device) if cuda else 0,
            micro_batches=resolved.num_micro_batches,
            loss=loss,
            grad_norm=grad_norm,
        )


def capture_local_copies(device: torch.device, transport: Transport) -> Capture | None:
    """What captures graphs. Collectives of a rank that is alone may be part of them, whatever those of several may."""
    return CudaCapture(device, transport.settle) if device.type == "cuda" else None


def fill_on_device(units: Iterable[Unit], spec: ModelSpec) -> None:
    """Random weights made where they lie: the host would take minutes, and what they are matters to no clock."""
    for unit in filling(units):
        unit.weight.normal_(0.0, spec.initializer_range)


def flops_of(resolved: ResolvedRun, action: tuple[Kind, int], *, causal: bool) -> float:
    """Model FLOPs of one rank in an action of one micro-batch; what is recomputed does not count.

    With m FLOPs of the matrix products and a of attention, a forward takes m + a and a backward 2m + 2a, of which the
    weight half takes m.
    """
    kind, stage = action
    spec, layout, seq = resolved.spec, resolved.layout, resolved.run.data.seq_len
    layers = layout.layers[stage]
    products = layers * spec.layer_flops_per_token(0, causal=causal)
    attention = layers * spec.layer_flops_per_token(seq, causal=causal) - products
    if stage == layout.num_stages - 1:
        products += spec.head_flops_per_token()
    shares = {
        Kind.FORWARD: (1, 1),
        Kind.BACKWARD: (2, 2),
        Kind.BACKWARD_INPUT: (1, 2),
        Kind.BACKWARD_WEIGHT: (1, 0),
    }
    of_products, of_attention = shares[kind]
    # The model's figures count forward and backward, three forwards' worth.
    per_token = (of_products * products + of_attention * attention) / 3
    return per_token * seq * layout.micro_batch / layout.tp


def mfu_of(
    resolved: ResolvedRun, actions: Mapping[tuple[Kind, int], float], peak_flops: float, *, causal: bool
) -> float:
    """Share of the peak that a rank reaches in the steady state, where it does each of its actions in turn."""
    flops = sum(flops_of(resolved, action, causal=causal) for action in actions)
    return flops / sum(actions.values()) / peak_flops


def grid_step(resolved: ResolvedRun, measured: Sequence[Measured], link_bandwidth: float) -> Timeline:
    """The pipeline of the whole grid in time, from what some of its ranks took.

    A stage that was not measured takes what a measured one with as many layers takes that is neither first nor last.

    Args:
        resolved: the run, with all its micro-batches.
        measured: first and last pipeline rank, and one between where there are more.
        link_bandwidth: bytes a second of a message between two stages.

    Raises:
        ValueError: a stage is like none of those that were measured.
    """
    layout = resolved.layout
    found = {key: seconds for one in measured for key, seconds in one.actions.items()}
    inner = {
        (kind, layout.layers[stage]): seconds
        for (kind, stage), seconds in found.items()
        if 0 < stage < layout.num_stages - 1
    }

    def cost(action: Action) -> float:
        seconds = found.get((action.kind, action.stage), inner.get((action.kind, layout.layers[action.stage])))
        if seconds is None:
            raise ValueError(f"no measured stage is like stage {action.stage}")
        return seconds

    slices = layout.tp if layout.uses_sequence_parallel else 1
    element = 2 if resolved.run.model.dtype == "bfloat16" else 4
    message = resolved.run.data.seq_len // slices * layout.micro_batch * resolved.spec.hidden_size * element
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, resolved.num_micro_batches)
    return simulate(schedule, cost, message / link_bandwidth)


def fewer_micro_batches(resolved: ResolvedRun, count: int) -> ResolvedRun:
    """The same run with fewer micro-batches in a step."""
    layout = resolved.layout
    count = min(count, resolved.num_micro_batches)
    train = replace(resolved.run.train, global_batch=count * layout.dp * layout.micro_batch)
    return replace(resolved, run=replace(resolved.run, train=train), num_micro_batches=count)
