"""Where vLLM and the real model are; without either, everything here is skipped and says how to get it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VLLM_VARIABLE = "PRFAAS_TEST_VLLM"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Needs the Python of vLLM's venv, and the model; every test may take minutes."""
    skip = pytest.mark.skip(
        reason=f"{VLLM_VARIABLE} is not set; `sh deploy/test.sh --engines` installs vLLM and sets it"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gemma)
            item.add_marker(pytest.mark.timeout(900))
            if not os.environ.get(VLLM_VARIABLE):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of a venv with vLLM."""
    return Path(os.environ[VLLM_VARIABLE])
