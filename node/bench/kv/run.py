"""The two commands at work: what they say on stderr, what they print, and how they end."""

from __future__ import annotations

import asyncio
import signal
import ssl
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcache.control import KvAddress
from kvcache.layout import DType
from node.bench.kv.capture import captured, synthetic
from node.bench.kv.certificates import Root
from node.bench.kv.credentials import Credentials, Tls, tls_files
from node.bench.kv.fetch import Fetched, KvFetcher
from node.bench.kv.serve import KvServer
from node.config import ConfigError
from node.tls import dialling_context, listening_context

CONNECT_S = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Network:
    """Where KV is served, and how it is kept from others: ``tls``, or the operator's word that there are none."""

    host: str
    port: int
    tls: bool
    trusted: bool


async def serve(
    network: Network,
    nbytes: int,
    credentials: Path,
    model_dir: Path | None,
    dtype: DType,
    nixl: bool,
    say: Say,
) -> None:
    """Offer KV until SIGTERM or SIGINT.

    Raises ConfigError, EngineLost, InsecureBind, OSError, ValueError.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    offer = synthetic() if model_dir is None else await captured(model_dir, dtype, say)
    server = KvServer(offer, nbytes, trusted_network=network.trusted, nixl=nixl)
    try:
        tls, context = _certificates(network.host) if network.tls else (None, None)
        port = await server.listen(network.host, network.port, context)
        server.credentials(tls).write(credentials)
        say(f"{server.subject.nbytes} bytes of {offer.source} KV at {network.host}:{port}")
        await stop.wait()
    finally:
        await server.close()


async def fetch(
    network: Network,
    codec: str,
    credentials: Path,
    connections: int,
    repeats: int,
    within_s: float,
    transport: str,
    say: Say,
) -> dict[str, object]:
    """Fetch once to warm up, then ``repeats`` times; what to print.

    Raises ConfigError, UnknownCodec, CodecError, PeerRefused, PeerUnreachable, FetchFailed.
    """
    known = Credentials.read(credentials)
    if network.tls != (known.tls is not None):
        raise ConfigError(f"--tls: serve was started {'without' if network.tls else 'with'} it")
    context = _dialling(known.tls) if known.tls is not None else None
    address = KvAddress(network.host, network.port)
    fetcher = KvFetcher(
        known, address, codec, connections, context, trusted_network=network.trusted, transport=transport
    )
    try:
        link = await fetcher.connect(CONNECT_S)
        say(f"{link.connections} connections, round trip {link.rtt_s * 1e3:.1f} ms")
        found = []
        for turn in range(repeats + 1):
            found.append(await fetcher.fetch(within_s))
            say(f"{turn or 'warm-up'}: {found[-1].seconds:.4f} s, {_gbps(found[-1]):.3f} Gbit/s")
        connections = fetcher.link().connections
        # The last commit is on its way to the server, over one of several connections: let it arrive before the end.
        await asyncio.sleep(2 * link.rtt_s)
    finally:
        await fetcher.close()
    median = sorted(found[1:], key=lambda one: one.seconds)[repeats // 2]
    return {
        "source": known.source,
        "bytes_raw": median.report.raw_bytes,
        "bytes_wire": median.report.wire_bytes,
        "seconds": round(median.seconds, 6),
        "goodput_gbps": round(_gbps(median), 4),
        "codec": median.report.codec,
        "transport": median.report.transport,
        "connections": connections,
        "verified": all(one.verified for one in found),
        "tls": network.tls,
        "rtt_s": round(link.rtt_s, 6),
        "granted_s": round(median.report.transfer_s, 6),
        "cpu_s": round(statistics.median(one.cpu_s for one in found[1:]), 6),
        "all_seconds": [round(one.seconds, 6) for one in found[1:]],
    }


def _gbps(one: Fetched) -> float:
    return one.report.raw_bytes * 8 / one.seconds / 1e9


def _certificates(host: str) -> tuple[Tls, ssl.SSLContext | None]:
    """What the fetching side shows and trusts, and the context to listen with."""
    root = Root()
    mine, theirs = root.certify("serve", host), root.certify("fetch")
    with tls_files(root.certificate, mine.certificate, mine.key) as files:
        return Tls(root.certificate, theirs.certificate, theirs.key), listening_context(files)


def _dialling(tls: Tls) -> ssl.SSLContext | None:
    with tls_files(tls.ca, tls.certificate, tls.key) as files:
        return dialling_context(files)
