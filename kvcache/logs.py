"""Log lines of gateways and nodes: as text, or as one JSON object a line for machines.

What a message names as ``key=%s`` becomes a field of the object, so that a request can be followed by its id. Neither
prompts nor secrets are logged anywhere.
"""

from __future__ import annotations

import json
import logging
import re
import time
from datetime import UTC, datetime
from enum import StrEnum

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
OWN = frozenset({"time", "level", "logger", "message", "exception"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLACEHOLDER = re.compile(r"(?:(\w+)=)?%(?:%|[-+ #0]*[\d.]*[a-z])")


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """A line of text; what a peer's words would do to it or to a terminal is written out. Tracebacks follow it."""

    _second: tuple[int, str] = (-1, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Local time; of the lines of one second only the milliseconds differ."""
        second = int(record.created)
        if self._second[0] != second:
            self._second = second, time.strftime(self.default_time_format, time.localtime(second))
        return f"{self._second[1]},{record.msecs:03.0f}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A line without its end and without an exception."""
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the message's fields, and an exception where one is."""

    def format(self, record: logging.LogRecord) -> str:
        """A line without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logging(form: LogFormat) -> None:
    """Log to stderr from now on, from INFO up. What no line shows is not found out for each.

    https://docs.python.org/3/howto/logging.html#optimization
    """
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The arguments that the message names."""
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    names = [found[1] for found in _PLACEHOLDER.finditer(record.msg) if not found[0].endswith("%%")]
    if len(names) != len(record.args):
        return {}
    named = zip(names, record.args, strict=True)
    return {name: value for name, value in named if name is not None and name not in OWN}
