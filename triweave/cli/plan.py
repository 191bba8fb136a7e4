"""`triweave plan`."""

from __future__ import annotations

import gc
import json as json_module
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from triweave.cli.options import Json, Whole
from triweave.errors import InputError, Problem

if TYPE_CHECKING:
    from triweave.planner.search import Progress


def plan(
    *,
    model: str,
    cluster: str,
    seq: Whole,
    global_batch: Whole,
    layout: str | None = None,
    top: Whole = 3,
    json: Json = False,
    out: Path | None = None,
    svg: Path | None = None,
    profile: str | None = None,
    moments: Literal["float32", "bfloat16"] = "float32",
    tp_across_nodes: bool = False,
) -> int:
    """Rank every legal layout of a model on a cluster: memory of each stage, step time, MFU, and why.

    Exit code 1 when nothing fits, or when the layout given does not.

    Example: triweave plan --model meta-llama/Llama-3-70B --cluster 4x8xh100-80gb --seq 4096 --global-batch 128

    Args:
        model: A catalogue name, or a Hugging Face folder.
        cluster: NODESxGPUSxGPU, or a YAML file that describes your own.
        seq: Tokens of a sequence.
        global_batch: Sequences of an optimizer step.
        layout: Answer this layout only, fitting or not: tp=8,pp=4,... with the keys of a run file's layout.
        top: How many answers.
        json: Print one JSON document.
        out: Write a run file with the best layout that this version trains.
        svg: Draw the best layout: memory of each stage against the card, and the pipeline in time.
        profile: Machine profile to price with: a file, or the name of one that comes with the package (h200).
        moments: How AdamW's moments are stored, as `optimizer.moments` of a run file.
        tp_across_nodes: Consider tensor-parallel groups that leave their node.
    """
    from triweave.planner.answer import to_json, to_text
    from triweave.planner.ask import answer_for, make_request
    from triweave.planner.graphs import offer_graphs
    from triweave.planner.request import timeline_of
    from triweave.planner.search import search
    from triweave.planner.words import typed

    with typed():
        request = make_request(
            model, cluster, seq, global_batch, moments=moments, tp_across_nodes=tp_across_nodes, profile=profile
        )
        if layout is not None:
            found = answer_for(request, layout)
        else:
            with _uncollected(), _Shown() as progress:
                found = offer_graphs(request, search(request, top, progress))
    if json:
        print(json_module.dumps(to_json(request, found)))
    else:
        print("\n".join(to_text(request, found)))
    if svg is not None and found.candidates:
        from triweave.planner.picture import draw_answer

        best = found.candidates[0]
        _write(svg, "--svg", draw_answer(request, best, timeline_of(request, best.layout)))
    fits = bool(found.candidates) and found.candidates[0].fits
    if out is not None and fits:
        from triweave.planner.ask import run_file_text

        _write(out, "--out", run_file_text(request, found.candidates[0].layout))
        print(f"wrote {out}; next: triweave verify {out}", file=sys.stderr)
    return 0 if fits else 1


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(Problem(option, path, f"cannot be written ({error.strerror})")) from None


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: a search makes no cycles, and walking what it remembers takes a seventh of its time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class _Shown:
    """Shows on a terminal how far a search is, once it has taken a second; wipes it off at the end."""

    def __init__(self) -> None:
        self.next_s = time.monotonic() + 1.0
        self.shown = False

    def __enter__(self) -> Progress | None:
        return self.show if sys.stderr.isatty() else None

    def __exit__(self, *error: object) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, opened: int, found: int) -> None:
        """Write one line over the last one."""
        if time.monotonic() > self.next_s:
            self.shown, self.next_s = True, time.monotonic() + 0.2
            line = f"searching: {opened:,} parts of the space opened, {found} answers found"
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
