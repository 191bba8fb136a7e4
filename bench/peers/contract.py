"""What every compared system is given (a layout, a model folder, a batch) and what it must give back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

IGNORED = -100
"""The target of a token that takes no part in the loss."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid of ranks: tensor x pipeline x data parallel, and how many virtual stages a pipeline rank holds."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sequence_parallel: bool = True
    """Whether activations between the tensor-parallel regions are split by sequence; no effect at tp 1."""

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.vpp, self.dp) < 1:
            raise ValueError(f"tp {self.tp}, pp {self.pp}, vpp {self.vpp}, dp {self.dp}: each must be at least 1")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def splits_sequence(self) -> bool:
        """Sequence parallelism is asked for and there is a tensor-parallel group to split over."""
        return self.sequence_parallel and self.tp > 1

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "dp": self.dp}
        named = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["single"]
        return " ".join(named + ["sp"] * self.splits_sequence)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch: `tokens` and `targets`, each int64 `[batch, seq]`; targets are already shifted."""

    tokens: torch.Tensor
    targets: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """Which targets count in the loss, bool `[batch, seq]`."""
        return self.targets != IGNORED


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of one optimizer step, all of one shape."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """`(batch, seq)` of every micro-batch."""
        batch, seq = self.micro_batches[0].tokens.shape
        return batch, seq

    @property
    def valid_tokens(self) -> int:
        """The divisor of the loss: targets that count, over the whole global batch."""
        return sum(int(micro.valid.sum()) for micro in self.micro_batches)

    @classmethod
    def read(cls, path: Path) -> Batch:
        """Read `{"micro_batches": [{"tokens": [[...]], "targets": [[...]]}]}`.

        Raises:
            ValueError: micro-batches differ in shape, or no target counts.
        """
        entries = json.loads(path.read_text())["micro_batches"]
        batch = cls(
            tuple(MicroBatch(torch.tensor(entry["tokens"]), torch.tensor(entry["targets"])) for entry in entries)
        )
        shapes = {tuple(tensor.shape) for micro in batch.micro_batches for tensor in (micro.tokens, micro.targets)}
        if len(shapes) != 1:
            raise ValueError(f"{path}: every tokens and targets must have one shape, found {sorted(shapes)}")
        if not batch.valid_tokens:
            raise ValueError(f"{path}: no target counts in the loss")
        return batch

    def write(self, path: Path) -> None:
        """Write the format that `read` reads."""
        entries = [{"tokens": m.tokens.tolist(), "targets": m.targets.tolist()} for m in self.micro_batches]
        path.write_text(json.dumps({"micro_batches": entries}))

    @classmethod
    def random(cls, seed: int, *, count: int, shape: tuple[int, int], vocab_size: int) -> Batch:
        """Random tokens, with an unequal number of valid targets in each micro-batch.

        Micro-batch `i` masks a prefix of about `i / count` of each sequence, as a chat whose prompt is not trained
        on, so a mean of micro-batch means differs from the mean over tokens.
        """
        generator = torch.Generator().manual_seed(seed)
        micro_batches = []
        for index in range(count):
            text = torch.randint(vocab_size, (shape[0], shape[1] + 1), generator=generator)
            targets = text[:, 1:].clone()
            for row in targets:
                jitter = int(torch.randint(3, (), generator=generator))
                row[: min(shape[1] * index // count + jitter, shape[1] - 1)] = IGNORED
            micro_batches.append(MicroBatch(text[:, :-1].clone(), targets))
        return cls(tuple(micro_batches))


class Result(TypedDict):
    """What a system returns for one forward and backward over a batch."""

    loss: float
    """Summed token loss divided by the valid tokens of the global batch."""
    grad_norm: float
    """2-norm over all gradients, each logical parameter once."""
    gradients: dict[str, torch.Tensor]
    """The whole gradient of each parameter, under its Hugging Face name; a tied head is the embedding."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one result is from another."""

    loss: float
    """|loss - reference| / |reference|."""
    grad_norm: float
    """|norm - reference| / reference."""
    gradient: float
    """The largest ||g - reference|| / ||reference|| over parameters."""
    worst: str
    """The parameter that has it."""

    def within(self, *, loss: float, gradient: float) -> bool:
        """Whether loss, gradient norm and every gradient stay under their limits. NaN does not."""
        return self.loss <= loss and self.grad_norm <= gradient and self.gradient <= gradient


def difference(result: Result, reference: Result) -> Difference:
    """Compare two results parameter by parameter, in float64.

    Raises:
        ValueError: the two do not name the same parameters with the same shapes.
    """
    ours, theirs = result["gradients"], reference["gradients"]
    shapes: list[dict[str, Any]] = [{name: tuple(g.shape) for name, g in side.items()} for side in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"parameters differ: {sorted(set(shapes[0].items()) ^ set(shapes[1].items()))}")
    relative = {
        name: float((ours[name].double() - theirs[name].double()).norm() / theirs[name].double().norm())
        for name in theirs
    }
    worst = max(relative, key=lambda name: (relative[name] != relative[name], relative[name]))
    return Difference(
        loss=abs(result["loss"] - reference["loss"]) / abs(reference["loss"]),
        grad_norm=abs(result["grad_norm"] - reference["grad_norm"]) / reference["grad_norm"],
        gradient=relative[worst],
        worst=worst,
    )
