"""The one function that decides whether a run can start. Pure: it reads files, and changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from triweave.catalogue import find_model
from triweave.cluster import Cluster
from triweave.config.cluster_file import cluster_of
from triweave.config.files import file_problems, neighbour
from triweave.config.schema import LayoutConfig, Run
from triweave.config.values import value_problems
from triweave.errors import InputError, Problem
from triweave.layout import Layout, balanced_layers, even_layers
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.rules import (
    attention_problems,
    even_problems,
    fp8_problems,
    grid_problems,
    model_problems,
    size_problems,
)
from triweave.weights_index import weight_problems


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run that can start, with what follows from its keys."""

    run: Run
    spec: ModelSpec
    layout: Layout
    """With `dp` and `layers` settled."""
    cluster: Cluster | None
    num_micro_batches: int
    """Micro-batches a data-parallel rank runs in one step."""
    gpus_per_node: int


def validate(
    run: Run, *, world_size: int | None = None, gpus_per_node: int | None = None, dry: bool = False
) -> ResolvedRun:
    """Check everything about a run that can be checked before it starts.

    Args:
        run: The run, as `load_run` gives it.
        world_size: Ranks that were started; None before there are any. Then they are the cluster's, or as many as
            the layout says.
        gpus_per_node: Ranks of a node; None takes the cluster's, or one node of all ranks.
        dry: The run is not to start here: its data and weights need not be there, and a model of the catalogue will do.

    Raises:
        InputError: with every problem that was found.
    """
    problems = value_problems(run)
    cluster = _cluster(run, world_size, problems)
    spec = _spec(run, problems, dry=dry)
    if not dry:
        problems += file_problems(run)

    ranks = world_size if world_size is not None else cluster.world_size if cluster else None
    layout = layout_of(run.layout, ranks)
    if run.layout.layers == ():
        rule = "must be even, balanced or the layers of every stage in model order"
        problems.append(Problem("layout.layers", "[]", rule, "even"))
    per_node = gpus_per_node or (cluster.gpus_per_node if cluster else ranks or layout.world_size)

    seq_len, global_batch = run.data.seq_len, run.train.global_batch
    sizes = size_problems(layout, seq_len, global_batch)
    problems += sizes
    if not sizes:
        problems += grid_problems(layout, world_size=ranks, global_batch=global_batch)
        if spec is not None:
            layout = replace(layout, layers=layers_of(run.layout.layers, spec, layout, seq_len))
            # With a number of ranks that is not the grid's, nobody knows where its nodes end.
            across = run.layout.tp_across_nodes or ranks not in (None, layout.world_size)
            if run.layout.layers == "even":
                problems += even_problems(spec, layout)
            problems += model_problems(spec, layout, seq_len=seq_len, gpus_per_node=per_node, tp_across_nodes=across)
            problems += _attention_problems(run, spec, layout)
            if run.model.fp8 and not problems:
                problems += fp8_problems(spec, layout, seq_len)
    if problems or spec is None:
        raise InputError(problems)
    return ResolvedRun(run, spec, layout, cluster, layout.micro_batches(global_batch), per_node)


def _attention_problems(run: Run, spec: ModelSpec, layout: Layout) -> list[Problem]:
    """What the kernel that is asked for cannot compute. On the CPU attention is torch's, whatever is asked for."""
    if run.runtime.device == "cpu":
        return []
    model = run.model
    packing, exact = run.data.packing, run.runtime.deterministic
    return attention_problems(spec, layout, model.attention, dtype=model.dtype, packing=packing, deterministic=exact)


def _cluster(run: Run, world_size: int | None, problems: list[Problem]) -> Cluster | None:
    if run.cluster is None:
        return None
    try:
        cluster = cluster_of(run.cluster)
    except InputError as error:
        problems.extend(error.problems)
        return None
    if world_size is not None and world_size != cluster.world_size:
        rule = f"has {cluster.world_size} GPUs, and {world_size} ranks were started"
        nodes, rest = divmod(world_size, cluster.gpus_per_node)
        nearest = f"1x{world_size}" if rest else f"{nodes}x{cluster.gpus_per_node}"
        problems.append(Problem("cluster", run.cluster, rule, f"{nearest}x{cluster.gpu.name}"))
    return cluster


def _spec(run: Run, problems: list[Problem], *, dry: bool) -> ModelSpec | None:
    folder = Path(run.model.path)
    if not os.path.exists(folder):
        if dry:
            try:
                return find_model(run.model.path)
            except InputError as error:
                problems.extend(replace(problem, key="model.path") for problem in error.problems)
                return None
        problems.append(Problem("model.path", run.model.path, "does not exist", neighbour(folder)))
        return None
    try:
        spec = spec_from_folder(folder)
    except InputError as error:
        problems.extend(error.problems)
        return None
    except OSError as error:
        problems.append(Problem("model.path", folder, f"cannot be read ({error.strerror})"))
        return None
    if run.model.weights == "load" and not dry:
        problems.extend(weight_problems(folder, spec))
    return spec


def layout_of(config: LayoutConfig, world_size: int | None) -> Layout:
    """The grid with `dp` settled and `layers` still open."""
    model_ranks = config.tp * config.pp * config.cp
    dp = config.dp
    if dp is None:
        # Where this does not divide, the rules name both numbers.
        dp = max(1, (world_size or model_ranks) // max(1, model_ranks))
    return Layout(
        tp=config.tp,
        pp=config.pp,
        vpp=config.vpp,
        cp=config.cp,
        dp=dp,
        micro_batch=config.micro_batch,
        sequence_parallel=config.sequence_parallel,
        keep_gathered=config.keep_gathered,
        schedule=config.schedule,
        shard=config.shard,
        shard_group=config.shard_group,
        recompute=config.recompute,
        offload=config.offload,
        cuda_graphs=config.cuda_graphs,
    )


def layers_of(wanted: str | tuple[int, ...], spec: ModelSpec, layout: Layout, seq_len: int) -> tuple[int, ...]:
    """The layers of every virtual stage that `layout.layers` of a run file asks for."""
    stages = max(1, layout.num_stages)  # a size below 1 is another rule's to refuse
    if isinstance(wanted, tuple):
        return wanted
    if wanted == "balanced":
        return balanced_layers(spec, stages, seq_len)
    return even_layers(spec.num_hidden_layers, stages)
