import math

import pytest

from scheduler.auditing import AuditValues, ClusterAudits, chosen

VALUES = AuditValues(share=0.25, most_tokens=100, tolerance=0.05, strikes=3)


def outcomes(*errors: float) -> list[bool]:
    audits = ClusterAudits()
    return [audits.add(error, VALUES) for error in errors]


def test_a_cluster_is_flagged_by_failures_in_a_row_and_anew_only_by_as_many_more() -> None:
    assert outcomes(1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == [False, False, True, False, False, True]


def test_a_pass_in_between_begins_the_count_anew() -> None:
    assert outcomes(1.0, 1.0, 0.01, 1.0, 1.0) == [False] * 5


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.0501])
def test_what_is_no_number_or_beyond_the_tolerance_fails(error: float) -> None:
    audits = ClusterAudits()
    audits.add(error, VALUES)
    assert (audits.passed, audits.failed) == (0, 1)


def test_the_share_counts_and_neither_long_nor_inexact_prompts_are_chosen() -> None:
    assert chosen(VALUES, 100, True, 0.249)
    assert not chosen(VALUES, 100, True, 0.25)
    assert not chosen(VALUES, 101, True, 0.0)
    assert not chosen(VALUES, 100, False, 0.0)
    assert not chosen(AuditValues(share=0.0), 1, True, 0.0)
