"""`triweave plan`."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from triweave.cli.options import Json
from triweave.errors import InputError, Problem


def plan(
    *,
    model: str,
    cluster: str,
    seq: int,
    global_batch: int,
    layout: str | None = None,
    top: int = 3,
    json: Json = False,
    out: Path | None = None,
    svg: Path | None = None,
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
        out: Write a run file with the best layout.
        svg: Draw the best layout: memory of each stage against the card, and the pipeline in time.
        tp_across_nodes: Consider tensor-parallel groups that leave their node.
    """
    from triweave.planner.answer import to_json, to_text
    from triweave.planner.ask import given_layout, make_request, run_file_text
    from triweave.planner.request import price, timeline_of
    from triweave.planner.search import Plan, search

    request = make_request(model, cluster, seq, global_batch, tp_across_nodes=tp_across_nodes)
    if layout is not None:
        found = Plan((price(request, given_layout(request, layout)),), (), 1)
    else:
        found = search(request, top, _progress if sys.stderr.isatty() else None)
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
        _write(out, "--out", run_file_text(request, found.candidates[0].layout))
        print(f"wrote {out}; next: triweave verify {out}", file=sys.stderr)
    return 0 if fits else 1


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(Problem(option, path, f"cannot be written ({error.strerror})")) from None


def _progress(done: int, total: int) -> None:
    end = "\r\x1b[K" if done + 1 == total else f"\rpricing {done + 1} of {total}\x1b[K"
    print(end, end="", file=sys.stderr, flush=True)
