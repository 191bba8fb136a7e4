"""A rank of one pipeline stage of a big grid: its tensor-parallel group is there, the other stages are not.

What the stage computes, keeps and exchanges among its tensor-parallel ranks is real, by the trainer's own engine and
schedule; messages of the other stages are random numbers (`triweave.dryrun.lone_rank`). Steps are run by turns as in
training, with a collective before and after each product, and with nothing communicated, for a card that has been at
work for longer runs slower. Memory is capped at that of an 80 GB card.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import stopwatch
import torch
import torch.distributed as dist
from session import measure_all
from stand_ins import Alone
from torch._C._distributed_c10d import PrefixStore, Store
from triweave_case import resolved_of
from workload import Case

from triweave.dryrun.batch import make_batch
from triweave.dryrun.lone_rank import LoneGroup
from triweave.dryrun.on_gpu import fill_on_device
from triweave.groups import Group
from triweave.layout import Coordinates
from triweave.training.clock import Clock
from triweave.training.engine import Engine, build_engine
from triweave.training.process import Process, started_by_launcher
from triweave.training.processes import meet
from triweave.training.step import Batch, train_step
from triweave.transport.choose import Wanted, choose_transport
from triweave.transport.interface import Gathering, Scattering, Transport
from triweave.transport.plain import Collectives

BACKEND = "stage"
CAP_BYTES = int(80e9)
WARM_UP, ROUNDS = 2, 3
TRAINED, COLLECTIVES, ALONE = "as trained", "collectives", "alone"


@contextmanager
def one_stage(process: Process, store: Store, first: int, world_size: int) -> Iterator[None]:
    """Be a rank of the stage whose first rank is `first` inside; of all groups only the stage's own has its members."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        make = partial(_make_group, process.world_size)
        dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=[kind])
    dist.init_process_group(BACKEND, store=store, rank=first + process.rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _make_group(num_present: int, made: Any, options: Any) -> Any:
    """Of a group that torch makes, the other ranks' part too if it is the stage's tensor-parallel group."""
    ranks = list(made.global_ranks_in_group)
    if not ranks or ranks != list(range(ranks[0], ranks[0] + num_present)):
        return LoneGroup(made.group_rank, made.group_size)
    place = made.store, made.group_rank, made.group_size
    if not torch.cuda.is_available():
        return dist.ProcessGroupGloo(*place, timeout=made.timeout)
    settings = dist.ProcessGroupNCCL.Options()
    settings._timeout = made.timeout
    settings.global_ranks_in_group = ranks
    settings.group_name = made.group_id
    return dist.ProcessGroupNCCL(*place, settings)


@dataclass
class Switch:
    """A transport that can be exchanged for another between steps."""

    inner: Transport | None = None
    ways: dict[str, Transport] = field(default_factory=dict)

    def choose(
        self, wanted: Wanted, group: Group, sequence_parallel: bool, device: torch.device, slice_bytes: int
    ) -> Transport:
        """Take what training would take, and what it is compared with."""
        trained = choose_transport(wanted, group, sequence_parallel, device, slice_bytes)
        self.ways = {TRAINED: trained, COLLECTIVES: Collectives(group, sequence_parallel), ALONE: Alone(group)}
        self.inner = trained
        return self

    @property
    def _now(self) -> Transport:
        assert self.inner is not None
        return self.inner

    @property
    def name(self) -> str:
        return self._now.name

    def gather(self, x: torch.Tensor, *, whole: bool, other: int) -> Gathering:
        return self._now.gather(x, whole=whole, other=other)

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> Scattering:
        return self._now.scatter(tokens, moved, other)


class Steps:
    """Steps of an engine, and when its actions ran."""

    def __init__(self, engine: Engine, work: Batch, device: torch.device) -> None:
        self.engine, self.work, self.clock = engine, work, Clock(device)
        self.clock.follow(engine.pipeline)
        self.whole_s: defaultdict[str, list[float]] = defaultdict(list)
        self.actions: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.rest_s: list[float] = []
        self.loss = self.grad_norm = 0.0

    def once(self, way: str = "") -> None:
        """One step; kept under the name of a way, if there is one."""
        stopwatch.wait()
        self.clock.start()
        loss, grad_norm = train_step(self.engine, self.work, 1e-6, 1.0)
        whole, spans = self.clock.stop()
        if not isfinite(grad_norm):
            raise RuntimeError(f"its gradients' norm is {grad_norm}: a GPU is faster on what is no number")
        if not way:
            return
        self.whole_s[way].append(whole)
        for span in spans:
            self.actions[way][f"{span.action.kind.value}{span.action.stage}"].append(span.duration_s)
        if way == TRAINED:
            self.loss, self.grad_norm = loss, grad_norm
            self.rest_s.append(whole - (spans[-1].end_s - spans[0].start_s))


def measure(process: Process, store: Store, case: Case) -> dict[str, Any]:
    """Build the stage and run its steps."""
    resolved, device = resolved_of(case), stopwatch.device()
    layout = resolved.layout
    first = layout.rank(Coordinates(0, 0, 0, int(case.options["stage"])))
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / total), device)
    with one_stage(process, PrefixStore(case.name, store), first, layout.world_size):
        switch = Switch()
        engine = build_engine(resolved, device, lambda units: fill_on_device(units, case.spec), switch.choose)
        # The same tokens on all ranks: those of a tensor-parallel group look up each other's words.
        torch.manual_seed(0)
        steps = Steps(engine, make_batch(resolved, device), device)
        for _ in range(WARM_UP):
            steps.once()
        trained = replace(engine, tp=replace(engine.tp, chosen=switch.ways[TRAINED]))
        peak = torch.cuda.max_memory_allocated() + trained.unseen_bytes if device.type == "cuda" else 0
        for number in range(1 + ROUNDS):
            for way, transport in switch.ways.items():
                switch.inner = transport
                stopwatch.wait()
                dist.barrier(engine.tp.group.handle, device_ids=[device.index] if device.type == "cuda" else None)
                steps.once(way if number else "")
        notes = f"bf16 compute, float32 masters, moments and gradient sums; slices: {switch.ways[TRAINED].name}"
        found = {
            way: {name: _slowest(taken, engine) for name, taken in actions.items()}
            for way, actions in steps.actions.items()
        }
        return stopwatch.result(steps.whole_s[TRAINED], notes, peak_bytes=peak) | {
            "actions_s": found,
            "rest_s": _slowest(steps.rest_s, engine),
            "micro_batches": resolved.num_micro_batches,
            "loss": steps.loss,
            "grad_norm": steps.grad_norm,
        }


def _slowest(seconds: list[float], engine: Engine) -> float:
    """The largest of the ranks' medians."""
    worst = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=engine.groups.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=engine.tp.group.handle)
    return float(worst)


def main() -> None:
    process = started_by_launcher()
    if process is None:
        raise SystemExit("bench/eight.py starts this")
    store = meet(process, 300)
    if store is None:
        raise SystemExit("a stage of one rank has nobody to exchange with")
    measure_all(partial(measure, process, store))


if __name__ == "__main__":
    main()
