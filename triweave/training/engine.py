"""One rank's part of a run: its stages, their shards, the pipeline that runs them and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from triweave.config.validate import ResolvedRun
from triweave.gradients import WeightGradients
from triweave.groups import Groups, make_groups
from triweave.layers.attention import AttentionKernel, choose_kernel
from triweave.layers.rotary import inverse_frequencies
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout
from triweave.llama import Stage
from triweave.model_spec import ModelSpec
from triweave.parameters import stage_parameters
from triweave.pipeline import Pipeline
from triweave.schedule.actions import PipelineSchedule
from triweave.schedule.build import build_schedule
from triweave.schedule.dataflow import channels
from triweave.sharding import Sharding, Unit, make_units, place_parameters, shard_module
from triweave.training.optimizer import ShardedAdamW
from triweave.training.weights import draw_weights, load_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything of one rank that a step touches."""

    spec: ModelSpec
    layout: Layout
    groups: Groups
    kernel: AttentionKernel
    tp: TensorParallel
    stages: dict[int, Stage]
    sharding: Sharding
    pipeline: Pipeline
    schedule: PipelineSchedule
    optimizer: ShardedAdamW


def build_engine(
    resolved: ResolvedRun, device: torch.device, fill: Callable[[list[Unit]], None] | None = None
) -> Engine:
    """Build this rank's part of the run, with its first weights in place. All ranks call it together.

    `fill` gives the units their first weights where they are not to be those that the run file names.
    """
    run, spec, layout = resolved.run, resolved.spec, resolved.layout
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, resolved.num_micro_batches)
    groups = make_groups(layout, spec, channels(schedule), device, run.runtime.timeout_s)
    kernel = choose_kernel(run.model.attention, device)
    tp = TensorParallel(groups.tp, layout.uses_sequence_parallel, WeightGradients())
    dtype = DTYPES[run.model.dtype]

    stages, units = build_stages(spec, layout, groups, tp, kernel, dtype)
    if fill is not None:
        fill(units)
    elif run.model.weights == "load":
        load_weights(units, Path(run.model.path), spec)
    else:
        draw_weights(units, spec, run.seed)

    sharding = Sharding(units, groups)
    seq = run.data.seq_len // (tp.size if tp.sequence_parallel else 1)
    pipeline = Pipeline(
        stages,
        groups,
        tp.weight_gradients,
        (seq, layout.micro_batch, spec.hidden_size),
        dtype,
        sharding.end_backward,
    )
    optimizer = ShardedAdamW(units, run.optimizer)
    return Engine(spec, layout, groups, kernel, tp, stages, sharding, pipeline, schedule, optimizer)


def build_stages(
    spec: ModelSpec,
    layout: Layout,
    groups: Groups,
    tp: TensorParallel,
    kernel: AttentionKernel,
    dtype: torch.dtype,
) -> tuple[dict[int, Stage], list[Unit]]:
    """This rank's virtual stages, and the units that hold their parameters (still without values)."""
    numbers = layout.stages_of(groups.at.pp)
    parameters = [p for number in numbers for p in stage_parameters(spec, layout, number, groups.tp.rank)]
    units = make_units(parameters, groups, layout.shard, dtype)
    frequencies = inverse_frequencies(spec).to(groups.device)
    stages: dict[int, Stage] = {}
    for number in numbers:
        with torch.device("meta"):
            stage = Stage(spec, layout, number, tp, kernel, frequencies)
        names = {parameter.name for parameter in stage_parameters(spec, layout, number, groups.tp.rank)}
        place_parameters(stage, [unit for unit in units if names & {p.name for p in unit.parameters}])
        stages[number] = stage
        if layout.shard in ("gradients", "full") and layout.dp > 1:
            _shard_stage(stage, {unit.name: unit for unit in units}, tp.weight_gradients)
    return stages, units


def _shard_stage(stage: Stage, units: dict[str, Unit], weight_gradients: WeightGradients) -> None:
    """Gather and reduce each unit around the module that uses it."""
    decoder = stage.model
    modules: list[tuple[nn.Module | None, str]] = [(decoder.embed_tokens, "embed"), (decoder.norm, "norm")]
    modules += [(layer, f"layers.{number}") for number, layer in decoder.layers.items()]
    modules.append((stage.lm_head, "head" if "head" in units else "embed"))
    for module, unit in modules:
        if module is not None:
            shard_module(module, units[unit], weight_gradients)
