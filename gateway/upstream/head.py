"""Heads of requests and responses: built and parsed with nothing in them that could begin another message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import httptools
import msgspec

Headers = tuple[tuple[bytes, bytes], ...]

MAX_HEAD_BYTES = 64 << 10
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TARGET = re.compile(r"/[\x21-\x7e]*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class BadHead(ValueError):
    """What is no head of a response, or frames its body in two ways."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server: what connections are pooled by."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> bytes:
        """As the Host header names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}").encode()


@lru_cache(maxsize=256)
def split_url(url: str) -> tuple[Origin, str]:
    """An absolute http(s) URL as origin and target. Raises ValueError for any other."""
    parts = urlsplit(url)
    printable = url.isascii() and url.isprintable()  # urlsplit drops line ends instead of refusing them
    if (
        not printable
        or parts.scheme not in _DEFAULT_PORTS
        or not parts.hostname
        or parts.username is not None
        or parts.fragment
    ):
        raise ValueError(f"url: {url[:200]!r} must be http://HOST[:PORT]/PATH or https://..., without user or fragment")
    try:
        parts.hostname.encode("idna")  # as looking it up does
    except UnicodeError as error:
        raise ValueError(f"url: {parts.hostname[:200]!r} cannot be a host's name: {error}") from error
    origin = Origin(parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme])
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not _TARGET.fullmatch(target):
        raise ValueError(f"url: the path of {url[:200]!r} must be printable ASCII without blanks")
    return origin, target


def request_head(
    method: str, origin: Origin, target: str, headers: Iterable[tuple[bytes, bytes]], body_bytes: int
) -> bytes:
    """A request's head; Host and Content-Length are set here and must not be among ``headers``.

    Raises ValueError for a name or a value that could end its line or the head.
    """
    lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method.encode(), target.encode(), origin.authority)]
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or _UNSAFE.search(value):
            raise ValueError(f"header {name[:80]!r}: not a name, or a value with control characters")
        lines.append(name + b": " + value)
    if body_bytes or method not in ("GET", "HEAD"):
        lines.append(b"content-length: %d" % body_bytes)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


class ResponseHead(msgspec.Struct, frozen=True):
    """``length``: bytes of the body, None where it is chunked or lasts until the connection ends. Names are lower."""

    status: int
    headers: Headers
    keep_alive: bool
    chunked: bool
    length: int | None

    def header(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        return next((value for key, value in self.headers if key == name), None)


class _Collected:
    """What httptools calls back with."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_head(data: bytes, of_head_request: bool) -> ResponseHead:
    """A response's head, its blank line included and nothing after it. Raises BadHead."""
    collected = _Collected()
    parser = httptools.HttpResponseParser(collected)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise BadHead(str(error)[:200] or "an upgrade nobody asked for") from error
    if not collected.complete:
        raise BadHead("incomplete")
    status = parser.get_status_code()
    lengths, codings = [], []
    for name, value in collected.headers:
        if _UNSAFE.search(value):
            raise BadHead(f"control characters in {name[:80]!r}")
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if status == 101 or len(lengths) > 1 or len(codings) > 1 or (lengths and codings):
        raise BadHead("its body is framed in two ways" if status != 101 else "an upgrade nobody asked for")
    if codings and codings != [b"chunked"]:
        raise BadHead(f"transfer-encoding {codings[0][:80]!r}")
    if lengths and not (lengths[0].isdigit() and len(lengths[0]) < 19):
        raise BadHead(f"content-length {lengths[0][:80]!r}")
    bodiless = of_head_request or status in (204, 304) or status < 200
    length = 0 if bodiless else int(lengths[0]) if lengths else None
    chunked = bool(codings) and not bodiless
    until_closed = length is None and not chunked
    keep_alive = parser.should_keep_alive() and not until_closed
    return ResponseHead(status, tuple(collected.headers), keep_alive, chunked, length)
