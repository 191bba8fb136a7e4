"""Whole layers that a profile measured, beside what their parts are priced at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import exp, log
from statistics import mean
from types import MappingProxyType
from typing import NamedTuple

from triweave.layout import Layout
from triweave.planner.machine import Machine
from triweave.planner.profile import Profile
from triweave.planner.time_layer import layer_work
from triweave.planner.time_parts import place_of
from triweave.planner.time_shapes import Decoder
from triweave.planner.time_trainer import TRIWEAVE

HOST_BOUND = 0.9
"""A layer whose issue takes more than this share of its time says nothing of the GPU."""


class Held(NamedTuple):
    """One layer, measured and priced, seconds forward and backward."""

    tp: int
    measured: tuple[float, float]
    priced: tuple[float, float]
    host_s: float
    """What the host needs to issue it, forward and backward; 0 where that was not measured."""

    @property
    def waits_for_host(self) -> bool:
        """Whether the GPU was faster than the host."""
        return self.host_s > HOST_BOUND * sum(self.measured)


def held_layers(profile: Profile, machine: Machine) -> Iterator[Held]:
    """Each layer of the profile beside its price on `machine`."""
    host_s = {
        one.tp: one.forward_seconds + one.backward_input_seconds + one.backward_weight_seconds
        for one in profile.hosts
        if one.shard is None and not one.recompute
    }
    for tp, batch, seq, hidden, ffn, heads, kv_heads, head_dim, forward, backward in profile.layers:
        decoder = Decoder(1, hidden, ffn, heads, kv_heads, head_dim, 1)
        layout = Layout(tp=tp, micro_batch=batch, sequence_parallel=tp > 1, layers=(1,))
        place = place_of(
            decoder, layout, machine, TRIWEAVE, seq_len=seq, gpus_per_node=max(1, profile.num_gpus), precision="bf16"
        )
        work = layer_work(place)
        priced = (work.forward.total, work.backward_input.total + work.backward_weight.total)
        yield Held(tp, (forward, backward), priced, host_s.get(tp, 0.0))


def with_layers(profile: Profile, machine: Machine) -> Machine:
    """The machine that knows how far whole layers are from their parts."""
    trainer = machine.trainer
    if trainer is None or not profile.layers:
        return machine
    logs: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for held in held_layers(profile, machine):
        if not held.waits_for_host:
            logs[held.tp].append((log(held.measured[0] / held.priced[0]), log(held.measured[1] / held.priced[1])))
    return replace(machine, trainer=replace(trainer, layer_ratios=_ratios(logs)))


def _ratios(logs: Mapping[int, list[tuple[float, float]]]) -> Mapping[int, tuple[float, float]]:
    return MappingProxyType(
        {tp: (exp(mean(one[0] for one in known)), exp(mean(one[1] for one in known))) for tp, known in logs.items()}
    )
