from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from deploy.demo import Run, as_json, long_prompt, show


def run(kv_equal: bool | None = True, tokens_equal: bool = True) -> Run:
    return Run(
        "long",
        "r1",
        "remote:east",
        "above_threshold",
        1500,
        32,
        2.0,
        15.0,
        1 << 20,
        1 << 19,
        0.01,
        " so",
        kv_equal,
        tokens_equal,
    )


def test_a_run_is_good_only_if_neither_kv_nor_tokens_differ() -> None:
    assert run().good
    assert run(kv_equal=None).good
    assert not run(kv_equal=False).good
    assert not run(tokens_equal=False).good


def test_the_json_carries_the_verdict() -> None:
    assert [entry["good"] for entry in as_json([run(), run(tokens_equal=False)])] == [True, False]


def test_the_table_fits_eighty_columns_and_names_a_difference() -> None:
    out = StringIO()
    show([run(), run(kv_equal=False)], Console(file=out, width=80))
    assert "NO" in out.getvalue()
    assert "above_threshold" in out.getvalue()
    assert "remote:east" in out.getvalue()


def test_tokens_that_came_too_fast_to_tell_are_shown_as_such() -> None:
    out = StringIO()
    show([replace(run(), tokens_per_s=None)], Console(file=out, width=80))
    assert "tokens per second" in out.getvalue()


def test_the_long_prompt_grows_with_the_threshold_and_never_changes() -> None:
    assert long_prompt(1500) == long_prompt(1500)
    assert len(long_prompt(3000)) > 1.8 * len(long_prompt(1500))
