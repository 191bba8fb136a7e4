"""Offload: the same bits as without it, the planner's bytes on the device and on the host, and faults that are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from allocations import Allocated, settled
from late_copies import LateEvent, late_copies
from parity import engine_for, in_pieces, local_batch, make_samples, one_forward
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor

from triweave import offload
from triweave.config.schema import DataConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.memory import rank_memory
from triweave.layout import Coordinates, Layout, Offload, Recompute, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import OURS
from triweave.planner.memory import predict_memory
from triweave.planner.memory_stage import stage_tapes
from triweave.planner.sizes import sizes_of
from triweave.training.engine import Engine
from triweave.training.step import evaluate_step, train_step
from triweave.verify.reference import Sample

SEQ, VOCAB, MICRO_BATCHES = 16, 300, 4
How = Callable[[], AbstractContextManager[None]]
State = tuple[list[tuple[float, float]], list[Tensor]]


def after_steps(engine: Engine, samples: list[Sample], layout: Layout) -> State:
    """Losses and gradient norms of two steps with a measurement between, and what the second leaves."""
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    told = [train_step(engine, batch, 1e-2, 1.0)]
    evaluate_step(engine, batch)
    told.append(train_step(engine, batch, 1e-2, 1.0))
    units = engine.sharding.units
    return told, [*(unit.gradient.clone() for unit in units), *(unit.master.clone() for unit in units)]


def both_ways(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], how: How, model: dict[str, Any]
) -> tuple[list[str], int]:
    """What differs in a bit with offload and without, and the bytes that waited on the host."""
    with how():
        plain = engine_for(folder, replace(layout, offload=()), SEQ, MICRO_BATCHES, weights="random", **model)
        told, tensors = after_steps(plain, samples, layout)
    assert plain.offloader.pool.num_bytes == 0
    with how(), late_copies():
        engine = engine_for(folder, layout, SEQ, MICRO_BATCHES, weights="random", **model)
        again, ours = after_steps(engine, samples, layout)
    differing = [] if again == told else [f"{told} and {again}"]
    differing += [f"tensor {n}" for n, pair in enumerate(zip(tensors, ours, strict=True)) if not torch.equal(*pair)]
    return differing, engine.offloader.pool.num_bytes


BOTH: tuple[Offload, ...] = ("attention", "mlp")
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": (Layout(offload=BOTH), {}),
    "one-layer": (Layout(offload=("layer",)), {}),
    "packed": (Layout(offload=("layer",), micro_batch=2), {"packed": True}),
    "bfloat16": (Layout(offload=BOTH), {"dtype": "bfloat16"}),
    "fp8": (Layout(tp=2, offload=BOTH), {"dtype": "bfloat16", "fp8": True}),
    "fp8-alone": (Layout(recompute=("swiglu",), offload=("layer",)), {"dtype": "bfloat16", "fp8": True}),
    "tp2": (Layout(tp=2, offload=BOTH), {}),
    "tp2-nosp": (Layout(tp=2, sequence_parallel=False, offload=("layer",)), {}),
    "tp4-pieces": (Layout(tp=4, offload=BOTH), {"how": in_pieces}),
    "gathered": (Layout(tp=2, keep_gathered=True, offload=BOTH), {}),
    "cp2": (Layout(cp=2, offload=BOTH), {}),
    "tp2-cp2-packed": (Layout(tp=2, cp=2, recompute=("norm",), offload=("layer",)), {"packed": True}),
    "gpipe": (Layout(pp=2, schedule="gpipe", offload=BOTH), {}),
    "pp2": (Layout(pp=2, offload=("layer",)), {}),
    "pp4": (Layout(pp=4, offload=BOTH), {}),
    "interleaved": (Layout(pp=2, vpp=2, schedule="interleaved", offload=BOTH), {}),
    "interleaved-layer": (Layout(pp=2, vpp=2, schedule="interleaved", offload=("layer",)), {}),
    "zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble", offload=BOTH), {}),
    "zero-bubble-again": (Layout(pp=2, schedule="zero-bubble", recompute=("norm", "mlp"), offload=("layer",)), {}),
    "full": (Layout(dp=2, shard="full", offload=BOTH), {}),
    "gradients": (Layout(pp=2, dp=2, shard="gradients", recompute=("norm", "swiglu"), offload=("mlp",)), {}),
    "full-zero-bubble": (
        Layout(tp=2, pp=2, dp=2, shard="full", schedule="zero-bubble", recompute=("attention",), offload=("mlp",)),
        {},
    ),
    "norm-swiglu": (Layout(recompute=("norm", "swiglu"), offload=BOTH), {}),
    "norm-swiglu-layer": (Layout(tp=2, recompute=("norm", "swiglu"), offload=("layer",)), {}),
    "mlp": (Layout(recompute=("mlp", "norm"), offload=("attention",)), {}),
    "attention": (Layout(recompute=("attention", "swiglu"), offload=("layer",)), {}),
    "layer": (Layout(pp=2, recompute=("layer",), offload=("layer",)), {}),
}


@pytest.mark.parametrize(("layout", "rest"), CASES.values(), ids=CASES.keys())
def test_offload_changes_no_bit(ranks: Ranks, tmp_path: Path, layout: Layout, rest: dict[str, Any]) -> None:
    """Losses, gradients and weights of two steps are those without offload, though every copy comes as late as it may.

    A measurement of held-out data in between keeps nothing, and leaves nothing behind.
    """
    rest = dict(rest)
    packed, how = rest.pop("packed", False), rest.pop("how", nullcontext)
    folder = tiny_config(tmp_path, hidden_size=64, intermediate_size=96)
    samples = make_samples(MICRO_BATCHES * layout.dp, layout.micro_batch, SEQ, VOCAB, packed=packed)
    for differing, on_host in ranks.run(layout.world_size, both_ways, folder, layout, samples, how, rest):
        assert not differing
        assert on_host > 0


# --- faults -----------------------------------------------------------------------------------------------------------


@contextmanager
def buffers_reused_early() -> Iterator[None]:
    """A buffer is given to the next layer while its own tensor still waits in it."""
    take = offload.HostPool.take

    def early(self: offload.HostPool, num_bytes: int) -> offload.HostBuffer:
        buffer = take(self, num_bytes)
        self._there[num_bytes].append(buffer)
        return buffer

    with patch.object(offload.HostPool, "take", early):
        yield


@contextmanager
def reused_before_the_copy_back() -> Iterator[None]:
    """A buffer's next copy does not wait for the one that empties it."""

    def put(self: offload.HostPool, buffer: offload.HostBuffer) -> None:
        buffer.free = None
        self._there[buffer.memory.numel()].append(buffer)

    with patch.object(offload.HostPool, "put", put):
        yield


@contextmanager
def nobody_waits() -> Iterator[None]:
    """The computing stream does not wait for copies."""
    with patch.object(offload, "_wait_for", lambda event: None):
        yield


def fault_on_rank(rank: int, folder: Path, layout: Layout, samples: list[Sample], fault: How) -> list[str]:
    """What differs with a fault planted, or how it ended."""
    try:
        return both_ways(rank, folder, layout, samples, fault, {})[0]
    except AssertionError as error:
        return [str(error)]


@pytest.mark.parametrize("fault", [buffers_reused_early, reused_before_the_copy_back, nobody_waits])
def test_a_fault_in_the_order_is_seen(ranks: Ranks, tmp_path: Path, fault: How) -> None:
    """Buffers reused a layer early, or before they were read, and copies that are not waited for change the result."""
    folder = tiny_config(tmp_path)
    # Two layers a stage: the first one's buffers are those that the next backward has just begun to read.
    layout = Layout(pp=2, offload=BOTH)
    samples = make_samples(MICRO_BATCHES, 1, SEQ, VOCAB, packed=False)
    assert any(ranks.run(2, fault_on_rank, folder, layout, samples, fault))


def test_late_copies_are_late() -> None:
    """What a copy back will fill is not a number until it is waited for."""
    with late_copies():
        copies: Any = offload.Copies(torch.device("cpu"))
    x, host = torch.ones(4), torch.zeros(16, dtype=torch.uint8)
    copies.start(offload._bytes_of(x), host)
    mark = copies.mark()
    assert isinstance(mark, LateEvent)
    assert x.isnan().all()
    mark.wait()
    assert torch.equal(x, torch.zeros(4))


# --- memory -----------------------------------------------------------------------------------------------------------


def kept_on_rank(rank: int, folder: Path, layout: Layout, samples: list[Sample], dtype: str) -> list[tuple[int, int]]:
    """Bytes on the device after one forward of each stage of this rank: as they are, and as the planner has them.

    Of the last layer everything is still there, for no pass has followed.
    """
    engine = engine_for(folder, layout, SEQ, MICRO_BATCHES, dtype=dtype, weights="random")
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    found = []
    for stage in engine.stages:
        engine.offloader._end_pass(None)
        with Allocated() as memory:
            edge = one_forward(engine, stage, batch)
            sizes = sizes_of(engine.spec, layout, SEQ, dtype, OURS)
            tapes = stage_tapes(engine.spec, layout, stage, sizes, dtype, OURS)
            host = sum(buffer.nbytes for buffer in engine.offloader.pool._made)
            planned = tapes.kept_bytes + tapes.layer.offloaded_bytes
            assert host >= tapes.layer.offloaded_bytes * tapes.num_layers
            found.append((settled(memory, planned), planned))
        del edge
    return found


KEPT = {
    "attention": Layout(tp=2, offload=("attention",)),
    "mlp": Layout(tp=2, offload=("mlp",)),
    "both": Layout(micro_batch=2, offload=BOTH),
    "layer": Layout(tp=2, pp=2, offload=("layer",)),
    "interleaved": Layout(pp=2, vpp=2, schedule="interleaved", offload=BOTH),
    "gathered": Layout(tp=2, keep_gathered=True, offload=BOTH),
    "norm-swiglu": Layout(tp=2, recompute=("norm", "swiglu"), offload=("mlp",)),
    "norm-swiglu-layer": Layout(recompute=("norm", "swiglu"), offload=("layer",)),
    "mlp-attention": Layout(tp=2, recompute=("mlp",), offload=("attention",)),
    "attention-layer": Layout(tp=2, recompute=("attention",), offload=("layer",)),
    "layer-layer": Layout(tp=2, recompute=("layer",), offload=("layer",)),
    "full": Layout(dp=2, shard="full", offload=BOTH),
}


@pytest.mark.parametrize("layout", KEPT.values(), ids=KEPT.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stays_on_the_device(ranks: Ranks, tmp_path: Path, layout: Layout, dtype: str) -> None:
    """After a stage's forward exactly the planner's tensors are there, and those of the layer that ran last."""
    folder = tiny_config(tmp_path)
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    samples = make_samples(MICRO_BATCHES * layout.dp, layout.micro_batch, SEQ, VOCAB, packed=False)
    for stages in ranks.run(layout.world_size, kept_on_rank, folder, layout, samples, dtype):
        for alive, planned in stages:
            assert alive == planned


def pinned_on_rank(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> tuple[int, int, int]:
    """Whole pages that were made after one step and after two, and what one layer moves of a micro-batch."""
    engine = engine_for(folder, layout, SEQ, len(samples), weights="random")
    batch = local_batch(samples, layout, 0)
    made = []
    for _ in range(2):
        train_step(engine, batch, 1e-3, 1.0)
        made.append(sum(-(-buffer.numel() // 4096) * 4096 for buffer in engine.offloader.pool._made))
    sizes = sizes_of(engine.spec, layout, SEQ, "float32", OURS)
    tapes = stage_tapes(engine.spec, layout, rank, sizes, "float32", OURS)
    return made[0], made[1], sum(-(-size // 4096) * 4096 for size in tapes.layer.offloaded.values())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(offload=BOTH),
        Layout(pp=2, offload=("mlp",)),
        Layout(pp=2, schedule="gpipe", offload=("layer",)),
        Layout(pp=2, vpp=2, schedule="interleaved", offload=BOTH),
        Layout(pp=2, schedule="zero-bubble", offload=BOTH),
    ],
    ids=["one", "pp2", "gpipe", "interleaved", "zero-bubble"],
)
def test_host_memory_is_known_beforehand(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """The pool holds what the planner says, or one layer less, and grows no more after the first step."""
    folder = tiny_config(tmp_path)
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    samples = make_samples(8, 1, SEQ, VOCAB, packed=False)
    spec = engine_for(folder, Layout(layers=(4,)), SEQ, 1, weights="random").spec
    planned = predict_memory(spec, layout, seq_len=SEQ, num_micro_batches=8, dtype="float32")
    for stage, (first, second, layer) in zip(
        planned, ranks.run(layout.world_size, pinned_on_rank, folder, layout, samples), strict=True
    ):
        assert first == second
        assert stage.host_bytes - layer <= first <= stage.host_bytes


SPEC = ModelSpec(1024, 512, 1408, 8, 8, 4, 64, max_position_embeddings=4096)


def off_by(layout: Layout, stage: int, micro_batches: int = 8) -> tuple[int, int, int]:
    """The check's peak of a stage's rank, how much the planner's is above it, and one activation; bytes."""
    layout = replace(layout, layers=even_layers(SPEC.num_hidden_layers, layout.num_stages))
    run = Run(
        model=ModelConfig(path="none"),
        data=DataConfig(train=("none",), seq_len=1024, packing=False),
        train=TrainConfig(global_batch=micro_batches, steps=1),
    )
    found = rank_memory(
        ResolvedRun(run, SPEC, layout, None, micro_batches, layout.world_size),
        layout.rank(Coordinates(0, 0, 0, stage)),
    )
    planned = predict_memory(
        SPEC,
        layout,
        seq_len=1024,
        num_micro_batches=micro_batches,
        assumptions=replace(OURS, gpus_per_node=layout.world_size),
    )[stage]
    real = found.peak_bytes + found.peer_bytes
    return real, planned.peak_allocated_bytes - real, 2 * 1024 * SPEC.hidden_size


RECOMPUTED: list[tuple[tuple[Recompute, ...], tuple[Offload, ...]]] = [
    ((), ("mlp",)),
    ((), ("attention", "mlp")),
    ((), ("layer",)),
    (("norm", "swiglu"), ("mlp",)),
    (("mlp",), ("attention",)),
    (("layer",), ("layer",)),
]


@pytest.mark.parametrize(("recompute", "moved"), RECOMPUTED, ids=str)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=4)], ids=str)
def test_peak_of_the_real_step(layout: Layout, recompute: tuple[Recompute, ...], moved: tuple[Offload, ...]) -> None:
    """The check follows what leaves and comes back through a whole step, and the planner's peak is its peak.

    To the bytes of a few numbers a token; across pipeline ranks to the message that may still be on its way.
    """
    real, above, activation = off_by(replace(layout, recompute=recompute, offload=moved), 0)
    without, above_without, _ = off_by(replace(layout, recompute=recompute), 0)
    assert abs(above - above_without) < 0.05 * activation
    assert real < without
