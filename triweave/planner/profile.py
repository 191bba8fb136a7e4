"""A machine profile: what was measured of one kind of GPU and its links, as a file that `plan` and `predict` read.

A profile holds measurements and says nothing of how they combine; `profile_machine` makes a `Machine` of it. Times
are in seconds, sizes in bytes, each a median of repeated runs on random data. YAML or JSON, read strictly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Literal

from triweave.cluster import CATALOGUE, nearest_gpu
from triweave.errors import InputError, Problem

VERSION = 1

Point = tuple[int, float]
"""`[bytes, seconds]`."""
MatmulPoint = tuple[int, int, int, float]
"""`[m, n, k, seconds]` of `[m, k] x [k, n]`."""
AttentionPoint = tuple[int, int, int, int, int, float, float]
"""`[batch, seq, heads, kv_heads, head_dim, forward seconds, backward seconds]`, causal, bf16."""

AttentionKernel = Literal["cudnn", "flash2", "flash3"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Span = Literal["node", "cluster"]
"""Whether all ranks sit in one node, or each in a node of its own."""


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """One attention kernel."""

    kernel: AttentionKernel
    points: tuple[AttentionPoint, ...]


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """One collective over a group of some size; bytes are those of the whole tensor."""

    kind: Collective
    ranks: int
    span: Span
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """One message from a rank to another."""

    span: Span
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of GPU, as it was measured."""

    version: Literal[1]
    gpu: str
    """Its name in the cluster catalogue."""
    torch: str
    """Version of PyTorch, with its CUDA."""
    date: str
    source: str
    """Who measured it, how, and on what."""
    matmul: tuple[MatmulPoint, ...] = ()
    """Products in bf16, through a linear layer."""
    matmul_fp8: tuple[MatmulPoint, ...] = ()
    attention: tuple[AttentionTable, ...] = ()
    memory: tuple[Point, ...] = ()
    """Operations bound by memory bandwidth, by the bytes that they read and write."""
    host_copy: tuple[Point, ...] = ()
    """Copies between pinned host memory and the GPU, one way."""
    collectives: tuple[CollectiveCurve, ...] = ()
    point_to_point: tuple[LinkCurve, ...] = ()
    overlap_slowdown: float | None = None
    """How much longer computation takes while a collective runs beside it, as a share."""
    launch_s: float | None = None
    """What the host needs to launch one kernel."""


def read_profile(path: Path) -> Profile:
    """Read a profile strictly.

    Raises:
        InputError: no such file, an unknown key, a value of another kind, another version, or a table that cannot have
            been measured; every problem at once, with file and line where it has one.
    """
    from triweave.config.load import load  # Only who has a profile waits for what reads files.

    profile = load(Profile, path)
    problems = list(profile_problems(profile))
    if problems:
        raise InputError(Problem(one.key, one.value, one.rule, one.nearest, str(path)) for one in problems)
    return profile


def profile_problems(profile: Profile) -> Iterator[Problem]:
    """What no measurement can have given: a GPU that is not in the catalogue, times or sizes that are not positive."""
    if profile.gpu not in CATALOGUE:
        rule = f"is not one of {', '.join(CATALOGUE)}"
        yield Problem("gpu", profile.gpu, rule, nearest_gpu(profile.gpu))
    for name, points in _tables(profile):
        for number, point in enumerate(points):
            if min(point) <= 0:
                yield Problem(f"{name}[{number}]", _listed(point), "must hold sizes and seconds above 0")
    for name, curve in _curves(profile):
        sizes = [size for size, _ in curve]
        if not sizes:
            yield Problem(name, "[]", "must hold at least 1 point, and holds 0")
        if any(after <= before for before, after in pairwise(sizes)):
            yield Problem(name, _listed(sizes), "must go from smaller to larger sizes", _listed(sorted(set(sizes))))
    for number, collective in enumerate(profile.collectives):
        if collective.ranks < 2:
            yield Problem(f"collectives[{number}].ranks", collective.ranks, "must be at least 2", "2")
    for name in ("overlap_slowdown", "launch_s"):
        value = getattr(profile, name)
        if value is not None and value < 0:
            yield Problem(name, value, "must be at least 0", "0.0")


def _tables(profile: Profile) -> Iterator[tuple[str, Sequence[Sequence[float]]]]:
    yield "matmul", profile.matmul
    yield "matmul_fp8", profile.matmul_fp8
    yield from ((f"attention[{i}].points", table.points) for i, table in enumerate(profile.attention))
    yield from _curves(profile)


def _curves(profile: Profile) -> Iterator[tuple[str, Sequence[Point]]]:
    if profile.memory:
        yield "memory", profile.memory
    if profile.host_copy:
        yield "host_copy", profile.host_copy
    yield from ((f"collectives[{i}].points", curve.points) for i, curve in enumerate(profile.collectives))
    yield from ((f"point_to_point[{i}].points", curve.points) for i, curve in enumerate(profile.point_to_point))


def profile_text(profile: Profile) -> str:
    """The YAML file of a profile; `read_profile` gives the same one back."""
    lines: list[str] = []
    for field in fields(profile):
        value = getattr(profile, field.name)
        if value is None or value == ():
            continue
        if not isinstance(value, tuple):
            lines.append(f"{field.name}: {_scalar(value)}")
            continue
        lines.append(f"{field.name}:")
        for item in value:
            if isinstance(item, tuple):
                lines.append(f"  - {_listed(item)}")
                continue
            first, *rest = (part.name for part in fields(item) if part.name != "points")
            lines.append(f"  - {first}: {getattr(item, first)}")
            lines += [f"    {name}: {getattr(item, name)}" for name in rest]
            lines.append("    points:")
            lines += [f"      - {_listed(point)}" for point in item.points]
    return "\n".join([*lines, ""])


def _scalar(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _listed(point: Sequence[float]) -> str:
    return f"[{', '.join(map(repr, point))}]"
