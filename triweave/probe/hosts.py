"""What the host needs to issue the trainer's layers: tiny tensors, many layers in a row, so that no GPU holds it up.

One layer alone after a wait says two or three times as much: caches are cold then, and nothing is ahead.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import pairwise

import torch

from triweave.config.schema import DataConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.batch import make_batch
from triweave.gradients import WeightGradients
from triweave.groups import Group, alone
from triweave.layers.attention import choose_kernel
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout, Recompute, Shard
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec
from triweave.planner.machine import Precision
from triweave.planner.profile import HostCost
from triweave.planner.space import RECOMPUTE
from triweave.probe.session import Session
from triweave.schedule.actions import Kind
from triweave.sharding import Unit, filling
from triweave.training.clock import Clock
from triweave.training.engine import build_engine
from triweave.training.step import train_step
from triweave.transport.choose import choose_transport
from triweave.transport.copy_engine import CopyEngines

SEQ = 64
LAYERS, FEW_LAYERS = 16, 3
"""In a row; in a rehearsal, whose times say nothing, few."""
REPEATS = 12
"""Of which the first quarter warms up."""
STEPS, MICRO_BATCHES = 6, 4
SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")


def tiny(ranks: int, layers: int) -> ModelSpec:
    """A model whose kernels take next to nothing, its heads as wide as those of real ones."""
    heads = 2 * ranks
    return ModelSpec(512, 64 * heads, 128 * heads, layers, heads, heads, 64, max_position_embeddings=SEQ)


def measure_hosts(session: Session) -> tuple[HostCost, ...]:
    """Layers of one rank and of the first 2, 4, ... as a tensor-parallel group, and what data-parallel ranks add."""
    found = []
    groups = session.in_order()
    kinds: list[tuple[tuple[Recompute, ...], Precision]] = [(recompute, "bf16") for recompute in RECOMPUTE]
    if session.has_fp8:
        kinds.append(((), "fp8"))
    for group in [alone(), *groups]:
        for recompute, precision in kinds:
            found.append(_layers(session, group, recompute, precision))
            session.tell("host", len(found) / (len(kinds) * (1 + len(groups)) + len(SHARDS)))
    if groups and groups[-1].size == session.group.size:
        found += [_replicas(session, shard) for shard in SHARDS]
    return tuple(found)


def _layers(session: Session, group: Group, recompute: tuple[Recompute, ...], precision: Precision) -> HostCost:
    layers = _layers_in_a_row(session)
    spec, tp = tiny(group.size, layers), group.size
    seq = max(SEQ, 16 * tp)  # fp8 is cast in sixteens
    shape = (seq // tp, 1, spec.hidden_size)
    transport = choose_transport("auto", group, tp > 1, session.device, 2 * seq * spec.hidden_size)
    if isinstance(transport, CopyEngines):
        # Products as small as these would not be cut, and those of real models are: twice the calls.
        transport = replace(transport, piece_s=0.0)
    later = WeightGradients()
    ours = TensorParallel(group, tp > 1, weight_gradients=later, chosen=transport)
    with torch.device("meta"):
        kernel = choose_kernel("auto", session.device)
        layer = DecoderLayer(spec, ours, kernel, recompute, fp8=precision == "fp8")
    layer.to(session.dtype).to_empty(device=session.device)
    for parameter in layer.parameters():
        parameter.data.fill_(0.01)
    positions = torch.arange(seq, device=session.device).unsqueeze(1)
    rotation = make_rotation(inverse_frequencies(spec).to(session.device), positions, session.dtype)
    x, upstream = session.random(*shape), session.random(*shape)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(2 if session.small else REPEATS):
        session.meet(group)
        marks = [time.perf_counter()]
        y = x.detach().requires_grad_()
        for _ in range(layers):
            y = layer(y, rotation, None)
        marks.append(time.perf_counter())
        with later.deferring() as put_off:
            y.backward(upstream)
        marks.append(time.perf_counter())
        with torch.no_grad():
            for work in put_off:
                work()
        marks.append(time.perf_counter())
        for kept, (begin, end) in zip(times, pairwise(marks), strict=True):
            kept.append((end - begin) / layers)
    session.meet(group)
    # Ranks of a group wait for each other in every layer, so the slower one counts each time, and no layer is left out:
    # hosts are uneven, and a step is made of all its moments.
    each = [session.worst(one[len(one) // 4 :], group) for one in times]
    forward, backward_input, backward_weight = (round(statistics.fmean(one), 9) for one in each)
    return HostCost(tp, None, recompute, forward, backward_input, backward_weight, precision)


def _replicas(session: Session, shard: Shard) -> HostCost:
    """Layers with the hooks and reductions of data parallelism over all ranks, as the trainer runs them."""
    layers = _layers_in_a_row(session)
    spec = tiny(1, layers)
    layout = Layout(dp=session.group.size, shard=shard, layers=(layers,))
    batch = MICRO_BATCHES * layout.dp
    run = Run(
        model=ModelConfig(path="", weights="random"),
        data=DataConfig(train=("",), seq_len=SEQ, packing=False),
        train=TrainConfig(global_batch=batch, steps=1),
    )
    resolved = ResolvedRun(run, spec, layout, None, MICRO_BATCHES, session.group.size)

    def fill(units: list[Unit]) -> None:
        for unit in filling(units):
            unit.weight.fill_(0.01)

    engine = build_engine(resolved, session.device, fill)
    tokens = make_batch(resolved, session.device)
    # The host's own clock, on whatever device it issues to.
    clock = Clock(torch.device("cpu"))
    clock.follow(engine.pipeline)
    times: dict[Kind, list[float]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
    for step in range(2 if session.small else STEPS):
        session.meet()
        clock.start()
        train_step(engine, tokens, 1e-6, 1.0)
        if step > 0:
            for span in clock.stop()[1]:
                times[span.action.kind].append(span.duration_s / layers)
    session.meet()
    forward, backward = session.worst([statistics.median(found) for found in times.values()])
    return HostCost(1, shard, (), round(forward, 9), round(backward, 9), 0.0)


def _layers_in_a_row(session: Session) -> int:
    return FEW_LAYERS if session.small else LAYERS


def measure_launch(session: Session) -> float:
    """Seconds of the host for one kernel, the smallest there is."""
    x = session.random(16)
    count = 100 if session.small else 500
    times = []
    for _ in range(5):
        session.wait()
        begin = time.perf_counter()
        for _ in range(count):
            x.add_(1)
        times.append((time.perf_counter() - begin) / count)
    session.wait()
    return round(session.worst([statistics.median(times)])[0], 9)
