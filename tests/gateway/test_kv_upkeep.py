"""The snapshot beside the state file: written at the end and in passing, taken at the start, never half."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from gateway import kv_upkeep
from gateway.kv_index import KEEP_LOST_S, KvIndex
from gateway.kv_upkeep import KvUpkeep
from kvcache.control import KvEvents
from tests.gateway.test_kv_index import FULL, batch, held, session, stored, tokens


def told() -> KvIndex:
    """An index that heard of two blocks."""
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 2))))
    return index


async def restarted(state: Path, fingerprint: str = "f") -> KvIndex:
    index = KvIndex(FULL, fingerprint)
    upkeep = KvUpkeep(index, (), state)
    upkeep.start()
    await upkeep.stop()
    return index


async def test_an_index_is_written_at_the_end_and_taken_at_the_start(tmp_path: Path) -> None:
    upkeep = KvUpkeep(told(), (), tmp_path / "state.db")
    upkeep.start()
    await upkeep.stop()
    await upkeep.stop()
    file = tmp_path / "state.db.prefixes"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert held(await restarted(tmp_path / "state.db")) == tokens(2)
    assert os.listdir(tmp_path) == [file.name]


async def test_without_a_state_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    upkeep = KvUpkeep(told(), (), None)
    upkeep.start()
    await upkeep.stop()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-9] + bytes(9),
        lambda data: b"",
        lambda data: b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=["short", "overwritten", "empty", "of something else, deeply nested"],
)
async def test_a_torn_file_is_dropped(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upkeep = KvUpkeep(told(), (), tmp_path / "state.db")
    upkeep.start()
    await upkeep.stop()
    file = tmp_path / "state.db.prefixes"
    file.write_bytes(damage(file.read_bytes()))
    index = await restarted(tmp_path / "state.db")
    assert held(index) is None
    assert len(index.index) == 0
    assert "prefix index begins empty" in caplog.text


async def test_the_file_of_another_model_is_dropped(tmp_path: Path) -> None:
    upkeep = KvUpkeep(told(), (), tmp_path / "state.db")
    upkeep.start()
    await upkeep.stop()
    assert held(await restarted(tmp_path / "state.db", "another")) is None


async def test_a_directory_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upkeep = KvUpkeep(told(), (), tmp_path / "gone" / "state.db")
    upkeep.start()
    await upkeep.stop()
    assert "prefix index not written" in caplog.text


@pytest.mark.parametrize("bound", ["MOST_BLOCKS_IN_PASSING", "MOST_RUNS_IN_PASSING"])
async def test_it_is_written_in_passing_unless_that_would_take_long(
    bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_upkeep, "SNAPSHOT_EVERY_S", 0.02)
    file = tmp_path / "state.db.prefixes"
    upkeep = KvUpkeep(told(), (), tmp_path / "state.db")
    upkeep.start()
    async with asyncio.timeout(5):
        while not file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await upkeep.stop()
    file.unlink()
    monkeypatch.setattr(kv_upkeep, bound, 0)
    upkeep.start()
    await asyncio.sleep(0.1)
    assert not file.exists()
    await upkeep.stop()
    assert file.exists()


async def test_nodes_that_stay_away_are_swept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_upkeep, "SWEEP_EVERY_S", 0.01)
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 2))))
    index.lost(node, asyncio.get_running_loop().time() - KEEP_LOST_S)
    upkeep = KvUpkeep(index, (), None)
    upkeep.start()
    async with asyncio.timeout(5):
        while held(index) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await upkeep.stop()
