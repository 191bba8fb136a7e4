"""From the words of the command line to a question, and from an answer to a run file.

What reads and writes run files is imported where it is used: most questions name none.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from triweave.catalogue import find_model
from triweave.cluster import Cluster
from triweave.config.cluster_file import cluster_of
from triweave.errors import InputError, Problem
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.moments import MomentsDtype
from triweave.planner.assumptions import OURS
from triweave.planner.profile import Profile
from triweave.planner.profile_machine import machine_from_profile, profile_of
from triweave.planner.request import Request, legal_problems, price
from triweave.planner.search import Plan
from triweave.rules import even_problems


def make_request(
    model: str,
    cluster: str,
    seq_len: int,
    global_batch: int,
    *,
    moments: MomentsDtype = "float32",
    tp_across_nodes: bool = False,
    profile: str | None = None,
) -> Request:
    """The question that the words ask.

    Raises:
        InputError: a model, a cluster or a number that is not understood; every problem at once.
    """
    problems: list[Problem] = []
    spec: ModelSpec | None = None
    machines: Cluster | None = None
    try:
        spec = _model(model)
    except InputError as error:
        problems += error.problems
    try:
        machines = cluster_of(cluster)
    except InputError as error:
        problems += error.problems
    for key, value in (("data.seq_len", seq_len), ("train.global_batch", global_batch)):
        if value < 1:
            problems.append(Problem(key, value, "must be at least 1", "1"))
    if spec is not None and seq_len > spec.max_position_embeddings:
        rule = f"is longer than the model's max_position_embeddings = {spec.max_position_embeddings}"
        problems.append(Problem("data.seq_len", seq_len, rule, str(spec.max_position_embeddings)))
    if machines is not None and machines.gpu.usable_bytes == 0:
        problems.append(Problem("cluster", cluster, "has no GPU to plan for", "1x8xh100-80gb"))
    measured: Profile | None = None
    try:
        measured = profile_of(profile) if profile is not None else None
    except InputError as error:
        problems += error.problems
    if problems or spec is None or machines is None:
        raise InputError(problems)
    on = machine_from_profile(measured, machines) if measured is not None else None
    return Request(
        model,
        cluster,
        spec,
        machines,
        seq_len,
        global_batch,
        tp_across_nodes=tp_across_nodes,
        assumptions=replace(OURS, gpus_per_node=machines.gpus_per_node, moments=moments),
        profile=measured,
        on=on,
    )


def _model(name: str) -> ModelSpec:
    path = Path(name)
    if path.is_file():
        rule = "is a file; a model is the Hugging Face folder that holds config.json, or a name of the catalogue"
        raise InputError(Problem("model.path", name, rule, str(path.parent) if path.name == "config.json" else None))
    return spec_from_folder(path) if path.is_dir() else find_model(name)


def given_layout(request: Request, words: str) -> Layout:
    """The layout of `--layout tp=8,pp=4,...`, whether it fits in memory or not.

    Raises:
        InputError: a key or value that a layout does not have, or a rule that it breaks.
    """
    from triweave.config.load import load_words
    from triweave.config.schema import LayoutConfig
    from triweave.config.validate import layers_of, layout_of

    # Commas part the keys, but not inside a list: recompute=[norm,swiglu].
    parts = [part for part in re.split(r",(?![^\[]*\])", words) if part]
    if not parts:
        raise InputError(Problem("layout", words, "names no key of a layout", "tp=8,pp=4"))
    try:
        config = load_words(LayoutConfig, parts, "layout")
    except InputError as error:
        raise InputError(replace(one, key=f"layout.{one.key}", where=None) for one in error.problems) from None
    layout = layout_of(config, request.cluster.world_size)
    layout = replace(layout, layers=layers_of(config.layers, request.spec, layout, request.seq_len))
    across = request.tp_across_nodes or config.tp_across_nodes
    problems = legal_problems(replace(request, tp_across_nodes=across), layout)
    if not problems and config.layers == "even":
        problems = even_problems(request.spec, layout)
    if problems:
        raise InputError(problems)
    return layout


def answer_for(request: Request, words: str) -> Plan:
    """The answer for the layout of `--layout` alone.

    Raises:
        InputError: as `given_layout`.
    """
    return Plan((price(request, given_layout(request, words)),), (), 1)


def run_file_text(request: Request, layout: Layout) -> str:
    """A run file with the layout; data and schedule of the training are for the user to fill in."""
    from triweave.config.document import commented_yaml
    from triweave.config.schema import DataConfig, LayoutConfig, ModelConfig, OptimizerConfig, Run, TrainConfig

    layers = layout.layers
    even = layers == even_layers(request.spec.num_hidden_layers, layout.num_stages)
    run = Run(
        model=ModelConfig(path=request.model),
        cluster=request.cluster_name,
        layout=LayoutConfig(
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            cp=layout.cp,
            micro_batch=layout.micro_batch,
            sequence_parallel=layout.sequence_parallel,
            keep_gathered=layout.keep_gathered,
            schedule=layout.schedule,
            shard=layout.shard,
            shard_group=layout.shard_group,
            recompute=layout.recompute,
            offload=layout.offload,
            cuda_graphs=layout.cuda_graphs,
            tp_across_nodes=layout.tp > request.cluster.gpus_per_node,
            layers="even" if even else layers,
        ),
        data=DataConfig(train=("train.jsonl",), seq_len=request.seq_len),
        optimizer=OptimizerConfig(moments=request.assumptions.moments),
        train=TrainConfig(global_batch=request.global_batch, epochs=1.0),
    )
    return commented_yaml(run)
