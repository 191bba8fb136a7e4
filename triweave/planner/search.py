"""Finds the fastest layouts that fit: the whole legal space, best first, and no more of it than needs pricing.

A queue holds the space as a tree: grids with a micro-batch; their schedules and layer maps; the ways to shard each; the
ways to recompute it. Every node stands at a step time that nothing below it undercuts, and is opened when it comes to
the head. A layout that fits goes back by its exact step time; the first ones that come up again are the answers. A
grid that cannot hold even its weights, gradients and optimizer states is never opened, nor is an order of it
whose most sparing layouts do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from triweave.errors import InputError, Problem, nearest_number
from triweave.layout import Layout, Shard, even_layers
from triweave.planner.assumptions import GIB
from triweave.planner.familiar import Familiar, familiar_layouts
from triweave.planner.request import (
    Candidate,
    Request,
    fits_in_memory,
    has_room_for,
    least_bytes,
    least_compute_of,
    least_time_of,
    legal_problems,
    may_fit,
    most_used_bytes,
    price,
    time_of,
)
from triweave.planner.space import RECOMPUTE, REPEATS_MORE, SHARDS, Grid, Order, grid_of, grids, orders, sharings
from triweave.planner.words import as_typed

Progress = Callable[[int, int], None]
"""Told how many parts of the space have been opened, and how many answers are found."""

_Path = tuple[int, ...]
"""Where a node hangs in the tree: numbers of the grid, of its order, of its way to shard and of what it recomputes."""
_ORDER, _SHARING = 2, 3
"""Lengths of paths."""

_STATE_BYTES = {"none": (18, 0), "optimizer": (6, 12), "gradients": (2, 16), "full": (0, 16)}
"""Of one parameter: what every rank holds, and what the ranks of a shard group share."""


class _Node(NamedTuple):
    """A part of the space in the queue. Ties go to what comes first in the space."""

    seconds: float
    """The step if it is `priced`, else what it cannot undercut."""
    path: _Path
    layout: Layout
    """All of it is settled that the path names."""
    priced: bool = False
    """Whether the layout is known to fit."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that is no answer, and why."""

    layout: Layout
    reason: str
    step_s: float | None = None
    """Of a layout that fits and is slower than the answers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the search found."""

    candidates: tuple[Candidate, ...]
    """Fastest first; all fit."""
    rejected: tuple[Rejected, ...]
    """One for each grid that has no answer; those that are only slower first."""
    num_considered: int
    """Layouts of the space, not counting ways to recompute."""
    familiar: tuple[Familiar, ...] = ()
    """What everybody tries first."""


def search(request: Request, top: int = 5, progress: Progress | None = None) -> Plan:
    """The `top` fastest layouts that fit.

    Args:
        request: the question.
        top: answers wanted; each is another grid, micro-batch, schedule, layer map or way to shard.
        progress: told now and then how far it is.

    Raises:
        InputError: no layout of the cluster is legal for the model and the batch, or `top` is not positive.
    """
    if top < 1:
        raise InputError(Problem("top", top, "must be at least 1", "1"))
    roots = list(grids(request))
    walk = _Walk(request, top)
    if not walk.start(roots):
        raise InputError(_no_legal_layout(request, roots))
    walk.run(progress or (lambda opened, found: None))
    considered = sum(len(walk.orders(root.pp)) * len(list(sharings(root.replicas))) for root in roots)
    rejected = walk.rejected(dict.fromkeys(map(grid_of, roots)))
    familiar = familiar_layouts(request, walk.answers[0] if walk.answers else None)
    return Plan(tuple(walk.answers), tuple(rejected), considered, tuple(familiar))


class _Walk:
    """The queue, and what has come out of it."""

    def __init__(self, request: Request, top: int) -> None:
        self.request = request
        self.top = top
        self.answers: list[Candidate] = []
        self.others: dict[Grid, Rejected] = {}
        """Grids that no rule or card allows, and fastest plain layouts of others."""
        self._queue: list[_Node] = []
        self._answered: set[_Path] = set()
        self._orders: dict[int, tuple[Order, ...]] = {}
        """By pipeline ranks."""
        self._first: dict[tuple[Grid, int, Shard], int] = {}
        """Bytes of the first rank, by grid, micro-batch and shard level."""
        self._fits: dict[Layout, bool] = {}
        """Of layouts that share among all their ranks."""

    def start(self, roots: Sequence[Layout]) -> bool:
        """Queue every grid that may hold the model; whether any is legal."""
        legal = False
        for number, layout in enumerate(roots):
            problem = _problem(self.request, layout)
            legal |= problem is None
            if reason := problem or _states_too_large(self.request, layout):
                self.others.setdefault(grid_of(layout), Rejected(layout, reason))
            else:
                seconds = least_compute_of(self.request, layout, even=True)
                self._queue.append(_Node(seconds, (number,), layout))
        heapify(self._queue)
        return legal

    def run(self, progress: Progress) -> None:
        """Open the queue until all answers are found, and the fastest plain layout of each grid."""
        steps = 0
        while self._queue:
            node = heappop(self._queue)
            if node.path[:_SHARING] in self._answered or not self._matters(node.layout):
                continue
            progress(steps, len(self.answers))
            steps += 1
            if node.priced:
                self._take(node)
            elif len(node.path) < _ORDER:
                self._open_grid(node)
            elif len(node.path) < _SHARING:
                self._open_order(node)
            else:
                self._price(node)

    def rejected(self, grids: Iterable[Grid]) -> list[Rejected]:
        """Why each grid without an answer has none: the slower ones first, fastest first."""
        answered = {grid_of(candidate.layout) for candidate in self.answers}
        reasons = [self.others.get(grid) or self._unanswered(grid) for grid in grids if grid not in answered]
        return sorted(reasons, key=lambda one: (one.step_s is None, one.step_s or 0.0))

    def _unanswered(self, grid: Grid) -> Rejected:
        """Why a grid has neither an answer nor a fastest plain layout: it is too large, or no better than the last."""
        layers = even_layers(self.request.spec.num_hidden_layers, grid.pp)
        root = Layout(**grid._asdict(), layers=layers)
        used, shard = min((self._first_bytes(root, shard), shard) for shard in _shards(root))
        nearest = replace(root, shard=shard)
        if has_room_for(self.request, used):
            every = [
                replace(root, layers=order.layers, shard=shard, recompute=recompute)
                for recompute in reversed(RECOMPUTE)
                for order in self.orders(grid.pp)
                if order.schedule == "1f1b"
                for shard in _shards(root)
            ]
            if fitting := next((one for one in every if self._has_room(one)), None):
                slowest = self.answers[-1].time.step_s
                return Rejected(fitting, f"slower: its layouts take {slowest:.2f} s a step or more")
            used, nearest = min(((most_used_bytes(self.request, one), one) for one in every), key=itemgetter(0))
        return Rejected(nearest, f"needs at least {used / GIB:.1f} GiB of {self.request.capacity_bytes / GIB:.1f}")

    def orders(self, pp: int) -> tuple[Order, ...]:
        """The orders of `pp` pipeline ranks."""
        if pp not in self._orders:
            self._orders[pp] = tuple(orders(self.request, pp))
        return self._orders[pp]

    def _open_grid(self, node: _Node) -> None:
        if not self._roomy_shards(node.layout):
            return
        for number, order in enumerate(self.orders(node.layout.pp)):
            layout = replace(node.layout, **order._asdict())
            if not self._matters(layout):
                continue
            # The rest of the rules are about the grid, which is legal.
            if order.schedule != "interleaved" or _problem(self.request, layout) is None:
                seconds = least_compute_of(self.request, layout, even=False)
                heappush(self._queue, _Node(seconds, (*node.path, number), layout))

    def _open_order(self, node: _Node) -> None:
        replicas, capacity = node.layout.replicas, self.request.capacity_bytes
        roomy = self._roomy_shards(node.layout)
        for number, (shard, group) in enumerate(sharings(replicas)):
            if shard not in roomy or _state_bytes(self.request, node.layout, shard, group or replicas) > capacity:
                continue
            layout = replace(node.layout, shard=shard, shard_group=group)
            if self._matters(layout):
                heappush(self._queue, _Node(least_time_of(self.request, layout), (*node.path, number), layout))

    def _price(self, node: _Node) -> None:
        layout = node.layout
        if not layout.recompute and not may_fit(self.request, replace(layout, recompute=("layer",))):
            return
        if self._has_room(layout):
            heappush(self._queue, node._replace(seconds=time_of(self.request, layout).step_s, priced=True))
        else:
            # None of these makes the step shorter, so they wait until this one is refused.
            for recompute in REPEATS_MORE[layout.recompute]:
                sparing = replace(layout, recompute=recompute)
                path = (*node.path[:_SHARING], RECOMPUTE.index(recompute))
                heappush(self._queue, _Node(least_time_of(self.request, sparing), path, sparing))

    def _take(self, node: _Node) -> None:
        self._answered.add(node.path[:_SHARING])
        if self._stands_for_its_grid(node.layout):
            reason = f"fits, and takes {node.seconds:.2f} s a step in 1F1B order"
            self.others[grid_of(node.layout)] = Rejected(node.layout, reason, node.seconds)
        if len(self.answers) < self.top:
            self.answers.append(price(self.request, node.layout))

    def _matters(self, layout: Layout) -> bool:
        """Whether a layout, or what is found below it, is still asked for; what no longer is never will be again."""
        return len(self.answers) < self.top or self._stands_for_its_grid(layout)

    def _stands_for_its_grid(self, layout: Layout) -> bool:
        """Whether it may be told as the fastest plain layout of its grid."""
        return _is_plain(layout) and grid_of(layout) not in self.others

    def _roomy_shards(self, layout: Layout) -> list[Shard]:
        """Shard levels at which the first rank may have room in 1F1B order with the layers spread evenly.

        No other order holds fewer layers or fewer micro-batches on it.
        """
        return [shard for shard in _shards(layout) if has_room_for(self.request, self._first_bytes(layout, shard))]

    def _first_bytes(self, layout: Layout, shard: Shard) -> int:
        """What the first rank uses at least, shared among all ranks."""
        key = grid_of(layout), layout.micro_batch, shard
        if key not in self._first:
            layers = even_layers(self.request.spec.num_hidden_layers, layout.pp)
            plain = replace(layout, schedule="1f1b", vpp=1, layers=layers, shard=shard, shard_group=None)
            self._first[key] = least_bytes(self.request, plain)
        return self._first[key]

    def _has_room(self, layout: Layout) -> bool:
        """Whether a layout fits: never where the same does not with half the micro-batch, or shared among more."""
        widest = replace(layout, shard_group=None)
        if widest not in self._fits:
            smaller = replace(widest, micro_batch=layout.micro_batch // 2)
            self._fits[widest] = self._fits.get(smaller, True) and fits_in_memory(self.request, widest)
        if not layout.uses_shard_groups or not self._fits[widest]:
            return self._fits[widest]
        return fits_in_memory(self.request, layout)


def _is_plain(layout: Layout) -> bool:
    """Whether a layout may stand for its grid: whole sequences, 1F1B, shared among all ranks."""
    return layout.cp == 1 and layout.schedule == "1f1b" and not layout.uses_shard_groups


def _shards(layout: Layout) -> tuple[Shard, ...]:
    """The shard levels of a layout's ranks; one rank has nothing to share."""
    return SHARDS if layout.replicas > 1 else SHARDS[:1]


def _state_bytes(request: Request, layout: Layout, shard: Shard, ranks: int) -> float:
    """What weights, gradients and optimizer states of the layers take at least on the fullest rank."""
    layers = -(-request.spec.num_hidden_layers // layout.pp)
    held, shared = _STATE_BYTES[shard]
    return layers * request.spec.layer_matmul_parameters / layout.tp * (held + shared / ranks)


def _states_too_large(request: Request, layout: Layout) -> str | None:
    """Why not even weights, gradients and optimizer states fit, however they are shared; None if they may."""
    needed = min(_state_bytes(request, layout, shard, layout.replicas) for shard in SHARDS)
    if needed <= request.capacity_bytes:
        return None
    return (
        f"weights, gradients and optimizer states alone need {needed / GIB:.1f} GiB"
        f" of {request.capacity_bytes / GIB:.1f}"
    )


def _problem(request: Request, layout: Layout) -> str | None:
    """The first rule that the layout breaks."""
    problems = legal_problems(request, layout)
    return str(as_typed(problems[0])) if problems else None


def _no_legal_layout(request: Request, roots: Sequence[Layout]) -> Problem:
    """What to change where every layout breaks a rule."""
    world, batch = request.cluster.world_size, request.global_batch
    legal: set[int] = set()
    for layout in roots:
        # Every data-parallel rank needs as many micro-batches as there are pipeline ranks.
        least = layout.dp * layout.pp
        nearest = max(least, batch - batch % layout.dp)
        for other in (nearest, nearest + layout.dp):
            if _problem(replace(request, global_batch=other), replace(layout, micro_batch=1)) is None:
                legal.add(other)
    if legal:
        rule = f"no layout of {world} GPUs divides it: dp must, with a micro-batch at least for each pipeline rank"
        return Problem("train.global_batch", batch, rule, nearest_number(batch, legal))
    first = _problem(request, roots[0]) if roots else "tp must divide the heads and the GPUs"
    return Problem("cluster", request.cluster, f"no layout of {world} GPUs is legal: {first}")
