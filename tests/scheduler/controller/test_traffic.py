"""What is believed of outputs and inputs, and the account that it rests on."""

from __future__ import annotations

import pytest

from scheduler.controller.ledger import Ledger
from scheduler.controller.observation import Kind, LocalNode, Observation, Spoken, Stage
from scheduler.controller.traffic import Traffic
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE

KIND = Kind("h20", H20, H20_DECODE)


def observed(lengths: tuple[int, ...] = (), spoken: tuple[Spoken, ...] = ()) -> Observation:
    return Observation((), (KIND,), (), CASE_STUDY_KV, 1000.0, lengths, spoken)


def test_a_node_of_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'n0' is of kind 'b200'"):
        Observation((LocalNode("n0", "b200", Stage.DECODE),), (KIND,), (), CASE_STUDY_KV, 0.0)


def test_the_mean_output_is_tokens_over_ends_and_its_bounds_enclose_it() -> None:
    traffic = Traffic(1000, 10)
    for step in range(20):
        traffic.observe(observed((500,) * 10, (Spoken(step * 10.0 - 10.0, 10_000, 10),)), step * 10.0)
    outlook = traffic.outlook(2.0)
    assert outlook is not None
    assert outlook.output_tokens == pytest.approx(1000.0)
    assert 700 < outlook.output_low < 1000 < outlook.output_high < 1400
    assert outlook.rate == pytest.approx(1.0)
    assert (outlook.requests, outlook.completions) == (200, 200)


def test_requests_with_nothing_to_prefill_count_as_output_of_those_that_have() -> None:
    traffic = Traffic(1000, 10)
    for step in range(10):
        traffic.observe(observed((500, 0), (Spoken(step * 10.0 - 10.0, 2000, 10),)), step * 10.0)
    outlook = traffic.outlook(2.0)
    assert outlook is not None
    assert outlook.output_tokens == pytest.approx(400.0)
    assert outlook.requests == 10


def test_nothing_is_believed_before_enough_has_ended() -> None:
    traffic = Traffic(1000, 10)
    for step in range(5):
        traffic.observe(observed((500,) * 20, (Spoken(step * 10.0 - 10.0, 50_000, 3),)), step * 10.0)
    assert traffic.outlook(2.0) is None


def test_answers_of_before_a_change_no_longer_count() -> None:
    traffic = Traffic(4000, 10)
    for step in range(60):
        traffic.observe(observed((500,) * 10, (Spoken(step * 10.0 - 10.0, 80_000, 10),)), step * 10.0)
    # outputs fall from 8000 to 100: old answers, begun before, go on beside the new ones
    said = []
    for step in range(60, 90):
        spoken = (Spoken(400.0, 40_000, 5), Spoken(step * 10.0 - 10.0, 1000, 10))
        said += traffic.observe(observed((500,) * 10, spoken), step * 10.0)
    assert said == ["output lengths have changed"]
    outlook = traffic.outlook(2.0)
    assert outlook is not None
    assert outlook.output_tokens == pytest.approx(100.0)


def test_after_a_change_the_mean_stays_within_what_few_ends_allow() -> None:
    traffic = Traffic(4000, 10)
    for step in range(60):
        traffic.observe(observed((500,) * 10, (Spoken(step * 10.0 - 10.0, 10_000, 10),)), step * 10.0)
    before = traffic.outlook(2.0)
    assert before is not None
    assert before.output_tokens == pytest.approx(1000.0)
    for step in range(60, 66):
        traffic.observe(observed((500,) * 10, (Spoken(step * 10.0 - 10.0, 20_000, 0),)), step * 10.0)
    outlook = traffic.outlook(2.0)
    assert outlook is not None
    assert outlook.output_tokens == outlook.output_low > 5000
    assert outlook.output_high == float("inf")


def test_the_windows_are_bounded() -> None:
    traffic = Traffic(100, 10)
    for step in range(100):
        traffic.observe(observed((500,) * 10, (Spoken(step * 10.0 - 10.0, 10_000, 10),)), step * 10.0)
    outlook = traffic.outlook(2.0)
    assert outlook is not None
    assert outlook.requests <= 110
    assert outlook.completions <= 110


def test_a_ledger_groups_answers_by_when_they_began_and_forgets_what_it_gave() -> None:
    ledger = Ledger()
    ledger.spoke("a", 3, 12.0)
    ledger.spoke("b", 4, 19.0)
    ledger.spoke("c", 5, 21.0)
    ledger.ended("a")
    assert ledger.take() == (Spoken(10.0, 7, 1), Spoken(20.0, 5, 0))
    ledger.spoke("b", 1, 40.0)
    ledger.ended("b", whole=False)
    ledger.ended("nobody")
    assert ledger.take() == (Spoken(10.0, 1, 0),)
    assert ledger.take() == ()
