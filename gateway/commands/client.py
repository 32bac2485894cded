"""What operator commands share: where the gateway is, calling it, and printing."""

from __future__ import annotations

import functools
import json
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click
import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT_S = 15.0
LONG_TIMEOUT_S = 180.0
"""For what is simulated before it is answered."""
STREAM_S = 300.0
"""Between two pieces of a streamed answer."""


class Api:
    """A gateway's HTTP API; every failure is one line."""

    def __init__(self, url: str, key: str | None, ca: Path | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                timeout=TIMEOUT_S,
                verify=ssl.create_default_context(cafile=ca) if ca else True,
                trust_env=False,
            )
        except (OSError, ValueError, httpx.InvalidURL) as error:
            raise click.ClickException(f"--gateway {url}: {error}") from error
        self._url = url

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer. Raises ClickException."""
        try:
            answer = self._http.request(method, path, json=body)
            plain: Any = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise click.ClickException(f"gateway {self._url}: {error}") from error
        except ValueError as error:
            raise click.ClickException(f"gateway {self._url}: the answer is not JSON; is this a gateway?") from error
        if answer.is_error:
            raise click.ClickException(_message(answer) or f"gateway {self._url}: HTTP {answer.status_code}")
        return dict(plain)

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float = STREAM_S) -> float:
        """Read a streamed answer to its end; seconds to its first event. Raises ClickException for half of one too."""
        began, first_s = time.monotonic(), None
        patience = httpx.Timeout(TIMEOUT_S, read=timeout_s)
        try:
            streamed = body | {"stream": True}
            with self._http.stream("POST", path, json=streamed, headers=headers, timeout=patience) as answer:
                if answer.is_error:
                    answer.read()
                    raise click.ClickException(_message(answer) or f"gateway {self._url}: HTTP {answer.status_code}")
                for line in answer.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    if first_s is None:
                        first_s = time.monotonic() - began
                    if line.startswith('data: {"error"'):
                        raise click.ClickException(json.loads(line.removeprefix("data: "))["error"]["message"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(f"gateway {self._url}: {error or type(error).__name__}") from error
        if first_s is None:
            raise click.ClickException(f"gateway {self._url}: an answer without a token")
        return first_s

    def download(self, path: str, into: BinaryIO) -> None:
        """Write an answer to a file as it comes. Raises ClickException."""
        try:
            with self._http.stream("GET", path) as answer:
                if answer.is_error:
                    answer.read()
                    raise click.ClickException(_message(answer) or f"gateway {self._url}: HTTP {answer.status_code}")
                for part in answer.iter_bytes():
                    into.write(part)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(f"gateway {self._url}: {error or type(error).__name__}") from error

    def answer_lines(self, path: str, body: dict[str, Any], heard: Callable[[float], None]) -> dict[str, Any]:
        """Post a question that takes a while; ``heard`` is told how far it is, from 0 to 1. Raises ClickException."""
        try:
            with self._http.stream(
                "POST", path, json=body, headers={"Accept": "application/x-ndjson"}, timeout=LONG_TIMEOUT_S
            ) as answer:
                if answer.is_error:
                    answer.read()
                    raise click.ClickException(_message(answer) or f"gateway {self._url}: HTTP {answer.status_code}")
                for line in answer.iter_lines():
                    said = json.loads(line)
                    if "error" in said:
                        raise click.ClickException(said["error"]["message"])
                    if "answer" in said:
                        return dict(said["answer"])
                    heard(said.get("progress", 0.0))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise click.ClickException(f"gateway {self._url}: {error or type(error).__name__}") from error
        raise click.ClickException(f"gateway {self._url}: it ended without an answer")


def _message(answer: httpx.Response) -> str | None:
    try:
        plain = answer.json()
    except ValueError:
        return None
    return plain.get("error", {}).get("message") if isinstance(plain, dict) else None


def gateway_options(command: F) -> F:
    """Add ``--gateway``, ``--key``, ``--ca`` and ``--json``; the command gets ``api`` and ``as_json``."""

    @functools.wraps(command)
    def wrapped(*args: Any, gateway_url: str, key: str | None, ca: Path | None, **rest: Any) -> Any:
        return command(*args, api=Api(gateway_url, key, ca), **rest)

    decorated: Any = wrapped
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--ca",
            envvar="PRFAAS_CA",
            type=click.Path(dir_okay=False, exists=True, path_type=Path),
            help="PEM root of the gateway, if not a public one; also from PRFAAS_CA.",
        ),
        click.option("--key", envvar="PRFAAS_KEY", help="API key; also from PRFAAS_KEY."),
        click.option(
            "--gateway",
            "gateway_url",
            envvar="PRFAAS_GATEWAY",
            default="http://127.0.0.1:8000",
            show_default=True,
            help="URL of the gateway; also from PRFAAS_GATEWAY.",
        ),
    ):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def print_json(value: Any) -> None:
    """Indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """A plain table, or ``empty`` where there is nothing to show."""
    if not rows:
        click.echo(empty)
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))  # in which nothing is markup
    Console(width=None if Console().is_terminal else 200).print(table)


def seconds(value: float | None) -> str | None:
    """A duration for people."""
    return None if value is None else f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def size(value: float | None) -> str | None:
    """Bytes for people."""
    if value is None:
        return None
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
