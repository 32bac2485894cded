"""A gateway in front of engines that answer whole requests, with no model and no nodes of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gateway.config import ConfigError, GatewayConfig
from gateway.fleet.listing import listed
from gateway.model import ServedModel, no_model
from kvcache.control import ModelInfo
from kvcache.fingerprint import Fingerprint
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.relay.backend import Backend, backend, engines_file, says, whole

ANSWER = whole(b'{"object": "text_completion", "choices": [{"index": 0, "text": "well"}]}')


@pytest.fixture
def model() -> ServedModel:
    return no_model()


@pytest.fixture
async def engine() -> AsyncIterator[Backend]:
    async with backend(says(ANSWER)) as one:
        yield one


@pytest.fixture
def config(tmp_path: Path, engine: Backend) -> GatewayConfig:
    return GatewayConfig(None, "", port=0, canary_s=0, engines_file=engines_file(tmp_path, engine))


@pytest.fixture
async def one(stage: Open) -> Stage:
    opened = await stage()
    await opened.until(lambda: all(engine.trouble is None for engine in opened.gateway.fleet.engines))
    return opened


async def test_it_is_ready_and_its_engines_answer(one: Stage) -> None:
    assert (await one.client.get("/ready")).status_code == 200
    answer = await one.client.post("/v1/completions", json={"model": "m", "prompt": "hello", "max_tokens": 4})
    assert answer.json()["choices"][0]["text"] == "well"


@pytest.mark.parametrize("name", ["", "tiny"])
async def test_no_request_can_mean_a_model_of_its_own(one: Stage, name: str) -> None:
    for path, body in (
        ("/v1/completions", {"model": name, "prompt": "hello"}),
        ("/tokenize", {"model": name, "prompt": "hello"}),
    ):
        answer = await one.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), path
    assert (await one.client.post("/tokenize", json={"prompt": "hello"})).status_code == 404


async def test_what_it_shows_has_the_engines_models_alone(one: Stage) -> None:
    assert [each["id"] for each in (await one.client.get("/v1/models")).json()["data"]] == ["m"]
    assert (await one.client.get("/v1/status")).json()["model"] is None
    assert (await one.client.get("/v1/overview")).json()["model"] is None


async def test_nodes_may_not_join_and_are_told_why(one: Stage, info: ModelInfo) -> None:
    theirs = msgspec.structs.replace(info, fingerprint=Fingerprint("w", "t", "l", "bfloat16").parts())
    for model in (info, theirs):
        node = await one.node("d", Role.DECODE, model=model)
        assert node.refused is not None
        assert (node.refused.field, "--model" in node.refused.reason) == ("model", True)


def test_engines_for_which_prompts_are_tokenised_need_one(config: GatewayConfig, tmp_path: Path) -> None:
    file = tmp_path / "split.toml"
    file.write_text('[[engine]]\nurl = "http://127.0.0.1:1"\nmodel = "m"\ndialect = "vllm-nixl-pull"\nname = "a"')
    with pytest.raises(ConfigError, match="--model: missing; a in --engines is of dialect vllm-nixl-pull"):
        listed(replace(config, engines_file=file))


def test_without_engines_there_must_be_a_model() -> None:
    with pytest.raises(ConfigError, match="--model: missing"):
        GatewayConfig(None, "")
