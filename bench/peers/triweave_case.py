"""A case as a run of triweave: its layout, what the rules say of it, the run. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from workload import Case

from triweave.cluster import Cluster, parse_cluster
from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.layout import Layout, balanced_layers, even_layers
from triweave.rules import layout_problems


def layout_of(case: Case) -> Layout:
    """The case's layout in triweave's own words."""
    schedule = case.option("schedule", "1f1b")
    layout = Layout(
        tp=case.tp,
        pp=case.pp,
        cp=case.cp,
        dp=case.dp,
        vpp=2 if schedule == "interleaved" else 1,
        micro_batch=case.micro_batch,
        schedule=schedule,  # type: ignore[arg-type]
        shard=case.option("shard", "optimizer"),  # type: ignore[arg-type]
        keep_gathered=case.option("keep_gathered", "off") == "on",
        cuda_graphs=case.option("graphs", "off") == "on",
        recompute=tuple(filter(None, case.option("recompute", "").split(","))),  # type: ignore[arg-type]
    )
    # The stages of a pipeline of which one alone is there are alike.
    even = case.system == "stage"
    spec, stages = case.spec, layout.num_stages
    layers = even_layers(spec.num_hidden_layers, stages) if even else balanced_layers(spec, stages, case.seq_len)
    return replace(layout, layers=layers)


def cluster_of(case: Case) -> Cluster:
    """The GPUs of a case: one host, or of a single stage as many hosts as there are stages."""
    per_node = case.num_processes
    return parse_cluster(f"{case.world_size // per_node}x{per_node}xh200-141gb")


def refusal_of(case: Case) -> str:
    """Why triweave does not run the case's layout, by its own rules; empty where it does."""
    layout, cluster = layout_of(case), cluster_of(case)
    problems = layout_problems(
        case.spec,
        layout,
        world_size=case.world_size,
        seq_len=case.seq_len,
        global_batch=case.sequences,
        gpus_per_node=cluster.gpus_per_node,
    )
    return "; ".join(f"{problem.key} = {problem.value} {problem.rule}" for problem in problems)


def resolved_of(case: Case) -> ResolvedRun:
    """The run: bf16, plain causal sequences, random weights."""
    layout, cluster = layout_of(case), cluster_of(case)
    run = Run(
        model=ModelConfig(path="", weights="random", fp8=case.option("fp8", "off") == "on"),
        data=DataConfig(train=("",), seq_len=case.seq_len, packing=False),
        optimizer=OptimizerConfig(moments=case.option("moments", "float32")),  # type: ignore[arg-type]
        train=TrainConfig(global_batch=case.sequences, steps=1),
    )
    return ResolvedRun(run, case.spec, layout, cluster, case.num_micro_batches, cluster.gpus_per_node)
