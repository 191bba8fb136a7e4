"""`triweave predict`."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from triweave.cli.options import Json


def predict(rows: Path, *, profile: str | None = None, json: Json = False) -> int:
    """Predict runs that somebody else measured: step time, tokens per second and memory.

    Each row of the CSV file is a run. The measured columns are never read to predict; where a row has them, the signed
    errors and their summary follow.

    Example: triweave predict published_runs.csv --json

    Args:
        rows: CSV file with a run a row (docs/planner.md lists the columns).
        profile: Machine profile for the rows of its GPU: a file, or the name of one that comes with the package (h200).
        json: Print one JSON document.
    """
    from triweave.planner.predict import errors_of, predict_row, read_rows, summary
    from triweave.planner.profile_machine import profile_of
    from triweave.planner.words import typed

    with typed():
        measured = profile_of(profile) if profile is not None else None
    answers = []
    errors = []
    for row in read_rows(rows):
        answer = predict_row(row, measured)
        errors.append(errors_of(row, answer))
        answers.append({"source": row["source"], "model": row["model"], **answer, "errors": errors[-1]})
    told = summary(errors)
    if json:
        print(json_module.dumps({"rows": answers, "summary": told}))
        return 0
    for name, figures in told.items():
        print(f"{name:22}", ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    unpredicted = [answer for answer in answers if "unpredicted" in answer]
    print(f"{len(answers)} rows, {len(unpredicted)} of them not or only partly predicted")
    return 0
