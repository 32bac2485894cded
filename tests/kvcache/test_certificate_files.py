"""Certificates that are replaced while connections are open, seen by clients that connect for real."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcache.certificate_files import CertificateFiles
from node.config import TlsFiles
from tests.node.test_tls import Root


@asynccontextmanager
async def echoing(files: TlsFiles) -> AsyncIterator[tuple[ssl.SSLContext, int]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert files.cert is not None
    context.load_cert_chain(files.cert, files.key)
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    async with server:
        yield context, server.sockets[0].getsockname()[1]


async def connect(root: Root, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """A connection, and the serial number of the certificate that it met."""
    trust = ssl.create_default_context(cafile=str(root.ca))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    shown = writer.get_extra_info("peercert")
    return reader, writer, int(shown["serialNumber"], 16)


async def serial(root: Root, port: int) -> int:
    _, writer, found = await connect(root, port)
    writer.close()
    return found


def watched(root: Root, name: str, context: ssl.SSLContext) -> CertificateFiles:
    return CertificateFiles(root.directory / f"{name}.pem", root.directory / f"{name}.key", [context])


async def test_new_connections_meet_the_new_certificate_and_open_ones_go_on(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    async with echoing(root.files("server")) as (context, port):
        files = watched(root, "server", context)
        reader, writer, before = await connect(root, port)
        root.files("server")
        files.load()
        after = await serial(root, port)
        assert after != before
        writer.write(b"still here")
        assert await reader.read(100) == b"still here"
        writer.close()


async def test_a_key_of_another_certificate_changes_nothing(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    async with echoing(root.files("server")) as (context, port):
        files = watched(root, "server", context)
        before = await serial(root, port)
        root.files("other")
        (root.directory / "other.key").replace(root.directory / "server.key")
        with pytest.raises(ssl.SSLError):
            files.load()
        assert await serial(root, port) == before


async def test_files_that_change_are_loaded_by_themselves_and_a_half_replaced_pair_is_told_once(tmp_path: Path) -> None:
    root, told = Root(tmp_path / "root"), list[OSError | None]()
    async with echoing(root.files("server")) as (context, port):
        files = watched(root, "server", context)
        before = await serial(root, port)
        following = asyncio.create_task(files.follow(told.append, every_s=0.02))
        root.files("next")
        (root.directory / "next.pem").replace(root.directory / "server.pem")
        await asyncio.sleep(0.15)
        assert [type(error) for error in told] == [ssl.SSLError]
        assert await serial(root, port) == before
        (root.directory / "next.key").replace(root.directory / "server.key")
        await asyncio.sleep(0.15)
        following.cancel()
        assert told[1:] == [None]
        assert await serial(root, port) != before
