"""Two real node processes, each with the real embedded engine on a small model, and a gateway that is the test."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from kvcache.control import Cancel, Cancelled, Delta, Failed, Finished, Heartbeat, PrefillDone, Sampling, TransferDone
from kvcache.layout import DType
from node.model import NodeModel
from tests.models import tiny_model
from tests.node.fake_gateway import heartbeats
from tests.node.test_node import CHUNK, Gateway

ROOT = Path(__file__).parents[2]
READY_S = 60.0


pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def model_dir(request, tmp_path_factory):
    arch = getattr(request, "param", "gemma3_text")
    return tiny_model(arch, tmp_path_factory.mktemp("model") / arch)


@pytest.fixture(scope="session")
def model(model_dir):
    return NodeModel.read(model_dir, DType.FLOAT32)


class Process:
    """One ``prfaas node``."""

    def __init__(self, child, log):
        self.child = child
        self.log = log

    @classmethod
    async def start(cls, role, gateway, model_dir, log, *options):
        arguments = ["--role", role, "--node-id", role, "--cluster", "local", "--gateway", gateway.url]
        arguments += ["--model", str(model_dir), "--dtype", "float32", "--pool-mib", "16"]
        arguments += ["--chunk-tokens", str(CHUNK), *options]
        code = "import sys; from node.cli import node; node(sys.argv[1:], prog_name='prfaas node')"
        with log.open("wb") as out:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code,
                *arguments,
                stderr=out,
                stdout=out,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        return cls(child, log)

    def engines(self):
        """Process ids of its engines."""
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"engines.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    async def end(self, number=signal.SIGTERM):
        """Its exit status after a signal."""
        if self.child.returncode is None:
            self.child.send_signal(number)
        async with asyncio.timeout(10):
            return await self.child.wait()


@contextlib.asynccontextmanager
async def processes(model_dir, tmp_path):
    async with Gateway() as gateway:
        gateway.beat_s = 0.02
        nodes = [
            await Process.start(role, gateway, model_dir, tmp_path / f"{role}.log") for role in ("prefill", "decode")
        ]
        try:
            for node, role in zip(nodes, ("prefill", "decode"), strict=True):
                waits = [
                    asyncio.create_task(node.child.wait()),
                    asyncio.create_task(gateway.hears(role, Heartbeat, within=READY_S)),
                ]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits[0].cancel()
                assert node.child.returncode is None, node.log.read_text()
                await waits[1]
            yield gateway, *nodes
        finally:
            for node in nodes:
                if node.child.returncode is None:
                    node.child.kill()
                    await node.child.wait()


def alive(pid):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_free(gateway, node):
    """Whether a node's last heartbeat says that no page is taken: each is free, or kept and held by nobody."""
    beat = heartbeats(gateway, node)[-1]
    return beat.pages_free == beat.pages_total


async def answer(gateway, generate):
    """The token ids of a generation, once it has ended well."""
    ended = await gateway.hears(
        "decode",
        Finished | Failed,
        lambda m: generate.generation in (getattr(m, "generation", 0), getattr(m, "job", 0)),
        30,
    )
    assert isinstance(ended, Finished), ended
    return [
        token
        for m in gateway.heard["decode"]
        if isinstance(m, Delta) and m.generation == generate.generation
        for token in m.token_ids
    ]


async def order(gateway, prefill_job, generate):
    await gateway.send("decode", generate)
    if prefill_job is not None:
        await gateway.send("prefill", prefill_job)


@pytest.mark.parametrize("model_dir", ["qwen3_next", "gemma3_text"], indirect=True)
async def test_a_remote_prefill_says_what_the_decode_node_says_alone(model_dir, model, tmp_path):
    async with processes(model_dir, tmp_path) as (gateway, prefill, decode):
        for codec, tokens in (("raw", 2), ("lossless", 129), ("raw", 513), ("lossless", 700)):
            ticket, prefill_job, generate = gateway.jobs(model, tokens)
            generate = msgspec.structs.replace(generate, sampling=Sampling(12, 0.0, ignore_eos=True))
            await order(gateway, msgspec.structs.replace(prefill_job, codec=codec), generate)
            remote = await answer(gateway, generate)
            done = await gateway.hears("decode", TransferDone, lambda m, t=ticket: m.transfer == t.transfer)
            assert (done.codec, done.raw_bytes) == (codec, model.layout.s_kv(tokens - 1))
            await gateway.hears("prefill", PrefillDone, lambda m, t=ticket: m.transfer == t.transfer)
            changes = {"generation": f"{generate.generation}.alone", "source": None, "salt": "knows no cached block"}
            alone = msgspec.structs.replace(generate, **changes)
            await order(gateway, None, alone)
            assert len(remote) == 12
            assert await answer(gateway, alone) == remote
        for name in ("prefill", "decode"):
            await gateway.until(lambda n=name: heartbeats(gateway, n)[-1].open_transfers == 0 and all_free(gateway, n))
            assert heartbeats(gateway, name)[-1].pages_cached > 0
        for node in (prefill, decode):
            engines = node.engines()
            assert len(engines) == 1
            assert await node.end() == 0, node.log.read_text()
            assert not alive(engines[0])
            assert "ready (" in node.log.read_text()


async def test_a_killed_engine_fails_the_job_and_the_node_works_again(model_dir, model, tmp_path):
    async with processes(model_dir, tmp_path) as (gateway, prefill, _):
        _, prefill_job, generate = gateway.jobs(model, 7000, seconds=60)
        await order(gateway, prefill_job, generate)
        await gateway.hears("decode", Heartbeat, lambda beat: beat.pages_free < beat.pages_total)
        os.kill(prefill.engines()[0], signal.SIGKILL)
        failed = await gateway.hears("prefill", Failed)
        assert (failed.stage, failed.cause) == ("prefill", "engine_lost")
        assert (await gateway.hears("decode", Failed)).stage == "transfer"
        await gateway.hears("prefill", Heartbeat, lambda beat: not beat.accepting)
        await gateway.until(lambda: heartbeats(gateway, "prefill")[-1].accepting, READY_S)
        _, prefill_job, generate = gateway.jobs(model, 300)
        await order(gateway, prefill_job, generate)
        assert await answer(gateway, generate)


async def test_a_killed_prefill_node_is_noticed_at_once_and_nothing_stays_behind(model_dir, model, tmp_path):
    async with processes(model_dir, tmp_path) as (gateway, prefill, _):
        _, prefill_job, generate = gateway.jobs(model, 7000, seconds=60)
        await order(gateway, prefill_job, generate)
        await gateway.hears("decode", Heartbeat, lambda beat: beat.pages_free < beat.pages_total)
        engine = prefill.engines()[0]
        await prefill.end(signal.SIGKILL)
        failed = await gateway.hears("decode", Failed, within=5)
        assert (failed.stage, failed.cause) == ("transfer", "peer_lost")
        await gateway.until(lambda: all_free(gateway, "decode"))
        await gateway.until(lambda: not alive(engine))


async def test_a_cancel_frees_a_running_prefill_within_a_chunk(model_dir, model, tmp_path):
    async with processes(model_dir, tmp_path) as (gateway, _, _):
        ticket, prefill_job, generate = gateway.jobs(model, 7000, seconds=60)
        await order(gateway, prefill_job, generate)
        await gateway.hears("decode", Heartbeat, lambda beat: beat.pages_free < beat.pages_total)
        await gateway.send("prefill", Cancel(ticket.transfer.hex()))
        cancelled = await gateway.hears("prefill", Cancelled, within=2)
        assert cancelled.prefilled_tokens < 6999
        await gateway.hears("decode", Failed, within=2)
        await gateway.until(lambda: all_free(gateway, "prefill"))
