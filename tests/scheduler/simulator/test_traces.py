"""Traces in five formats. The samples are synthetic; the numbers in them mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.simulator.traces.formats import FORMATS
from scheduler.simulator.traffic import Traffic

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> Traffic:
    (path,) = SAMPLES.glob(f"{name}.*")
    with path.open() as file:
        return FORMATS[name](file)


@pytest.mark.parametrize(
    ("name", "requests", "block_tokens"),
    [("mooncake", 24, 512), ("bailian", 12, 16), ("azure", 10, 0), ("burstgpt", 8, 0), ("decisions", 6, 0)],
)
def test_every_request_of_a_trace_is_read_and_time_begins_at_the_first(
    name: str, requests: int, block_tokens: int
) -> None:
    found = sample(name)
    assert len(found) == requests
    assert found.arrival_s[0] == 0.0
    assert found.block_tokens == block_tokens
    assert all(len(blocks) >= 1 for blocks in found.blocks)


def test_milliseconds_seconds_and_dates_become_seconds() -> None:
    assert sample("mooncake").arrival_s[4] == 3.0
    assert sample("bailian").arrival_s[1] == pytest.approx(1.7)
    assert 1.0 < sample("azure").arrival_s[1] < 3.0
    assert sample("burstgpt").arrival_s[1] == 3.0
    assert sample("decisions").arrival_s[1] == pytest.approx(0.8)


def test_shared_prefixes_are_found_by_their_names() -> None:
    mooncake = sample("mooncake")
    assert mooncake.uncached_tokens()[1] == mooncake.prompt_tokens[1] - 1 - 512
    turns = sample("bailian")
    assert turns.uncached_tokens()[1] < turns.prompt_tokens[1] - 16


def test_a_request_that_failed_where_it_was_logged_is_left_out_of_burstgpt() -> None:
    assert sample("burstgpt").output_tokens.min() >= 1


def test_our_own_log_counts_what_was_cached_as_not_there_and_an_answer_that_never_came_as_one_token() -> None:
    found = sample("decisions")
    first, second = found.prompt_tokens[:2]
    again = FORMATS["decisions"](
        (SAMPLES / "decisions.jsonl").read_text().replace('"cached_tokens": 64', '"cached_tokens": 0').splitlines()
    )
    assert (again.prompt_tokens[0], again.prompt_tokens[1]) == (first, second + 64)
    assert found.output_tokens[4] == 1


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 5', "line 1"),
        ("mooncake", '{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": []}', "input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "hash_ids"),
        ("bailian", '\n{"input_length": 5, "output_length": 1, "hash_ids": []}', "line 2: timestamp"),
        ("azure", "TIMESTAMP,ContextTokens\n", "GeneratedTokens"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "yesterday"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,-5,3\n", "must be from 0"),
        ("decisions", '{"at": 1.0, "usage": null, "decision": {"facts": {}}}', "decision.facts.request"),
        ("decisions", '{"at": 1.0, "decision": {"facts": {"request": 3}}}', "decision.facts.request"),
        ("mooncake", "", "no requests"),
        ("mooncake", '{"timestamp": "nan", "input_length": 5, "output_length": 1, "hash_ids": []}', "timestamp"),
        ("mooncake", '{"timestamp": 0, "input_length": 1.5, "output_length": 1, "hash_ids": []}', "input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": true, "output_length": 1, "hash_ids": []}', "input_length"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 10000000000, "output_length": 1, "hash_ids": []}',
            "from 0 to",
        ),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [true]}', "hash_ids"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\ninf,5,3\n", "line 2: Timestamp"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "x" * 200_000 + ",1,1\n", "line 2: field larger"),
        ("azure", "ContextTokens,GeneratedTokens,TIMESTAMP\n1,1\n", "date and time is missing"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n0,5,3\n1e15,5,3\n", "traffic: it lasts"),
    ],
)
def test_a_line_that_is_not_of_the_format_is_named(name: str, text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        FORMATS[name](text.splitlines())
