"""Cross entropy over logits whose vocabulary is split over the tensor-parallel ranks: no rank ever sees them all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.collectives import all_reduce
from triweave.kernels.dispatch import uses_kernels
from triweave.layers.tensor_parallel import TensorParallel

IGNORE = -100
"""Target of a position that is not trained."""


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Sum of the token losses, in float32.

    Nothing of the logits' size is made beside them: they are kept as they are, and backward overwrites them with their
    gradient, scaled as it is asked for.

    Args:
        logits: `[seq, batch, vocab/tp]`, contiguous, vocabulary padding included; backward overwrites them.
        targets: `[seq, batch]` token ids, `IGNORE` where nothing is trained.
        vocab_size: true vocabulary; padding beyond it takes no probability and gets no gradient.
        tp: the tensor-parallel ranks that share the vocabulary.

    Communicates two all-reduces of `[seq, batch]` numbers forward (maximum; target logit and sum of exponentials
    together) and none backward. Arithmetic is float32 whatever the logits are.
    """
    loss: Tensor = _CrossEntropy.apply(logits, targets, vocab_size, tp)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
        columns = logits.shape[-1]
        first = tp.rank * columns
        local = targets - first
        num_valid = min(max(vocab_size - first, 0), columns)
        highest, total, target = _statistics(logits, local, num_valid)

        here = (local >= 0) & (local < columns)
        top = all_reduce(highest.clone(), tp.group, dist.ReduceOp.MAX)
        shares = torch.stack([total * (highest - top).exp(), (target - top).masked_fill(~here, 0)])
        total, target = all_reduce(shares, tp.group)
        trained = targets != IGNORE
        ctx.save_for_backward(logits, targets, torch.stack([top, total]))
        ctx.first, ctx.num_valid = first, num_valid
        loss: Tensor = ((total.log() - target) * trained).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, (top, total) = ctx.saved_tensors
        _to_gradient(logits, targets - ctx.first, ctx.num_valid, top, total, (targets != IGNORE) * grad_loss)
        return logits, None, None, None


def _statistics(logits: Tensor, local_targets: Tensor, num_valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row the highest logit, the sum of exponentials relative to it, the target's logit (0 if not here)."""
    if uses_kernels(logits):
        from triweave.kernels.cross_entropy import logit_statistics

        return logit_statistics(logits, local_targets, num_valid)
    here = (local_targets >= 0) & (local_targets < logits.shape[-1])
    column = local_targets.masked_fill(~here, 0).unsqueeze(-1)
    target = logits.gather(-1, column).squeeze(-1).float().masked_fill(~here, 0)
    if num_valid == 0:
        return torch.full_like(target, -torch.inf), torch.zeros_like(target), target
    scores = logits[..., :num_valid].float()
    highest = scores.amax(-1)
    return highest, (scores - highest.unsqueeze(-1)).exp_().sum(-1), target


def _to_gradient(
    logits: Tensor, local_targets: Tensor, num_valid: int, top: Tensor, total: Tensor, scale: Tensor
) -> None:
    """Overwrite logits with `(softmax - one-hot) * scale`.

    The difference is taken before it is rounded to the type of the logits: in bfloat16 a probability near 1 is 1, and
    what is left to learn would be 0.
    """
    if uses_kernels(logits):
        from triweave.kernels.cross_entropy import logits_to_gradient

        logits_to_gradient(logits, local_targets, num_valid, top, total, scale)
        return
    here = (local_targets >= 0) & (local_targets < logits.shape[-1])
    column = local_targets.masked_fill(~here, 0).unsqueeze(-1)
    gradient = (logits.float() - top.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
    gradient.scatter_add_(-1, column, -here.unsqueeze(-1).to(gradient.dtype))
    gradient[..., num_valid:] = 0
    logits.copy_(gradient.mul_(scale.unsqueeze(-1)))
