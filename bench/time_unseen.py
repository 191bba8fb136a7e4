"""Predictions for GPUs whose own training runs had no part in any number, and for this project's own runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from time_cases import Case, predict_run, score, variant

from triweave.planner.machine import Machine


@dataclass(frozen=True)
class Unseen:
    """A kind of GPU, and its share of peak as known without any training run on it."""

    name: str
    row_names: tuple[str, ...]
    matmul_ceiling: float
    fp8_ceiling: float
    known_from: str
    own_stacks: bool = False
    """Whether its stacks were calibrated on this GPU: their efficiency is then 1."""


HOPPER_FP8, BLACKWELL_FP8 = (1403 / 1979) / (794 / 989), (3432 / 4500) / (1745 / 2250)
"""Share of peak of the best fp8 product over that of the best bf16 product (machine-learning-engineering's tables)."""
A100_SHARE = 0.76 / (271 / 312)
"""What products of training shapes reach of the best product on an A100."""

UNSEEN = (
    Unseen("A100 80 GB", ("A100-SXM-80GB", "A100-80GB", "A800", "A100"), 0.76, 0.0, "products of an A100", True),
    Unseen("A100 40 GB", ("A100-SXM-40GB",), 0.76, 0.0, "products of an A100"),
    Unseen("H100", ("H100-SXM-80GB", "H100-80GB", "H100"), 0.74, 0.74 * HOPPER_FP8, "products of an H200"),
    Unseen(
        "H100, second way",
        ("H100-SXM-80GB", "H100-80GB", "H100"),
        794 / 989 * A100_SHARE,
        1403 / 1979 * A100_SHARE,
        "its best product, at A100's share of its own",
    ),
    Unseen("H200", ("H200",), 0.74, 0.74 * HOPPER_FP8, "its own products"),
    Unseen("B200", ("B200-180GB", "B200"), 0.48, 0.48 * BLACKWELL_FP8, "products of a B200"),
    Unseen("GB200", ("GB200", "Blackwell"), 0.48, 0.48 * BLACKWELL_FP8, "products of a B200"),
)


@lru_cache(maxsize=64)
def _as_unseen(machine: Machine, matmul_ceiling: float, fp8_ceiling: float) -> Machine:
    return replace(machine, matmul_ceiling=matmul_ceiling, fp8_ceiling=fp8_ceiling)


def _is_of(case: Case, gpu: Unseen) -> bool:
    """Cards held below their power are another machine."""
    name, source = case.row["gpu_type"], case.row["source"]
    if name.endswith(("500W", "limited")) or source.startswith("torchao"):
        return False
    return name.startswith(gpu.row_names) and ("40GB" in name) == ("40 GB" in gpu.name)


def unseen_gpus(cases: Sequence[Case]) -> list[list[str]]:
    """One row a GPU: all its rows, priced without any number that came from them."""
    table = []
    for gpu in UNSEEN:
        members = [case for case in cases if _is_of(case, gpu)]
        if not members:
            continue
        ours = []
        for case in members:
            on = _as_unseen(case.run.on, gpu.matmul_ceiling, gpu.fp8_ceiling)
            stack = variant(case.run.stack, 1.0, case.run.stack.links) if gpu.own_stacks else case.run.stack
            ours.append(predict_run(replace(case.run, on=on, stack=stack)))
        result = score(members, [step for step, _ in ours], [bounds for _, bounds in ours])
        table.append(
            [gpu.name, gpu.known_from, str(result.n), *result.cells[:2], f"{100 * (result.inside or 0):.0f} %"]
        )
    return table
