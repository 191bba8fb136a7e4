"""Launching a kernel as it was compiled: what is compiled for one kind of arguments never meets another kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triweave.kernels.compiled import Kernel


class Jit:
    """Stands for what `triton.jit` makes: it compiles for each call, and tells what it was called with."""

    arg_names = ("x", "count", "rate", "ADD", "BLOCK")

    def __init__(self, *, interprets: bool = False) -> None:
        self.interprets = interprets
        self.compiled: list[tuple[object, ...]] = []
        self.ran: list[tuple[int, tuple[int, ...], tuple[object, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: object, **options: object) -> Any:
            number = len(self.compiled)
            self.compiled.append((*arguments, options))
            return None if self.interprets else Compiled(self, number)

        return run


class Compiled:
    """Stands for one compiled kernel."""

    def __init__(self, jit: Jit, number: int) -> None:
        self.jit, self.number = jit, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.jit.ran.append((self.number, grid, arguments))


@pytest.fixture
def jit() -> Jit:
    return Jit()


def launch(
    kernel: Kernel, x: Tensor, count: int = 8, rate: float = 0.5, grid: tuple[int, ...] = (4,), **more: Any
) -> None:
    """A launch of which tests change one thing."""
    kernel.launch(grid, x, count, rate, **{"ADD": True, "BLOCK": 128, "num_warps": 4, **more})


def test_second_launch_is_of_what_was_compiled(jit: Jit) -> None:
    """The compiled kernel gets the new arguments and the constants in the kernel's order, without Triton's options."""
    kernel, x = Kernel(jit), torch.zeros(8)
    launch(kernel, x)
    launch(kernel, x, BLOCK=128, ADD=True)
    other = torch.ones(8)
    launch(kernel, other, rate=0.25)
    assert len(jit.compiled) == 1
    assert [(number, grid, arguments[1:]) for number, grid, arguments in jit.ran] == [
        (0, (4, 1, 1), (8, 0.5, True, 128)),
        (0, (4, 1, 1), (8, 0.25, True, 128)),
    ]
    assert jit.ran[1][2][0] is other


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(16, dtype=torch.bfloat16)},
        {"x": torch.zeros(9)[1:]},
        {"count": 9},
        {"grid": (5,)},
        {"ADD": False},
        {"BLOCK": 256},
        {"num_warps": 8},
    ],
    ids=["type", "alignment", "number", "grid", "constant", "block", "warps"],
)
def test_other_arguments_are_compiled_for(jit: Jit, change: dict[str, Any]) -> None:
    """A type, an address that is not aligned, a number or a constant that was not met before goes through Triton."""
    kernel, same = Kernel(jit), {"x": torch.zeros(8)}
    launch(kernel, **same)
    launch(kernel, **{**same, **change})
    assert len(jit.compiled) == 2
    launch(kernel, **{**same, **change})
    assert [number for number, *_ in jit.ran] == [1]


def test_interpreter_is_asked_each_time() -> None:
    """Where nothing is compiled, as in Triton's interpreter, nothing is kept."""
    jit = Jit(interprets=True)
    kernel = Kernel(jit)
    for _ in range(2):
        launch(kernel, torch.zeros(8))
    assert (len(jit.compiled), jit.ran) == (2, [])
