"""`triweave convert`."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triweave.cli.options import Json

if TYPE_CHECKING:
    from triweave.conversion.convert import Converted, Progress


def convert(
    src: Path,
    dst: Path,
    /,
    *,
    to: str | None = None,
    model: Path | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
    json: Json = False,
) -> int:
    """Convert weights: Hugging Face folder, checkpoint of any layout, Megatron-Core's torch_dist.

    What SRC is, is seen from its files. Rows are carried over a few megabytes at a time, so memory does not grow with
    the model. DST appears when it is complete. Only weights are carried: a checkpoint that is made starts at step 0.

    Example: triweave convert runs/llama8b/checkpoints/step-200 exports/llama8b --dtype bfloat16

    Args:
        src: Hugging Face folder, step-N folder of a run, or Megatron checkpoint.
        dst: Folder to make.
        to: hf, triweave or megatron; left out, the name of DST tells (step-N), or it is hf.
        model: Folder with config.json, where SRC lies beside none.
        dtype: bfloat16, float16 or float32; left out, as stored (of a run's masters: as config.json says).
        max_shard_size: Largest weight file.
        force: Replace DST where it is one of the three already.
        json: Print one JSON document.
    """
    from triweave.conversion.sizes import read_size

    max_shard_bytes = read_size(max_shard_size, "--max-shard-size")

    from triweave.conversion.convert import Request
    from triweave.conversion.convert import convert as carry

    request = Request(src, dst, to, model, dtype, max_shard_bytes, force)
    with _progress() as progress:
        done = carry(request, progress)
    if json:
        print(json_module.dumps(_to_json(done)))
    else:
        print("\n".join(_to_text(done)))
    return 0


def _to_json(done: Converted) -> dict[str, Any]:
    return {
        "source": {"kind": done.source.kind, "path": str(done.source.root)},
        "target": {"kind": done.kind, "path": str(done.target)},
        "dtype": done.dtype,
        "tensors": done.tensors,
        "parameters": done.parameters,
        "read_bytes": done.read_bytes,
        "seconds": round(done.seconds, 3),
        "rounded": done.rounded,
        "dropped": list(done.dropped),
    }


def _to_text(done: Converted) -> Iterator[str]:
    from triweave.conversion.kinds import KIND_NAMES

    speed = done.read_bytes / 1e9 / max(done.seconds, 1e-9)
    yield f"read      {done.source.root}, {KIND_NAMES[done.source.kind]}"
    yield f"wrote     {done.target}, {KIND_NAMES[done.kind]}, in {done.dtype}"
    yield (
        f"weights   {done.tensors} tensors, {done.parameters / 1e6:,.1f} M parameters, in {done.seconds:.1f} s"
        f" ({speed:.2f} GB/s)"
    )
    if done.rounded:
        yield f"rounded   {done.rounded} tensors held values that {done.dtype} does not have"
    for what in done.dropped:
        yield f"dropped   {what}"


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on standard error where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1)
        yield lambda name, done, total: bar.update(task, description=name, completed=done / total)
