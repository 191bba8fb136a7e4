"""Whole layers that a profile measured, beside what their parts are priced at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from triweave.layout import Layout
from triweave.planner.machine import Machine
from triweave.planner.profile import Profile
from triweave.planner.time_layer import layer_work, products_share
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
    products: float
    """Share of matrix products in what it is priced at."""
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
        if one.shard is None and not one.recompute and one.precision == "bf16"
    }
    for tp, batch, seq, hidden, ffn, heads, kv_heads, head_dim, forward, backward in profile.layers:
        decoder = Decoder(1, hidden, ffn, heads, kv_heads, head_dim, 1)
        layout = Layout(tp=tp, micro_batch=batch, sequence_parallel=tp > 1, layers=(1,))
        place = place_of(
            decoder, layout, machine, TRIWEAVE, seq_len=seq, gpus_per_node=max(1, profile.num_gpus), precision="bf16"
        )
        work = layer_work(place)
        priced = (work.forward.total, work.backward_input.total + work.backward_weight.total)
        yield Held(tp, (forward, backward), priced, products_share(work), host_s.get(tp, 0.0))


def with_layers(profile: Profile, machine: Machine) -> Machine:
    """The machine that knows how far whole layers are from their parts."""
    trainer = machine.trainer
    if trainer is None or not profile.layers:
        return machine
    found: defaultdict[int, dict[float, tuple[float, float]]] = defaultdict(dict)
    for held in held_layers(profile, machine):
        if not held.waits_for_host:
            ratios = held.measured[0] / held.priced[0], held.measured[1] / held.priced[1]
            found[held.tp][held.products] = ratios
    ratios_of = {tp: tuple((share, *by_share[share]) for share in sorted(by_share)) for tp, by_share in found.items()}
    return replace(machine, trainer=replace(trainer, layer_ratios=MappingProxyType(ratios_of)))
