"""From the words of the command line to a question, and from an answer to a run file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from triweave.catalogue import find_model
from triweave.cluster import Cluster, parse_cluster
from triweave.config.document import commented_yaml
from triweave.config.load import load_words
from triweave.config.schema import DataConfig, LayoutConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import layers_of, layout_of
from triweave.errors import InputError, Problem
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.planner.request import Request
from triweave.rules import layout_problems


def make_request(
    model: str, cluster: str, seq_len: int, global_batch: int, *, tp_across_nodes: bool = False
) -> Request:
    """The question that the words ask.

    Raises:
        InputError: a model, a cluster or a number that is not understood; every problem at once.
    """
    problems: list[Problem] = []
    spec: ModelSpec | None = None
    machines: Cluster | None = None
    try:
        spec = spec_from_folder(Path(model)) if Path(model).is_dir() else find_model(model)
    except InputError as error:
        problems += error.problems
    try:
        machines = parse_cluster(cluster)
    except InputError as error:
        problems += error.problems
    for key, value in (("--seq", seq_len), ("--global-batch", global_batch)):
        if value < 1:
            problems.append(Problem(key, value, "must be at least 1", "1"))
    if spec is not None and seq_len > spec.max_position_embeddings:
        rule = f"is longer than the model's max_position_embeddings = {spec.max_position_embeddings}"
        problems.append(Problem("--seq", seq_len, rule, str(spec.max_position_embeddings)))
    if machines is not None and machines.gpu.usable_bytes == 0:
        problems.append(Problem("--cluster", cluster, "has no GPU to plan for", "1x8xh100-80gb"))
    if problems or spec is None or machines is None:
        raise InputError(problems)
    return Request(model, spec, machines, seq_len, global_batch, tp_across_nodes=tp_across_nodes)


def given_layout(request: Request, words: str) -> Layout:
    """The layout of `--layout tp=8,pp=4,...`, whether it fits in memory or not.

    Raises:
        InputError: a key or value that a layout does not have, or a rule that it breaks.
    """
    # Commas part the keys, but not inside a list: recompute=[norm,swiglu].
    parts = [part for part in re.split(r",(?![^\[]*\])", words) if part]
    if not parts:
        raise InputError(Problem("--layout", words, "names no key of a layout", "tp=8,pp=4"))
    config = load_words(LayoutConfig, parts, "--layout")
    layout = layout_of(config, request.cluster.world_size)
    layout = replace(layout, layers=layers_of(config.layers, request.spec, layout, request.seq_len))
    problems = layout_problems(
        request.spec,
        layout,
        world_size=request.cluster.world_size,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        gpus_per_node=request.cluster.gpus_per_node,
        tp_across_nodes=request.tp_across_nodes or config.tp_across_nodes,
    )
    if problems:
        raise InputError(problems)
    return layout


def run_file_text(request: Request, layout: Layout) -> str:
    """A run file with the layout; data and schedule of the training are for the user to fill in."""
    layers = layout.layers
    even = layers == even_layers(request.spec.num_hidden_layers, layout.num_stages)
    run = Run(
        model=ModelConfig(path=request.model),
        cluster=str(request.cluster),
        layout=LayoutConfig(
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            cp=layout.cp,
            micro_batch=layout.micro_batch,
            sequence_parallel=layout.sequence_parallel,
            schedule=layout.schedule,
            shard=layout.shard,
            recompute=layout.recompute,
            tp_across_nodes=layout.tp > request.cluster.gpus_per_node,
            layers="even" if even else layers,
        ),
        data=DataConfig(train=("train.jsonl",), seq_len=request.seq_len),
        train=TrainConfig(global_batch=request.global_batch, epochs=1.0),
    )
    return commented_yaml(run)
