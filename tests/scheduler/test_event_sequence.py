"""Order of numbered batches: nothing is applied twice, out of turn or across a gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.event_sequence import EventSequence


def test_batches_in_order_are_handed_out_at_once() -> None:
    sequence = EventSequence[str]()
    assert [sequence.offer(n, str(n)) for n in range(3)] == [["0"], ["1"], ["2"]]
    assert (sequence.applied, sequence.missing) == (2, None)


def test_a_batch_after_a_gap_waits_until_the_gap_is_filled() -> None:
    sequence = EventSequence[str](applied=4)
    assert sequence.offer(7, "7") == []
    assert sequence.missing == 5
    assert sequence.offer(8, "8") == []
    assert sequence.offer(6, "6", live=False) == []
    assert sequence.offer(5, "5", live=False) == ["5", "6", "7", "8"]
    assert (sequence.applied, sequence.missing) == (8, None)


def test_a_batch_that_was_applied_is_dropped() -> None:
    sequence = EventSequence[str](applied=4)
    assert sequence.offer(4, "4", live=False) == []
    assert sequence.missing is None
    assert sequence.offer(5, "5") == ["5"]
    assert sequence.offer(5, "again", live=False) == []
    assert sequence.applied == 5


def test_a_source_that_counts_anew_is_noticed_and_a_replay_is_none() -> None:
    sequence = EventSequence[str]()
    sequence.offer(9, "9")
    assert sequence.went_back(0)
    assert sequence.went_back(9)
    assert not sequence.went_back(10)
    replayed = EventSequence[str](applied=4)
    replayed.offer(5, "5", live=False)
    assert not replayed.went_back(5)


def test_what_begins_by_clearing_needs_nothing_before_it() -> None:
    sequence = EventSequence[str](applied=4)
    sequence.offer(7, "7")
    sequence.offer(21, "21")
    assert sequence.offer(20, "20", resets=True) == ["20", "21"]
    assert (sequence.applied, sequence.missing) == (21, None)


def test_an_old_batch_does_not_reset() -> None:
    sequence = EventSequence[str](applied=4)
    assert sequence.offer(3, "3", live=False, resets=True) == []
    assert sequence.applied == 4


def test_giving_up_goes_on_with_what_came_up_to_the_next_gap() -> None:
    sequence = EventSequence[str](applied=4)
    for number in (7, 8, 10):
        sequence.offer(number, str(number))
    assert sequence.give_up() == ["7", "8"]
    assert sequence.missing == 9
    assert sequence.give_up() == ["10"]
    assert sequence.give_up() == []
    assert sequence.applied == 10


def test_too_many_waiting_are_said_and_the_oldest_goes() -> None:
    sequence = EventSequence[int](max_waiting=3)
    for number in (5, 6, 7):
        sequence.offer(number, number)
    assert not sequence.overflowed
    sequence.offer(8, 8)
    assert sequence.overflowed
    assert sequence.give_up() == [6, 7, 8]
    assert not sequence.overflowed


@given(st.permutations(range(8)))
def test_any_order_of_arrival_gives_one_order_of_application(order: list[int]) -> None:
    sequence = EventSequence[int]()
    given_out = [batch for number in order for batch in sequence.offer(number, number, live=False)]
    assert given_out == sorted(order)


def test_few_batches_that_are_large_are_too_many_to_wait_too() -> None:
    sequence = EventSequence[int](max_waiting_bytes=100)
    for number in (5, 6):
        sequence.offer(number, number, nbytes=50)
    sequence.offer(6, 6, nbytes=50)
    assert not sequence.overflowed
    sequence.offer(7, 7, nbytes=90)
    assert sequence.overflowed
    assert sequence.give_up() == [7]
    for number in range(8, 50):
        assert sequence.offer(number, number, nbytes=90) == [number]
    assert not sequence.overflowed
