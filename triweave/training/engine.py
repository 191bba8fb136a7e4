"""One rank's part of a run: its stages, their shards, the pipeline that runs them and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch

from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.gradients import WeightGradients
from triweave.graphs.capture import Capture
from triweave.graphs.cuda import CudaCapture
from triweave.graphs.rank import Graphs
from triweave.groups import Groups, make_groups
from triweave.layers.attention import AttentionKernel, choose_kernel
from triweave.layers.rotary import inverse_frequencies
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout
from triweave.llama import Stage
from triweave.model_spec import ModelSpec
from triweave.offload import Offloader
from triweave.overlap import exchange_bytes
from triweave.parameters import stage_parameters
from triweave.pipeline import Pipeline
from triweave.schedule.actions import PipelineSchedule
from triweave.schedule.build import build_schedule
from triweave.schedule.dataflow import channels
from triweave.sharding import Sharding, Unit, Use, make_units, place_parameters
from triweave.sharing import buffer_sizes, part_numel
from triweave.training.optimizer import ShardedAdamW
from triweave.training.weights import draw_weights, load_weights
from triweave.transport.buffers import Memory
from triweave.transport.choose import ChooseTransport, choose_memory, choose_transport
from triweave.transport.copy_engine import CopyEngines
from triweave.transport.interface import Transport

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

FP8_CAPABILITY = (8, 9)
"""Ada, the first with tensor cores for fp8; Hopper is 9.0."""


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
    offloader: Offloader

    @property
    def unseen_bytes(self) -> int:
        """Memory that peers read and write: the caching allocator's statistics do not have it."""
        transport = self.tp.transport
        exchanged = 0
        if isinstance(transport, CopyEngines):
            exchanged = exchange_bytes(self.tp.size, transport.received[self.tp.rank].nbytes)
        return exchanged + self.sharding.memory.unseen_bytes

    @property
    def graph_bytes(self) -> int:
        """Memory of captured layers: the caching allocator's statistics have it as reserved, and not as allocated."""
        return self.pipeline.graphs.num_bytes


def build_engine(
    resolved: ResolvedRun,
    device: torch.device,
    fill: Callable[[list[Unit]], None] | None = None,
    transport_for: ChooseTransport = choose_transport,
    capture_for: Callable[[torch.device, Transport], Capture | None] | None = None,
) -> Engine:
    """Build this rank's part of the run, with its first weights in place. All ranks call it together.

    `fill` gives the units their first weights where they are not to be those that the run file names;
    `transport_for` says what carries slices where that cannot be asked of the machine, `capture_for` what captures
    graphs where that is not CUDA.
    """
    run, spec, layout = resolved.run, resolved.spec, resolved.layout
    if run.model.fp8:
        check_fp8(device)
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, resolved.num_micro_batches)
    groups = make_groups(layout, spec, channels(schedule), device, run.runtime.collective_timeout_s)
    kernel = choose_kernel(run.model.attention, device)
    dtype = DTYPES[run.model.dtype]
    sequence_parallel = layout.uses_sequence_parallel
    slice_shape = (
        run.data.seq_len // layout.cp // (layout.tp if sequence_parallel else 1),
        layout.micro_batch,
        spec.hidden_size,
    )
    transport = transport_for(
        run.runtime.overlap_tp, groups.tp, sequence_parallel, device, prod(slice_shape) * dtype.itemsize
    )
    tp = TensorParallel(groups.tp, sequence_parallel, layout.keeps_gathered, WeightGradients(), transport)

    offloader = Offloader(layout.offload, device)
    stages, units, memory = build_stages(
        spec, layout, groups, tp, kernel, dtype, run.runtime.overlap_dp, fp8=run.model.fp8, offloader=offloader
    )
    if fill is not None:
        fill(units)
    elif run.model.weights == "load":
        load_weights(units, Path(run.model.path), spec)
    else:
        draw_weights(units, spec, run.seed)

    sharding = Sharding(units, groups, memory)
    if layout.replicas > 1:
        for number, stage in stages.items():
            sharding.follow(number, uses_of(stage, units), tp.weight_gradients)
    capture = (capture_for or cuda_capture)(device, transport) if layout.cuda_graphs else None
    pipeline = Pipeline(
        stages,
        groups,
        tp.weight_gradients,
        slice_shape,
        dtype,
        sharding.begin,
        sharding.end_backward,
        offloader,
        Graphs(
            {number: stage.graphs for number, stage in stages.items()},
            tp.weight_gradients,
            capture,
            f"there are none on {device.type}" if device.type != "cuda" else f"slices travel by {transport.name}",
        ),
    )
    optimizer = ShardedAdamW(units, run.optimizer)
    return Engine(spec, layout, groups, kernel, tp, stages, sharding, pipeline, schedule, optimizer, offloader)


def cuda_capture(device: torch.device, transport: Transport) -> Capture | None:
    """What captures graphs on `device`; None where nothing can."""
    able = device.type == "cuda" and transport.is_capturable
    return CudaCapture(device, transport.settle) if able else None


def check_fp8(device: torch.device) -> None:
    """Refuse fp8 where the tensor cores have none. The CPU computes it too, for tests.

    Raises:
        InputError: the GPU is older than Ada.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
        rule = f"needs a GPU of compute capability {needed} or more; {torch.cuda.get_device_name(device)} has {found}"
        raise InputError(Problem("model.fp8", True, rule, "false"))


def build_stages(
    spec: ModelSpec,
    layout: Layout,
    groups: Groups,
    tp: TensorParallel,
    kernel: AttentionKernel,
    dtype: torch.dtype,
    overlap_dp: Literal["auto", "off"],
    *,
    fp8: bool = False,
    offloader: Offloader | None = None,
) -> tuple[dict[int, Stage], list[Unit], Memory]:
    """This rank's virtual stages, the units that hold their parameters (still without values), and where those lie."""
    numbers = layout.stages_of(groups.at.pp)
    parameters = [p for number in numbers for p in stage_parameters(spec, layout, number, groups.tp.rank)]
    units = make_units(parameters, groups, layout.shard, dtype)
    memory = choose_memory(
        overlap_dp,
        groups.shards,
        groups.device,
        [size for unit in units for size in buffer_sizes(unit.shard, unit.numel, dtype.itemsize)],
        part_numel(layout.shard, [unit.numel for unit in units], groups.shards.size) if groups.shards.size > 1 else 0,
    )
    for unit in units:
        unit.allocate(memory)
    frequencies = inverse_frequencies(spec).to(groups.device)
    stages: dict[int, Stage] = {}
    for number in numbers:
        with torch.device("meta"):
            stage = Stage(spec, layout, number, tp, kernel, frequencies, cp=groups.cp, fp8=fp8, offloader=offloader)
        names = {parameter.name for parameter in stage_parameters(spec, layout, number, groups.tp.rank)}
        place_parameters(stage, [unit for unit in units if names & {p.name for p in unit.parameters}])
        stages[number] = stage
    return stages, units, memory


def uses_of(stage: Stage, units: list[Unit]) -> Iterator[Use]:
    """The modules of a stage that hold parameters, in the order of their forwards, each with its unit."""
    by_name = {unit.name: unit for unit in units}
    decoder = stage.model
    if decoder.embed_tokens is not None:
        yield Use(decoder.embed_tokens, by_name["embed"], reads_weights_again=False)
    for number, layer in decoder.layers.items():
        yield Use(layer, by_name[f"layers.{number}"])
    if decoder.norm is not None and stage.lm_head is not None:
        yield Use(decoder.norm, by_name["norm"])
        yield Use(stage.lm_head, by_name["head" if "head" in by_name else "embed"])
