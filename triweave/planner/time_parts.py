"""The nouns of the time model: seconds by what is done, and where a block of a model runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from triweave.layout import Layout, Recompute
from triweave.planner.machine import Machine, Precision, Trainer
from triweave.planner.time_collectives import GroupShape, group_shape
from triweave.planner.time_matmul import matmul_s
from triweave.planner.time_shapes import Decoder
from triweave.planner.time_stack import Bytes, Measured, Stack

FP8_CASTS = (Measured("fp8 amax", 2), Measured("fp8 cast", 4))
"""The trainer's: the largest magnitude in one reading, both orders in another."""


class Parts(NamedTuple):
    """Seconds by what is done."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    host: float = 0.0
    """The GPU waits for a layer's kernels to be launched."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def times(self, factor: float) -> Parts:
        """Every part times `factor`."""
        return Parts._make([seconds * factor for seconds in self])

    def at_least(self, floor: float) -> Parts:
        """The same, waiting for the host where that takes `floor` seconds to launch it."""
        return self._replace(host=self.host + max(0.0, floor - self.total))


def add(*parts: Parts) -> Parts:
    """Element-wise sum."""
    return Parts._make(map(sum, zip(*parts, strict=True)))


class Work(NamedTuple):
    """One micro-batch through a block: forward, the two halves of backward, and what is recomputed before backward."""

    forward: Parts
    backward_input: Parts
    backward_weight: Parts
    recompute: Parts = Parts()

    def times(self, count: int) -> Work:
        """`count` such blocks one after the other."""
        return Work._make([parts.times(count) for parts in self])


def chain(*works: Work) -> Work:
    """Blocks one after the other."""
    return Work._make(map(add, *works))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What the blocks of a run have in common; the key under which their costs are remembered.

    Compared by identity, for `place_of` makes equal ones once.
    """

    decoder: Decoder
    machine: Machine
    stack: Stack
    tp: GroupShape
    cp: GroupShape
    micro_batch: int
    seq: int
    sequence_parallel: bool
    keeps_gathered: bool
    recompute: tuple[Recompute, ...]
    precision: Precision

    @property
    def trainer(self) -> Trainer | None:
        """What was measured of this package's trainer, if it is what runs."""
        return self.machine.trainer if self.stack.own else None

    def slowdown(self, beside: Literal["copies", "buffers", "collectives"]) -> float:
        """What products lose beside what moves data, as a share of the time that this takes."""
        known = self.trainer.slowdowns if self.trainer is not None else {}
        return known.get(beside, self.stack.slowdown)

    @property
    def links(self) -> float:
        """Share of the speed of its collectives, as it is known, that the tensor-parallel group reaches in training.

        All of it where the profile holds them, for it was measured with training's own calls (`probe.links`).
        """
        trainer, group = self.trainer, self.tp
        measured = trainer is not None and group.nodes == 1 and group.ranks in trainer.collectives
        return 1.0 if measured else self.stack.links

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.seq // self.cp.ranks

    @property
    def own_tokens(self) -> int:
        """Those whose residual stream this tensor-parallel rank computes."""
        return self.tokens // self.tp.ranks if self.sequence_parallel else self.tokens

    @property
    def activation_bytes(self) -> float:
        """The residual stream of a micro-batch in bf16: `[seq/cp, batch, hidden]`."""
        return 2.0 * self.tokens * self.decoder.hidden

    def products(self, n: int, k: int, precision: Precision | None = None) -> tuple[float, float, float]:
        """Seconds of a linear layer with `[n, k]` weights: forward, input gradient, weight gradient."""
        m, machine, kind = self.tokens, self.machine, precision or self.precision
        efficiency = self.stack.efficiency
        return (
            matmul_s(machine, m, n, k, kind, "NT") / efficiency,
            matmul_s(machine, m, k, n, kind, "NN") / efficiency,
            matmul_s(machine, n, k, m, kind, "TN") / efficiency,
        )

    def memory(self, elements: float, cost: Bytes) -> tuple[float, float]:
        """Seconds of an element-wise operation, forward and backward."""
        forward, backward = cost.measured
        return self.passes(elements, cost.forward, forward), self.passes(elements, cost.backward, backward)

    def passes(self, elements: float, moved: float, measured: tuple[Measured, ...] = ()) -> float:
        """Seconds of passes over memory of `moved` bytes per element, as they were measured where they were."""
        known = self.trainer.operations if self.trainer is not None else {}
        if measured and all(one.operation in known for one in measured):
            return sum(one.share * known[one.operation](elements * one.bytes) for one in measured if elements)
        return elements * moved / (self.machine.hbm_kernel_bytes_per_s * self.stack.efficiency)

    def accumulate(self, parameters: float) -> float:
        """Seconds that adding a micro-batch's weight gradients to their sums takes beyond the products."""
        return parameters * self.stack.accumulate / (self.machine.hbm_kernel_bytes_per_s * self.stack.efficiency)

    def casts(self, elements: float) -> float:
        """Seconds to make fp8 of the input of a product, one way."""
        if self.precision != "fp8":
            return 0.0
        return self.passes(elements, self.stack.cast, FP8_CASTS)


def place_of(
    decoder: Decoder,
    layout: Layout,
    machine: Machine,
    stack: Stack,
    *,
    seq_len: int,
    gpus_per_node: int,
    precision: Precision,
) -> Place:
    """The place that a layout gives its blocks."""
    return _place(
        decoder,
        machine,
        stack,
        group_shape(layout, "tp", gpus_per_node),
        group_shape(layout, "cp", gpus_per_node),
        layout.micro_batch,
        seq_len,
        layout.uses_sequence_parallel,
        layout.keeps_gathered,
        layout.recompute,
        precision,
    )


_place = lru_cache(maxsize=65536)(Place)
