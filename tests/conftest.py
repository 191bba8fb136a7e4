"""Fixtures that more than one test file uses."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from ranks import TESTS_PRELOAD, Ranks

from triweave.training.rank_server import start_server

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("triweave", deadline=None)
settings.load_profile("triweave")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton, and where a kernel, is first imported


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage: tests that collect need not look at all of it each time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """What forks all ranks, those of `run_ranks` too, which would start a barer one: it imports while tests begin."""
    start_server(TESTS_PRELOAD)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of gloo processes."""
    pool = Ranks()
    yield pool
    pool.close()
