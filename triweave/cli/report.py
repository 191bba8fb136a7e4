"""`triweave report`."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from triweave.cli.options import Json
from triweave.errors import InputError, Problem
from triweave.report.page import page
from triweave.report.read import read_run
from triweave.report.summary import summary


def report(run_dir: Path, /, *, out: Path | None = None, json: Json = False) -> int:
    """Write one HTML page of a run: plan against measurement, the pipeline in time, loss, memory, throughput.

    Works while the run is running and needs nothing but its folder. The page loads nothing from anywhere.

    Example: triweave report runs/llama70b --out llama70b.html

    Args:
        run_dir: The run's folder (`output_dir`).
        out: The page; left out, report.html in the folder.
        json: Print the numbers as one JSON document, and write no page unless --out says where.
    """
    record = read_run(run_dir)
    if json:
        print(json_module.dumps(summary(record)))
    if out is not None or not json:
        path = out or run_dir / "report.html"
        try:
            path.write_text(page(record), encoding="utf-8")
        except OSError as error:
            raise InputError(Problem("--out", path, f"cannot be written ({error.strerror})")) from None
        if not json:
            print(f"wrote {path}: {record.steps[-1]['step'] if record.steps else 0} steps")
    return 0
