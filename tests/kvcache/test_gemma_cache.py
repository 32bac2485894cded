"""The real Gemma 3 270M: its layout. What the codecs make of its cache is in tests/node/test_bench_codec.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.fingerprint import fingerprint_of, layout_digest
from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from kvcache.presets import gemma3_270m

pytestmark = pytest.mark.gemma


def test_the_preset_is_the_layout_of_the_real_config(gemma_dir: Path) -> None:
    config = json.loads((gemma_dir / "config.json").read_text())
    assert layout_from_config(config, DType.BFLOAT16) == gemma3_270m()


def test_the_real_models_fingerprint_holds_the_presets_layout(gemma_dir: Path) -> None:
    assert fingerprint_of(gemma_dir, DType.BFLOAT16).layout == layout_digest(gemma3_270m())
