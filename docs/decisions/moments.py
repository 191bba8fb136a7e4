"""How far AdamW's second moment in bfloat16 is from the same in float32, for some betas: figures of decision 15."""

from __future__ import annotations

import torch
from torch import Tensor

BETAS = (0.95, 0.98, 0.984375, 0.99, 0.995, 0.998, 0.999)
STEPS, NUMEL = 3000, 2048


def drift(beta: float) -> Tensor:
    """Mean error of the root of the second moment, every 50th step of the last two thirds of a run.

    Gradients are normal numbers whose scale falls tenfold.
    """
    generator = torch.Generator().manual_seed(0)
    exact, small = torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=torch.bfloat16)
    errors = []
    for step in range(1, STEPS + 1):
        square = (0.1 ** (step / STEPS) * torch.randn(NUMEL, generator=generator)).square()
        exact = beta * exact + (1 - beta) * square
        small = (beta * small.float() + (1 - beta) * square).bfloat16()
        if step > STEPS // 3 and step % 50 == 0:
            errors.append((small.float() / exact).sqrt().mean() - 1)
    return torch.stack(errors)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("beta       stands still within     error of the root: mean     worst")
    for beta in BETAS:
        errors = drift(beta)
        worst = errors.abs().max().item()
        print(f"{beta:<10g} {2**-8 / (1 - beta):20.0%} {errors.mean().item():+26.1%} {worst:12.1%}")


if __name__ == "__main__":
    main()
