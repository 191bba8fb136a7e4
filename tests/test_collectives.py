"""Every collective changes how a value lies over the ranks, as its docstring says, and never the value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

from triweave import collectives
from triweave.collectives import (
    copy_to_tensor_parallel,
    finish,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
    scatter_to_tensor_parallel,
)
from triweave.groups import Group, alone

AUTOGRAD: dict[str, Callable[[Tensor, Group], Tensor]] = {
    name: function
    for name, function in vars(collectives).items()
    if inspect.isfunction(function) and re.search("_(to|from)_(tensor|sequence)_parallel$", name)
}
PLAIN = ("all_reduce", "all_gather", "reduce_scatter")
SHAPE = (8, 3, 4)
"""`[seq, batch, hidden]`; sequence and hidden can be cut among 4 ranks."""


def stated_types(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """The types in and out that a docstring gives, forward first."""
    return re.findall(r"(replicate|partial|shard\(-?\d\)) -> (replicate|partial|shard\(-?\d\))", function.__doc__ or "")


def whole_value(seed: int) -> Tensor:
    """Small whole numbers: their sums are exact in any order, so equal means equal bit for bit."""
    return torch.randint(-50, 50, SHAPE, generator=torch.Generator().manual_seed(seed)).double()


def part(value: Tensor, kind: str, group: Group) -> Tensor:
    """What this rank holds of `value` when it lies over the ranks as `kind` says."""
    if kind == "replicate":
        return value.clone()
    if kind == "partial":
        shares = [whole_value(1000 + rank) for rank in range(group.size - 1)]
        shares.append(value - sum(shares, torch.zeros(SHAPE, dtype=value.dtype)))
        return shares[group.rank]
    dim = int(kind.removeprefix("shard(").removesuffix(")"))
    return value.chunk(group.size, dim)[group.rank].clone()


def check_types(rank: int, size: int) -> None:
    """Forward and backward of every collective move the same value from the stated type to the stated type."""
    group = Group(tuple(range(size)), rank, dist.group.WORLD)
    value, gradient = whole_value(1), whole_value(2)
    for name, function in AUTOGRAD.items():
        (before, after), (gradient_before, gradient_after) = stated_types(function)
        for transposed in (False, True):
            x = part(value, before, group)
            upstream = part(gradient, gradient_before, group)
            if transposed:  # the same numbers, not contiguous in memory
                x, upstream = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, upstream))
            x.requires_grad_()
            kept = upstream.clone()
            y = function(x * 1, group)
            assert torch.equal(y, part(value, after, group)), f"{name} forward"
            y.backward(upstream)
            assert x.grad is not None
            assert torch.equal(x.grad, part(gradient, gradient_after, group)), f"{name} backward"
            assert torch.equal(upstream, kept), f"{name} overwrites the gradient that it is given"
    for name in PLAIN:
        plain, started = getattr(collectives, name), getattr(collectives, f"start_{name}")
        ((before, after),) = stated_types(plain)
        for x in (part(value, before, group), part(value, before, group).transpose(0, 1).contiguous().transpose(0, 1)):
            assert torch.equal(plain(x.contiguous(), group), part(value, after, group)), name
            assert torch.equal(finish(started(part(value, before, group), group)), part(value, after, group)), name


def check_block(rank: int, size: int) -> None:
    """A two-layer block over the ranks has the outputs and gradients of autograd through the whole block."""
    group = Group(tuple(range(size)), rank, dist.group.WORLD)
    generator = torch.Generator().manual_seed(3)
    x, w, v, target = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((8, 3, 4), (4, 12), (12, 4), (8, 3, 4))
    )

    whole_x, whole_w, whole_v = (t.clone().requires_grad_() for t in (x, w, v))
    y = torch.tanh(torch.tanh(whole_x) @ whole_w) @ whole_v
    (torch.sin(y) * target).sum().backward()

    def near(ours: Tensor | None, theirs: Tensor | None) -> None:
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def slice_of(t: Tensor | None, dim: int) -> Tensor | None:
        return None if t is None else t.chunk(size, dim)[rank]

    for sequence_parallel in (False, True):
        mine_w, mine_v = (t.clone().requires_grad_() for t in (w.chunk(size, 1)[rank], v.chunk(size, 0)[rank]))
        mine_x = (x.chunk(size, 0)[rank] if sequence_parallel else x).clone().requires_grad_()
        enter, leave = (
            (gather_from_sequence_parallel, reduce_scatter_to_sequence_parallel)
            if sequence_parallel
            else (copy_to_tensor_parallel, reduce_from_tensor_parallel)
        )
        out = leave(torch.tanh(enter(torch.tanh(mine_x), group) @ mine_w) @ mine_v, group)
        near(out, slice_of(y, 0) if sequence_parallel else y)
        # The loss of this rank's positions, or of all: every rank starts its backward with its own part of d loss.
        (torch.sin(out) * (target.chunk(size, 0)[rank] if sequence_parallel else target)).sum().backward()
        near(mine_x.grad, slice_of(whole_x.grad, 0) if sequence_parallel else whole_x.grad)
        near(mine_w.grad, slice_of(whole_w.grad, 1))
        near(mine_v.grad, slice_of(whole_v.grad, 0))

    # Cut apart, computed on and put together again: along the sequence and along the last dimension.
    for cut, gather in (
        (scatter_to_sequence_parallel, gather_from_sequence_parallel),
        (scatter_to_tensor_parallel, gather_from_tensor_parallel),
    ):
        whole_x, mine_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.tanh(whole_x).mul(target).sum().backward()
        out = gather(torch.tanh(cut(mine_x, group)), group)
        near(out, torch.tanh(x))
        # A gather along the sequence takes partial gradients: each rank's share of the loss.
        share = size if gather is gather_from_sequence_parallel else 1
        out.mul(target).sum().div(share).backward()
        near(mine_x.grad, whole_x.grad)


@pytest.mark.parametrize("size", [2, 4])
def test_types_are_those_of_the_docstring(ranks: Ranks, size: int) -> None:
    """Forward and backward, each collective takes and gives what its docstring says, for the value it was given."""
    ranks.run(size, check_types, size)


@pytest.mark.parametrize("size", [2, 4])
def test_block_equals_one_process(ranks: Ranks, size: int) -> None:
    """Products split by columns and rows between two collectives have the gradients of the whole computation."""
    ranks.run(size, check_block, size)


def test_every_docstring_gives_its_types() -> None:
    """Every collective is in the tests above: its docstring has types forward and, if autograd sees it, backward."""
    assert len(AUTOGRAD) == 7
    assert [len(stated_types(function)) for function in AUTOGRAD.values()] == [2] * 7
    assert [len(stated_types(getattr(collectives, name))) for name in PLAIN] == [1] * 3


@pytest.mark.parametrize("name", [*AUTOGRAD, *PLAIN])
def test_one_rank_does_nothing(name: str) -> None:
    """In a group of one every collective gives back the very tensor it was given, and needs no process group."""
    x = torch.randn(SHAPE, requires_grad=True)
    assert getattr(collectives, name)(x, alone()) is x
    if name in PLAIN:
        assert finish(getattr(collectives, f"start_{name}")(x, alone())) is x
