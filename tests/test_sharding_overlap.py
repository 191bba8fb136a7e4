"""What the data-parallel axis has in flight: started in time, waited for before use, never more than it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from late import late_collectives
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from triweave.layout import REDUCTIONS_BESIDE, UNITS_AHEAD, Layout, even_layers
from triweave.pipeline import _Execution
from triweave.schedule.actions import Action, Kind
from triweave.sharding import Unit
from triweave.sharding.overlap import Gradients
from triweave.sharding.unit import Reduction
from triweave.training.step import evaluate_step, train_step
from triweave.transport.across import Across
from triweave.verify.reference import Sample

SEQ = 8
Fault = Callable[[], AbstractContextManager[None]]


def with_layers(layout: Layout) -> Layout:
    """The layout with four layers spread evenly."""
    return replace(layout, layers=even_layers(4, layout.num_stages))


def samples_for(layout: Layout) -> list[Sample]:
    """Four micro-batches for each data-parallel rank."""
    return make_samples(4 * layout.dp, 1, SEQ, 300, packed=False)


LAYOUTS = {
    "none": Layout(dp=2, shard="none"),
    "optimizer": Layout(dp=3, shard="optimizer"),
    "gradients": Layout(dp=2, shard="gradients"),
    "full": Layout(dp=2, shard="full"),
    "full-recompute": Layout(dp=2, shard="full", recompute=("layer",)),
    "optimizer-zero-bubble": Layout(pp=2, dp=2, schedule="zero-bubble"),
    "none-interleaved": Layout(pp=2, vpp=2, dp=2, shard="none", schedule="interleaved"),
    "gradients-interleaved": Layout(pp=2, vpp=2, dp=2, shard="gradients", schedule="interleaved"),
    "full-zero-bubble": Layout(pp=2, dp=2, shard="full", schedule="zero-bubble"),
    "full-tp2": Layout(tp=2, dp=2, shard="full"),
    "optimizer-tp2": Layout(tp=2, dp=2),
    "optimizer-groups": Layout(dp=4, shard_group=2),
    "gradients-groups": Layout(dp=4, shard="gradients", shard_group=2),
    "full-groups": Layout(dp=4, shard="full", shard_group=2),
}


# --- waited for before use --------------------------------------------------------------------------------------------


def train_on_rank(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], late: bool, fault: Fault = nullcontext
) -> tuple[list[float], list[bytes]]:
    """Losses and norms of two steps, a validation and a third step, and the weights that they leave."""
    with fault(), late_collectives() if late else nullcontext():
        engine = engine_for(folder, layout, SEQ, 4, weights="random", dtype="bfloat16")
        batch = local_batch(samples, layout, engine.groups.at.dp)
        numbers = [*train_step(engine, batch, 1e-2, 1.0), *train_step(engine, batch, 1e-2, 1.0)]
        numbers += [evaluate_step(engine, batch), *train_step(engine, batch, 1e-2, 1.0)]
        weights = []
        for unit in engine.sharding.units:
            unit.gather()
            weights.append(bytes(unit.weight.detach().clone().view(torch.uint8).numpy()))
            unit.release()
    return numbers, weights


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_late_collectives_change_nothing(ranks: Ranks, tmp_path: Path, layout: Layout, tied: bool) -> None:
    """Bit for bit the same losses, norms and weights if each collective ends only when somebody waits for it."""
    folder = tiny_config(tmp_path, tie_word_embeddings=tied)
    layout = with_layers(layout)
    samples = samples_for(layout)
    soon, late = (ranks.run(layout.world_size, train_on_rank, folder, layout, samples, late) for late in (False, True))
    assert soon == late


@contextmanager
def reduction_not_waited_for() -> Iterator[None]:
    """The reduced gradients are used as soon as the reduction is started."""
    with patch.object(Reduction, "finish", lambda self: self.unit.add_reduced(self.whole)):
        yield


@contextmanager
def gather_not_waited_for() -> Iterator[None]:
    """Weights are used as soon as their gather is started."""
    with patch.object(Unit, "finish_gather", lambda self: None):
        yield


@contextmanager
def reduced_one_micro_batch_early() -> Iterator[None]:
    """Whole gradients go out before the step's last backward has added to them."""
    begin = Gradients.begin

    def begin_early(self: Gradients, backwards: Any) -> None:
        begin(self, backwards - type(backwards)(dict.fromkeys(backwards, 1)))

    with patch.object(Gradients, "begin", begin_early):
        yield


@contextmanager
def across_not_waited_for() -> Iterator[None]:
    """What shard groups sum across is used as soon as its parts are there."""
    start = Across.all_reduce

    def careless(self: Across, part: Tensor, after: Any = None) -> Any:
        work = start(self, part, after)
        return after if after is not None else work and type("Done", (), {"wait": lambda _: None})()

    with patch.object(Across, "all_reduce", careless):
        yield


@contextmanager
def across_after_every_micro_batch() -> Iterator[None]:
    """Shards are summed across again and again, with what was summed before in them."""
    with patch.object(Gradients, "_was_last", lambda self, unit: True):
        yield


@pytest.mark.parametrize(
    ("shard", "fault"),
    [
        ("optimizer", across_not_waited_for),
        ("gradients", across_not_waited_for),
        ("full", across_not_waited_for),
        ("gradients", across_after_every_micro_batch),
    ],
)
def test_a_careless_sum_across_is_seen(ranks: Ranks, tmp_path: Path, shard: Any, fault: Fault) -> None:
    """The comparison fails where the sum over shard groups is not waited for, or is done too often."""
    folder = tiny_config(tmp_path)
    layout = with_layers(Layout(dp=4, shard=shard, shard_group=2))
    samples = samples_for(layout)
    right = ranks.run(4, train_on_rank, folder, layout, samples, True)
    wrong = ranks.run(4, train_on_rank, folder, layout, samples, True, fault)
    assert right != wrong


@pytest.mark.parametrize(
    ("shard", "fault"),
    [
        ("none", reduction_not_waited_for),
        ("optimizer", reduction_not_waited_for),
        ("gradients", reduction_not_waited_for),
        ("optimizer", gather_not_waited_for),
        ("full", gather_not_waited_for),
        ("none", reduced_one_micro_batch_early),
        ("optimizer", reduced_one_micro_batch_early),
    ],
)
def test_missing_wait_is_seen(ranks: Ranks, tmp_path: Path, shard: Any, fault: Fault) -> None:
    """The comparison fails where a wait is left out, or gradients go out too early."""
    folder = tiny_config(tmp_path)
    layout = with_layers(Layout(dp=2, shard=shard))
    samples = samples_for(layout)
    right = ranks.run(2, train_on_rank, folder, layout, samples, True)
    wrong = ranks.run(2, train_on_rank, folder, layout, samples, True, fault)
    assert right != wrong


# --- started in time --------------------------------------------------------------------------------------------------


class Journal:
    """What one rank starts, waits for and computes in a step, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Write down every action, reduction and gather."""
        start, finish, do, gather = Unit.start_reduction, Reduction.finish, _Execution.do, Unit._start_gather

        def started(unit: Unit) -> Reduction:
            self.events.append(("reduce", unit.name))
            return start(unit)

        def finished(reduction: Reduction) -> None:
            self.events.append(("reduced", reduction.unit.name))
            finish(reduction)

        def gathered(unit: Unit) -> None:
            self.events.append(("gather", unit.name))
            gather(unit)

        def done(execution: _Execution, action: Action, received: Tensor | None) -> None:
            self.events.append(("begin", str(action)))
            do(execution, action, received)
            self.events.append(("end", str(action)))

        with (
            patch.object(Unit, "start_reduction", started),
            patch.object(Reduction, "finish", finished),
            patch.object(Unit, "_start_gather", gathered),
            patch.object(_Execution, "do", done),
        ):
            yield


def keep_journal(
    rank: int, folder: Path, layout: Layout, samples: list[Sample]
) -> tuple[list[tuple[str, str]], dict[int, tuple[list[str], str]]]:
    """The journal of a step; for each stage its units in the order of their backwards, and its last backward."""
    engine = engine_for(folder, layout, SEQ, 4, weights="random")
    batch = local_batch(samples, layout, engine.groups.at.dp)
    train_step(engine, batch, 1e-3, 1.0)
    journal = Journal()
    with journal.keeping():
        train_step(engine, batch, 1e-3, 1.0)
    ends = {}
    for action in engine.schedule.ranks[engine.groups.at.pp]:
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            units = list(dict.fromkeys(use.unit.name for use in reversed(engine.sharding._uses[action.stage])))
            ends[action.stage] = (units, str(action))
    return journal.events, ends


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        Layout(pp=2, dp=2),
        Layout(pp=2, dp=2, schedule="zero-bubble"),
        Layout(pp=2, vpp=2, dp=2, schedule="interleaved"),
    ],
    ids=["dp2", "1f1b", "zero-bubble", "interleaved"],
)
def test_whole_gradients_leave_during_the_last_backward(
    ranks: Ranks, tmp_path: Path, layout: Layout, shard: Any
) -> None:
    """Each unit is reduced once a step, from within its stage's last backward, and waited for when all is computed."""
    folder = tiny_config(tmp_path)
    layout = with_layers(replace(layout, shard=shard))
    answers = ranks.run(layout.world_size, keep_journal, folder, layout, samples_for(layout))
    for events, ends in answers:
        for units, action in ends.values():
            inside = events[events.index(("begin", action)) + 1 : events.index(("end", action))]
            assert inside == [("reduce", unit) for unit in units]
        reduced = [name for kind, name in events if kind == "reduce"]
        assert sorted(reduced) == sorted(name for units, _ in ends.values() for name in units)
        last = max(index for index, (kind, _) in enumerate(events) if kind == "end")
        assert [event for event in events[last:] if event[0] == "reduced"] == [("reduced", name) for name in reduced]
        assert ("reduced", reduced[0]) not in events[:last]
    same_on_all_replicas(layout, [events for events, _ in answers])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS.values() if layout.shard in ("gradients", "full")])
def test_all_replicas_start_the_same_in_the_same_order(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """What a rank gathers and reduces, and when, is what its data-parallel peers do: nobody waits for ever."""
    folder = tiny_config(tmp_path)
    layout = with_layers(layout)
    answers = ranks.run(layout.world_size, keep_journal, folder, layout, samples_for(layout))
    same_on_all_replicas(layout, [events for events, _ in answers])
    for events, ends in answers:
        reduced = [name for kind, name in events if kind == "reduce"]
        assert sorted(reduced) == sorted(4 * [name for units, _ in ends.values() for name in units])
        assert [name for kind, name in events if kind == "reduced"] == reduced


def same_on_all_replicas(layout: Layout, journals: list[list[tuple[str, str]]]) -> None:
    """Ranks of one data-parallel group have the same journal."""
    for group in layout.groups("dp"):
        assert len({tuple(journals[rank]) for rank in group}) == 1


def test_weights_are_gathered_ahead(ranks: Ranks, tmp_path: Path) -> None:
    """`full`: gathers start two units ahead, and what is needed again at once stays: the head, the first layer."""
    folder = tiny_config(tmp_path)
    layout = with_layers(Layout(dp=2, shard="full"))
    for events, _ in ranks.run(2, keep_journal, folder, layout, samples_for(layout)):
        gathers = [name for kind, name in events if kind == "gather"]
        layers = [f"layers.{number}" for number in range(4)]
        # The norm is freed while the head computes its forward; the embedding's backward reads no weight.
        one = [*layers[1:], "norm", "head", "norm", *reversed(layers)]
        assert gathers == ["embed", "layers.0", *one, *3 * ["embed", *one]]
        assert events[: events.index(("begin", "F0.0"))] == [("gather", "embed"), ("gather", "layers.0")]
        # The next micro-batch's embedding is on its way while this one's first layer computes its backward.
        before = [event for event in events[: events.index(("begin", "F0.1"))] if event[0] == "gather"]
        assert before[-1] == ("gather", "embed")


# --- no more than may be ----------------------------------------------------------------------------------------------


def watch_units(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> tuple[set[int], set[int], int]:
    """How many units' whole weights, and whole gradients, ever stand at once; how many units there are."""
    weights: list[int] = []
    made: list[StorageWeakRef] = []
    gradients: list[int] = []
    zeros, prefetch, release = Unit._zeros, Unit.prefetch, Unit.release
    engine = engine_for(folder, layout, SEQ, 4, weights="random")
    batch = local_batch(samples, layout, engine.groups.at.dp)

    def look() -> None:
        weights.append(sum(unit.weight.untyped_storage().size() > 0 for unit in engine.sharding.units))
        gradients.append(sum(not reference.expired() for reference in made))

    def watched_zeros(numel: int, device: torch.device) -> Tensor:
        result = zeros(numel, device)
        made.append(StorageWeakRef(result.untyped_storage()))
        look()
        return result

    def watched(original: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def call(unit: Unit) -> None:
            original(unit)
            look()

        return call

    with (
        patch.object(Unit, "_zeros", staticmethod(watched_zeros)),
        patch.object(Unit, "prefetch", watched(prefetch)),
        patch.object(Unit, "release", watched(release)),
    ):
        look()
        train_step(engine, batch, 1e-3, 1.0)
        evaluate_step(engine, batch)
        look()
    assert weights[-1] == weights[0]
    assert gradients[-1] == 0
    return set(weights), set(gradients), len(engine.sharding.units)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, shard="gradients"),
        Layout(dp=2, shard="full"),
        Layout(dp=2, shard="full", recompute=("layer",)),
        Layout(pp=2, dp=2, shard="full"),
        Layout(pp=2, dp=2, shard="full", schedule="zero-bubble"),
    ],
    ids=["gradients", "full", "full-recompute", "full-pp2", "full-zero-bubble"],
)
def test_units_at_a_time(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """Beside the unit that computes, two units' weights (`full`) and two units' whole gradients, and never more."""
    folder = tiny_config(tmp_path)
    layout = with_layers(layout)
    for weights, gradients, num_units in ranks.run(layout.world_size, watch_units, folder, layout, samples_for(layout)):
        assert weights == (set(range(1 + UNITS_AHEAD + 1)) if layout.shard == "full" else {num_units})
        assert gradients == set(range(1 + REDUCTIONS_BESIDE + 1))
