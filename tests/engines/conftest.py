"""Models that all engine tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import tiny_model

ModelMaker = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Directory of a tiny model by name: an architecture, with ``:window`` for gemma3_text where it matters."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            arch, _, window = name.partition(":")
            path = tmp_path_factory.mktemp(arch)
            made[name] = tiny_model(arch, path, window=int(window or 64))
        return made[name]

    return make
