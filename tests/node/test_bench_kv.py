"""``prfaas bench kv``: the production path between two processes, and figures that cannot be had without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from engines.protocol import PrefillCommand
from kvcache.blocks import PageGeometry
from kvcache.codecs import CodecError
from kvcache.control import KvAddress
from kvcache.hostpool import HostPool
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import plan_transfer
from kvcache.transport import PeerRefused, PeerUnreachable
from node.bench.captured import made_up
from node.bench.cli import bench
from node.bench.kv import capture
from node.bench.kv.capture import Offer
from node.bench.kv.certificates import Root
from node.bench.kv.credentials import Credentials
from node.bench.kv.fetch import FetchFailed, KvFetcher
from node.bench.kv.party import Subject
from node.bench.kv.recording import CHUNK_TOKENS, Recording, tokens_within
from node.bench.kv.replay import ReplayEngine
from node.bench.kv.serve import KvServer
from node.config import ConfigError
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]
KEYS = {
    *("source", "bytes_raw", "bytes_wire", "seconds", "goodput_gbps", "codec", "connections", "verified"),
    *("transport", "tls", "rtt_s", "granted_s", "cpu_s", "all_seconds"),
}
KV = tuple(TensorSpec(name, DType.BFLOAT16, (2, 32)) for name in ("k", "v"))
LAYOUT = KVLayout(
    (
        GroupSpec(GroupKind.FULL, (LayerSpec(0, KV),)),
        GroupSpec(GroupKind.SLIDING, (LayerSpec(1, KV),), window=96),
        GroupSpec(GroupKind.STATE, (LayerSpec(2, (TensorSpec("s", DType.BFLOAT16, (3, 700)),)),)),
    )
)
RECORDED = 300
TOKENS = 1000


def recording() -> Recording:
    made = made_up(LAYOUT, RECORDED, CHUNK_TOKENS)
    try:
        return Recording.of(made.plan, made.table, made.pool)
    finally:
        made.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[KvServer, int]]:
    server = KvServer(Offer(recording(), "synthetic", "f" * 32), LAYOUT.s_kv(TOKENS), trusted_network=False)
    try:
        yield server, await server.listen("127.0.0.1", 0, None)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def fetching(known: Credentials, port: int, codec: str = "raw", connections: int = 2) -> AsyncIterator[KvFetcher]:
    address = KvAddress("127.0.0.1", port)
    fetcher = KvFetcher(known, address, codec, connections, None, trusted_network=False)
    try:
        yield fetcher
    finally:
        await fetcher.close()


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "raw,full=int8"])
async def test_every_byte_is_fetched_and_verified_again_and_again(codec: str) -> None:
    async with serving() as (server, port), fetching(server.credentials(None), port, codec) as fetcher:
        link = await fetcher.connect(5)
        assert link.connections == 2
        for _ in range(3):
            found = await fetcher.fetch(10)
            assert found.verified
            assert found.report.raw_bytes == LAYOUT.s_kv(TOKENS)
            assert found.report.codec == codec
            assert found.seconds > found.report.transfer_s > 0
        assert (found.report.wire_bytes == found.report.raw_bytes) == (codec == "raw")


async def test_other_bytes_than_were_offered_are_not_verified() -> None:
    async with serving() as (server, port), fetching(server.credentials(None), port) as fetcher:
        assert (await fetcher.fetch(10)).verified
        server._party.pool.buffer[5] ^= 1
        assert not (await fetcher.fetch(10)).verified


async def test_two_may_fetch_at_once() -> None:
    async with serving() as (server, port):
        known = server.credentials(None)
        async with fetching(known, port) as one, fetching(known, port, "lossless") as other:
            found = await asyncio.gather(one.fetch(10), other.fetch(10))
    assert all(each.verified for each in found)


async def test_credentials_of_another_run_open_nothing() -> None:
    async with serving() as (server, port), serving() as (other, _):
        stale = msgspec.structs.replace(server.credentials(None), key=other.credentials(None).key)
        async with fetching(stale, port) as fetcher:
            with pytest.raises(FetchFailed, match="signature"):
                await fetcher.fetch(5)
        stranger = msgspec.structs.replace(server.credentials(None), public_key=bytes(32))
        async with fetching(stranger, port) as fetcher:
            with pytest.raises((PeerRefused, PeerUnreachable), match="key"):
                await fetcher.connect(5)


async def test_a_codec_that_the_cache_cannot_have_is_refused_at_once() -> None:
    async with serving() as (server, port):
        with pytest.raises(CodecError, match="fp16"):
            async with fetching(server.credentials(None), port, "fp16"):
                pass


def test_a_recording_goes_on_with_its_beginning_where_more_is_wanted() -> None:
    geometry = PageGeometry.of(LAYOUT)
    recorded = recording()
    plan = plan_transfer(LAYOUT, 0, TOKENS, CHUNK_TOKENS)
    count = geometry.pages_for(0, TOKENS)
    table, pool = geometry.table(0, TOKENS, range(count)), HostPool.create(geometry.page_bytes, count)
    recorded.write(plan, table, pool)
    for piece in plan.pieces:
        found = b"".join(pool.views(table.extents(piece)))
        source = bytes(recorded.tensors[piece.group, piece.layer, piece.tensor])
        begin = piece.start * plan.tensor(piece).nbytes if piece.start < piece.stop else 0
        repeated = source * (begin // len(source) + 1 + len(found) // len(source) + 1)
        assert found == repeated[begin : begin + len(found)]


@pytest.mark.parametrize("nbytes", [LAYOUT.s_kv(1), LAYOUT.s_kv(96) + 1, LAYOUT.s_kv(5000) - 1])
def test_the_offer_is_the_longest_cache_that_fits(nbytes: int) -> None:
    tokens = tokens_within(LAYOUT, nbytes)
    assert LAYOUT.s_kv(tokens) <= nbytes < LAYOUT.s_kv(tokens + 1)


def test_less_than_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="one token"):
        tokens_within(LAYOUT, LAYOUT.s_kv(1) - 1)


async def test_a_recording_is_copied_only_into_pages_that_do_not_hold_it() -> None:
    geometry = PageGeometry.of(LAYOUT)
    count = geometry.pages_for(0, RECORDED)
    pool = HostPool.create(geometry.page_bytes, 2 * count)
    engine = ReplayEngine(geometry, pool, recording())

    async def export(*pages: int) -> None:
        async for _ in engine.submit(PrefillCommand("j", (0,) * RECORDED, 0, RECORDED, pages)):
            pass

    def page(number: int) -> bytes:
        return bytes(pool.buffer[number * geometry.page_bytes :][: geometry.page_bytes])

    first, others = range(count), range(count, 2 * count)
    await export(*first)
    await export(*others)
    wanted = page(0)
    assert any(wanted)
    assert page(count) == wanted
    pool.buffer[0] ^= 1
    await export(*first)
    assert page(0) != wanted, "it was copied again"
    await export(*reversed(first))
    assert page(count - 1) == wanted
    await export(*first)
    assert page(0) == wanted, "it holds another part of the cache: it had to be copied"


def test_credentials_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("{}")
    path.chmod(0o644)
    known = Credentials(
        bytes(32), "n", "i", bytes(32), Subject(LAYOUT, "f" * 32, TOKENS, CHUNK_TOKENS), "synthetic", bytes(16), None
    )
    known.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Credentials.read(path) == known
    assert os.listdir(tmp_path) == ["bench.json"]


@pytest.mark.parametrize("text", ["", "{}", '{"key": 1}', "x" * 100])
def test_a_file_that_holds_no_credentials_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--credentials"):
        Credentials.read(path)


def test_a_root_signs_for_addresses_and_for_names() -> None:
    root = Root()
    for host, kind in (("10.0.0.1", x509.IPAddress), ("kv.example", x509.DNSName)):
        certificate = x509.load_pem_x509_certificate(root.certify("serve", host).certificate.encode())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(value) for value in names.get_values_for_type(kind)] == [host]


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["kv", *arguments])


@pytest.mark.parametrize("command", [("serve", "--bytes", "1000"), ("fetch", "--codec", "raw")])
def test_a_network_needs_tls_or_the_operators_word(command: tuple[str, ...], tmp_path: Path) -> None:
    there = ("--port", "7000", "--credentials", str(tmp_path / "c"), "--host", "10.1.2.3")
    refused = ran(*command, *there)
    assert refused.exit_code == 2
    assert "--tls" in refused.output
    assert "--insecure-lab-network" in refused.output
    both = ran(*command, *there, "--tls", "--insecure-lab-network")
    assert both.exit_code == 2
    assert not (tmp_path / "c").exists()


def bench_process(*arguments: str, **options: object) -> subprocess.Popen[str]:
    code = "from node.bench.cli import bench; bench()"
    return subprocess.Popen([sys.executable, "-c", code, "kv", *arguments], cwd=ROOT, text=True, **options)


@pytest.mark.parametrize(("tls", "transport"), [(False, "tcp"), (True, "shm")])
def test_the_commands_print_their_figures_as_json(tmp_path: Path, tls: bool, transport: str) -> None:
    path, flags = tmp_path / "bench.json", ["--tls"] if tls else []
    serve = ("serve", "--port", "0", "--bytes", "2000000", "--credentials", str(path))
    server = bench_process(*serve, *flags, stderr=subprocess.PIPE)
    try:
        line = server.stderr.readline()
        port = line.rsplit(":", 1)[1].strip()
        fetch = ("fetch", "--port", port, "--codec", "lossless", "--credentials", str(path), "--repeats", "2", "--json")
        fetch += ("--transport", transport)
        done = bench_process(*fetch, *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = done.communicate(timeout=60)
        assert done.returncode == 0, err
        figures = json.loads(out)
        assert figures.keys() == KEYS
        assert figures["verified"] is True
        assert figures["tls"] is tls
        assert figures["transport"] == transport
        assert figures["source"] == "synthetic"
        assert figures["bytes_wire"] < figures["bytes_raw"] <= 2_000_000
        assert figures["goodput_gbps"] == pytest.approx(figures["bytes_raw"] * 8e-9 / figures["seconds"], rel=1e-2)
        assert len(figures["all_seconds"]) == 2
        assert "warm-up" in err
        if tls:
            plain = bench_process(*fetch, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert "serve was started with it" in plain.communicate(timeout=60)[1]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        server.stderr.close()


async def test_a_model_computes_its_kv_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_model("gemma3_text", tmp_path / "model")
    said: list[str] = []
    first = await capture.captured(model, DType.FLOAT32, said.append)
    assert first.source == "captured"
    assert any("computed" in text for text in said)
    (kept,) = (tmp_path / "cache" / "prfaas").iterdir()
    said.clear()
    assert (await capture.captured(model, DType.FLOAT32, said.append)).recording == first.recording
    assert said == []
    damaged = bytearray(kept.read_bytes())
    damaged[100] ^= 1
    kept.write_bytes(damaged)
    assert (await capture.captured(model, DType.FLOAT32, said.append)).recording == first.recording
    assert said != []
