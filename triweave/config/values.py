"""Rules about the values of a run that need no model, no file and no cluster."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triweave.config.schema import OptimizerConfig, Run, TrainConfig
from triweave.errors import Problem
from triweave.moments import LEAST_SHARES


@dataclass(frozen=True, slots=True)
class _Range:
    """Where the numbers of `keys` must lie. Whatever is compared with not-a-number is false, so it is refused."""

    keys: tuple[str, ...]
    holds: Callable[[float], bool]
    rule: str
    nearest: str | None = None


_RANGES = (
    _Range(
        (
            *("optimizer.learning_rate", "optimizer.eps", "train.epochs"),
            *("train.spike_factor", "checkpoint.hours_between_failures"),
        ),
        lambda number: 0 < number < math.inf,
        "must be greater than 0",
    ),
    _Range(
        ("optimizer.min_learning_rate", "optimizer.weight_decay", "optimizer.max_grad_norm"),
        lambda number: 0 <= number < math.inf,
        "must be at least 0",
        "0.0",
    ),
    _Range(
        (
            *("train.steps", "train.max_skipped_steps", "validation.max_batches"),
            *("checkpoint.keep", "log.every_steps", "runtime.timeout_s"),
        ),
        lambda number: number >= 1,
        "must be at least 1",
        "1",
    ),
    _Range(
        (
            *("optimizer.warmup_steps", "validation.every_steps", "checkpoint.every_steps"),
            *("train.compare_replicas_every", "runtime.hang_timeout_s", "runtime.max_starts_without_step"),
        ),
        lambda number: number >= 0,
        "must be at least 0",
        "0",
    ),
    _Range(("optimizer.warmup_ratio",), lambda number: 0 <= number < 1, "is a share of the run: from 0 to below 1"),
    _Range(("seed",), lambda number: 0 <= number < 2**63, "must be from 0 to below 2^63", "0"),
)


def value_problems(run: Run) -> list[Problem]:
    """Numbers out of their range, and keys that contradict each other."""
    return [*_range_problems(run), *_optimizer(run.optimizer, run.train), *_length(run.train), *_held_out(run)]


def _range_problems(run: Run) -> Iterator[Problem]:
    for bounds in _RANGES:
        for key in bounds.keys:
            number = functools.reduce(getattr, key.split("."), run)
            if number is not None and not bounds.holds(number):  # type: ignore[arg-type]
                yield Problem(key, number, bounds.rule, bounds.nearest)


def _optimizer(optimizer: OptimizerConfig, train: TrainConfig) -> Iterator[Problem]:
    lowest, peak = optimizer.min_learning_rate, optimizer.learning_rate
    if lowest > peak > 0:
        rule = f"must be at most learning_rate = {peak:g}: it is where the decay ends"
        yield Problem("optimizer.min_learning_rate", lowest, rule, f"{peak:g}")
    elif lowest > 0 and optimizer.lr_schedule == "constant":
        yield Problem("optimizer.min_learning_rate", lowest, "has no effect: lr_schedule: constant never decays", "0.0")
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            yield Problem(f"optimizer.betas[{index}]", beta, "must be from 0 to below 1", str((0.9, 0.95)[index]))
        elif 1 - beta < (least := LEAST_SHARES[optimizer.moments]):
            rule = (
                f"leaves 1 - beta = {1 - beta:.3g}, and optimizer.moments: {optimizer.moments} needs at least"
                f" {least:g}: a moment that changes by less in a step is rounded back to what it was (float32 has no"
                " such limit)"
            )
            yield Problem(f"optimizer.betas[{index}]", beta, rule, str(1 - least))
    steps, ratio = optimizer.warmup_steps, optimizer.warmup_ratio
    if steps is not None and ratio is not None:
        rule = f"excludes optimizer.warmup_ratio = {ratio:g}: give one of the two (null unsets a key)"
        yield Problem("optimizer.warmup_steps", steps, rule)
    elif steps is not None and train.steps is not None and steps > train.steps >= 1:
        rule = f"must be at most train.steps = {train.steps}"
        yield Problem("optimizer.warmup_steps", steps, rule, str(train.steps))


def _length(train: TrainConfig) -> Iterator[Problem]:
    if train.epochs is None and train.steps is None:
        yield Problem("train", None, "does not say how long: give train.epochs or train.steps")
    elif train.epochs is not None and train.steps is not None:
        rule = f"excludes train.epochs = {train.epochs:g}: give one of the two (null unsets a key)"
        yield Problem("train.steps", train.steps, rule)


def _held_out(run: Run) -> Iterator[Problem]:
    share = run.data.validation
    if isinstance(share, str):
        return
    if not 0 <= share < 1:
        rule = "is a share of the examples, from 0 to below 1, or a path"
        yield Problem("data.validation", share, rule, "0.01")
    if share == 0 and run.validation.every_steps > 0:
        rule = "has nothing to measure: data.validation is 0"
        yield Problem("validation.every_steps", run.validation.every_steps, rule, "0")
