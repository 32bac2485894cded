"""Log lines as JSON: what a message names becomes a field."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from kvcache.logs import TEXT, JsonFormatter, TextFormatter


def line(message: str, *args: object, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("room.module", logging.INFO, __file__, 1, message, args, exc_info)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_what_a_message_names_is_a_field_of_its_own() -> None:
    found = line("dispatch id=%s attempt=%d took=%.1f s of %d", "r1", 2, 0.25, 7)
    assert found["message"] == "dispatch id=r1 attempt=2 took=0.2 s of 7"
    assert (found["id"], found["attempt"], found["took"]) == ("r1", 2, 0.25)
    assert (found["level"], found["logger"], found["time"][-6:]) == ("info", "room.module", "+00:00")


def test_a_field_never_replaces_what_every_line_has() -> None:
    assert line("level=%s time=%s", "x", "y")["level"] == "info"


@pytest.mark.parametrize("message", ["100%% of id=%s", "id=%r"])
def test_percent_signs_and_other_conversions_are_understood(message: str) -> None:
    assert line(message, "r1")["id"] == "r1"


def test_an_exception_stays_within_its_line() -> None:
    try:
        raise ValueError("scripted")
    except ValueError:
        found = line("broke id=%s", "r1", exc_info=sys.exc_info())
    assert found["exception"].endswith("ValueError: scripted")


def test_a_peers_words_cannot_begin_a_line_of_text_or_steer_a_terminal() -> None:
    words = "gone\r\n2026-01-01 ERROR forged\x1b[2J\u2028\x9b1m \u00e9 \t"
    record = logging.LogRecord("room.module", logging.INFO, __file__, 1, "lost cause=%s", (words,), None)
    line = TextFormatter(TEXT).format(record)
    assert line.isprintable()
    assert line.endswith(r"lost cause=gone\r\n2026-01-01 ERROR forged\x1b[2J\u2028\x9b1m é \t")
