"""The engines, by the words that `launch --to` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triweave.config.validate import ResolvedRun
from triweave.launch import kubernetes, megatron, ray, skypilot, slurm, torchrun
from triweave.launch.job import Settings


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to start a run."""

    files: Callable[[ResolvedRun, Settings], dict[str, str]]
    """Texts by file name."""
    command: Callable[[ResolvedRun, Settings, str], str]
    """What submits them, from the folder that they are in."""


ENGINES = {
    "torchrun": Engine(torchrun.files, torchrun.command),
    "slurm": Engine(slurm.files, slurm.command),
    "kubernetes": Engine(kubernetes.files, kubernetes.command),
    "skypilot": Engine(skypilot.files, skypilot.command),
    "ray": Engine(ray.files, ray.command),
    "megatron": Engine(megatron.files, megatron.command),
}
