"""Layers as graphs: the same bits as without them, on every schedule, and only where they may be used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graph_standin import Rerun, graphs
from parity import engine_for, in_pieces, local_batch, make_reference, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from tiny_models import tiny_llama
from torch import Tensor

from triweave.graphs.cuda import CudaPool
from triweave.graphs.rank import room_for
from triweave.graphs.replay import LayerReplay
from triweave.layers.documents import Documents
from triweave.layout import Layout
from triweave.schedule.build import build_schedule
from triweave.schedule.slots import most_in_flight
from triweave.training.engine import Engine
from triweave.training.not_finite import find_not_finite
from triweave.training.step import Batch, evaluate_step, train_step
from triweave.verify.compare import Tolerance, compare_with_reference
from triweave.verify.reference import Reference, Sample

SEQ, VOCAB, MICRO_BATCHES, STEPS = 16, 300, 4, 3
How = Callable[[], AbstractContextManager[None]]


def after_steps(engine: Engine, samples: list[Sample], layout: Layout) -> tuple[list[Any], list[Tensor]]:
    """Losses and gradient norms of some steps with measurements between, and what the last leaves."""
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    told: list[Any] = []
    for _ in range(STEPS):
        told += [train_step(engine, batch, 1e-2, 1.0), evaluate_step(engine, batch)]
    units = engine.sharding.units
    return told, [*(unit.gradient.clone() for unit in units), *(unit.master.clone() for unit in units)]


def both_ways(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], how: How, model: dict[str, Any]
) -> tuple[list[str], list[int]]:
    """What differs in a bit with graphs and without, and the replays of each slot."""
    with how():
        plain = engine_for(folder, layout, SEQ, MICRO_BATCHES, weights="random", **model)
        told, tensors = after_steps(plain, samples, layout)
    capture = Rerun(reuses=layout.schedule != "zero-bubble")
    with how(), graphs(capture):
        engine = engine_for(folder, layout, SEQ, MICRO_BATCHES, weights="random", **model)
        again, ours = after_steps(engine, samples, layout)
    differing = [] if again == told else [f"{told} and {again}"]
    differing += [f"tensor {n}" for n, pair in enumerate(zip(tensors, ours, strict=True)) if not torch.equal(*pair)]
    return differing, [pool.replays for pool in capture.pools]


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": (Layout(), {}),
    "two-sequences": (Layout(micro_batch=2), {"dtype": "bfloat16"}),
    "fp8": (Layout(tp=2), {"dtype": "bfloat16", "fp8": True}),
    "fp8-alone": (Layout(recompute=("swiglu",)), {"dtype": "bfloat16", "fp8": True}),
    "tp4-pieces": (Layout(tp=4), {"how": in_pieces}),
    "packed": (Layout(micro_batch=2), {"packed": True}),
    "packed-zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble"), {"packed": True}),
    "gpipe": (Layout(pp=2, schedule="gpipe"), {}),
    "pp4": (Layout(pp=4, recompute=("layer",)), {}),
    "interleaved": (Layout(tp=2, pp=2, vpp=2, schedule="interleaved", recompute=("norm", "attention")), {}),
    "zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble", recompute=("norm", "swiglu")), {}),
    "zero-bubble-fp8": (Layout(pp=2, schedule="zero-bubble"), {"dtype": "bfloat16", "fp8": True}),
    "optimizer": (Layout(pp=2, dp=2, shard="optimizer"), {"dtype": "bfloat16"}),
    "replicas": (Layout(tp=2, dp=2, shard="none"), {}),
}


@pytest.mark.parametrize(("layout", "rest"), CASES.values(), ids=CASES.keys())
def test_graphs_change_no_bit(ranks: Ranks, tmp_path: Path, layout: Layout, rest: dict[str, Any]) -> None:
    """Losses, gradients and weights of three steps are those without graphs; from the second on all is replayed."""
    rest = dict(rest)
    how, packed = rest.pop("how", nullcontext), rest.pop("packed", False)
    folder = tiny_config(tmp_path, hidden_size=64, intermediate_size=96)
    samples = make_samples(MICRO_BATCHES * layout.dp, layout.micro_batch, SEQ, VOCAB, packed=packed)
    passes = 3 if layout.schedule == "zero-bubble" else 2
    for differing, replays in ranks.run(layout.world_size, both_ways, folder, layout, samples, how, rest):
        assert not differing
        layers = 4 // layout.pp
        assert sum(replays) == (STEPS - 1) * MICRO_BATCHES * layers * passes


def verified(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], reference: Reference, wrong: bool
) -> tuple[str | None, int]:
    """The first difference from transformers, and the replays; if `wrong`, these give half of a gradient."""
    capture = Rerun()
    backward = LayerReplay.backward
    half = patch.object(LayerReplay, "backward", lambda self, grad_y: backward(self, grad_y) / 2)
    with graphs(capture), half if wrong else nullcontext():
        engine = engine_for(folder, layout, SEQ, MICRO_BATCHES)
        batch = local_batch(samples, layout, engine.groups.at.dp)
        verdict = compare_with_reference(engine, batch, reference, Tolerance())
    return verdict.first_difference, sum(pool.replays for pool in capture.pools)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_verify_compares_what_is_replayed(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """Gradients of replayed layers equal those of transformers, and a replay that is wrong is seen."""
    folder = tiny_llama(tmp_path / "model")
    samples = make_samples(MICRO_BATCHES, 1, SEQ, VOCAB, packed=True)
    reference = make_reference(folder, samples, tmp_path / "reference.safetensors")
    for wrong in (False, True):
        found = ranks.run(layout.world_size, verified, folder, layout, samples, reference, wrong)
        assert all(replays > 0 for _, replays in found)
        assert all((difference is not None) == wrong for difference, _ in found)


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "rank", "most"),
    [
        (Layout(), 0, {0: 1}),
        (Layout(pp=4), 0, {0: 4}),
        (Layout(pp=4), 3, {3: 1}),
        (Layout(pp=4, schedule="gpipe"), 1, {1: 8}),
        (Layout(pp=2, vpp=2, schedule="interleaved"), 0, {0: 4, 2: 2}),
        (Layout(pp=4, schedule="zero-bubble"), 0, {0: 4}),
        (Layout(pp=4, schedule="zero-bubble"), 3, {3: 4}),
    ],
)
def test_micro_batches_in_flight(layout: Layout, rank: int, most: dict[int, int]) -> None:
    """As many slots as the schedule has micro-batches in flight; a weight half that is put off is in flight."""
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, 8)
    assert most_in_flight(schedule.ranks[rank]) == most


def documents(*lengths: int) -> Documents:
    """One sequence of these documents."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(1)
    return Documents(ids, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))


def test_room_for_documents() -> None:
    """There is room for twice as many as any micro-batch has; none where one of them is not packed."""
    room = room_for([documents(4, 4), documents(2, 2, 4), documents(8)])
    assert room is not None
    assert (room.count, room.max_seqlen) == (6, 8)
    room.become(documents(3, 5))
    assert room.cu_seqlens.tolist() == [0, 3, 8, 8, 8, 8, 8]
    assert room_for([documents(8), None]) is None


def eager_again(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> list[int]:
    """Replays so far: after two steps, one that is looked into, one with more documents than there is room for."""
    capture = Rerun()
    with graphs(capture):
        engine = engine_for(folder, layout, SEQ, 2, weights="random")
    batch = local_batch(samples[:2], layout, 0)
    counts = []

    def step(batch: Batch) -> None:
        train_step(engine, batch, 1e-2, 1.0)
        counts.append(sum(pool.replays for pool in capture.pools))

    train_step(engine, batch, 1e-2, 1.0)
    find_not_finite(engine, batch)  # of one micro-batch at a time: its schedule is not to be captured
    step(batch)
    with engine.pipeline.graphs.paused():
        step(batch)
    many = replace(samples[0].inputs, documents=documents(*[1] * SEQ))
    step(replace(batch, inputs=[many, batch.inputs[1]]))
    find_not_finite(engine, batch)
    counts.append(sum(pool.replays for pool in capture.pools))
    return counts


def test_layers_run_by_themselves_where_graphs_do_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    """Paused, with more documents than there is room for, and where modules are looked into, nothing is replayed."""
    folder = tiny_config(tmp_path, hidden_size=64, intermediate_size=96)
    samples = make_samples(2, 1, SEQ, VOCAB, packed=True)
    layers, passes = 4, 2
    (counts,) = ranks.run(1, eager_again, folder, Layout(), samples)
    step = 2 * layers * passes
    assert counts == [step, step, step + step // 2, step + step // 2]


# --- CUDA's part ------------------------------------------------------------------------------------------------------


def cuda_pool(events: list[str], monkeypatch: pytest.MonkeyPatch) -> CudaPool:
    """A pool whose graphs tell what is done to them; one that was broken off cannot be ended, as CUDA has it."""

    class Graph:
        def capture_begin(self, **_: object) -> None:
            events.append("begin")

        def capture_end(self) -> None:
            events.append("end")
            if "work fails" in events:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self) -> None:
            events.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return CudaPool(None, None, lambda: events.append("settle"))  # type: ignore[arg-type]


def test_a_graph_begins_and_ends_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is under way when a capture begins, when it ends, and when it is replayed."""
    events: list[str] = []
    _, replay = cuda_pool(events, monkeypatch).capture(lambda: events.append("work"))
    replay()
    assert events == ["settle", "begin", "work", "settle", "end", "settle", "replay"]


def test_what_breaks_a_capture_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Want of memory while a graph is captured is told as such, not as what becomes of the capture."""
    events: list[str] = []

    def work() -> None:
        events.append("work fails")
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        cuda_pool(events, monkeypatch).capture(work)
    assert events == ["settle", "begin", "work fails", "end"]
