"""A node that does nothing is told from one that is slow, one that was not heard, and one that has no work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.progress import LEAST_S, Progress
from tests.calm import calm

CHUNK_S = 0.1


def stuck_at(progress: Progress, start: float, until: float, step: float = 0.5) -> float | None:
    """When it counts as stuck, heard twice a second."""
    at = start
    while at <= until:
        if progress.stuck(at):
            return at
        at += step
    return None


def test_a_node_that_says_nothing_of_its_job_is_stuck_after_four_times_what_was_predicted_or_five_seconds() -> None:
    for expected, after in ((0.1, LEAST_S), (1.0, LEAST_S), (3.0, 12.0)):
        progress = Progress()
        progress.begin("a", expected, CHUNK_S, now=100.0)
        assert stuck_at(progress, 100.0, 200.0) == 100.0 + after


def test_longer_jobs_that_come_behind_it_do_not_put_that_off() -> None:
    progress = Progress()
    for number in range(8):
        progress.begin(str(number), 1.0 + number, CHUNK_S, now=number * 0.3)
    assert stuck_at(progress, 0.0, 60.0) == LEAST_S


def test_nor_does_calling_some_of_those_back_that_were_there() -> None:
    progress = Progress()
    for number in range(4):
        progress.begin(str(number), 1.0, CHUNK_S, now=0.0)
    progress.moved(0.0)
    for number in range(4, 8):
        progress.begin(str(number), 30.0, CHUNK_S, now=1.0)
    for number in range(3):
        progress.end(str(number), now=3.0 + number * 0.3)
    assert stuck_at(progress, 3.0, 60.0) == LEAST_S


def test_once_they_are_all_called_back_the_next_may_be_a_long_one() -> None:
    for alone in (True, False):
        progress = Progress()
        progress.begin("short", 0.1, CHUNK_S, now=0.0)
        if alone:
            progress.end("short", now=1.0)
        progress.begin("long", 30.0, CHUNK_S, now=1.0)
        progress.end("short", now=1.0)
        assert stuck_at(progress, 1.0, 200.0) == 4 * 30.0


def test_silence_adds_up_over_jobs_that_come_one_at_a_time() -> None:
    progress = Progress()
    progress.begin("a", 1.0, CHUNK_S, now=0.0)
    progress.end("a", now=3.0)  # late
    assert not progress.stuck(50.0), "it has nothing to do"
    progress.begin("b", 1.0, CHUNK_S, now=50.0)
    assert stuck_at(progress, 50.0, 60.0) == 52.0


def test_any_word_of_a_job_is_a_sign() -> None:
    progress = Progress()
    progress.begin("a", 1.0, CHUNK_S, now=0.0)
    progress.begin("b", 2.0, CHUNK_S, now=0.0)
    for at in (4.0, 8.0, 12.0):
        assert not progress.stuck(at)
        progress.moved(at)
    progress.computed("a", now=16.0)
    assert not progress.stuck(20.0)
    progress.computed("b", now=20.0)
    assert not progress.stuck(1000.0), "what is computed is the link's to bring"


def test_what_was_heard_last_counts_and_not_what_time_it_is() -> None:
    """A gateway that slept for a minute asks with the moment of the node's last word."""
    progress = Progress()
    progress.begin("a", 1.0, CHUNK_S, now=0.0)
    heard = 1.0
    assert not progress.stuck(heard)


def test_kv_that_leaves_is_a_sign_and_a_count_that_went_back_is_none() -> None:
    progress = Progress()
    progress.begin("a", 1.0, CHUNK_S, now=0.0)
    progress.told(1000, now=1.0)
    progress.told(2000, now=4.0)
    assert not progress.stuck(8.0)
    progress.told(500, now=8.0)
    assert progress.stuck(9.0)


def test_where_kv_leaves_while_a_job_is_computed_the_next_chunk_is_waited_for_and_no_whole_job() -> None:
    progress = Progress()
    progress.begin("a", 30.0, CHUNK_S, now=0.0)
    for beat in range(4):
        progress.told(1000 * beat, now=float(beat))
    assert progress.sends_early
    assert stuck_at(progress, 3.0, 60.0) == 3.0 + LEAST_S


def test_kv_of_what_is_computed_already_tells_nothing_of_how_a_node_sends() -> None:
    progress = Progress()
    progress.begin("a", 30.0, CHUNK_S, now=0.0)
    progress.begin("b", 60.0, CHUNK_S, now=0.0)
    progress.computed("a", now=30.0)
    for beat in range(10):
        progress.told(1000 * beat, now=30.0 + beat)
    assert not progress.sends_early
    progress.end("a", now=40.0)
    assert stuck_at(progress, 40.0, 400.0, step=1.0) == 39.0 + 4 * 60.0, "from the last sign on"


@calm
@given(
    st.lists(st.floats(0.05, 20.0), min_size=1, max_size=12),
    st.floats(1.0, 3.0),
    st.floats(0.0, 30.0),
    st.sampled_from(["at once", "when it runs", "never"]),
)
def test_a_node_three_times_slower_than_predicted_is_never_stuck(
    takes: list[float], slower: float, apart: float, says_begun: str
) -> None:
    """One job after the other, each said to be computed, and to be begun as nodes do that or another way."""
    progress, free = Progress(), 0.0
    events: list[tuple[float, int, str, float]] = []
    for number, took in enumerate(takes):
        sent = apart * number
        begun = max(free, sent)
        free = begun + slower * took
        events.append((sent, 0, f"begin {number}", took))
        if says_begun != "never":
            events.append((sent if says_begun == "at once" else begun, 1, f"begun {number}", 0.0))
        events.append((free, 2, f"computed {number}", 0.0))
    for at, _, what, expected in sorted(events):
        assert not progress.stuck(at - 1e-6)
        kind, number = what.split()
        if kind == "begin":
            progress.begin(number, expected, CHUNK_S, at)
        elif kind == "begun":
            progress.moved(at)
        else:
            progress.computed(number, at)


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_over_is_not_waited_for(ends: bool) -> None:
    progress = Progress()
    progress.begin("a", 1.0, CHUNK_S, now=0.0)
    if ends:
        progress.end("a", now=0.5)
        progress.end("a", now=0.6)
    assert progress.stuck(10.0) is not ends
