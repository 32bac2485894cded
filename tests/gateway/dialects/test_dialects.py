"""What each dialect asks of both engines, to the field, and what it makes of prefill's answer."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.fields import join_usage
from gateway.dialects.protocol import Handoff, NoHandoff, Pair, Side
from gateway.dialects.table import SPLIT
from gateway.fleet.config import DialectName, EngineConfig, EngineRole

CLIENT = {
    "model": "m",
    "prompt": "hello",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "min_tokens": 5,
    "stop": ["x"],
    "stop_token_ids": [7],
    "logprobs": 2,
    "new_field": {"kept": True},
}
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2], []],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "pp_size": 1,
    "transfer_mode": "pull",
}


def pair(name: str, body: dict[str, Any] = CLIENT, ranks: int = 1, rank: int | None = None) -> Pair:
    dialect = DialectName(name)
    there = EngineConfig(
        "http://10.0.0.7:8000", "p", "m", EngineRole.PREFILL, dialect, ranks=ranks, bootstrap="10.0.0.7:8998"
    )
    here = EngineConfig("http://10.0.0.8:8000", "d", "m", EngineRole.DECODE, dialect)
    return Pair("id.1", "/v1/completions", body, Side(there, rank, "engine-of-rank"), Side(here), room=1000)


@pytest.mark.parametrize("name", ["vllm-nixl-pull", "vllm-nixl-push", "vllm-mooncake"])
def test_prefill_of_vllm_computes_one_token_whatever_it_is(name: str) -> None:
    body = SPLIT[DialectName(name)].prefill(pair(name)).body
    params = body.pop("kv_transfer_params")
    assert body == {
        "model": "m",
        "prompt": "hello",
        "stream": False,
        "max_tokens": 1,
        "ignore_eos": True,
        "new_field": {"kept": True},
    }
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)


def test_prefill_bounds_the_newer_field_only_where_the_client_has_it() -> None:
    dialect = SPLIT[DialectName.VLLM_NIXL_PULL]
    asked = dialect.prefill(pair("vllm-nixl-pull", CLIENT | {"max_completion_tokens": 9})).body
    assert (asked["max_completion_tokens"], asked["max_tokens"]) == (1, 1)


@pytest.mark.parametrize("name", ["vllm-nixl-pull", "vllm-nixl-push", "vllm-mooncake", "sglang"])
def test_decode_is_asked_what_the_client_asked(name: str) -> None:
    dialect = SPLIT[DialectName(name)]
    handoff = None if dialect.concurrent else Handoff(PARAMS)
    body = dialect.decode(pair(name), handoff).body
    assert {field: body[field] for field in CLIENT} == CLIENT


def test_pull_hands_on_all_of_it_and_push_all_but_the_blocks() -> None:
    pulled = SPLIT[DialectName.VLLM_NIXL_PULL].decode(pair("vllm-nixl-pull"), Handoff(PARAMS)).body
    pushed = SPLIT[DialectName.VLLM_NIXL_PUSH].decode(pair("vllm-nixl-push"), Handoff(PARAMS)).body
    assert pulled["kv_transfer_params"] == PARAMS
    assert pushed["kv_transfer_params"] == {k: v for k, v in PARAMS.items() if k != "remote_block_ids"}


def test_nixl_prefill_is_told_of_no_peer() -> None:
    params = SPLIT[DialectName.VLLM_NIXL_PULL].prefill(pair("vllm-nixl-pull")).body["kv_transfer_params"]
    assert params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


@pytest.mark.parametrize(
    ("answer", "cause", "faulty"),
    [
        ({"choices": [{"finish_reason": "length"}]}, "no_kv_transfer_params", True),
        ({"choices": [{"finish_reason": "stop"}], "kv_transfer_params": None}, "first_token_ended", False),
        ({"kv_transfer_params": PARAMS | {"remote_block_ids": [[], []]}}, "no_blocks", True),
        ({"kv_transfer_params": PARAMS | {"tp_size": None}}, "kv_transfer_params_incomplete", True),
        ({"kv_transfer_params": PARAMS | {"do_remote_prefill": False}}, "kv_transfer_params_incomplete", True),
        ({"kv_transfer_params": PARAMS | {"transfer_mode": "push"}}, "other_transfer_mode", True),
    ],
)
def test_what_cannot_be_gone_on_from_is_never_handed_on(answer: dict[str, Any], cause: str, faulty: bool) -> None:
    with pytest.raises(NoHandoff, match=cause) as caught:
        SPLIT[DialectName.VLLM_NIXL_PULL].handoff(pair("vllm-nixl-pull"), answer)
    assert caught.value.faulty is faulty


def test_a_handoff_tells_what_prefill_had_cached() -> None:
    dialect, which = SPLIT[DialectName.VLLM_NIXL_PULL], pair("vllm-nixl-pull")
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    assert dialect.handoff(which, {"kv_transfer_params": PARAMS, "usage": usage}).cached_tokens == 4
    named = PARAMS | {"remote_prefill_cached_tokens": 6}
    assert dialect.handoff(which, {"kv_transfer_params": named, "usage": usage}).cached_tokens == 6
    assert dialect.handoff(which, {"kv_transfer_params": PARAMS}).cached_tokens is None


def test_both_sides_of_mooncake_name_one_transfer() -> None:
    dialect, which = SPLIT[DialectName.VLLM_MOONCAKE], pair("vllm-mooncake", ranks=2, rank=1)
    prefill, decode = dialect.prefill(which), dialect.decode(which, None)
    assert prefill.body["kv_transfer_params"]["transfer_id"] == "xfer-id.1"
    assert prefill.headers == ((b"x-data-parallel-rank", b"1"),)
    assert decode.body["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://10.0.0.7:8998",
        "remote_engine_id": "engine-of-rank",
        "transfer_id": "xfer-id.1",
    }


@pytest.mark.parametrize("reasons", [[], ["stop"], ["length", "abort"]])
def test_mooncake_sends_only_what_ended_by_its_length(reasons: list[str]) -> None:
    answer = {"choices": [{"finish_reason": reason} for reason in reasons]}
    with pytest.raises(NoHandoff):
        SPLIT[DialectName.VLLM_MOONCAKE].handoff(pair("vllm-mooncake"), answer)


def test_sglang_has_one_room_for_one_prompt_and_one_each_for_a_batch() -> None:
    dialect = SPLIT[DialectName.SGLANG]
    single = dialect.prefill(pair("sglang")).body
    assert (single["bootstrap_host"], single["bootstrap_port"], single["bootstrap_room"]) == ("10.0.0.7", 8998, 1000)
    assert (single["rid"], single["stream"], "stream_options" in single) == ("id.1", False, False)
    batch = dialect.decode(pair("sglang", CLIENT | {"prompt": ["a", "b", "c"]}), None).body
    assert batch["bootstrap_host"] == ["10.0.0.7"] * 3
    assert batch["bootstrap_port"] == [8998] * 3
    assert batch["bootstrap_room"] == [1000, 1001, 1002]
    assert batch["rid"] == ["id.1-0", "id.1-1", "id.1-2"]


def test_a_room_of_sglang_leads_to_the_rank_that_was_chosen() -> None:
    dialect, which = SPLIT[DialectName.SGLANG], pair("sglang", CLIENT | {"prompt": ["a", "b"]}, ranks=3, rank=2)
    prefill, decode = dialect.prefill(which).body, dialect.decode(which, None).body
    assert [room % 3 for room in prefill["bootstrap_room"]] == [2, 2]
    assert (prefill["routed_dp_rank"], decode["disagg_prefill_dp_rank"]) == (2, 2)


def test_letting_go_is_a_request_that_decode_refuses_with_the_same_kv_in_it() -> None:
    ((side, ask),) = SPLIT[DialectName.VLLM_NIXL_PULL].let_go(pair("vllm-nixl-pull"), Handoff(PARAMS))
    assert side.engine.name == "d"
    assert ask.body["kv_transfer_params"] == PARAMS
    assert ask.body["model"] != "m"
    assert SPLIT[DialectName.VLLM_NIXL_PULL].let_go(pair("vllm-nixl-pull"), None) == ()
    said = SPLIT[DialectName.SGLANG].let_go(pair("sglang"), None)
    assert [(side.engine.name, ask.path, ask.body) for side, ask in said] == [
        ("p", "/abort_request", {"rid": "id.1"}),
        ("d", "/abort_request", {"rid": "id.1"}),
    ]


@pytest.mark.parametrize(
    ("told", "known", "becomes"),
    [
        ({"cached_tokens": 9}, 4, {"cached_tokens": 4}),
        ({"cached_tokens": 9, "audio_tokens": 0}, None, {"audio_tokens": 0}),
        ({"cached_tokens": 9}, 400, {"cached_tokens": 10}),
        (None, 4, None),
    ],
)
def test_only_what_prefill_had_cached_counts_as_cached(told: Any, known: int | None, becomes: Any) -> None:
    payload = {"usage": {"prompt_tokens": 10, "prompt_tokens_details": told}}
    join_usage(payload, Handoff(cached_tokens=known))
    assert payload["usage"]["prompt_tokens_details"] == becomes
