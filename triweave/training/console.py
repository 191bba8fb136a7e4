"""What a run says while it runs: the plan before the first step, a line an interval, the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from triweave.config.validate import ResolvedRun
from triweave.data.summary import Summary
from triweave.layout import Layout
from triweave.parameters import holds_embedding, holds_head
from triweave.training.engine import DTYPES, Engine
from triweave.training.metrics import Meter, StepMetrics, duration


class Console:
    """Rank 0's voice; the other ranks' is silent. With a terminal a progress bar stands below the lines."""

    def __init__(self, num_steps: int, done: int, *, speaks: bool) -> None:
        self.speaks = speaks
        self._progress = None
        if speaks and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, transient=True)
            self._task = self._progress.add_task("training", total=num_steps, completed=done)
            self._progress.start()

    def say(self, *lines: str) -> None:
        """Print lines, above the bar if there is one."""
        for line in lines if self.speaks else ():
            if self._progress is not None:
                self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
            else:
                print(line, flush=True)

    def advance(self) -> None:
        """A step is done."""
        if self._progress is not None:
            self._progress.advance(self._task)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()


def opening(resolved: ResolvedRun, engine: Engine, meter: Meter, data: Summary, num_steps: int) -> list[str]:
    """What will run, on one screen: model, grid, layer map, batch arithmetic, data, where it goes."""
    run, spec, layout = resolved.run, resolved.spec, resolved.layout
    parts = f"micro-batch {layout.micro_batch} x {resolved.num_micro_batches} x dp {layout.dp}"
    weights = sum(unit.numel for unit in engine.sharding.units)
    train = data.train
    return [
        f"model     {run.model.path}: {spec.num_parameters / 1e6:,.1f} M parameters, {run.model.dtype}",
        f"grid      {layout} = {layout.world_size} ranks on {engine.groups.device.type}"
        f"{', sequence parallel' if layout.uses_sequence_parallel else ''}, schedule {layout.schedule},"
        f" shard {layout.sharing}",
        *layer_map(layout, resolved.gpus_per_node),
        *([f"tensor    {engine.tp.transport.name}"] if layout.tp > 1 else []),
        *([f"replicas  {engine.sharding.carried_by}"] if layout.replicas > 1 else []),
        *([f"layers    {engine.pipeline.graphs.name}"] if layout.cuda_graphs else []),
        f"attention {engine.kernel.in_words(DTYPES[run.model.dtype], spec.head_dim, packed=run.data.packing)}",
        f"rank 0    {weights / 1e6:,.1f} M parameters of {spec.num_parameters / 1e6:,.1f} M",
        f"batch     {run.train.global_batch} sequences = {parts}; {meter.tokens_per_step:,} tokens a step,"
        f" {num_steps} steps",
        f"data      {train.examples:,} examples in {train.sequences:,} sequences of {data.seq_len}"
        f" ({100 * train.efficiency:.0f} % full), {train.trained_tokens:,} trained tokens",
        f"output    {run.output_dir}",
    ]


def layer_map(layout: Layout, gpus_per_node: int) -> list[str]:
    """Which layers and which ranks each pipeline rank has."""
    lines = []
    for pp_rank in range(layout.pp):
        parts = [stage_contents(layout, stage) for stage in layout.stages_of(pp_rank)]
        ranks = [rank for rank in range(layout.world_size) if layout.coordinates(rank).pp == pp_rank]
        nodes = sorted({rank // gpus_per_node for rank in ranks})
        where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]}-{nodes[-1]}"
        lines.append(f"stage {pp_rank:<4}{' + '.join(parts)}: {spell(ranks)}, {where}")
    return lines


def stage_contents(layout: Layout, stage: int) -> str:
    """`embedding, layers 0-14` or the like."""
    layers = layout.layers_of(stage)
    parts = ["embedding"] if holds_embedding(layout, stage) else []
    parts.append(f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}")
    if holds_head(layout, stage):
        parts.append("norm and head")
    return ", ".join(parts)


def spell(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]}-{ranks[-1]}"


def closing(metrics: StepMetrics | None, elapsed_s: float, tokens: int) -> str:
    """How it went."""
    memory = f", peak memory {metrics.peak_allocated_gib:.1f} GiB a rank" if metrics is not None else ""
    return f"done      {tokens:,} tokens in {duration(elapsed_s)}{memory}"
