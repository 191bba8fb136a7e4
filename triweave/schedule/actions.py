"""What a pipeline schedule is: for every pipeline rank, an ordered list of actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action computes."""

    FORWARD = "F"
    """Activations of a virtual stage for a micro-batch."""
    BACKWARD = "B"
    """Input and weight gradients together."""
    BACKWARD_INPUT = "I"
    """The gradient of the stage's input only: what the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """The weight gradients that BACKWARD_INPUT put off."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does: `kind` for virtual stage `stage` and micro-batch `micro_batch`."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The whole order: `ranks[p]` is what pipeline rank `p` does, first to last."""

    name: str
    num_stages: int
    """Virtual stages of the pipeline; stage `v` lives on pipeline rank `v % pp`."""
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients run apart from input gradients."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for action in self.ranks[0])
