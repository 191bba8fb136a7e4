"""The same layout with its layers as CUDA graphs: looked at where a step waits for its host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from triweave.planner.assumptions import GIB
from triweave.planner.familiar import familiar_layouts
from triweave.planner.request import Candidate, Request, legal_problems, price
from triweave.planner.search import Plan

_GAIN = 0.99
"""Graphs that make a step shorter by less are not offered: they take memory, and no host is known so well."""


def with_graphs(request: Request, candidate: Candidate) -> Candidate | None:
    """The same with CUDA graphs, fitting or not, where that is legal and shortens the step by more than a percent."""
    step, layout = candidate.time.step_s, candidate.layout
    if layout.cuda_graphs or candidate.time.breakdown.host <= (1 - _GAIN) * step:
        return None
    changed = replace(layout, cuda_graphs=True)
    if legal_problems(request, changed):
        return None
    found = price(request, changed)
    return found if found.time.step_s < _GAIN * step else None


def offer_graphs(request: Request, plan: Plan) -> Plan:
    """Answers of a search, which knows no graphs, with them where they are faster so and fit; fastest first.

    Other layouts that would be faster with graphs than these are not looked for.
    """
    found = []
    for one in plan.candidates:
        other = with_graphs(request, one)
        found.append(other if other is not None and other.fits else one)
    if not any(one.layout.cuda_graphs for one in found):
        return plan
    found.sort(key=lambda one: one.time.step_s)
    return replace(plan, candidates=tuple(found), familiar=tuple(familiar_layouts(request, found[0])))


def what_graphs_do(request: Request, candidate: Candidate) -> Iterator[str]:
    """What graphs bring a layout and what they cost: one that has them, or would be faster with them."""
    if candidate.layout.cuda_graphs:
        plain = price(request, replace(candidate.layout, cuda_graphs=False))
        yield (
            f"CUDA graphs take {_cost(plain, candidate)} GiB more, and"
            f" {_gain_ms(plain, candidate)} ms off a step of {1e3 * plain.time.step_s:.0f} ms that waits for its host"
        )
    elif (other := with_graphs(request, candidate)) is not None:
        verdict = "" if other.fits else f"; {other.peak_bytes / GIB:.1f} GiB do not fit"
        yield (
            f"CUDA graphs (cuda_graphs: true) would take {_cost(candidate, other)} GiB more and"
            f" {_gain_ms(candidate, other)} ms off a step that waits for its host{verdict}"
        )


def _cost(plain: Candidate, graphs: Candidate) -> str:
    more = max(one.used_bytes - other.used_bytes for one, other in zip(graphs.memory, plain.memory, strict=True))
    return f"{more / GIB:.1f}"


def _gain_ms(plain: Candidate, graphs: Candidate) -> str:
    return f"{1e3 * (plain.time.step_s - graphs.time.step_s):.0f}"
