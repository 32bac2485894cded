"""Events over ZMQ as a stranger reads them: a subscriber in another process, and requests for a replay."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from deploy.stack import free_port
from kvcache.kv_events import decode_batch
from node.config import ConfigError, EventEndpoints, event_endpoints
from node.event_log import EventLog
from node.event_socket import EventSocket
from tests.node.test_event_log import BLOCK, chain

SUBSCRIBER = """
import json, sys, zmq
context = zmq.Context()
sub = context.socket(zmq.SUB)
sub.connect(sys.argv[1])
sub.subscribe(b"kv@")
sub.setsockopt(zmq.RCVTIMEO, 20000)
seen = []
while len(seen) < int(sys.argv[2]):
    topic, number, payload = sub.recv_multipart()
    if not seen:
        print("first", flush=True)
    seen.append([topic.decode(), int.from_bytes(number, "big"), payload.hex()])
print(json.dumps(seen), flush=True)
"""


@asynccontextmanager
async def publishing(log: EventLog) -> AsyncIterator[EventEndpoints]:
    endpoints = EventEndpoints(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
    socket = EventSocket(endpoints, "kv@n@m", log)
    task = asyncio.create_task(socket.run())
    try:
        yield endpoints
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.close()


def tell(log: EventLog, at: int) -> None:
    log.stored(chain(1, first=at * 1000))
    log.flush()


async def test_a_subscriber_in_another_process_reads_what_was_published() -> None:
    log = EventLog(BLOCK, "mamba")
    async with publishing(log) as endpoints:
        command = [sys.executable, "-c", SUBSCRIBER, endpoints.publish, "5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as subscriber:  # noqa: ASYNC220 (it returns)
            assert subscriber.stdout is not None
            try:
                first = asyncio.create_task(asyncio.to_thread(subscriber.stdout.readline))
                while not first.done():  # a subscription takes its time to arrive: publish until it has
                    tell(log, log.next_seq)
                    await asyncio.sleep(0.05)
                for _ in range(5):
                    tell(log, log.next_seq)
                seen = json.loads(await asyncio.to_thread(subscriber.stdout.readline))
            finally:
                subscriber.kill()
        numbers = [number for _, number, _ in seen]
        assert numbers == list(range(numbers[0], numbers[0] + 5))
        for topic, number, payload in seen:
            assert topic == "kv@n@m"
            assert decode_batch(bytes.fromhex(payload)) == decode_batch(log.batch(number))


async def test_a_replay_gives_all_from_a_number_on_and_says_where_it_ends() -> None:
    log = EventLog(BLOCK, "mamba")
    for at in range(4):
        tell(log, at)
    async with publishing(log) as endpoints, asyncio.timeout(10):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoints.replay)
            await dealer.send_multipart((b"", (1).to_bytes(8, "big"), b"one frame too many"))
            await dealer.send_multipart((b"", b"short"))
            await dealer.send_multipart((b"", (2).to_bytes(8, "big")))
            answers = [await dealer.recv_multipart() for _ in range(3)]
    assert answers[:2] == [[b"", b"kv@n@m", seq.to_bytes(8, "big"), log.batch(seq)] for seq in (2, 3)]
    assert answers[2] == [b"", b"kv@n@m", b"\xff" * 8, b""]


async def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    log = EventLog(BLOCK, "mamba")
    async with publishing(log) as endpoints:
        with pytest.raises(ConfigError, match="--kv-events-replay-endpoint"):
            EventSocket(EventEndpoints(f"tcp://127.0.0.1:{free_port()}", endpoints.replay), "t", log)
        with pytest.raises(ConfigError, match="--kv-events-endpoint"):
            EventSocket(EventEndpoints(endpoints.publish), "t", log)


def test_off_by_default_and_on_the_loopback_by_a_flag() -> None:
    assert event_endpoints(None, None, False) is None
    found = event_endpoints("tcp://127.0.0.1:5557", "tcp://localhost:5558", False)
    assert found == EventEndpoints("tcp://127.0.0.1:5557", "tcp://localhost:5558")


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "10.0.0.1", "[::]", "example.com"])
def test_off_the_loopback_is_refused_unless_the_flag_says_what_that_means(host: str) -> None:
    with pytest.raises(ConfigError, match=r"neither credentials nor encryption.*--kv-events-insecure-network"):
        event_endpoints(f"tcp://{host}:5557", None, False)
    with pytest.raises(ConfigError, match=r"--kv-events-replay-endpoint.*neither credentials"):
        event_endpoints("tcp://127.0.0.1:5557", f"tcp://{host}:5558", False)
    assert event_endpoints(f"tcp://{host}:5557", None, True) == EventEndpoints(f"tcp://{host}:5557")


@pytest.mark.parametrize(
    ("publish", "replay", "says"),
    [
        ("ipc:///tmp/x", None, "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1", None, "HOST:PORT"),
        ("tcp://127.0.0.1:1/x", None, "HOST:PORT"),
        ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", "must differ"),
        (None, "tcp://127.0.0.1:1", "missing"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused_with_its_flag(
    publish: str | None, replay: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        event_endpoints(publish, replay, False)
