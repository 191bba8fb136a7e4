"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from ranks import Ranks, start_server

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("triweave", deadline=None)
settings.load_profile("triweave")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton, and where a kernel, is first imported


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """What forks ranks: it imports while the first tests run."""
    start_server()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of gloo processes."""
    pool = Ranks()
    yield pool
    pool.close()
