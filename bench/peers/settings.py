"""Named sets of cases on a shape: which settings of each system are tried, the most telling first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workload import SYSTEMS, Case, shapes

SETS = ("best", "sweep", "all", "fp8", "alone", "one")
SHAPES = ("8b-8k", "8b-4k", "70b-4k", "tiny")
"""Shapes that the sets are made for; the others are those of `bench/eight.py`."""


def cases_of(wanted: str, shape_names: list[str]) -> list[Case]:
    """The cases of a set on some shapes: all that are expected to be best come before all others.

    `best` holds, for each layout, ours and each peer at the setting that is expected to be its fastest; `sweep` the
    settings around it, so that the fastest is found and not assumed; `all` both; `fp8` ours, each in bf16 and in fp8;
    `alone` one rank of the best without the other; `one` all of the model on one GPU. Systems that share processes
    stand together.
    """
    both = (best, sweep)
    parts = {"best": (best,), "sweep": (sweep,), "all": both, "fp8": both, "alone": (best,), "one": (one,)}[wanted]
    found = [case for part in parts for shape in shape_names for case in part(shape)]
    if wanted == "alone":
        # The bubble of a pipeline is not there where one stage is alone.
        return [_alone(case) for case in found if case.pp == 1]
    if wanted == "fp8":
        return [case for case in found if case.system == "triweave" for case in (case, _in_fp8(case))]
    return found


def best(shape: str) -> list[Case]:
    """Every layout of every system, at the setting that is expected to be its fastest."""
    row, many, all_fits = _row(shape), _many(shape), _all_fits(shape)
    some = {} if all_fits else {"recompute": "op"}
    layers = {} if all_fits else {"recompute": "layer"}
    return [
        row("triweave", "dp2", many // 2, shard="optimizer"),
        row("triweave", "tp2", many, keep_gathered="on"),
        row("triweave", "pp2", schedule="zero-bubble"),
        row("megatron-core", "tp2", many // 2),
        row("megatron-core", "pp2", **layers),
        row("megatron-core", "dp2", **layers),
        row("torchtitan", "tp2", many),
        row("torchtitan", "dp2", many, recompute="op"),
        row("torchtitan", "dp2", many // 2),
        row("torchtitan", "pp2", **some),
        row("transformers", "dp2", **layers),
    ]


def sweep(shape: str) -> list[Case]:
    """The settings around the best. What may not fit comes last of its system: a row that says so is an answer."""
    row, many, all_fits = _row(shape), _many(shape), _all_fits(shape)
    cheap = {} if all_fits else {"recompute": "norm,swiglu"}
    other = {"recompute": "layer"} if all_fits else {}
    ours = [
        row("triweave", "dp2", many, shard="gradients", **cheap),
        row("triweave", "dp2", many // 2, shard="gradients"),
        row("triweave", "dp2", many // 2, shard="optimizer", recompute="norm,swiglu"),
        row("triweave", "dp2", many, shard="full", **cheap),
        row("triweave", "dp2", many // 2, shard="full"),
        row("triweave", "tp2", many),
        row("triweave", "tp2", 2 * many, **cheap),
        row("triweave", "tp2", many // 2),
        # The host's own row: micro-batches of one, issued kernel by kernel and as graphs.
        row("triweave", "tp2", keep_gathered="on"),
        row("triweave", "tp2", keep_gathered="on", graphs="on"),
        row("triweave", "pp2", schedule="interleaved"),
        row("triweave", "pp2", schedule="1f1b"),
    ]
    if all_fits:
        ours += [row("triweave", "dp2", many, shard="optimizer"), row("triweave", "dp2", shard="none")]
    else:
        ours += [row("triweave", "dp2", shard="none", recompute="layer")]
    return [
        *ours,
        row("megatron-core", "pp2", **other),
        row("megatron-core", "pp2", schedule="interleaved", recompute="layer"),
        row("megatron-core", "tp2", many),
        row("megatron-core", "tp2", attention="unfused"),
        row("megatron-core", "dp2", **other),
        row("torchtitan", "tp2", many // 2),
        row("torchtitan", "tp2", many, recompute="op"),
        row("torchtitan", "tp2", many, compile="off"),
        row("torchtitan", "dp2", many // 2, recompute="op"),
        row("torchtitan", "dp2", many, recompute="op", compile="off"),
        row("torchtitan", "pp2", recompute="op", compile="off"),
        row("torchtitan", "pp2", recompute="op", schedule="Interleaved1F1B"),
        *([row("torchtitan", "dp2", many), row("torchtitan", "pp2", recompute="op")] if all_fits else []),
        *([] if all_fits else [row("torchtitan", "pp2")]),
        row("transformers", "dp2", recompute="layer", compile="on"),
        row("transformers", "dp2", 2, recompute="layer"),
        row("transformers", "dp2", **other),
    ]


def one(shape: str) -> list[Case]:
    """All of the model on one GPU, with moments in bfloat16 for the room, in bf16 and in fp8.

    Of a sequence of 8,192 an fp8 step does not fit beside the weights' casts: there both are also told of a model with
    four layers fewer.
    """
    row = _row(shape)
    common = {"moments": "bfloat16", "recompute": "norm,swiglu"}
    whole = [row("triweave", "dp1", **common), row("triweave", "dp1", graphs="on", **common)]
    if shape != "8b-8k":
        return [case for case in whole for case in (case, _in_fp8(case))]
    fewer = row("triweave", "dp1", layers="28", **common)
    return [*whole, fewer, _in_fp8(fewer)]


def sessions(cases: list[Case]) -> list[list[Case]]:
    """Neighbours of one system, grid and number of processes, which run in the same processes one after the other."""
    runs: list[list[Case]] = []
    for case in cases:
        if runs and _processes(runs[-1][0]) == _processes(case):
            runs[-1].append(case)
        else:
            runs.append([case])
    return runs


def _processes(case: Case) -> tuple[str, int, int]:
    return case.system, case.world_size, case.num_processes


def _row(shape: str) -> Callable[..., Case]:
    def row(system: str, layout: str, micro_batch: int = 1, **options: str) -> Case:
        if system not in SYSTEMS:
            raise ValueError(f"no system {system}")
        return Case(system, shape, micro_batch=micro_batch, options=options, **{layout[:2]: int(layout[2:])})

    return row


def _many(shape: str) -> int:
    """As many sequences in a micro-batch as make 16,384 tokens, where the GPU has its products at full speed."""
    return 4 if shapes()[shape].seq_len == 4096 else 2


def _all_fits(shape: str) -> bool:
    """Whether all activations can be kept: the wide layers of 70B are few enough here."""
    return shape == "70b-4k"


def _in_fp8(case: Case) -> Case:
    return replace(case, options={**case.options, "fp8": "on"})


def _alone(case: Case) -> Case:
    return replace(case, options={**case.options, "alone": "on"})
