"""Engines of the operator's file, and those in pods beside them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config import ConfigError, GatewayConfig
from gateway.fleet.config import EngineConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.listing import Listing, listed

ONE = '[[engine]]\nurl = "http://127.0.0.1:1"\nmodel = "m"\nname = "a"\n'
TWO = ONE + '[[engine]]\nurl = "http://127.0.0.1:2"\nmodel = "m"\nname = "b"\n'
IN_A_POD = EngineConfig("http://10.0.0.1:8000", "pod-0", "m")


class Looked:
    """Health, as far as it is told to look."""

    times = 0

    def look_now(self) -> None:
        self.times += 1


def listing(file: Path) -> tuple[Listing, Fleet, Looked]:
    config, health = GatewayConfig(None, "", engines_file=file), Looked()
    fleet = Fleet(listed(config), "local")
    unchecked: Any = health
    return Listing(lambda: config, fleet, unchecked), fleet, health


def names(fleet: Fleet) -> list[str]:
    return sorted(engine.name for engine in fleet.engines if not engine.draining)


def test_a_file_that_is_read_again_adds_engines_and_has_them_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(ONE)
    one, fleet, health = listing(file)
    assert one.reload() == []
    file.write_text(TWO)
    (change,) = one.reload()
    assert (change.option, change.was, change.now) == ("--engines", "a", "a, b")
    assert (names(fleet), health.times) == (["a", "b"], 1)


def test_pods_that_come_and_go_take_up_nothing_that_an_operator_is_still_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(ONE)
    one, fleet, _ = listing(file)
    monkeypatch.setattr(one, "_pods", SimpleNamespace(found=(IN_A_POD,)))
    for unfinished in (TWO, "[[engine]"):
        file.write_text(unfinished)
        one._pods_changed()
        assert names(fleet) == ["a", "pod-0"]
    with pytest.raises(ConfigError, match="--engines"):
        one.reload()
    file.write_text(TWO)
    one.reload()
    assert names(fleet) == ["a", "b", "pod-0"]
