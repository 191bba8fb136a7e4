"""`triweave data`."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from triweave.cli.options import Json, Overrides, Whole


def data(
    run_file: Path,
    /,
    *overrides: Overrides,
    example: Whole = 0,
    json: Json = False,
) -> int:
    """Show what a run file's data becomes: counts, lengths, and which tokens of an example are trained.

    Example: triweave data run.yaml --example 3

    Args:
        run_file: The run file.
        overrides: Keys of the run file with new values.
        example: Number of the example to show.
        json: Print one JSON document.
    """
    from triweave.config.load import load_run
    from triweave.data.preview import preview, render
    from triweave.model_spec import spec_from_folder

    run = load_run(run_file, overrides)
    shown = preview(run, spec_from_folder(Path(run.model.path)), example=example)
    if json:
        print(json_module.dumps(shown.to_dict()))
        return 0
    from rich.console import Console

    render(shown, Console())
    return 0
