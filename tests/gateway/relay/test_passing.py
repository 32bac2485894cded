"""What leaves for the client, write by write, of reads from an engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.relay.headers import Header
from gateway.relay.passing import End, Passing
from gateway.upstream.connection import Connection
from tests.gateway.relay.backend import END, STREAM, chunk, event, whole


class Client:
    """Takes writes; ``HEAD`` stands for the head of an answer."""

    chunked = True

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write = self.written.append

    def begin(self, status: int, headers: list[Header], length: int | None) -> bytes:
        return b"HEAD"


class Wire:
    """A transport that takes everything."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Nobody:
    """Counts no connections."""

    def on_free(self, connection: Connection) -> None:
        pass

    def on_lost(self, connection: Connection) -> None:
        pass


async def passed(*reads: bytes, strips: bool = False) -> tuple[list[bytes], End | None]:
    loop, client = asyncio.get_running_loop(), Client()
    connection, passing = Connection(Nobody(), loop), Passing(client, loop, strips)
    connection.connection_made(cast(Any, Wire()))
    connection.start(b"POST / HTTP/1.1\r\n\r\n", b"", passing, loop.time() + 60)
    for read in reads:
        connection.data_received(read)
    connection.abandon()
    return client.written, passing.end.result() if passing.end.done() else None


SHORT = whole(b"{}").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
A, B = chunk(event("a")), chunk(event("b"))


@pytest.mark.parametrize(
    ("reads", "written", "end"),
    [
        ([SHORT + b"{}"], [b"HEAD{}"], End.WHOLE),
        ([SHORT, b"{", b"}"], [b"HEAD", b"{", b"}"], End.WHOLE),
        ([SHORT + b"{", b"}"], [b"HEAD{", b"}"], End.WHOLE),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], [b"HEAD"], End.WHOLE),
        ([STREAM], [b"HEAD"], None),
        ([STREAM + A, B], [b"HEAD" + A, B], None),
        ([STREAM + A[:9], A[9:], B], [b"HEAD", A, B], None),
        ([STREAM + END], [b"HEAD" + END[:-5], b"0\r\n\r\n"], End.WHOLE),
    ],
)
async def test_what_comes_together_leaves_together_and_nothing_waits(
    reads: list[bytes], written: list[bytes], end: End | None
) -> None:
    assert await passed(*reads) == (written, end)


async def test_a_head_leaves_before_an_error_that_came_with_it() -> None:
    written, end = await passed(STREAM + b"zz\r\n")
    assert b"".join(written).startswith(b"HEAD")
    assert b"engine_protocol" in b"".join(written)
    assert end is End.BROKEN
    assert (await passed(SHORT + b"{", b"", b"}too much"))[0] == [b"HEAD{", b"}"]


async def test_a_head_whose_first_event_is_stripped_leaves_all_the_same() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n'
    written, _ = await passed(STREAM + chunk(usage), A, strips=True)
    assert written == [b"HEAD", A]
