"""The layout's own forward and gradients, compared with the reference slice by slice where they lie.

No rank gathers anything: each compares the slices it holds, and only squared errors travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triweave.layers.documents import own_slices
from triweave.training.engine import Engine
from triweave.training.step import Batch, loss_of, sum_over_grid
from triweave.verify.reference import Reference, observed_modules


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative errors that count as equal: of the loss, and of outputs and gradients by Frobenius norm.

    The defaults are float32's: two float32 kernels that sum in another order differ by up to 2.5e-5 in an output of
    a deep random model on an H200; the planted faults of the tests differ by more than 1e-2. In a shorter precision
    `noise` holds the error that rounding alone makes, by name, and twice that is allowed on top.
    """

    loss: float = 1e-5
    output: float = 1e-4
    gradient: float = 1e-4
    noise: Mapping[str, float] = field(default_factory=dict)

    def allows(self, base: float, name: str, error: float) -> bool:
        """Whether `error` is within `base` and the noise of `name`; never for a NaN."""
        return error <= base + 2 * self.noise.get(name, 0.0)


BFLOAT16_EPSILON = 2.0**-8

LOSS_IN_FP8, OUTPUT_IN_FP8, GRADIENT_IN_FP8 = 0.01, 0.4, 0.6
"""Tolerances of products in fp8 beside a reference without. One product is off by 0.04, with a gradient in it by 0.06;
behind twelve layers of a random model outputs are by 0.2 and gradients of queries and keys by 0.35. A slice that is
wrong or a term that is lost still shows; for what is smaller, verify the same layout with `model.fp8: false`."""


def tolerance_for(reference: Reference, rounded: Reference) -> Tolerance:
    """The tolerance of a precision whose own error is that of `rounded` against the float32 `reference`."""
    noise = {"loss": abs(rounded.loss - reference.loss) / abs(reference.loss)}
    errors = Errors()
    with reference.tensors() as exact, rounded.tensors() as short:
        for key in exact.keys():  # noqa: SIM118 - safetensors' file is no dict
            kind, _, name = key.partition(".")
            # Outputs are kept by micro-batch (the last part of the key), gradients are not.
            module = name.rpartition(".")[0] if kind == "output" else name
            errors.add(module, short.get_tensor(key), exact.get_tensor(key))
    noise.update(errors.relative())
    return Tolerance(BFLOAT16_EPSILON / 4, BFLOAT16_EPSILON, BFLOAT16_EPSILON, noise)


def in_fp8(tolerance: Tolerance) -> Tolerance:
    """The tolerance where the layers' products are in fp8 and the reference's are not."""
    return replace(tolerance, loss=LOSS_IN_FP8, output=OUTPUT_IN_FP8, gradient=GRADIENT_IN_FP8)


@dataclass(slots=True)
class Errors:
    """Squared differences and squared reference values by name; plain sums, so ranks' shares add up."""

    difference: dict[str, float] = field(default_factory=dict)
    reference: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        """Account one slice."""
        theirs = theirs.to(ours.device, torch.float32)
        difference = (ours.float() - theirs).square().sum(dtype=torch.float64).item()
        self.difference[name] = self.difference.get(name, 0.0) + difference
        square = theirs.square().sum(dtype=torch.float64).item()
        self.reference[name] = self.reference.get(name, 0.0) + square

    def relative(self) -> dict[str, float]:
        """Relative error of each name; an output that ought to be zero counts by its absolute size."""
        return {
            name: (square / (self.reference[name] or 1.0)) ** 0.5 for name, square in sorted(self.difference.items())
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `triweave verify` answers."""

    reference_loss: float
    layout_loss: float
    outputs: Mapping[str, float]
    """Relative error of each module's output, in the order in which they compute."""
    gradients: Mapping[str, float]
    """Relative error of each parameter's gradient, by Hugging Face name."""
    first_difference: str | None
    """First module whose output differs; else `loss`; else the first parameter whose gradient differs."""

    @property
    def passed(self) -> bool:
        """Whether the layout computes what one process computes."""
        return self.first_difference is None

    @property
    def loss_error(self) -> float:
        """Absolute difference of the two losses."""
        return abs(self.layout_loss - self.reference_loss)

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Name and relative error of the gradient that differs most."""
        return max(self.gradients.items(), key=lambda item: (item[1] != item[1], item[1]))

    def to_json(self) -> dict[str, Any]:
        """The documented JSON answer."""
        name, relative = self.worst_gradient
        return {
            "pass": self.passed,
            "loss": {"reference": self.reference_loss, "layout": self.layout_loss, "abs": self.loss_error},
            "worst_gradient": {"name": name, "rel": relative},
            "first_difference": self.first_difference,
        }


def compare_with_reference(engine: Engine, batch: Batch, reference: Reference, tolerance: Tolerance) -> Verdict:
    """Run the layout on the reference's batch and compare. All ranks call it together and get the same verdict."""
    outputs, gradients = Errors(), Errors()
    with reference.tensors() as file:
        with _comparing_outputs(engine, file, outputs, len(batch.inputs)):
            engine.pipeline.evaluate(engine.schedule, batch.inputs, loss_of(engine, batch))
        # Where layers are captured the second run is the one that replays them: as training does, it is compared.
        for _ in range(2 if engine.pipeline.graphs.are_captured else 1):
            engine.sharding.zero_gradients()
            loss = engine.pipeline.train(
                engine.schedule, batch.inputs, loss_of(engine, batch), loss_scale=1 / batch.trained_tokens
            )
            engine.sharding.reduce_gradients()
        (total,) = sum_over_grid(engine, loss)
        compare_gradients(engine, file, gradients)
    return judge(
        reference.loss,
        total.item() / batch.trained_tokens,
        _merged(outputs, engine).relative(),
        _merged(gradients, engine).relative(),
        engine.spec.num_hidden_layers,
        tolerance,
    )


def judge(
    reference_loss: float,
    layout_loss: float,
    outputs: Mapping[str, float],
    gradients: Mapping[str, float],
    num_layers: int,
    tolerance: Tolerance,
) -> Verdict:
    """Name the first difference: outputs in the order in which they compute, then the loss, then gradients."""
    ordered = {name: outputs[name] for name in observed_modules(num_layers) if name in outputs}
    wrong = [name for name, error in ordered.items() if not tolerance.allows(tolerance.output, name, error)]
    if not tolerance.allows(tolerance.loss, "loss", abs(layout_loss - reference_loss) / abs(reference_loss)):
        wrong.append("loss")
    wrong += [
        name for name, error in in_model_order(gradients) if not tolerance.allows(tolerance.gradient, name, error)
    ]
    return Verdict(reference_loss, layout_loss, ordered, gradients, wrong[0] if wrong else None)


def in_model_order(gradients: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """Gradients with layers in numerical order, the embedding first and the head last."""

    def place(item: tuple[str, float]) -> tuple[int, int, str]:
        name = item[0]
        if name.startswith("model.layers."):
            return (1, int(name.split(".")[2]), name)
        return (0, 0, name) if "embed" in name else (2, 0, name)

    return sorted(gradients.items(), key=place)


@contextmanager
def _comparing_outputs(engine: Engine, file: Any, errors: Errors, num_micro_batches: int) -> Iterator[None]:
    first = engine.groups.at.dp * num_micro_batches
    seen: dict[str, int] = {}

    def compare(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor | tuple[Tensor, Tensor]) -> None:
            if isinstance(output, tuple):  # a norm that also passes the residual stream on
                output = output[1]
            number = first + seen.get(name, 0)
            seen[name] = seen.get(name, 0) + 1
            theirs = file.get_tensor(f"output.{name}.{number}").transpose(0, 1)  # [seq, batch, ...]
            errors.add(name, *_same_part(engine, name, output, theirs))

        return hook

    handles = []
    for stage in engine.stages.values():
        modules = dict(stage.named_modules())
        for name in observed_modules(engine.spec.num_hidden_layers):
            if modules.get(name) is not None:
                handles.append(modules[name].register_forward_hook(compare(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _same_part(engine: Engine, name: str, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the reference's output that this rank holds, beside this rank's own without padding."""
    rank, cp = engine.tp.rank, engine.groups.cp
    if cp.size > 1:
        theirs = own_slices(theirs, cp.rank, cp.size)
    if name == "lm_head":
        width = ours.shape[-1]
        theirs = theirs[..., rank * width : (rank + 1) * width]
        return ours[..., : theirs.shape[-1]], theirs
    if ours.shape[0] != theirs.shape[0]:
        theirs = theirs.narrow(0, rank * ours.shape[0], ours.shape[0])
    return ours, theirs


def compare_gradients(engine: Engine, file: Any, errors: Errors) -> None:
    """Compare the reduced gradients in this rank's shards."""
    for unit in engine.sharding.units:
        for segment in unit.segments():
            inside = unit.in_shard(segment.start, segment.stop)
            if inside is None:
                continue
            piece = segment.piece
            window = [slice(None)] * len(piece.shape)
            window[piece.dim] = slice(piece.start, piece.stop)
            whole = file.get_slice(f"gradient.{piece.name}")[tuple(window)].reshape(-1)
            start = unit.shard_start + inside.start - segment.start
            theirs = whole[start : start + (inside.stop - inside.start)]
            errors.add(piece.name, unit.gradient[inside], theirs)


def _merged(errors: Errors, engine: Engine) -> Errors:
    """Sum of all ranks' errors."""
    if engine.groups.world.size == 1:
        return errors
    gathered: list[Any] = [None] * engine.groups.world.size
    dist.all_gather_object(gathered, errors)
    merged = Errors()
    for one in gathered:
        for name, square in one.difference.items():
            merged.difference[name] = merged.difference.get(name, 0.0) + square
            merged.reference[name] = merged.reference.get(name, 0.0) + one.reference[name]
    return merged
