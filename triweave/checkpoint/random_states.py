"""The state of every random generator of a process, as JSON.

Nothing in a step draws from them: data order and first weights have generators of their own, and there is no dropout.
They are kept so that what a user adds draws on where it stopped.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """States of Python's generator, numpy's and torch's, and of the GPU's if `device` is one."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    states = {
        "python": [version, list(words), gauss],
        "numpy": {**numpy, "state": {"key": numpy["state"]["key"].tolist(), "pos": int(numpy["state"]["pos"])}},
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set every generator to where `random_states` found it.

    Raises:
        ValueError: these are no such states.
    """
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        numpy = states["numpy"]
        key = np.asarray(numpy["state"]["key"], dtype=np.uint32)
        np.random.set_state({**numpy, "state": {"key": key, "pos": int(numpy["state"]["pos"])}})
        torch.set_rng_state(_tensor(states["torch"]))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    except (KeyError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no states of random generators ({error})") from None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
