"""The command line: a file a verb, read only when the verb is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownOptionError

from triweave import __version__
from triweave.errors import InputError, Problem, TriweaveError
from triweave.training.process import let_the_first_rank_speak

VERBS = {
    "demo": "Fine-tune a real checkpoint on a grid of processes of this machine, from nothing to an answer.",
    "train": "Train what a run file describes.",
    "verify": "Prove that a layout computes what one process computes.",
    "plan": "Rank every legal layout of a model on a cluster: memory of each stage, step time, MFU, and why.",
    "check": "Run the real step of any rank with no GPU: peak memory, by component, and where it peaks.",
    "probe": "Measure this machine, so that `plan` and `predict` speak of it.",
    "doctor": "Examine the machines of a job: GPUs, links, network, disks, versions; each fault with its cure.",
    "launch": "Write the files that start a run: torchrun, Slurm, Kubernetes, SkyPilot, Ray, Megatron-LM.",
    "report": "One HTML page of a run: plan against measurement, the pipeline in time, loss, memory, throughput.",
    "predict": "Predict runs that somebody else measured: step time, tokens per second and memory.",
    "convert": "Convert weights: Hugging Face folder, checkpoint of any layout, Megatron-Core's torch_dist.",
    "data": "Show what a run file's data becomes: counts, lengths, and which tokens are trained.",
    "schema": "Print the JSON schema of run files, for editors.",
}
"""One line each; the verb's own file holds the rest of its help."""

OF_A_RUN_FILE = ("train", "verify", "check", "launch", "data")
"""Verbs whose options may be followed by keys of the run file that they read."""


def make_app(chosen: str | None = None) -> App:
    """The application; only the chosen verb is imported, and its help is its own docstring."""
    app = App(
        name="triweave",
        version=__version__,
        help="Plan, prove and run 3D-parallel training of Llama-family models.",
        help_format="plaintext",
    )
    for verb, line in VERBS.items():
        app.command(f"triweave.cli.{verb}:{verb}", name=verb, help=None if verb == chosen else line)
    return app


def main(words: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 good, 1 the answer is no, 2 the input is wrong, 130 interrupted."""
    try:
        code = _run(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
        # The reader has gone (`| head`): the interpreter's own flush at the end must not complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(words: Sequence[str]) -> int:
    """Run one verb; what is wrong becomes one message on standard error. Returns the exit code."""
    try:
        if not words:
            raise InputError(Problem("verb", None, f"is missing: give {', '.join(VERBS)} or --help"))
        code = make_app(words[0])(words, result_action="return_value", exit_on_error=False, print_error=False)
    except CycloptsError as error:
        message, code = _complaint(error, words[0]), InputError.exit_code
    except TriweaveError as error:
        message, code = str(error), error.exit_code
    else:
        return code if isinstance(code, int) else 0
    let_the_first_rank_speak()
    print(f"error: {message}", file=sys.stderr)
    return code


def _complaint(error: CycloptsError, verb: str) -> str:
    """What is wrong with the words of the command line."""
    hint = ""
    if isinstance(error, UnknownOptionError) and verb in OF_A_RUN_FILE:
        hint = f" Keys of a run file come after it: triweave {verb} RUN_FILE --KEY VALUE"
    return f"{error}{hint}"
