"""A daily pattern is believed where days agree, and only there."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.controller.forecast import DAY_S, SLOT_S, DailyPattern, SlotRecord


def day(pattern: DailyPattern, number: int, output: int = 1000, tokens: int = 5000) -> list[SlotRecord]:
    """One slot at noon: 400 requests of which half are that long and half a tenth of it."""
    noon = number * DAY_S + DAY_S / 2
    found = []
    for minute in range(16):
        lengths = (tokens, tokens // 10) * 13 if minute < 15 else ()
        done = pattern.add(lengths, 26 * output, 26, noon + minute * 60.0)
        found += [] if done is None else [done]
    return found


def test_two_days_that_agree_are_a_forecast_of_the_third() -> None:
    pattern = DailyPattern()
    records = day(pattern, 0) + day(pattern, 1)
    assert [record.requests for record in records] == [390, 390]
    expected = pattern.expect(2 * DAY_S + DAY_S / 2)
    assert expected is not None
    assert (expected.days, expected.output_tokens) == (2, pytest.approx(1000.0))
    assert expected.rate == pytest.approx(390 / SLOT_S)
    assert expected.lengths.above(1000) == pytest.approx(0.5)
    assert pattern.expect(2 * DAY_S + DAY_S / 2 + SLOT_S) is None


@pytest.mark.parametrize("other", [{"output": 2000}, {"tokens": 20_000}])
def test_days_that_differ_are_no_forecast(other: dict[str, int]) -> None:
    pattern = DailyPattern()
    day(pattern, 0)
    day(pattern, 1, **other)
    assert pattern.expect(2 * DAY_S + DAY_S / 2) is None


def test_one_day_is_no_pattern_and_a_day_is_no_forecast_of_itself() -> None:
    pattern = DailyPattern()
    day(pattern, 0)
    assert pattern.expect(DAY_S + DAY_S / 2) is None
    day(pattern, 1)
    assert pattern.expect(DAY_S + DAY_S / 2) is None


def test_records_that_were_kept_as_json_forecast_the_same() -> None:
    pattern = DailyPattern()
    records = day(pattern, 0) + day(pattern, 1)
    kept = msgspec.json.decode(msgspec.json.encode(records), type=tuple[SlotRecord, ...])
    assert kept == tuple(records)
    again = DailyPattern(kept).expect(2 * DAY_S + DAY_S / 2)
    assert again is not None
    assert again.rate == pytest.approx(390 / SLOT_S)


def test_a_slot_with_next_to_no_traffic_is_not_kept() -> None:
    pattern = DailyPattern()
    assert pattern.add((100,) * 5, 500, 5, 0.0) is None
    assert pattern.add((), 0, 0, SLOT_S) is None
