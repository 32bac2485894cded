"""What a worker has for itself, and what all tell together."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import ConfigError, GatewayConfig
from gateway.state import State
from gateway.workers.exposition import SharedExposition, merged
from gateway.workers.serving import serve_workers
from gateway.workers.worker import Worker, first_state, listen, reserve


def worker(number: int, directory: Path, port: int = 8000) -> Worker:
    return Worker(number, 3, port, False, directory)


def test_each_worker_has_a_state_file_and_an_address_of_its_own(tmp_path: Path, config: GatewayConfig) -> None:
    given = replace(config, state_file=tmp_path / "s.db", advertise="https://gateway.example:8000/")
    found = [(one.config(given).state_file, one.url(given, 9000)) for one in (worker(0, tmp_path), worker(2, tmp_path))]
    assert found == [
        (tmp_path / "s.db", "https://gateway.example:9000/"),
        (tmp_path / "s.db.2", "https://gateway.example:9000/"),
    ]


def test_a_worker_without_a_state_begins_with_a_copy_and_keeps_what_it_has(
    tmp_path: Path, config: GatewayConfig
) -> None:
    given = replace(config, state_file=tmp_path / "s.db")
    state = State(given.state_file)
    key = state.ticket_key()
    state.close()
    first_state(given, 2)
    copy = State(tmp_path / "s.db.1")
    assert copy.ticket_key().private_bytes_raw() == key.private_bytes_raw()
    copy.execute("INSERT INTO counters VALUES ('x', 1)")
    copy.close()
    first_state(given, 2)
    with sqlite3.connect(tmp_path / "s.db.1") as kept:
        assert kept.execute("SELECT value FROM counters WHERE name = 'x'").fetchall() == [(1,)]


def test_workers_share_a_port_that_nobody_else_gets(tmp_path: Path) -> None:
    with reserve("127.0.0.1", 0, shared=True) as kept:
        port = kept.getsockname()[1]
        with listen("127.0.0.1", port, shared=True), listen("127.0.0.1", port, shared=True):
            pass
        with pytest.raises(ConfigError, match=str(port)):
            listen("127.0.0.1", port, shared=False)


def test_workers_get_a_port_on_which_connections_of_a_single_gateway_linger() -> None:
    with listen("127.0.0.1", 0, shared=False) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = before.accept()
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    with reserve("127.0.0.1", port, shared=True), listen("127.0.0.1", port, shared=True):
        pass


def test_several_workers_need_redis(config: GatewayConfig) -> None:
    with pytest.raises(ConfigError, match="--redis"):
        serve_workers(replace(config, workers=2), lambda: config)


EACH = """# HELP a_total An a
# TYPE a_total counter
a_total{x="q\\"} y"} %d.0
# HELP b A b
# TYPE b gauge
b 1.0
"""


def test_every_series_says_whose_it_is_and_families_stay_together() -> None:
    families = {
        one.name: {tuple(sorted(sample.labels.items())): sample.value for sample in one.samples}
        for one in text_string_to_metric_families(merged({0: EACH % 3, 1: EACH % 4}))
    }
    assert families["a"] == {(("worker", "0"), ("x", 'q"} y')): 3.0, (("worker", "1"), ("x", 'q"} y')): 4.0}
    assert families["b"] == {(("worker", "0"),): 1.0, (("worker", "1"),): 1.0}
    assert families["prfaas_workers"] == {(): 2.0}


async def test_whoever_is_asked_asks_the_others_and_goes_without_who_is_gone(tmp_path: Path) -> None:
    ones = [SharedExposition(worker(number, tmp_path), lambda n=number: (EACH % n).encode()) for number in range(2)]
    for one in ones:
        await one.start()
    text = (await ones[1].render()).decode()
    assert 'worker="0"' in text
    assert "prfaas_workers 2" in text  # of three; the third never came
    await ones[0].stop()
    await asyncio.sleep(0)
    assert 'worker="0"' not in (await ones[1].render()).decode()
    await ones[1].stop()
