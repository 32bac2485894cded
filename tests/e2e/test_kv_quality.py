"""Processes and a throttled link: a request that allows it gets a lossy codec, one that does not gets every bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.stack import free_port
from kvcache.quality import Quality
from tests.faults.proxy import SlowProxy
from tests.models import tiny_model
from tests.stacks import RunningStack, node, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = 1500
TOKENS = 8
BYTES_PER_S = 300_000
"""Of one connection; the prompt's KV is over a megabyte."""


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A remote prefill node behind a slow link that has carried something, and a local one.

    They cache nothing: the same prompt is sent in whole again and again.
    """
    model: Path = tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param)
    port = free_port()
    proxy = SlowProxy(port, BYTES_PER_S)
    kv = ("--kv-port", str(port), "--kv-advertise", f"127.0.0.1:{proxy.port}")
    nodes = (
        node("east-prefill", "east", "prefill", *kv, "--no-prefix-cache"),
        node("local-prefill", "local", "prefill", "--no-prefix-cache"),
        node("local-decode", "local", "decode", "--no-prefix-cache"),
    )
    try:
        with running_stack(model, tmp_path_factory.mktemp("logs"), nodes=nodes, ready_s=90.0) as running:
            running.await_idle(60)
            for hint in ("remote", "local"):
                assert running.complete(some_ids(PROMPT, seed=9), 1, hint=hint).status_code == 200
            yield running
    finally:
        proxy.close()


def ask(stack: RunningStack, quality: str | None, hint: str) -> tuple[httpx.Response, dict[str, Any]]:
    """Answer and only attempt of the same prompt, by one way and at one quality."""
    headers = {"x-prfaas-route-hint": hint} | ({} if quality is None else {"x-prfaas-kv-quality": quality})
    answer = stack.http.post("/v1/completions", json=stack.body(some_ids(PROMPT), TOKENS), headers=headers)
    assert answer.status_code == 200, answer.text
    [attempt] = stack.record(answer)["attempts"]
    assert answer.headers["x-prfaas-kv-codec"] == attempt["codec"]
    return answer, attempt


def test_near_takes_a_lossy_codec_over_the_slow_link_and_still_answers(stack: RunningStack) -> None:
    answer, near = ask(stack, "near", "remote")
    assert near["cluster"] == "east"
    assert near["exactness"] == "near"
    assert len(answer.json()["choices"][0]["token_ids"]) == TOKENS
    _, exact = ask(stack, "exact", "remote")
    assert near["raw_bytes"] == exact["raw_bytes"]
    assert near["wire_bytes"] < 0.7 * exact["wire_bytes"]
    options = stack.record(answer)["decision"]["options"]
    [predicted] = [{codec["name"]: codec for codec in one["codecs"]} for one in options if one["cluster"] == "east"]
    allowed = [codec["predicted_ttft_s"] for codec in predicted.values() if codec["allowed"]]
    assert predicted[near["codec"]]["predicted_ttft_s"] == min(allowed) < predicted["lossless"]["predicted_ttft_s"]


@pytest.mark.parametrize("quality", [None, "exact"])
def test_exact_commits_the_same_bytes_whatever_the_link(stack: RunningStack, quality: str | None) -> None:
    remote, over_the_link = ask(stack, quality, "remote")
    local, at_home = ask(stack, quality, "local")
    for attempt in (over_the_link, at_home):
        assert attempt["exactness"] == "exact"
        assert attempt["codec"] in Quality.EXACT.codecs
    assert over_the_link["kv_digest"] == at_home["kv_digest"]
    assert remote.json()["choices"][0]["token_ids"] == local.json()["choices"][0]["token_ids"]


def test_nodes_tell_what_their_codecs_did(stack: RunningStack) -> None:
    _, exact = ask(stack, "exact", "remote")
    stack.await_idle()
    said = {work["codec"]: work for work in stack.nodes()["east-prefill"]["heartbeat"]["codecs"]}
    assert said[exact["codec"]]["encoded_bytes"] >= exact["raw_bytes"]
    assert said[exact["codec"]]["encode_s"] > 0
