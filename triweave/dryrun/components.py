"""What a tensor is for, told from where in the trainer it was made."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import triweave

PACKAGE = str(Path(triweave.__file__).parent)
_NOT_THE_TRAINER = ("dryrun/", "cli/")

WEIGHTS, MASTER_WEIGHTS, GRADIENTS, MOMENTS = "weights", "master weights", "gradients", "optimizer moments"
ACTIVATIONS, LOSS, MESSAGES, COLLECTIVES = "activations", "logits and loss", "message buffers", "collective buffers"
BATCH, WORKSPACE, GRAPHS, OTHER = "batch", "workspace", "CUDA graphs", "other"

CAPTURE = "capturing CUDA graphs"
"""The moment at which the pools of graphs grow."""

_OF_FILE = {
    "gradients.py": GRADIENTS,
    "pipeline.py": MESSAGES,
    "collectives.py": COLLECTIVES,
    "llama.py": ACTIVATIONS,
    "recompute.py": ACTIVATIONS,
    "graphs/replay.py": ACTIVATIONS,
    "offload.py": ACTIVATIONS,
    "layers/cross_entropy.py": LOSS,
    "kernels/cross_entropy.py": LOSS,
    "training/optimizer.py": MOMENTS,
    "training/step.py": OTHER,
    "": BATCH,
}


_OF_FOLDER = {
    "graphs": GRAPHS,
    "layers": ACTIVATIONS,
    "kernels": ACTIVATIONS,
    "sharding": GRADIENTS,
    "transport": COLLECTIVES,
}


def caller() -> tuple[str, str]:
    """The file of the trainer, relative to the package, that runs now, and its function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            file = path[len(PACKAGE) + 1 :].replace(os.sep, "/")
            if not file.startswith(_NOT_THE_TRAINER):
                return file, frame.f_code.co_name
        frame = frame.f_back
    return "", ""


def component_of(file: str, module: str, *, in_autograd: bool) -> str:
    """The component of what is made by `file` while `module` computes.

    Args:
        file: of the trainer, relative to the package.
        module: path of the module whose forward or backward runs; empty outside of modules.
        in_autograd: whether an operation's own backward runs, which no file of the trainer holds.
    """
    folder = file.partition("/")[0]
    found = _OF_FILE.get(file) or _OF_FOLDER.get(folder, OTHER)
    if module.startswith("lm_head") and found is ACTIVATIONS:
        return LOSS
    if file == "pipeline.py" and in_autograd:
        return ACTIVATIONS
    return found
