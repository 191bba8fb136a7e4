"""The search: the same answers as pricing every layout, all of them legal and fitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triweave.cluster import CATALOGUE, Cluster
from triweave.errors import InputError
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.ask import make_request
from triweave.planner.assumptions import OURS
from triweave.planner.explain import why
from triweave.planner.request import (
    MAX_OOM_PROBABILITY,
    Request,
    fits_in_memory,
    least_compute_of,
    least_time_of,
    may_fit,
    most_that_fits,
    most_used_bytes,
    price,
    time_of,
)
from triweave.planner.search import Plan, search
from triweave.planner.space import RECOMPUTE, REPEATS_MORE, grid_of, layouts
from triweave.rules import layout_problems

GIB = 2**30


def is_legal(request: Request, layout: Layout) -> bool:
    return not layout_problems(
        request.spec,
        layout,
        world_size=request.cluster.world_size,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        gpus_per_node=request.cluster.gpus_per_node,
    )


def priced_one_by_one(request: Request) -> list[tuple[float, Layout]]:
    """Every legal layout with the recompute that makes it fit soonest, fastest first."""
    found = []
    for layout in layouts(request):
        ways = [replace(layout, recompute=recompute) for recompute in RECOMPUTE]
        fitting = [one for one in (price(request, way) for way in ways if is_legal(request, way)) if one.fits]
        if fitting:
            best = min(fitting, key=lambda one: one.time.step_s)
            found.append((best.time.step_s, best.layout))
    return sorted(found, key=lambda item: item[0])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Small models on up to eight GPUs whose memory is so small that some layouts fit and others do not."""
    layers = draw(st.integers(1, 12))
    heads = draw(st.sampled_from([4, 6, 8]))
    spec = ModelSpec(
        vocab_size=draw(st.sampled_from([1024, 32000])),
        hidden_size=256 * heads,
        intermediate_size=draw(st.sampled_from([3072, 12288])),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([2, heads])),
        head_dim=128,
        tie_word_embeddings=draw(st.booleans()),
        max_position_embeddings=8192,
    )
    nodes, per_node, gpu = draw(
        st.sampled_from([(1, 2, "h100-80gb"), (2, 2, "a100-80gb"), (1, 6, "h200-141gb"), (2, 4, "h100-80gb")])
    )
    cluster = Cluster(nodes, per_node, CATALOGUE[gpu])
    seq_len, global_batch = draw(st.sampled_from([1024, 4096])), draw(st.sampled_from([8, 12, 24]))
    assumptions = replace(OURS, moments=draw(st.sampled_from(["float32", "bfloat16"])))
    request = Request("small", str(cluster), spec, cluster, seq_len, global_batch, assumptions=assumptions)
    legal = [layout for layout in layouts(request) if is_legal(request, layout)]
    if not legal:
        return request
    # As much as one of the layouts needs, with something or nothing recomputed.
    few = draw(st.lists(st.sampled_from(legal), min_size=1, max_size=4))
    recompute = draw(st.sampled_from(RECOMPUTE))
    needed = min(price(request, replace(layout, recompute=recompute)).peak_bytes for layout in few)
    capacity = int(needed * draw(st.sampled_from([1.0, 1.05, 1.1])))
    gpu = replace(cluster.gpu, usable_bytes=capacity)
    return replace(request, cluster=replace(cluster, gpu=gpu))


@settings(max_examples=18)
@given(requests(), st.integers(1, 6))
def test_finds_what_pricing_everything_finds(request: Request, top: int) -> None:
    """The answers are the fastest of the whole space, in order, each the cheapest recomputation that fits."""
    expected = priced_one_by_one(request)
    try:
        plan = search(request, top)
    except InputError:
        assert not any(is_legal(request, layout) for layout in layouts(request))
        return
    assert [one.time.step_s for one in plan.candidates] == pytest.approx([step for step, _ in expected[:top]], rel=1e-9)
    alone = [replace(one.layout, recompute=()) for one in plan.candidates]
    assert len(set(alone)) == len(alone)
    assert plan.num_considered == len(list(layouts(request)))
    answered = {grid_of(one.layout) for one in plan.candidates}
    assert answered | {grid_of(one.layout) for one in plan.rejected} == set(map(grid_of, layouts(request)))
    for reject in plan.rejected:
        grid = grid_of(reject.layout)
        assert grid not in answered
        own = [(step, at) for step, at in expected if grid_of(at) == grid]
        plain = [step for step, at in own if at.schedule == "1f1b" and not at.uses_shard_groups]
        if reject.reason.startswith("fits"):
            # Told with the time of its fastest plain layout.
            assert reject.step_s == pytest.approx(plain[0], rel=1e-9)
            assert f"takes {plain[0]:.2f} s" in reject.reason
        elif reject.reason.startswith("slower"):
            assert own
            assert own[0][0] >= (expected[:top][-1][0]) * (1 - 1e-9)
        else:
            assert not plain


@settings(max_examples=30)
@given(requests(), st.data())
def test_the_bound_is_below_the_step(request: Request, data: st.DataObject) -> None:
    """No step is shorter than the bound by which layouts are visited, and repeating more makes no bound smaller."""
    legal = [layout for layout in layouts(request) if is_legal(request, layout)]
    if not legal:
        return
    layout = data.draw(st.sampled_from(legal))
    root = replace(layout, schedule="1f1b", vpp=1, layers=even_layers(request.spec.num_hidden_layers, layout.pp))
    assert least_compute_of(request, root, even=True) <= least_compute_of(request, layout, even=False) * (1 + 1e-9)
    assert least_compute_of(request, layout, even=False) <= least_time_of(request, layout) * (1 + 1e-9)
    assert_repeating_more_takes_longer(request, layout)


def assert_repeating_more_takes_longer(request: Request, layout: Layout) -> None:
    for recompute, more in REPEATS_MORE.items():
        one = replace(layout, recompute=recompute)
        assert least_time_of(request, one) <= time_of(request, one).step_s
        for other in more:
            assert least_time_of(request, one) <= least_time_of(request, replace(layout, recompute=other))


def test_every_way_to_recompute_is_reached_once() -> None:
    """What repeats more leads from nothing recomputed to each choice of the space, on one way."""
    reached = [other for more in REPEATS_MORE.values() for other in more]
    assert sorted(REPEATS_MORE) == sorted(RECOMPUTE)
    assert sorted(reached) == sorted(RECOMPUTE[1:])


@settings(max_examples=40)
@given(requests(), st.data())
def test_layouts_are_legal_and_fit_when_they_say_so(request: Request, data: st.DataObject) -> None:
    """Whatever is legal takes all GPUs, and fits exactly when its fullest card uses no more than may be used."""
    layout = data.draw(st.sampled_from(list(layouts(request))))
    assert layout.world_size == layout.tp * layout.pp * layout.cp * layout.dp == request.cluster.world_size
    assert layout.replicas % layout.shard_ranks == 0
    if not is_legal(request, layout):
        return
    layout = replace(layout, recompute=data.draw(st.sampled_from(RECOMPUTE)))
    assert is_legal(request, layout)
    candidate = price(request, layout)
    assert candidate.fits == (candidate.peak_bytes <= most_that_fits(request)) == fits_in_memory(request, layout)
    assert candidate.peak_bytes == most_used_bytes(request, layout)
    # What tells most layouts that do not fit is no more than the peak, and least with whole layers recomputed.
    assert may_fit(request, layout) or not candidate.fits
    assert may_fit(request, replace(layout, recompute=("layer",))) or not may_fit(request, layout)
    assert not candidate.fits or candidate.peak_bytes <= request.capacity_bytes


@pytest.fixture(scope="module")
def question() -> Request:
    return make_request("meta-llama/Llama-3-70B", "4x8xh100-80gb", 4096, 128)


@pytest.fixture(scope="module")
def answer(question: Request) -> Plan:
    return search(question, 10)


def test_repeating_more_takes_longer(question: Request) -> None:
    """For a large model as well, on layouts from all over the space."""
    for layout in list(layouts(question))[::61]:
        if is_legal(question, layout):
            assert_repeating_more_takes_longer(question, layout)


def test_answers_are_legal_and_fit(question: Request, answer: Plan) -> None:
    """Ten answers, each another layout that no rule refuses, each below the probability of running out of memory."""
    assert len({replace(one.layout, recompute=()) for one in answer.candidates}) == 10
    for one in answer.candidates:
        assert is_legal(question, one.layout)
        assert one.fits
        assert one.oom_probability <= MAX_OOM_PROBABILITY
        assert one.peak_bytes <= question.capacity_bytes
        assert price(question, one.layout) == one
    steps = [one.time.step_s for one in answer.candidates]
    assert steps == sorted(steps)


def test_more_answers_begin_with_the_fewer(question: Request, answer: Plan) -> None:
    """Asking for three answers gives the first three of ten."""
    assert search(question, 3).candidates == answer.candidates[:3]


def test_beats_the_layouts_of_the_books(question: Request, answer: Plan) -> None:
    """Neither Megatron's published grid for 70B nor recomputed FSDP is faster than what the search finds."""

    def step(layout: Layout) -> float:
        return price(question, layout).time.step_s

    best = answer.candidates[0].time.step_s
    assert best < step(Layout(tp=8, pp=4, layers=(20,) * 4))
    assert best < step(Layout(dp=32, shard="full", recompute=("layer",), layers=(80,)))


def test_rejections_hold_both_numbers() -> None:
    """One node is too small for 70B with its optimizer: every grid says how much it needs and how much there is."""
    plan = search(make_request("meta-llama/Llama-3-70B", "1x8xh100-80gb", 4096, 64), 3)
    assert plan.candidates == ()
    assert len(plan.rejected) == 20
    for reject in plan.rejected:
        needed, capacity = _gib(reject.reason)
        assert needed > 79.1 == capacity


def test_too_many_pipeline_ranks_for_the_batch() -> None:
    """A grid with fewer micro-batches than pipeline ranks is refused by that rule, with both numbers."""
    plan = search(make_request("meta-llama/Llama-3-70B", "4x8xh100-80gb", 4096, 16), 1)
    reasons = {grid_of(one.layout): one.reason for one in plan.rejected}
    assert "pp = 32 pipeline ranks need at least 32" in reasons[1, 32, 1, 1]
    assert "16 micro-batches" in reasons[1, 32, 1, 1]


def test_a_batch_that_no_layout_divides() -> None:
    """It is an input error with the nearest batch that one divides."""
    # An odd sequence leaves nothing to sequence and context parallel, so that dp or pp must take all GPUs.
    request = make_request("meta-llama/Llama-3-70B", "4x8xh100-80gb", 4095, 3)
    with pytest.raises(InputError, match="no layout of 32 GPUs divides it") as error:
        search(request)
    (problem,) = error.value.problems
    nearest = int(problem.nearest or 0)
    assert nearest == 32
    assert search(replace(request, global_batch=nearest)).num_considered > 0


def test_tensor_parallel_stays_in_its_node_unless_asked(question: Request) -> None:
    """Groups of 16 are considered only with `tp_across_nodes`."""
    assert max(layout.tp for layout in layouts(question)) == 8
    assert max(layout.tp for layout in layouts(replace(question, tp_across_nodes=True))) == 32


def test_tells_how_far_it_is(question: Request) -> None:
    """What is opened and what is found only grow, and all answers are found before the end."""
    told: list[tuple[int, int]] = []
    search(question, 2, lambda opened, found: told.append((opened, found)))
    assert told == sorted(told)
    assert [found for _, found in told] == sorted(found for _, found in told)
    assert {found for _, found in told} >= {0, 1, 2}


def _gib(reason: str) -> Sequence[float]:
    words = reason.replace("GiB", "").split()
    return [float(word) for word in words if word[0].isdigit()]


def test_context_parallel_pays_where_sequences_are_long() -> None:
    """70B at 131,072 tokens on 16 nodes is fastest with context parallel, and says what data parallel would need."""
    request = make_request("meta-llama/Llama-3.1-70B", "16x8xh100-80gb", 131072, 64)
    best = search(request, 1).candidates[0]
    assert best.layout.cp > 1
    (line,) = [line for line in why(request, best) if line.startswith(f"context parallel {best.layout.cp}")]
    assert "do not fit" in line or "not legal" in line


def test_context_parallel_does_not_pay_where_they_are_short(answer: Plan) -> None:
    """At 4,096 tokens none of the best three for 70B on 32 GPUs splits sequences."""
    assert all(one.layout.cp == 1 for one in answer.candidates[:3])


def test_finds_the_grid_of_a_published_recipe() -> None:
    """At 8,192 tokens the answer for 70B is the grid of NVIDIA's recipe (dgxc-benchmarking)."""
    best = search(make_request("meta-llama/Llama-3-70B", "4x8xh100-80gb", 8192, 128), 1).candidates[0].layout
    assert (best.tp, best.pp, best.vpp, best.cp) == (4, 4, 5, 2)


def test_shard_groups_pay_across_many_nodes() -> None:
    """Sharing inside a node is faster than among all of 256 GPUs where computing hides less, and takes more memory."""
    request = make_request("llama-3.1-8b", "32x8xh100-80gb", 512, 2048)
    whole = Layout(dp=256, shard="full", recompute=("layer",), layers=(32,))
    inside = replace(whole, shard_group=8)
    assert time_of(request, inside).step_s < time_of(request, whole).step_s
    assert most_used_bytes(request, inside) > most_used_bytes(request, whole)
