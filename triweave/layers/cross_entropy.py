"""Cross entropy over logits whose vocabulary is split over the tensor-parallel ranks: no rank ever sees them all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.collectives import all_reduce
from triweave.layers.tensor_parallel import TensorParallel

IGNORE = -100
"""Target of a position that is not trained."""


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Sum of the token losses, in float32.

    Args:
        logits: `[seq, batch, vocab/tp]`, vocabulary padding included, whose values may be overwritten.
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
        rows = logits.shape[-1]
        first = tp.rank * rows
        scores = logits.float()
        if first + rows > vocab_size:
            scores[..., max(vocab_size - first, 0) :] = -torch.inf
        highest = all_reduce(scores.amax(-1), tp.group, dist.ReduceOp.MAX)
        scores = scores.sub_(highest.unsqueeze(-1)) if scores is not logits else scores - highest.unsqueeze(-1)

        local = targets - first
        mine = (local >= 0) & (local < rows)
        local = local.masked_fill(~mine, 0)
        target_score = scores.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        probabilities = scores.exp_()
        sums = all_reduce(torch.stack([probabilities.sum(-1), target_score]), tp.group)
        total, target_score = sums[0], sums[1]
        trained = targets != IGNORE

        # d loss / d logits = softmax - one-hot. Taken before it is rounded to the type of the logits: in bfloat16 a
        # probability near 1 is 1, and what is left to learn would be 0.
        grad = probabilities.div_(total.unsqueeze(-1))
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.unsqueeze(-1).to(grad.dtype))
        ctx.save_for_backward(grad.to(logits.dtype), trained)
        return ((total.log() - target_score) * trained).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        grad, trained = ctx.saved_tensors
        return grad.mul_((trained * grad_loss).unsqueeze(-1)), None, None, None
