"""The data-parallel axis: what each level keeps, to the byte, and that its shards add up to the whole."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from allocations import Allocated, settled
from hypothesis import given
from hypothesis import strategies as st
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config

from triweave.groups import Group, Groups, alone
from triweave.layers.attention import AttentionKernel
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout, Shard, even_layers
from triweave.llama import Stage
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.parameters import LocalParameter, stage_parameters
from triweave.sharding import ALIGNMENT, Unit, make_units, place_parameters
from triweave.training.engine import Engine
from triweave.training.step import Batch, evaluate_step, train_step
from triweave.transport.across import Across
from triweave.transport.buffers import PlainMemory
from triweave.verify.reference import Sample

SEQ = 8
SHARDS: tuple[Shard, ...] = get_args(Shard)
CPU = torch.device("cpu")


# --- shards of a unit -------------------------------------------------------------------------------------------------


def unit_of(parameters: list[LocalParameter], dp: int, rank: int, shard: Shard) -> Unit:
    """A unit as data-parallel rank `rank` of `dp` holds it; nothing communicates."""
    group = Group(tuple(range(dp)), rank)
    groups = Groups(Layout(dp=dp), rank, CPU, group, alone(), alone(), group, alone(), alone(), alone())
    unit = Unit("layers.0", parameters, groups, shard, torch.float32, Across(alone()))
    unit.allocate(PlainMemory(group, CPU))
    return unit


@given(
    dp=st.integers(1, 7),
    shard=st.sampled_from(SHARDS),
    heads=st.integers(1, 3),
    hidden=st.integers(1, 40),
    bias=st.booleans(),
    tp=st.integers(1, 2),
)
def test_shards_tile_the_unit(dp: int, shard: Shard, heads: int, hidden: int, bias: bool, tp: int) -> None:
    """Shards are equal and end to end, and hold each element of each slice once, decayed ones first."""
    spec = ModelSpec(10, hidden, 2 * hidden, 1, 2 * heads, 2 * heads, 2, attention_bias=bias)
    parameters = list(stage_parameters(spec, Layout(tp=tp, layers=(1,)), 0, 0))
    parameters = [parameter for parameter in parameters if parameter.unit == "layers.0"]
    units = [unit_of(parameters, dp, rank, shard) for rank in range(dp)]
    whole = shard == "none" or dp == 1
    assert {unit.shard_stop - unit.shard_start for unit in units} == {units[0].numel // (1 if whole else dp)}
    assert len({(unit.numel, unit.num_decayed) for unit in units}) == 1

    held = torch.zeros(units[0].numel, dtype=torch.long)
    for unit in units[: 1 if whole else dp]:
        held[unit.shard_start : unit.shard_stop] += 1
        assert unit.gradient.numel() == unit.shard_stop - unit.shard_start
    assert held.eq(1).all()

    used = torch.zeros(units[0].numel, dtype=torch.long)
    for segment in units[0].segments():
        used[segment.start : segment.stop] += 1
        assert segment.stop - segment.start == torch.Size(segment.piece.local_shape).numel()
        assert (segment.stop <= units[0].num_decayed) == segment.parameter.decay
        parts = [unit.in_shard(segment.start, segment.stop) for unit in units[: 1 if whole else dp]]
        covered = [
            unit.shard_start + index
            for unit, part in zip(units, parts, strict=False)
            if part is not None
            for index in range(part.start, part.stop)
        ]
        assert covered == list(range(segment.start, segment.stop))
    assert used.max() == 1
    assert used.sum() == sum(parameter.numel for parameter in parameters)
    assert all(offset % ALIGNMENT == 0 for offset in units[0].offsets.values())


def test_wrong_plan_is_seen() -> None:
    """A module whose parameters are not those of the plan, by name or by shape, is refused."""
    spec = ModelSpec(10, 8, 16, 1, 2, 2, 4)
    layout = Layout(layers=(1,))
    planned = list(stage_parameters(spec, layout, 0, 0))
    wider = list(stage_parameters(ModelSpec(10, 8, 24, 1, 2, 2, 4), layout, 0, 0))
    groups = Groups(layout, 0, CPU, *[alone()] * 7)

    def place(parameters: list[LocalParameter]) -> None:
        with torch.device("meta"):
            stage = Stage(spec, layout, 0, TensorParallel(), AttentionKernel(), torch.empty(2))
        units = make_units(parameters, groups, "none", torch.float32)
        for unit in units:
            unit.allocate(PlainMemory(alone(), CPU))
        place_parameters(stage, units)

    place(planned)
    with pytest.raises(RuntimeError, match=r"lm_head.weight is not in the plan"):
        place(planned[:-1])
    with pytest.raises(RuntimeError, match=r"gate_up_proj.weight has shape \(32, 8\), its plan says \(48, 8\)"):
        place(wider)
    extra = LocalParameter("model.extra.weight", (2,), (), "extra", decay=False)
    with pytest.raises(RuntimeError, match=r"parameters without a module: model.extra.weight"):
        place([*planned, extra])


# --- what is kept -----------------------------------------------------------------------------------------------------


def measure_state(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], dtype: str
) -> tuple[int, dict[str, int], int]:
    """Bytes alive after a step, what the engine's tensors account for, and elements of the units' buffers."""
    with Allocated() as allocated:
        engine = engine_for(folder, layout, SEQ, len(samples) // layout.dp, weights="random", dtype=dtype)
        batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
        for _ in range(2):
            train_step(engine, batch, 1e-3, 1.0)
        evaluate_step(engine, batch)
    units, states = engine.sharding.units, list(engine.optimizer.states())
    gradients = [unit.gradient if unit.whole_gradient is None else unit.whole_gradient for unit in units]
    held = {
        "weights": [unit.weight for unit in units],
        "masters": [unit.master for unit in units],
        "gradients": gradients,
        "moments": [moments[kind] for _, moments in states for kind in ("exp_avg", "exp_avg_sq")],
        "step counters": [moments["step"] for _, moments in states],
        "rotary frequencies": [stage.frequencies for stage in engine.stages.values()],
    }
    seen: set[int] = set()
    bytes_of = dict.fromkeys(held, 0)
    for kind, tensors in held.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                bytes_of[kind] += storage.nbytes()
                seen.add(storage.data_ptr())
    return settled(allocated, sum(bytes_of.values())), bytes_of, sum(unit.numel for unit in units)


BYTES = {
    # weights, master weights, gradient sums, two moments: bytes an element of the unit, dp = 2
    ("bfloat16", "none"): (2.0, 4.0, 4.0, 8.0),
    ("bfloat16", "optimizer"): (2.0, 2.0, 4.0, 4.0),
    ("bfloat16", "gradients"): (2.0, 2.0, 2.0, 4.0),
    ("bfloat16", "full"): (0.0, 2.0, 2.0, 4.0),
    # In float32 the weights are their own master, unless they are freed between uses.
    ("float32", "none"): (4.0, 0.0, 4.0, 8.0),
    ("float32", "optimizer"): (4.0, 0.0, 4.0, 4.0),
    ("float32", "gradients"): (4.0, 0.0, 2.0, 4.0),
    ("float32", "full"): (0.0, 2.0, 2.0, 4.0),
}


@pytest.mark.parametrize(("dtype", "shard"), BYTES)
def test_levels_keep_what_zero_says(ranks: Ranks, tmp_path: Path, dtype: str, shard: Shard) -> None:
    """Between steps a rank holds 18, 6 + 12/dp, 2 + 16/dp or 16/dp bytes a parameter, and not a tensor beside.

    Rajbhandari et al. 1910.02054, with gradient sums in float32.
    """
    folder = tiny_config(tmp_path)
    layout = Layout(dp=2, shard=shard, layers=(4,))
    samples = make_samples(2, 1, SEQ, 300, packed=False)
    for alive, held, numel in ranks.run(2, measure_state, folder, layout, samples, dtype):
        weights, masters, gradients, moments = BYTES[dtype, shard]
        assert held["weights"] == weights * numel
        assert held["masters"] == masters * numel
        assert held["gradients"] == gradients * numel
        assert held["moments"] == moments * numel
        assert alive == sum(held.values())
    if dtype == "bfloat16":
        per_parameter = {"none": 18, "optimizer": 6 + 12 / 2, "gradients": 2 + 16 / 2, "full": 16 / 2}
        assert sum(BYTES[dtype, shard]) == per_parameter[shard]


# --- the norm of the gradient -----------------------------------------------------------------------------------------


def with_layers(layout: Layout) -> Layout:
    """The layout with four layers spread evenly."""
    return replace(layout, layers=even_layers(4, layout.num_stages))


def step_of(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> tuple[float, float]:
    """Loss and gradient norm of one training step."""
    engine = engine_for(folder, layout, SEQ, len(samples) // layout.dp, weights="random")
    return train_step(engine, local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp), 1e-3, 1.0)


ODD = {
    "tp8-more-than-kv-heads": (Layout(tp=8), {}),
    "tp8-nosp": (Layout(tp=8, sequence_parallel=False), {}),
    "tp4-dp2-two-kv-heads": (Layout(tp=4, dp=2), {"num_key_value_heads": 2}),
    "tp2-one-kv-head": (Layout(tp=2, dp=3, shard="gradients"), {"num_key_value_heads": 1}),
    "tied-pp2-dp2": (Layout(pp=2, dp=2), {"tie_word_embeddings": True}),
    "tied-pp2-dp3-none": (Layout(pp=2, dp=3, shard="none"), {"tie_word_embeddings": True}),
    "tied-tp2-pp2-full": (Layout(tp=2, pp=2, dp=2, shard="full"), {"tie_word_embeddings": True}),
    "dp3-none": (Layout(dp=3, shard="none"), {}),
    "cp2-none": (Layout(cp=2, shard="none"), {}),
    "cp2-dp2-tp2": (Layout(cp=2, dp=2, tp=2), {}),
    "dp3-full": (Layout(dp=3, shard="full"), {}),
    "dp6-full-groups-of-2": (Layout(dp=6, shard="full", shard_group=2), {}),
    "dp6-optimizer-groups-of-3": (Layout(dp=6, shard_group=3), {}),
    "tied-pp2-groups-of-1": (Layout(pp=2, dp=2, shard_group=1), {"tie_word_embeddings": True}),
    "padded-vocabulary": (Layout(tp=4, pp=2), {"vocab_size": 301}),
}


@pytest.mark.parametrize(("layout", "model"), ODD.values(), ids=ODD.keys())
def test_gradient_norm_is_the_dense_one(ranks: Ranks, tmp_path: Path, layout: Layout, model: dict[str, Any]) -> None:
    """Every element counts once in the norm: replicas, tied copies, padding and shards included; all ranks agree."""
    folder = tiny_config(tmp_path, **model)
    layout = with_layers(layout)
    samples = make_samples(6, 1, SEQ, 300, packed=False)
    norm, loss = dense_norm(folder, samples)
    answers = ranks.run(layout.world_size, step_of, folder, layout, samples)
    assert len(set(answers)) == 1
    assert answers[0] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))


def dense_norm(folder: Path, samples: list[Sample]) -> tuple[float, float]:
    """Norm of all parameters' gradients laid end to end, and the loss, in one process."""
    layout = with_layers(Layout())
    engine: Engine = engine_for(folder, layout, SEQ, len(samples), weights="random")
    batch: Batch = local_batch(samples, layout, 0)
    loss, _ = train_step(engine, batch, 0.0, 0.0)
    gradients = {
        segment.piece.name: unit.gradient[segment.start : segment.stop].double()
        for unit in engine.sharding.units
        for segment in unit.segments()
    }
    spec = spec_from_folder(folder)
    assert {name: g.numel() for name, g in gradients.items()} == {t.name: t.numel for t in spec.tensors()}
    return torch.cat(list(gradients.values())).norm().item(), loss


# --- what is let go ---------------------------------------------------------------------------------------------------


def outlive(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> list[bool]:
    """Whether units and stages are there still when nobody has their engine any more."""
    left = []
    gc.disable()
    for _ in range(2):
        gc.collect()  # what torch itself leaves behind when it is first used
        engine = engine_for(folder, layout, SEQ, len(samples) // layout.dp, weights="random")
        train_step(engine, local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp), 1e-3, 1.0)
        held = [*map(weakref.ref, engine.sharding.units), *map(weakref.ref, engine.stages.values())]
        del engine
        left = [reference() is not None for reference in held]
    return left


@pytest.mark.parametrize("shard", SHARDS)
def test_an_engine_goes_with_its_last_user(ranks: Ranks, tmp_path: Path, shard: Shard) -> None:
    """Without the cycle collector: the next engine of the process finds the memory free."""
    folder = tiny_config(tmp_path)
    layout = with_layers(Layout(dp=2, shard=shard))
    samples = make_samples(2, 1, SEQ, 300, packed=False)
    for left in ranks.run(2, outlive, folder, layout, samples):
        assert not any(left)


# --- a new step -------------------------------------------------------------------------------------------------------


def forget(rank: int, folder: Path, layout: Layout, samples: list[Sample], dtype: str) -> list[list[float]]:
    """Gradient norms of the same step on new sums, and on sums that hold no number."""
    norms = []
    for former in (0.0, float("nan")):
        engine = engine_for(folder, layout, SEQ, len(samples) // layout.dp, weights="random", dtype=dtype)
        for unit in engine.sharding.units:
            for parameter in unit.parameters:
                if unit.whole_gradient is not None:
                    unit.view(unit.whole_gradient, parameter).fill_(former)
        norms.append([train_step(engine, local_batch(samples, layout, engine.groups.at.dp), 1e-3, 1.0)[1]])
    return norms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2, schedule="zero-bubble"), Layout(dp=2, shard="none")])
def test_a_step_forgets_the_former(ranks: Ranks, tmp_path: Path, layout: Layout, dtype: str) -> None:
    """Nothing of the last step's sums is in the next one's, though nobody fills them with zeros."""
    folder = tiny_config(tmp_path, architectures=["Qwen2ForCausalLM"])
    layout = with_layers(layout)
    samples = make_samples(2 * layout.dp, 1, SEQ, 300, packed=False)
    for clean, former in ranks.run(layout.world_size, forget, folder, layout, samples, dtype):
        assert clean == former
