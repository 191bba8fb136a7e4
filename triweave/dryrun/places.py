"""Where in a step the trainer is: the schedule's action, and the module whose forward or backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from triweave.dryrun.components import caller, component_of
from triweave.schedule.actions import Action
from triweave.training.engine import Engine

_KEY = "triweave module"


class Places:
    """Follows modules by hooks; autograd's nodes carry the path of the module that made them."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self.building = True
        self.path: list[str] = []
        self.launches: Callable[[], int] = lambda: 0
        self.launched: list[int] = []
        """Kernels before each action, and after the last one."""

    def __call__(self) -> tuple[str, str] | None:
        """Component of what is made now, and where that is; None for what takes nothing of the card."""
        file, function = caller()
        if (file, function) == ("offload.py", "_make"):
            return None  # memory of the host
        # What modules make before they get their weights are placeholders, which take nothing.
        if self.building and (file == "llama.py" or file.startswith("layers/")):
            return None
        node: Any = None if self.path else torch._C._current_autograd_node()
        module = self.path[-1] if self.path else "" if node is None else node.metadata.get(_KEY, "")
        component = component_of(file, module, in_autograd=node is not None)
        moment = self._outside(file, function) if self.action is None else str(self.action)
        return component, f"{moment} {module or file.removesuffix('.py')}" if self.action else moment

    def _outside(self, file: str, function: str) -> str:
        if self.building:
            return "building the model"
        return "optimizer step" if file == "training/optimizer.py" else f"after the pipeline, {function}"

    def begin(self, engine: Engine, launches: Callable[[], int]) -> None:
        """Follow the steps of an engine that is built; `launches` is asked at the beginning of every action."""
        self.building = False
        self.launches = launches
        engine.pipeline.before_action = self._enter
        for stage in engine.stages.values():
            for path, module in stage.named_modules():
                if path not in ("", "model", "model.layers"):
                    module.register_forward_pre_hook(lambda _, __, path=path: self.path.append(path))
                    module.register_forward_hook(self._leave)

    def _enter(self, action: Action | None) -> None:
        self.action = action
        # A block that runs again stops half way: modules that it was in are left without a word.
        self.path.clear()
        self.launched.append(self.launches())

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        path = self.path.pop()
        for node in _made_between(inputs, (output,) if isinstance(output, Tensor) else output):
            node.metadata.setdefault(_KEY, path)


def _made_between(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Iterator[Any]:
    """Autograd's nodes from a module's outputs back to its inputs."""
    ends = {x.grad_fn for x in inputs if isinstance(x, Tensor)}
    seen, waiting = set(), [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]
