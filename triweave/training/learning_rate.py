"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from triweave.config.schema import OptimizerConfig


def warmup_steps(config: OptimizerConfig, num_steps: int) -> int:
    """Steps of warm-up, from `warmup_steps` or from `warmup_ratio` of the run (rounded up)."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return math.ceil((config.warmup_ratio or 0.0) * num_steps)


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (from 0) of `num_steps`.

    Linear from 0 over the warm-up, reaching the peak on its last step; then `lr_schedule` down to
    `min_learning_rate`, reached after the last step.
    """
    warmup = warmup_steps(config, num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_schedule]
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * shape
