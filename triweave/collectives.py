"""The collectives of tensor and sequence parallelism, plain and as autograd functions.

Each docstring gives the type of the tensor over the tensor-parallel ranks, in and out, forward and backward:
*replicate* (all equal), *partial* (the value is their sum), *shard(dim)* (each holds a slice of `dim`).
f and g are the letters of Shoeybi et al. (1909.08053), f-bar and g-bar those of Korthikanti et al. (2205.05198).
Dimension 0 of an activation is the sequence: `[seq, batch, hidden]`.

`layers/linear.py` folds them into its products, over a `triweave.transport`, to hide them behind the products' own
work; here they stand alone, for layers that have no product to fold them into.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.groups import Group
from triweave.kernels.dispatch import uses_kernels


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over `group`: partial -> replicate."""
    if group.size > 1:
        dist.all_reduce(x, op, group=group.handle)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate along dimension 0 over `group`: shard(0) -> replicate."""
    return finish(start_all_gather(x, group))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over `group` and keep this rank's slice of dimension 0: partial -> shard(0)."""
    return finish(start_reduce_scatter(x, group))


def gather_into(out: Tensor, x: Tensor, group: Group, *, async_op: bool = False) -> dist.Work | None:
    """Fill `out` with every rank's `x`, one after the other along dimension 0."""
    # Renamed in torch 2.13; the former name is deprecated there and the only one in 2.11.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = function(out, x, group=group.handle, async_op=async_op)
    return work


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group, *, async_op: bool = False) -> dist.Work | None:
    """Fill `out` with this rank's slice (along dimension 0) of the sum of every rank's `x`."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = function(out, x, group=group.handle, async_op=async_op)
    return work


Pending = tuple[Tensor, dist.Work | None]
"""A tensor that a collective is filling, and what to wait for."""


def start_all_gather(x: Tensor, group: Group) -> Pending:
    """`all_gather` that runs beside what follows; `finish` waits for it."""
    if group.size == 1:
        return x, None
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return out, gather_into(out, x.contiguous(), group, async_op=True)


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """`reduce_scatter` that runs beside what follows; `finish` waits for it."""
    if group.size == 1:
        return x, None
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return out, reduce_scatter_into(out, x.contiguous(), group, async_op=True)


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """`all_reduce`, in place, that runs beside what follows; `finish` waits for it."""
    if group.size == 1:
        return x, None
    x = x.contiguous()
    return x, dist.all_reduce(x, group=group.handle, async_op=True)


def finish(pending: Pending) -> Tensor:
    """Wait for a started collective (on a GPU: make the current stream wait) and return its result."""
    result, work = pending
    if work is not None:
        work.wait()
    return result


def sum_parts(parts: list[Tensor]) -> Tensor:
    """Sum one part a rank, in rank order, rounded once: the same bits on every run.

    More than two parts of a 16-bit type are summed in float32; a sum of two is rounded once anyway, and one part alone
    is its own sum.
    """
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0] + parts[1]
    if uses_kernels(parts[0]):
        from triweave.kernels.partial_sums import sum_in_order

        return sum_in_order(parts)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _my_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    size = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * size, size)


def _gather_last_dim(x: Tensor, group: Group) -> Tensor:
    return all_gather(x.movedim(-1, 0), group).movedim(0, -1).contiguous()


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.group), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ScatterToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _my_slice(x, group, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_last_dim(grad, ctx.group), None


class _GatherFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_last_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _my_slice(grad, ctx.group, -1).contiguous(), None


class _ScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _my_slice(x, group, 0).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _GatherFromSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _ReduceScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Operator f. Forward: identity, replicate -> replicate. Backward: all-reduce, partial -> replicate."""
    return x if group.size == 1 else _CopyToTensorParallel.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Operator g. Forward: all-reduce (in place), partial -> replicate. Backward: identity, replicate -> replicate."""
    return x if group.size == 1 else _ReduceFromTensorParallel.apply(x, group)


def scatter_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Forward: keep a slice of the last dim, replicate -> shard(-1). Backward: all-gather, shard(-1) -> replicate."""
    return x if group.size == 1 else _ScatterToTensorParallel.apply(x, group)


def gather_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Forward: all-gather of the last dim, shard(-1) -> replicate. Backward: slice, replicate -> shard(-1)."""
    return x if group.size == 1 else _GatherFromTensorParallel.apply(x, group)


def scatter_to_sequence_parallel(x: Tensor, group: Group) -> Tensor:
    """Forward: keep a slice of the sequence, replicate -> shard(0). Backward: all-gather, shard(0) -> replicate."""
    return x if group.size == 1 else _ScatterToSequenceParallel.apply(x, group)


def gather_from_sequence_parallel(x: Tensor, group: Group) -> Tensor:
    """Operator g-bar. Forward: all-gather, shard(0) -> replicate. Backward: reduce-scatter, partial -> shard(0)."""
    return x if group.size == 1 else _GatherFromSequenceParallel.apply(x, group)


def reduce_scatter_to_sequence_parallel(x: Tensor, group: Group) -> Tensor:
    """Operator f-bar. Forward: reduce-scatter, partial -> shard(0). Backward: all-gather, shard(0) -> replicate."""
    return x if group.size == 1 else _ReduceScatterToSequenceParallel.apply(x, group)
