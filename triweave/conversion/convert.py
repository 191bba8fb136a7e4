"""Carries the weights of one folder into another, a band of rows at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from triweave.checkpoint.hugging_face_write import MAX_SHARD_BYTES, check_destination
from triweave.conversion.checkpoint_target import checkpoint_target
from triweave.conversion.kinds import Found, Kind, check_target, recognise, target_kind
from triweave.conversion.origin import Model, model_of
from triweave.conversion.sources import CheckpointSource, HuggingFaceSource, MegatronSource, Source
from triweave.conversion.targets import Target, hugging_face_target, megatron_target
from triweave.errors import InputError, Problem, RunFailed, closest
from triweave.model_spec import TensorSpec, read_hf_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BAND_BYTES = 2**25
"""Of the float32 rows that are in memory at once."""

Progress = Callable[[str, int, int], None]
"""Told the tensor that is being copied, the elements done and the elements of the whole model."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert."""

    source: Path
    target: Path
    to: str | None = None
    model: Path | None = None
    dtype: str | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    force: bool = False


@dataclass(frozen=True, slots=True)
class Converted:
    """What was done."""

    source: Found
    target: Path
    kind: Kind
    dtype: str
    tensors: int
    parameters: int
    read_bytes: int
    seconds: float
    rounded: int
    """Tensors of which some value had to be rounded to the type that was written."""
    dropped: tuple[str, ...]
    """What was not taken along, in words."""


def convert(request: Request, progress: Progress) -> Converted:
    """Convert, or refuse before anything is written.

    Raises:
        InputError: what is asked for cannot be, or the source is damaged.
        RunFailed: the disk refuses.
    """
    found = recognise(request.source, "SRC")
    kind = target_kind(found, request.target, request.to)
    check_target(found, request.target, force=request.force)
    begin = time.monotonic()
    with _told_as_source():
        model = model_of(found, request.model)
        source = _open(found, model)
    with closing(source):
        name = _dtype(request.dtype, kind, found, model, source)
        dtype = DTYPES[name]
        target_path = request.target.resolve()
        check_destination(target_path, model.spec.num_parameters * dtype.itemsize, replace=True)
        try:
            with _target(kind, request, target_path, model, dtype, source) as target:
                carried = _carry(model, source, target, dtype, progress)
        except OSError as error:
            raise RunFailed(f"cannot write {request.target}: {error.strerror}") from None
    return Converted(
        source=found,
        target=request.target,
        kind=kind,
        dtype=name,
        tensors=len(source.dtypes),
        parameters=model.spec.num_parameters,
        read_bytes=carried.read_bytes,
        seconds=time.monotonic() - begin,
        rounded=len(carried.rounded),
        dropped=source.dropped,
    )


def bands(tensor: TensorSpec) -> Iterator[tuple[int, int]]:
    """Rows of a tensor that are carried together."""
    row_bytes = 4 * tensor.numel // tensor.shape[0]
    step = max(1, BAND_BYTES // row_bytes)
    for start in range(0, tensor.shape[0], step):
        yield start, min(start + step, tensor.shape[0])


@dataclass(slots=True)
class _Carried:
    read_bytes: int = 0
    rounded: set[str] = field(default_factory=set)


def _carry(model: Model, source: Source, target: Target, dtype: torch.dtype, progress: Progress) -> _Carried:
    carried, done = _Carried(), 0
    for tensor in model.spec.tensors():
        for start, stop in bands(tensor):
            progress(tensor.name, done, model.spec.num_parameters)
            rows = source.read(tensor, start, stop)
            written = rows.to(dtype)
            if dtype == torch.float16:
                _check_range(tensor.name, rows, written)
            if tensor.name not in carried.rounded and _was_rounded(rows, written):
                carried.rounded.add(tensor.name)
            target.write(tensor, start, written)
            done += rows.numel()
            carried.read_bytes += rows.nbytes
    progress("", done, model.spec.num_parameters)
    return carried


def _check_range(name: str, rows: Tensor, written: Tensor) -> None:
    """Refuse to make infinities of numbers, which float16 alone does: the other types reach equally far."""
    beyond = written.isinf() & ~rows.isinf()
    if beyond.any():
        value, limit = rows[beyond].abs().max().item(), torch.finfo(written.dtype).max
        dtype = str(written.dtype).removeprefix("torch.")
        rule = f"ends at {limit:.6g}, and {name} holds {value:.6g}"
        raise InputError(Problem("--dtype", dtype, rule, "bfloat16"))


def _open(found: Found, model: Model) -> Source:
    openers: dict[Kind, Callable[[Path], Source]] = {
        "hf": lambda folder: HuggingFaceSource(folder, model.spec),
        "triweave": lambda folder: CheckpointSource(folder, model.spec),
        "megatron": lambda folder: MegatronSource(folder, model.spec),
    }
    return openers[found.kind](found.folder)


def _target(
    kind: Kind, request: Request, folder: Path, model: Model, dtype: torch.dtype, source: Source
) -> AbstractContextManager[Target]:
    if kind == "hf":
        return hugging_face_target(folder, model, dtype, request.max_shard_bytes, replace=request.force)
    if kind == "megatron":
        return megatron_target(folder, model, dtype, request.max_shard_bytes)
    # Its config.json goes on saying how the weights were stored, so that they come back so.
    return checkpoint_target(folder, model, DTYPES[_stored(source)], request.max_shard_bytes)


def _dtype(asked: str | None, kind: Kind, found: Found, model: Model, source: Source) -> str:
    """The type that is written.

    A checkpoint of triweave holds float32. Of a Hugging Face or Megatron source the widest stored type is kept; of a
    checkpoint, whose masters are float32 always, the type that config.json names.
    """
    if asked is not None and asked not in DTYPES:
        raise InputError(Problem("--dtype", asked, f"must be {', '.join(DTYPES)}", closest(asked, list(DTYPES))))
    if kind == "triweave":
        if asked not in (None, "float32"):
            raise InputError(Problem("--dtype", asked, "must be float32: a checkpoint holds master weights", "float32"))
        return "float32"
    if asked is not None:
        return asked
    if found.kind == "triweave":
        config = read_hf_config(model.folder)
        named = config.get("dtype") or config.get("torch_dtype")
        return named if named in DTYPES else "float32"
    return _stored(source)


def _stored(source: Source) -> str:
    """The type of all tensors; float32, which holds every other, where they differ."""
    stored = set(source.dtypes.values())
    return next((name for name, dtype in DTYPES.items() if stored == {dtype}), "float32")


def _was_rounded(rows: Tensor, written: Tensor) -> bool:
    holds_all = torch.promote_types(rows.dtype, written.dtype) == written.dtype
    return not holds_all and not torch.equal(written.to(rows.dtype), rows)


@contextmanager
def _told_as_source() -> Iterator[None]:
    """What is wrong with the source's files is told under the name that it has on the command line."""
    try:
        yield
    except InputError as error:
        keys = {"resume": "SRC", "model.path": "SRC"}
        raise InputError(replace(p, key=keys.get(p.key, p.key)) for p in error.problems) from None
