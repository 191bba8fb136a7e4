"""AdamW (Loshchilov and Hutter 1711.05101) on the float32 master shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triweave.config.schema import OptimizerConfig
from triweave.kernels.dispatch import uses_kernels
from triweave.sharding import Unit

_PIECE = 2**20
"""Elements whose moments are widened to float32 at once where torch's kernel steps."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of one unit's shard that is decayed, or is not."""

    unit: Unit
    inside: slice
    """Which elements of the shard."""
    parameter: nn.Parameter
    """A view of the master shard."""


class ShardedAdamW:
    """AdamW over this rank's shards; two groups of parts, with weight decay and without.

    Where there is no kernel of ours, torch's fused one steps. It is called by itself: torch.optim's first optimizer
    imports torch's compiler, which takes each rank most of a second, and whose frames stay behind in a cycle (torch
    2.13) that keeps the engine's memory when the engine is gone.
    """

    def __init__(self, units: list[Unit], config: OptimizerConfig) -> None:
        self.config = config
        self.parts = [part for unit in units for part in _parts(unit)]
        self._moments: list[dict[str, Tensor]] = [{} for _ in self.parts]

    def step(self, learning_rate: float, divisor: Tensor | None = None) -> None:
        """Update the master shards from the reduced gradients.

        Args:
            learning_rate: of this step.
            divisor: float32 scalar that the gradients are divided by first; not a number to leave everything as it is.
                The count of steps goes on, for it is the run's.
        """
        for part in self.parts:
            part.unit.own()
        if self.parts and uses_kernels(self.parts[0].parameter):
            self._step_in_one_pass(learning_rate, divisor)
            return
        for decayed in (True, False):
            self._step_fused(learning_rate, divisor, decayed=decayed)

    @torch.no_grad()
    def _step_fused(self, learning_rate: float, divisor: Tensor | None, *, decayed: bool) -> None:
        states = [(part, state) for part, state in self.states() if _is_decayed(part) == decayed]
        if not states:
            return
        torch._foreach_add_([state["step"] for _, state in states], 1.0)
        # Gradients are asked for every step: units that keep only shards may have a new buffer.
        held = [
            (part.parameter, part.unit.gradient[part.inside], state["exp_avg"], state["exp_avg_sq"], state["step"])
            for part, state in states
        ]
        if self.config.moments == "float32":
            self._fused(held, learning_rate, divisor, decayed=decayed)
            return
        # torch's kernel wants one type. A piece at a time: all moments in float32 would be what is to be saved.
        for *flats, step in held:
            for parameter, gradient, *moments in zip(*(flat.split(_PIECE) for flat in flats), strict=True):
                wide = [moment.float() for moment in moments]
                self._fused([(parameter, gradient, *wide, step)], learning_rate, divisor, decayed=decayed)
                torch._foreach_copy_(moments, wide)

    def _fused(
        self, held: Sequence[Sequence[Tensor]], learning_rate: float, divisor: Tensor | None, *, decayed: bool
    ) -> None:
        """Step by torch's kernel: parameters, gradients, both moments and steps, all in float32."""
        parameters, gradients, exp_avgs, exp_avg_sqs, steps = (list(column) for column in zip(*held, strict=True))
        beta1, beta2 = self.config.betas
        torch._fused_adamw_(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=learning_rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.config.weight_decay if decayed else 0.0,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
            # The kernel divides while it reads: one pass less than scaling before.
            grad_scale=divisor,
            found_inf=None if divisor is None else divisor.isnan().float(),
        )

    @torch.no_grad()
    def _step_in_one_pass(self, learning_rate: float, divisor: Tensor | None) -> None:
        from triweave.kernels.adamw import adamw_step, step_rates

        states = list(self.states())
        torch._foreach_add_([state["step"] for _, state in states], 1.0)
        rates = step_rates(states[0][1]["step"], divisor, learning_rate, self.config)
        for part, state in states:
            weight = part.unit.own_weights()
            adamw_step(
                part.parameter,
                state["exp_avg"],
                state["exp_avg_sq"],
                part.unit.gradient[part.inside],
                None if weight is None else weight[part.inside],
                rates,
                self.config,
                learning_rate=learning_rate,
                weight_decay=self.config.weight_decay if _is_decayed(part) else 0.0,
            )

    def states(self) -> Iterator[tuple[Part, dict[str, Tensor]]]:
        """Each part with its moments `exp_avg` and `exp_avg_sq` and its `step`; made of zeros if not there yet.

        Moments have the type that `optimizer.moments` says.
        """
        dtype = torch.bfloat16 if self.config.moments == "bfloat16" else torch.float32
        for part, state in zip(self.parts, self._moments, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.parameter.device)
                state["exp_avg"] = torch.zeros_like(part.parameter, dtype=dtype)
                state["exp_avg_sq"] = torch.zeros_like(part.parameter, dtype=dtype)
            yield part, state


def _parts(unit: Unit) -> Iterator[Part]:
    for start, stop in ((0, unit.num_decayed), (unit.num_decayed, unit.numel)):
        inside = unit.in_shard(start, stop)
        if inside is not None:
            yield Part(unit, inside, nn.Parameter(unit.master[inside]))


def _is_decayed(part: Part) -> bool:
    first: int = part.inside.start
    return part.unit.shard_start + first < part.unit.num_decayed
