"""CUDA graphs as `plan` offers them: where a step waits for its host, where they are legal, and where they fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triweave.layout import Layout, even_layers
from triweave.planner.ask import make_request
from triweave.planner.explain import why
from triweave.planner.graphs import offer_graphs, with_graphs
from triweave.planner.request import Candidate, Request, legal_problems, price
from triweave.planner.search import Plan, search

SMALL = "meta-llama/Llama-3.2-1B"


def asked(seq: int, *, cluster: str = "1x1xh200-141gb", batch: int = 1) -> Request:
    """By the profile of one H200, whose host is slow enough to be waited for."""
    return make_request(SMALL, cluster, seq, batch, profile="h200")


def one_gpu(request: Request, **changes: object) -> Candidate:
    layout = Layout(layers=even_layers(request.spec.num_hidden_layers, 1))
    return price(request, replace(layout, **changes))  # type: ignore[arg-type]


def on_card(request: Request, usable: int) -> Request:
    """The same with so many bytes of a card for programs."""
    return replace(request, cluster=replace(request.cluster, gpu=replace(request.cluster.gpu, usable_bytes=usable)))


def test_a_step_that_waits_is_offered_graphs() -> None:
    """Sequences so short that the host is waited for: graphs are the answer, and what they cost and bring is said."""
    request = asked(512)
    (eager,) = search(request, 1).candidates
    (found,) = offer_graphs(request, search(request, 1)).candidates
    assert found == price(request, replace(eager.layout, cuda_graphs=True))
    assert found.fits
    assert found.time.step_s < 0.99 * eager.time.step_s
    assert not legal_problems(request, found.layout)
    (line,) = (line for line in why(request, found) if "CUDA graphs" in line)
    more = max(a.used_bytes - b.used_bytes for a, b in zip(found.memory, eager.memory, strict=True)) / 2**30
    assert f"{more:.1f} GiB more" in line
    assert f"{1e3 * (eager.time.step_s - found.time.step_s):.0f} ms off" in line


def test_a_step_that_does_not_wait_is_left_alone() -> None:
    """Long sequences keep the GPU busy: nothing is offered, nothing is said."""
    request = asked(8192, batch=8)
    plan = search(request, 2)
    assert offer_graphs(request, plan) is plan
    assert not any("CUDA graphs" in line for one in plan.candidates for line in why(request, one))


def test_what_does_not_fit_is_said_and_not_offered() -> None:
    """On the smallest card that has room for the layout it stays the answer, and says what graphs would take."""
    request = asked(512)
    plain = one_gpu(request)
    low, high = 0, request.capacity_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if price(on_card(request, middle), plain.layout).fits else (middle, high)
    tight = on_card(request, high)
    plan = Plan((price(tight, plain.layout),), (), 1)
    assert plan.candidates[0].fits
    assert offer_graphs(tight, plan) is plan
    (line,) = (line for line in why(tight, plan.candidates[0]) if "CUDA graphs" in line)
    assert "do not fit" in line


@pytest.mark.parametrize("shard", ["gradients", "full"])
def test_what_is_not_legal_is_not_offered(shard: str) -> None:
    """Sums of gradients that come and go have no graphs."""
    request = asked(512, cluster="1x2xh200-141gb", batch=8)
    plain = one_gpu(request, dp=2, shard=shard)
    assert plain.time.breakdown.host > 0
    assert with_graphs(request, plain) is None


def test_answers_stay_in_order_and_in_number() -> None:
    """Graphs change no count of answers, and the fastest comes first still."""
    request = asked(256, cluster="1x4xh200-141gb", batch=4)
    plan = search(request, 5)
    found = offer_graphs(request, plan)
    assert any(one.layout.cuda_graphs for one in found.candidates)
    assert len(found.candidates) == len(plan.candidates)
    times = [one.time.step_s for one in found.candidates]
    assert times == sorted(times)
    assert all(one.fits for one in found.candidates)
    without = {replace(one.layout, cuda_graphs=False) for one in found.candidates}
    assert without == {one.layout for one in plan.candidates}
