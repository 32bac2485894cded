"""Many long transfers against pools that hold one and a half of them: they queue, none fails, none is starved."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.stack import QUICKSTART_NODES
from kvcache.blocks import PageGeometry
from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRANSFERS = 20
PROMPT = 2048
TOKENS = 4
POOL_MIB = 2


def transfers_that_fit(directory: Path) -> float:
    config = json.loads((directory / "config.json").read_text())
    geometry = PageGeometry.of(layout_from_config(config, DType.FLOAT32))
    return (POOL_MIB << 20) / (geometry.page_bytes * geometry.pages_for(0, PROMPT - 1))


def test_twenty_transfers_all_end_well(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path / "llama")
    assert 1 < transfers_that_fit(directory) < 2
    prompts = [some_ids(PROMPT, seed=seed) for seed in range(TRANSFERS)]
    with running_stack(directory, tmp_path / "logs", pool_mib=POOL_MIB, nodes=QUICKSTART_NODES) as stack:
        with ThreadPoolExecutor(TRANSFERS) as senders:
            answers = list(senders.map(lambda prompt: stack.complete(prompt, TOKENS, hint="remote"), prompts))
        assert [answer.status_code for answer in answers] == [200] * TRANSFERS
        assert {answer.headers["x-prfaas-route"] for answer in answers} == {"remote:east"}
        plain = PlainModel(directory)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.json()["choices"][0]["token_ids"] == plain.speak(prompt, TOKENS).token_ids
        stack.await_idle()
