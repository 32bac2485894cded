"""The real Gemma 3 270M: its layout, and what the lossless codec makes of its cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.fingerprint import fingerprint_of, layout_digest
from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from kvcache.presets import gemma3_270m
from tests.bench.codecs import cache_in_pool, measure

pytestmark = pytest.mark.gemma


def test_the_preset_is_the_layout_of_the_real_config(gemma_dir: Path) -> None:
    config = json.loads((gemma_dir / "config.json").read_text())
    assert layout_from_config(config, DType.BFLOAT16) == gemma3_270m()


def test_the_real_models_fingerprint_holds_the_presets_layout(gemma_dir: Path) -> None:
    assert fingerprint_of(gemma_dir, DType.BFLOAT16).layout == layout_digest(gemma3_270m())


def test_lossless_saves_at_least_30_percent_of_a_real_cache_and_not_a_bit_is_lost(gemma_dir: Path) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    with cache_in_pool(gemma_dir, text, 1000) as (pool, table, plan):
        assert plan.nbytes == gemma3_270m().s_kv(1000)
        assert measure("lossless", pool, table, plan, passes=1)["ratio"] >= 1.43
