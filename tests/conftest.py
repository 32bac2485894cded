"""What all tests share: the real model's directory, where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GEMMA_VARIABLE = "PRFAAS_TEST_GEMMA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the real model's directory its tests are skipped, and say how to get it."""
    if os.environ.get(GEMMA_VARIABLE):
        return
    skip = pytest.mark.skip(reason=f"{GEMMA_VARIABLE} is not set; `python -m deploy.gemma` makes the directory")
    for item in items:
        if item.get_closest_marker("gemma"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def gemma_dir() -> Path:
    """The converted Gemma 3 270M."""
    return Path(os.environ[GEMMA_VARIABLE])
