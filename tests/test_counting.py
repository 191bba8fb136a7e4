"""Every collective and every message of a step, counted: those that are asked for, and none beside.

What is counted is what reaches torch's process groups, whatever Python function it came through.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triweave.groups import Group, Groups
from triweave.layers.attention import AttentionKernel
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import UNITS_AHEAD, Layout, Recompute, even_layers
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.parameters import has_tied_copy, holds_embedding, holds_head, kv_replicas
from triweave.schedule.actions import Kind
from triweave.schedule.build import build_schedule
from triweave.training.step import evaluate_step, train_step
from triweave.transport.messages import Messages
from triweave.verify.reference import Sample

SEQ = 8
SPEC = ModelSpec(300, 64, 96, 1, 8, 4, 8)
KINDS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
Counts = Counter[tuple[str, str]]
"""How often, by kind and by group."""


class Recorder(TorchDispatchMode):
    """Every call of a process group: its kind, its ranks, and the bytes of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            group = next(value for value in args if isinstance(value, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            nbytes = max(value.nbytes for value in tree_leaves(args) if isinstance(value, Tensor))
            self.calls.append((KINDS.get(func.name(), func.name()), ranks, nbytes))
        return func(*args, **(kwargs or {}))

    def counts(self, groups: Groups) -> Counts:
        """The calls by kind and by the name of the group; a group that no axis has keeps its ranks as its name."""
        names = {group.ranks: "pipeline" for group in groups.channels.values()}
        named: Counts = Counter()
        for kind, ranks, _ in self.calls:
            for name in ("tied", "kv", "across", "shards", "cp", "tp", "world"):
                if kind not in ("send", "receive") and getattr(groups, name).ranks == ranks:
                    names[ranks] = name
            named[kind, names.get(ranks, str(ranks))] += 1
        return named


# --- one layer --------------------------------------------------------------------------------------------------------


def count_layer(
    rank: int,
    size: int,
    sequence_parallel: bool,
    recompute: tuple[Recompute, ...],
    splits: bool,
    messages: bool = False,
    keep_gathered: bool = False,
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Kinds of calls of one layer, forward, backward and later.

    Each moves one activation of the whole sequence; a message, one rank's slice of it.
    """
    group = Group(tuple(range(size)), rank, dist.group.WORLD)
    tp = TensorParallel(group, sequence_parallel, keep_gathered, chosen=Messages(group) if messages else None)
    layer = DecoderLayer(SPEC, tp, AttentionKernel(), recompute)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    rotation = make_rotation(inverse_frequencies(SPEC), torch.arange(SEQ).unsqueeze(1), torch.float32)
    x = torch.ones(SEQ // size if sequence_parallel else SEQ, 1, SPEC.hidden_size, requires_grad=True)
    with Recorder() as forward:
        y = layer(x, rotation, None)
    with Recorder() as backward, tp.weight_gradients.deferring() if splits else nullcontext([]) as work:
        y.sum().backward()
    with Recorder() as later, torch.no_grad():
        for one in work:
            one()
    halves = (forward.calls, backward.calls, later.calls)
    assert {nbytes for calls in halves for _, _, nbytes in calls} == {
        4 * SEQ * SPEC.hidden_size // (size if messages else 1)
    }
    counted = [Counter(kind for kind, _, _ in calls) for calls in halves]
    return counted[0], counted[1], counted[2]


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        (False, (), {"all-reduce": 2}, {"all-reduce": 2}),
        (True, (), {"all-gather": 2, "reduce-scatter": 2}, {"all-gather": 4, "reduce-scatter": 2}),
        # Norm outputs and products are computed again from what a rank has.
        (True, ("norm", "swiglu"), {"all-gather": 2, "reduce-scatter": 2}, {"all-gather": 4, "reduce-scatter": 2}),
        # A block that runs again communicates as in forward, up to the last sum, which backward does not read.
        (False, ("layer",), {"all-reduce": 2}, {"all-reduce": 3}),
        (True, ("layer",), {"all-gather": 2, "reduce-scatter": 2}, {"all-gather": 6, "reduce-scatter": 3}),
    ],
)
def test_layer_communicates_as_often_as_it_must(
    ranks: Ranks, sequence_parallel: bool, recompute: tuple[str, ...], forward: dict[str, int], backward: dict[str, int]
) -> None:
    """A layer does two all-reduces each way, or the same bytes as gathers and scatters plus two to gather inputs again.

    Shoeybi et al. 1909.08053 figure 4; Korthikanti et al. 2205.05198 section 4.2.2.
    """
    counted = ranks.run(2, count_layer, 2, sequence_parallel, recompute, False)
    assert counted == [(Counter(forward), Counter(backward), Counter())] * 2


@pytest.mark.parametrize("splits", [False, True])
def test_kept_inputs_are_not_gathered_again(ranks: Ranks, splits: bool) -> None:
    """A layer that keeps its gathered inputs does as many gathers backward as forward, whether or not it is split."""
    once = Counter({"all-gather": 2, "reduce-scatter": 2})
    counted = ranks.run(2, count_layer, 2, True, (), splits, False, True)
    assert counted == [(once, once, Counter())] * 2


def test_split_backward_gathers_late(ranks: Ranks) -> None:
    """Where a schedule splits backward, inputs are gathered in the weight half and not held until then."""
    forward = backward = Counter({"all-gather": 2, "reduce-scatter": 2})
    assert ranks.run(2, count_layer, 2, True, (), True) == [(forward, backward, Counter({"all-gather": 2}))] * 2


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("recompute", "again"), [((), 0), (("layer",), 3)])
def test_overlapped_layer_moves_the_same_bytes(
    ranks: Ranks, size: int, recompute: tuple[Recompute, ...], again: int
) -> None:
    """Done in pieces, each gather and scatter of a layer is one message to and from every peer, and none beside."""

    def messages(times: int) -> Counter[str]:
        return Counter({"send": times * (size - 1), "receive": times * (size - 1)})

    at_once = ranks.run(size, count_layer, size, True, recompute, False, True)
    assert at_once == [(messages(4), messages(6 + again), Counter())] * size
    if not recompute:
        split = ranks.run(size, count_layer, size, True, recompute, True, True)
        assert split == [(messages(4), messages(4), messages(2))] * size


# --- a whole step -----------------------------------------------------------------------------------------------------


def count_steps(
    rank: int, folder: Path, layout: Layout, samples: list[Sample]
) -> tuple[tuple[Counts, Counts, Counts], set[int], tuple[int, int]]:
    """Calls of two training steps with a validation step between them; replicas of the slices in this rank's shard.

    And the bytes that the last step sums across shard groups, with those that this rank owns of the float32 sums.
    """
    engine = engine_for(folder, layout, SEQ, len(samples) // layout.dp, weights="random")
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    counted = []
    for step in (train_step, evaluate_step, train_step):
        with Recorder() as recorder:
            step(engine, batch, *((1e-3, 1.0) if step is train_step else ()))
        counted.append(recorder.counts(engine.groups))
    partial = {
        segment.piece.replicas
        for unit in engine.sharding.units
        for segment in unit.segments()
        if segment.piece.partial and unit.in_shard(segment.start, segment.stop) is not None
    }
    across = sum(nbytes for _, ranks, nbytes in recorder.calls if ranks == engine.groups.across.ranks)
    owned = 4 * sum(unit.shard_stop - unit.shard_start for unit in engine.sharding.units)
    return (counted[0], counted[1], counted[2]), partial, (across, owned)


def asked_for(
    spec: ModelSpec, layout: Layout, rank: int, micro_batches: int, partial: set[int], *, training: bool
) -> Counts:
    """What one rank's step must communicate. `partial`: replicas of slices in its shard whose gradients are parts."""
    counts: Counts = Counter()
    at = layout.coordinates(rank)
    stages = layout.stages_of(at.pp)
    num_layers = sum(len(layout.layers_of(stage)) for stage in stages)
    embeds = any(holds_embedding(layout, stage) for stage in stages)
    heads = any(holds_head(layout, stage) for stage in stages)
    backward = 1 if training else 0

    if layout.uses_sequence_parallel:
        # A layer as above; the lookup is summed into slices; the head gathers its input, twice if it goes back.
        gathers = num_layers * (2 + 4 * backward) + embeds * backward + heads * (1 + backward)
        scatters = num_layers * (2 + 2 * backward) + embeds + heads * backward
        counts["all-gather", "tp"] = micro_batches * gathers
        counts["reduce-scatter", "tp"] = micro_batches * scatters
        # The gradients of all norms in one call, by the data-parallel ranks whose shards they lie in.
        counts["all-reduce", "tp"] = backward if layout.tp in partial else 0
    elif layout.tp > 1:
        counts["all-reduce", "tp"] = micro_batches * (num_layers * (2 + 2 * backward) + embeds + heads * backward)
    if layout.tp > 1:
        counts["all-reduce", "tp"] += micro_batches * heads * 2  # the loss: maximum, then sums
        if kv_replicas(spec, layout.tp) in partial:
            counts["all-reduce", "kv"] = backward

    if layout.cp > 1:
        # Keys and values of each half of the sequence, again in backward, and then their gradients.
        counts["all-gather", "cp"] = micro_batches * num_layers * (2 + 2 * backward)
        counts["reduce-scatter", "cp"] = micro_batches * num_layers * 2 * backward

    for stage in range(layout.num_stages - 1):
        here, there = layout.stage_owner(stage), layout.stage_owner(stage + 1)
        if here != there and at.pp in (here, there):
            counts["send", "pipeline"] += micro_batches * (backward if at.pp == there else 1)
            counts["receive", "pipeline"] += micro_batches * (1 if at.pp == there else backward)

    copied = has_tied_copy(spec, layout)
    units = num_layers + embeds + heads * (1 if spec.tie_word_embeddings and not copied else 2)
    if layout.replicas > 1:
        # How often a unit's weights are gathered, and its gradients reduced.
        gathers, reductions = {
            "none": (0, 0),
            "optimizer": (backward, backward),
            "gradients": (backward, micro_batches * backward),
            "full": (0, micro_batches * backward),
        }[layout.shard]
        counts["all-gather", "shards"] = units * gathers
        if layout.shard == "full":
            counts["all-gather", "shards"] = gathers_of_full(spec, layout, at.pp, micro_batches, training=training)
        counts["reduce-scatter", "shards"] = units * reductions
        counts["all-reduce", "shards"] = units * backward if layout.shard == "none" else 0
        # Once a step, however many micro-batches there are.
        counts["all-reduce", "across"] = units * backward if layout.uses_shard_groups else 0
    if copied and (embeds or heads):
        counts["all-reduce", "tied"] = backward
    counts["all-reduce", "world"] = 1  # loss and squared gradient norm together
    return +counts


def gathers_of_full(spec: ModelSpec, layout: Layout, pp_rank: int, micro_batches: int, *, training: bool) -> int:
    """Gathers of units at `full`: one before every use but those that come so soon that the weights have stayed.

    A lookup's backward and a weight half need no weights.
    """
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, micro_batches)
    uses: list[object] = []
    for action in schedule.ranks[pp_rank]:
        first, last = holds_embedding(layout, action.stage), holds_head(layout, action.stage)
        units = [*layout.layers_of(action.stage), *(("norm", "head") if last else ())]
        if action.kind is Kind.FORWARD:
            uses += ["embedding", *units] if first else units
        elif training and action.kind is not Kind.BACKWARD_WEIGHT:
            uses += reversed(units)
    return sum(unit not in uses[max(0, at - UNITS_AHEAD) : at] for at, unit in enumerate(uses))


STEPS = {
    "tp2-pp2-dp2": (Layout(tp=2, pp=2, dp=2), {}),
    "none": (Layout(tp=2, pp=2, dp=2, sequence_parallel=False, shard="none"), {}),
    "gradients-interleaved": (Layout(tp=2, pp=2, vpp=2, dp=2, shard="gradients", schedule="interleaved"), {}),
    "full-zero-bubble": (Layout(tp=2, pp=2, dp=2, shard="full", schedule="zero-bubble"), {}),
    "optimizer-groups": (Layout(dp=4, shard_group=2), {}),
    "gradients-groups": (Layout(tp=2, dp=4, shard="gradients", shard_group=2), {}),
    "full-groups-zero-bubble": (
        Layout(pp=2, dp=4, shard="full", shard_group=2, schedule="zero-bubble"),
        {"tie_word_embeddings": True},
    ),
    "tied": (Layout(tp=2, pp=2, dp=2), {"tie_word_embeddings": True}),
    "tied-gpipe": (Layout(tp=2, pp=2, schedule="gpipe"), {"tie_word_embeddings": True}),
    "tied-one-stage": (Layout(tp=2, dp=2), {"tie_word_embeddings": True}),
    "tp4-two-kv-heads": (Layout(tp=4, dp=2), {"num_key_value_heads": 2}),
    "cp2-tp2-dp2": (Layout(cp=2, tp=2, dp=2), {}),
    "cp2-pp2-dp2-full-zero-bubble": (Layout(cp=2, pp=2, dp=2, shard="full", schedule="zero-bubble"), {}),
}


@pytest.mark.parametrize(("layout", "model"), STEPS.values(), ids=STEPS.keys())
def test_step_communicates_what_is_asked_for(
    ranks: Ranks, tmp_path: Path, layout: Layout, model: dict[str, Any]
) -> None:
    """Every rank's step, trained or only evaluated, makes exactly the calls that its place on the grid asks for."""
    folder = tiny_config(tmp_path, **model)
    spec = spec_from_folder(folder)
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    micro_batches = 4
    samples = make_samples(micro_batches * layout.dp, 1, SEQ, 300, packed=False)
    counted = ranks.run(layout.world_size, count_steps, folder, layout, samples)
    for rank, ((first, evaluated, second), partial, (across, owned)) in enumerate(counted):
        training = asked_for(spec, layout, rank, micro_batches, partial, training=True)
        assert first == training, rank
        assert evaluated == asked_for(spec, layout, rank, micro_batches, partial, training=False), rank
        assert second == training, rank
        assert across == (owned if layout.uses_shard_groups else 0), rank
    held = set.union(*(partial for _, partial, _ in counted))
    assert (layout.tp in held) == layout.uses_sequence_parallel
    assert (kv_replicas(spec, layout.tp) in held) == (kv_replicas(spec, layout.tp) > 1)


def one_too_many(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> tuple[Counts, Counts]:
    """Counts of a training step as it is, and of one that also has a barrier."""
    engine = engine_for(folder, layout, SEQ, len(samples), weights="random")
    batch = local_batch(samples, layout, 0)
    counted = []
    for barrier in (False, True):
        with Recorder() as recorder:
            train_step(engine, batch, 1e-3, 1.0)
            if barrier:
                dist.barrier()
        counted.append(recorder.counts(engine.groups))
    return counted[0], counted[1]


def test_call_too_many_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    """A collective that nobody asked for, of whatever kind, makes the counts differ."""
    samples = make_samples(1, 1, SEQ, 300, packed=False)
    for as_it_is, more in ranks.run(2, one_too_many, tiny_config(tmp_path), Layout(tp=2), samples):
        assert more - as_it_is == Counter({("c10d::barrier", "world"): 1})
