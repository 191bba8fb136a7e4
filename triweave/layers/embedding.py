"""`VocabParallelEmbedding`: each tensor-parallel rank looks up its own slice of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triweave.gradients import main_grad
from triweave.layers.linear import combine_partial
from triweave.layers.tensor_parallel import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary rows split over the tensor-parallel ranks.

    Forward: tokens `[seq, batch]` to `[seq/tp, batch, hidden]` (`[seq, batch, hidden]` without sequence parallelism).
    A rank gives zeros for tokens outside its rows; the sum over the ranks is the lookup.
    """

    def __init__(self, rows: int, hidden_size: int, tp: TensorParallel) -> None:
        """`rows` are this rank's own."""
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """`[seq, batch]` to `[seq/tp, batch, hidden]` or `[seq, batch, hidden]`."""
        return combine_partial(_Lookup.apply(self.weight, tokens, self.tp), self.tp)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, tp: TensorParallel) -> Tensor:
        local = tokens - tp.rank * weight.shape[0]
        outside = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside)
        ctx.weight, ctx.tp = weight, tp
        rows = weight[local]
        return rows.masked_fill_(outside.unsqueeze(-1), 0) if tp.size > 1 else rows

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None]:
        local, outside = ctx.saved_tensors
        weight = ctx.weight

        def add_weight_gradient() -> None:
            # Straight into the float32 rows that were looked up: no [vocab, hidden] gradient is ever made.
            grad = grad_output.float().masked_fill_(outside.unsqueeze(-1), 0)
            main_grad(weight).index_add_(0, local.flatten(), grad.flatten(0, 1))

        ctx.tp.weight_gradients.submit(add_weight_gradient)
        return None, None, None
