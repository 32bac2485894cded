"""The client: exchanges over kept connections, every bound and every way in which a server can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest

from gateway.upstream import pool as pools
from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.head import MAX_HEAD_BYTES, split_url
from gateway.upstream.pool import Pool, PoolLimits
from gateway.upstream.response import HIGH_BYTES, Response
from tests.gateway.upstream.scripted import answers, read_request, scripted

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def whole(pool: Pool, url: str, method: str = "POST", body: bytes = b"{}", deadline_s: float = 5.0) -> bytes:
    async with await pool.request(method, url, (), body, deadline_s=deadline_s) as response:
        return await response.read(1 << 20)


async def failure(pool: Pool, url: str, deadline_s: float = 5.0) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await whole(pool, url, deadline_s=deadline_s)
    return caught.value


async def test_requests_one_after_the_other_share_a_connection() -> None:
    connections = 0
    talk = answers(OK)

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await talk(reader, writer)

    async with scripted(counted) as url:
        pool = Pool()
        assert [await whole(pool, url) for _ in range(3)] == [b"hi"] * 3
        pool.close()
    assert connections == 1


async def test_a_server_reads_what_was_sent() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)

    async with scripted(talk) as url:
        large = b"x" * (1 << 20)
        await (await Pool().request("POST", f"{url}/v1?a=b", [(b"x-one", b"1")], large, deadline_s=5)).read(10)
    head, body = seen[0]
    assert head.startswith(b"POST /v1?a=b HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nx-one: 1\r\n" in head
    assert body == large


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        ((CHUNKED, b"2\r\nhi\r\n", b"0\r\n\r\n"), b"hi"),
        ((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", OK), b"hi"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), b""),
        ((b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 2\r\n\r", b"\nh", b"i"), b"hi"),
    ],
)
async def test_a_body_is_read_to_its_end_and_the_connection_kept(parts: tuple[bytes, ...], body: bytes) -> None:
    async with scripted(answers(*parts, pause_s=0.005)) as url:
        pool = Pool()
        assert [await whole(pool, url), await whole(pool, url)] == [body, body]
        pool.close()


async def test_a_body_without_a_length_lasts_until_the_server_closes() -> None:
    async with scripted(answers(b"HTTP/1.1 200 OK\r\n\r\n", b"until", b" closed", then_close=True)) as url:
        assert await whole(Pool(), url) == b"until closed"


async def test_the_answer_to_head_has_no_body() -> None:
    async with scripted(answers(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n")) as url:
        pool = Pool()
        assert await whole(pool, url, "HEAD", b"") == b""
        assert await whole(pool, url, "HEAD", b"") == b""


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"garbage that is no head\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi!", Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 0\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (10 << 20), Cause.TOO_LARGE),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n", Cause.TOO_LARGE),
        (CHUNKED + b"zz\r\n", Cause.PROTOCOL),
        (CHUNKED + b"5\r\nhe", Cause.CLOSED),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", Cause.CLOSED),
        (b"", Cause.CLOSED),
    ],
)
async def test_what_is_no_whole_response_fails_by_name(answer: bytes, cause: Cause) -> None:
    async with scripted(answers(answer, then_close=True)) as url:
        error = await failure(Pool(), url)
    assert (error.cause, error.sent, error.answered) == (cause, True, bool(answer))


async def test_a_connection_with_a_second_response_that_nobody_asked_for_is_not_used_again() -> None:
    connections = 0
    talk = answers(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged")

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await talk(reader, writer)

    async with scripted(counted) as url:
        pool = Pool()
        assert [await whole(pool, url) for _ in range(3)] == [b"hi"] * 3
        pool.close()
    assert connections == 3


async def test_what_comes_on_a_free_connection_closes_it() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged")
        await reader.read()

    async with scripted(talk) as url:
        pool = Pool()
        assert await whole(pool, url) == b"hi"
        await asyncio.sleep(0.1)
        assert await whole(pool, url) == b"hi"
        pool.close()


async def test_nobody_there_is_said_without_having_sent_anything() -> None:
    error = await failure(Pool(), "http://127.0.0.1:1")
    assert (error.cause, error.sent) == (Cause.CONNECT, False)


async def test_the_systems_roots_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plain = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(1) or plain())

    async def no_tls(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()

    async with scripted(no_tls) as url:
        pool = Pool()
        for _ in range(3):
            assert (await failure(pool, url.replace("http", "https"))).cause is Cause.TLS
        pool.close()
    assert len(made) == 1


async def test_a_server_that_is_silent_or_never_ends_meets_the_deadline() -> None:
    async with scripted(answers()) as silent, scripted(answers(CHUNKED, b"1\r\na\r\n")) as endless:
        for url, answered in ((silent, False), (endless, True)):
            error = await failure(Pool(), url, deadline_s=0.1)
            assert (error.cause, error.answered) == (Cause.DEADLINE, answered)


async def test_whoever_is_cancelled_or_closes_early_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        assert not await reader.read()
        gone.set()

    async with scripted(talk) as url:
        pool = Pool()
        response = await pool.request("POST", url, (), b"{}", deadline_s=5)
        assert await anext(response.body) == b"a"
        response.close()
        await asyncio.wait_for(gone.wait(), 2)
        gone.clear()
        reading = asyncio.create_task(whole(pool, url))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.wait_for(gone.wait(), 2)


async def test_what_nobody_reads_is_not_fetched() -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async with scripted(talk) as url:
        response = await Pool().request("POST", url, (), b"{}", deadline_s=20)
        await asyncio.sleep(0.3)
        held = sent
        assert response._unread < 4 * HIGH_BYTES
        assert held < 32
        size = 0
        async for part in response.body:
            size += len(part)
        assert size == 64 << 20


async def test_connections_are_bounded_and_so_is_waiting_for_one() -> None:
    at_once = 0
    most = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once, most
        while True:
            await read_request(reader)
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.05)
            at_once -= 1
            writer.write(OK)

    async with scripted(talk) as url:
        pool = Pool(PoolLimits(connections=2, waiting=2))
        found = await asyncio.gather(*(whole(pool, url) for _ in range(5)), return_exceptions=True)
        assert most == 2
        assert found[:4] == [b"hi"] * 4
        assert isinstance(found[4], UpstreamError)
        assert found[4].cause is Cause.POOL_FULL
        pool.close()


async def test_whoever_leaves_the_line_loses_nobody_a_connection() -> None:
    async with scripted(answers(OK, pause_s=0.02)) as url:
        pool = Pool(PoolLimits(connections=1))
        asked = [asyncio.create_task(whole(pool, url)) for _ in range(6)]
        for at in (1, 3, 4):
            await asyncio.sleep(0.012)
            asked[at].cancel()
        done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
        assert {one for one in done if not isinstance(one, asyncio.CancelledError)} == {b"hi"}
        assert await whole(pool, url) == b"hi"
        pool.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_a_server_that_does_not_finish_a_handshake_is_given_up() -> None:
    async with scripted(silent) as url:
        pool = Pool(PoolLimits(connect_s=0.1))
        secure = url.replace("http:", "https:")
        error = await failure(pool, secure)
        assert (error.cause, error.sent) == (Cause.CONNECT_TIMEOUT, False)
        leaving = asyncio.create_task(whole(Pool(), secure))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await asyncio.sleep(0.01)
        assert pool.open(split_url(secure)[0]) == 0


async def test_whoever_stands_in_line_meets_the_deadline_and_takes_nothing_along() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await asyncio.sleep(0.2)
            writer.write(OK)

    async with scripted(talk) as url:
        pool = Pool(PoolLimits(connections=1))
        first = asyncio.create_task(whole(pool, url))
        await asyncio.sleep(0.02)
        error = await failure(pool, url, deadline_s=0.1)
        assert (error.cause, error.sent) == (Cause.DEADLINE, False)
        assert [await first, await whole(pool, url)] == [b"hi"] * 2
        pool.close()


async def test_a_host_that_vanishes_is_noticed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "WATCHED_AFTER_S", 0.05)
    async with scripted(silent) as url:
        pool, loop = Pool(), asyncio.get_running_loop()
        origin = split_url(url)[0]
        kept, gone = [await pool.acquire(origin, loop.time() + 5) for _ in range(2)]
        transport = kept._transport
        assert transport is not None
        gone.abandon()
        await asyncio.sleep(0.1)
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        kept.abandon()


async def test_a_free_connection_is_closed_when_it_grows_old() -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await answers(OK)(reader, writer)
        ended.set()

    async with scripted(talk) as url:
        pool = Pool(PoolLimits(idle_s=0.1))
        await whole(pool, url)
        await asyncio.wait_for(ended.wait(), 2)
        await asyncio.sleep(0)


@pytest.mark.parametrize(("name", "value"), [(b"a b", b"c"), (b"a", b"b\r\nx: y"), (b"a:", b"b"), (b"a", b"b\x00")])
async def test_a_header_cannot_hold_another_one(name: bytes, value: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        await Pool().request("GET", "http://127.0.0.1:1/", [(name, value)], deadline_s=1)


@pytest.mark.parametrize(
    "url", ["ftp://a/", "http://u:p@a/", "http://a/b c", "/x", "http://a/\r\nx", "http://a/#f", "http://a..b/"]
)
async def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        await Pool().request("GET", url, deadline_s=1)


async def test_a_connection_that_was_lost_before_its_use_fails_as_one_that_was_never_made() -> None:
    async with scripted(answers(OK)) as url:
        pool, (origin, _) = Pool(), split_url(url)
        loop = asyncio.get_running_loop()
        connection = await pool.acquire(origin, loop.time() + 5)
        assert connection._transport is not None
        connection._transport.abort()
        for _ in range(2):  # before and after the loss is said
            response = Response(connection, loop)
            connection.start(b"POST / HTTP/1.1\r\n\r\n", b"", response, loop.time() + 5)
            with pytest.raises(UpstreamError) as caught:
                await response.opened()
            assert (caught.value.cause, caught.value.sent) == (Cause.CLOSED, False)
            await asyncio.sleep(0.01)
        assert pool.open(origin) == 0


async def test_a_connection_that_is_lost_is_counted_out_whatever_its_user_makes_of_it() -> None:
    class Breaks(Response):
        def on_failure(self, error: UpstreamError) -> None:
            raise ZeroDivisionError

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(silent) as url:
        pool, (origin, _) = Pool(), split_url(url)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        connection = await pool.acquire(origin, loop.time() + 5)
        connection.start(b"POST / HTTP/1.1\r\n\r\n", b"", Breaks(connection, loop), loop.time() + 5)
        assert connection._transport is not None
        connection._transport.abort()
        await asyncio.sleep(0.05)
        assert pool.open(origin) == 0
