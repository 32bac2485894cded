"""What gateways over one Redis differ in where they must not is said, with the cure."""

import pytest

from gateway.shared.common import Common, differences

MINE = Common("m", ("r1", "r2"))


@pytest.mark.parametrize(
    "other",
    [None, MINE, Common(), Common("", ("r2",)), Common("m", ("r2", "r3")), Common("m")],
    ids=["older", "same", "relay only", "relay, same roots", "rotating", "no certificates"],
)
def test_what_fits_is_nothing_to_speak_of(other):
    assert differences(MINE, [("http://b", other)], 1.5) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Common("other"), ["http://b serves another model", "--redis-prefix"]),
        (Common("m", ("r3",)), ["http://b believes in other certificate authorities", "same --ca"]),
    ],
)
def test_what_does_not_fit_is_named_with_its_cure(other, words):
    (text,) = differences(MINE, [("http://a", MINE), ("http://b", other)], 0.0)
    assert all(word in text for word in words)


@pytest.mark.parametrize(("ahead_s", "words"), [(300.0, "300 s ahead of"), (-61.2, "61 s behind")])
def test_a_clock_that_is_minutes_off_is_named(ahead_s, words):
    (text,) = differences(MINE, [], ahead_s)
    assert words in text
    assert "NTP" in text
