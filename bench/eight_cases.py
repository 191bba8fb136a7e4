"""What `bench/eight.py` runs on 2, 4 or 8 GPUs: the cases of each part, most telling first. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "peers")]

from triweave_case import cluster_of, resolved_of  # noqa: E402
from workload import Case, shapes  # noqa: E402

from triweave.planner.forecast import stages_of  # noqa: E402

SIZES = (2, 4, 8)
"""GPUs that there are cases for."""
STAGES = 4
"""Pipeline stages of the grid whose stages are run one at a time."""
LAYERS_A_GPU = 10
"""Layers of that grid's model for each tensor-parallel rank: 80, those of 70B, at TP 8."""
FILLED = 0.97
"""Share of a card that the deepest model may take by the closed form, whose worst error on GPUs was 3 %."""


def own_cases(gpus: int, *, tiny: bool) -> list[Case]:
    """Llama-3-8B at 8,192 in every layout that is asked about, of ours."""
    shape, half = ("tiny-deep" if tiny else "8b-8k"), gpus // 2
    # As many sequences in a micro-batch as keep a tensor-parallel rank's kernels longer than the host needs for them.
    many = min(4, half)

    def row(micro_batch: int = 1, *, tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, **options: str) -> Case:
        return Case("triweave", shape, tp, pp, dp, micro_batch, options, cp)

    mixed = {
        2: [],
        4: [row(2, tp=2, pp=2, schedule="zero-bubble"), row(pp=2, dp=2, schedule="zero-bubble")],
        8: [row(2, tp=4, pp=2, schedule="zero-bubble"), row(2, tp=2, pp=2, dp=2, schedule="zero-bubble")],
    }[gpus]
    if tiny:
        mixed = [replace(case, micro_batch=1) for case in mixed]
    return [
        row(many, tp=gpus, keep_gathered="on"),
        row(dp=gpus, shard="full"),
        row(dp=gpus, shard="optimizer"),
        *mixed,
        row(pp=gpus, schedule="interleaved"),
        row(min(2, half), cp=2, tp=half),
    ]


def peer_cases(gpus: int, *, tiny: bool) -> list[Case]:
    """The peers on all GPUs, at the settings that are expected to be their fastest: the same tokens a step."""
    shape, many = ("tiny-deep" if tiny else "8b-8k"), min(4, gpus // 2)
    cases = [Case("torchtitan", shape, dp=gpus), Case("torchtitan", shape, tp=gpus, micro_batch=many)]
    if not tiny:
        cases.append(Case("torchtitan", shape, dp=gpus, micro_batch=2, options={"recompute": "op"}))
    cases.append(Case("megatron-core", shape, tp=gpus, micro_batch=many))
    return cases if tiny or many == 1 else [*cases, Case("megatron-core", shape, tp=gpus)]


def verify_cases(gpus: int) -> list[Case]:
    """The layouts of `own_cases` on a model small enough for transformers, eight sequences a step."""
    found = {}
    for case in own_cases(gpus, tiny=True):
        options = {**case.options, "sequences": "8"}
        verified = replace(case, system="verify", micro_batch=1, options=options)
        found[verified.name] = verified
    return list(found.values())


def stage_cases(gpus: int, *, tiny: bool) -> list[Case]:
    """Middle, first and last stage of TP over all GPUs x PP 4, with the layers that one stage of 70B has at TP 8.

    On fewer GPUs the stage is as many times shallower: a rank holds as much as at TP 8.
    """
    lengths = ["tiny-deep"] if tiny else ["70b-whole-8k", "70b-whole-4k"]
    layers = STAGES if tiny else LAYERS_A_GPU * gpus
    middle, first, last = STAGES // 2, 0, STAGES - 1

    def row(shape: str, stage: int, micro_batch: int = 1) -> Case:
        # As many micro-batches as fill the pipeline, and as many again.
        options = {"stage": str(stage), "layers": str(layers), "sequences": str(2 * STAGES * micro_batch)}
        return Case("stage", shape, tp=gpus, pp=STAGES, micro_batch=micro_batch, options=options)

    cases = [row(shape, stage) for stage in (middle, first, last) for shape in lengths]
    # At 4,096 a layer is so short that the host may be the limit: twice the tokens show it.
    return cases if tiny else [*cases, row("70b-whole-4k", middle, 2)]


def whole_cases(gpus: int, *, tiny: bool) -> list[Case]:
    """All of 70B, or as many of its layers as fit, at TP over all GPUs alone, with moments in bfloat16.

    With layers recomputed there is room to spare; recomputing what costs next to nothing is a quarter faster, by the
    planner, and fits on eight too.
    """
    if tiny:
        return []
    return [case for again in ("layer", "norm,swiglu") if (case := deepest_whole(gpus, again)) is not None]


def deepest_whole(gpus: int, recompute: str) -> Case | None:
    """The deepest model of 70B's width that the planner expects to fit; None where not one layer does."""
    options = {"recompute": recompute, "moments": "bfloat16", "sequences": "4"}
    case = Case("triweave", "70b-whole-8k", tp=gpus, options=options)
    for layers in range(shapes()[case.shape].spec.num_hidden_layers, 0, -1):
        deep = replace(case, options={**options, "layers": str(layers)})
        if used_bytes(deep) <= FILLED * cluster_of(deep).gpu.usable_bytes:
            return deep
    return None


def used_bytes(case: Case) -> int:
    """What the fullest rank of a case takes of its card, by the planner's closed form."""
    return max(stage.used_bytes for stage in stages_of(resolved_of(case)))
