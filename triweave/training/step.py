"""One optimizer step, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triweave.collectives import all_reduce
from triweave.layers.cross_entropy import vocab_parallel_cross_entropy
from triweave.llama import StageInput
from triweave.pipeline import Loss
from triweave.training.engine import Engine


@dataclass(frozen=True, slots=True)
class Batch:
    """What one data-parallel rank computes in a step."""

    inputs: Sequence[StageInput]
    """One a micro-batch."""
    targets: Sequence[Tensor]
    """`[seq, batch]` of each micro-batch: the token to predict, or IGNORE."""
    trained_tokens: int
    """Tokens with a loss in the whole global batch, over all ranks and micro-batches."""


def train_step(engine: Engine, batch: Batch, learning_rate: float, max_grad_norm: float) -> tuple[float, float]:
    """Forward, backward and update. Nothing is updated where the loss or the gradient is no number.

    Returns:
        The loss of the global batch (mean over its trained tokens, the same number on every layout) and the norm
        of its gradient before clipping.
    """
    engine.sharding.zero_gradients()
    loss = engine.pipeline.train(
        engine.schedule, batch.inputs, loss_of(engine, batch), loss_scale=1 / batch.trained_tokens
    )
    engine.sharding.reduce_gradients()

    loss, squared_norm = sum_over_grid(engine, loss, engine.sharding.squared_gradient_norm())
    grad_norm = squared_norm.sqrt()
    too_long = ((grad_norm + 1e-6) / max_grad_norm).clamp(min=1.0) if max_grad_norm > 0 else torch.ones_like(grad_norm)

    # Decided where the numbers are: the host learns of them when the step is over, and waits for nothing before.
    divisor = torch.where(torch.isfinite(loss + squared_norm), too_long, torch.nan)
    engine.optimizer.step(learning_rate, divisor)
    engine.sharding.publish()
    return loss.item() / batch.trained_tokens, grad_norm.item()


def evaluate_step(engine: Engine, batch: Batch) -> float:
    """Summed loss of the trained tokens of a global batch, forward only."""
    loss = engine.pipeline.evaluate(engine.schedule, batch.inputs, loss_of(engine, batch))
    (total,) = sum_over_grid(engine, loss)
    return float(total)


def loss_of(engine: Engine, batch: Batch) -> Loss:
    """The loss function that the pipeline's last stage calls."""

    def loss(micro_batch: int, logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, batch.targets[micro_batch], engine.spec.vocab_size, engine.tp)

    return loss


def sum_over_grid(engine: Engine, loss: Tensor, *shares: Tensor) -> Tensor:
    """Sum the ranks' shares in one all-reduce; the tensor-parallel ranks all hold the same loss, so it counts once."""
    return all_reduce(torch.stack([loss / engine.tp.size, *shares]), engine.groups.world)
