"""Fixtures that more than one test file uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Ranks

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("triweave", deadline=None)
settings.load_profile("triweave")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of gloo processes."""
    pool = Ranks()
    yield pool
    pool.close()
