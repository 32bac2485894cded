"""What survives a restart, and records that stay bounded."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway import decisions as module
from gateway.clusters import ClusterState, Dial
from gateway.config import ConfigError, GatewayConfig
from gateway.decisions import Decisions
from gateway.errors import ApiError
from gateway.keys import KeyBook, Role
from gateway.model import ServedModel
from gateway.registry import Registry
from gateway.serve import open_gateway
from gateway.state import State
from gateway.terms import ClusterTerms, KeyLimits
from scheduler.facts import Prices, RequestFacts, SizeFacts


def record(n: int, request_id: str | None = None) -> dict[str, Any]:
    return {"id": f"id{n}", "request_id": request_id or f"r{n}", "n": n}


def test_the_ticket_key_clusters_and_keys_survive_a_restart(tmp_path: Path, model: ServedModel) -> None:
    file = tmp_path / "state.db"
    before = State(file)
    key = before.ticket_key().private_bytes_raw()
    registry = Registry(before, "local", model.fingerprint, 100)
    registry.register("east", Dial.OUT, 2.5)
    registry.register("west", Dial.IN)
    registry.set_draining("east", True)
    registry.remove("west")
    _, secret = KeyBook(before).create("a", Role.ADMIN)
    before.close()
    after = State(file)
    assert after.ticket_key().private_bytes_raw() == key
    again = Registry(after, "local", model.fingerprint, 100)
    assert [(c.name, c.state, c.egress_gbps) for c in again.clusters] == [
        ("local", ClusterState.ACTIVE, 0.0),
        ("east", ClusterState.DRAINING, 2.5),
    ]
    with pytest.raises(ApiError):
        again.cluster("west")
    assert KeyBook(after).find(secret) is not None
    after.close()


def test_clusters_of_an_older_schema_are_kept_without_a_limit(tmp_path: Path, model: ServedModel) -> None:
    file = tmp_path / "state.db"
    with sqlite3.connect(file) as old:
        old.execute(
            "CREATE TABLE clusters (name TEXT PRIMARY KEY, dial TEXT NOT NULL, state TEXT NOT NULL, "
            "created REAL NOT NULL)"
        )
        old.execute("INSERT INTO clusters VALUES ('east', 'in', 'active', 1.0)")
        old.execute("PRAGMA user_version=1")
    state = State(file)
    assert Registry(state, "local", model.fingerprint, 100).cluster("east").egress_gbps == 0.0
    state.close()


def test_what_operators_say_of_clusters_and_keys_is_kept_over_a_restart(tmp_path: Path, model: ServedModel) -> None:
    file = tmp_path / "state.db"
    before = State(file)
    registry = Registry(before, "local", model.fingerprint, 100)
    prices = Prices(0.05, 0.001, (0.5,) * 12 + (1.0,) * 12)
    registry.register("east", Dial.IN, terms=ClusterTerms("eu", True, prices))
    registry.set_terms("local", ClusterTerms("us"))
    limits = KeyLimits("acme", regions=frozenset({"eu", "us"}), barred=frozenset({"west"}), trusted_only=True)
    _, secret = KeyBook(before).create("a", Role.ADMIN, limits=limits)
    before.close()
    after = State(file)
    again = Registry(after, "local", model.fingerprint, 100)
    assert again.cluster("east").terms == ClusterTerms("eu", True, prices)
    assert again.cluster("local").terms.region == "us"
    found = KeyBook(after).find(secret)
    assert found is not None
    assert (found.limits, found.tenant) == (limits, "acme")
    after.close()


def test_a_file_of_an_older_schema_gains_what_it_lacks(tmp_path: Path, model: ServedModel) -> None:
    file = tmp_path / "state.db"
    whole = State(file)
    _, secret = KeyBook(whole).create("a", Role.ADMIN)
    Registry(whole, "local", model.fingerprint, 100).register("east", Dial.IN)
    whole.close()
    with sqlite3.connect(file) as db:
        db.execute("ALTER TABLE keys DROP COLUMN limits")
        db.execute("ALTER TABLE clusters DROP COLUMN terms")
        db.execute("PRAGMA user_version=3")
    state = State(file)
    found = KeyBook(state).find(secret)
    assert found is not None
    assert found.limits == KeyLimits()
    assert Registry(state, "local", model.fingerprint, 100).cluster("east").terms == ClusterTerms()
    state.close()


def test_a_key_without_a_tenant_is_one_of_its_own_and_one_that_shares_is_of_all_that_share() -> None:
    book = KeyBook(State(None))
    secrets = [book.create("x", Role.CLIENT)[1] for _ in range(2)]
    shared = [book.create("x", Role.CLIENT, limits=KeyLimits(share_cache=True))[1] for _ in range(2)]
    own = [found.tenant for secret in secrets if (found := book.find(secret)) is not None]
    common = [found.tenant for secret in shared if (found := book.find(secret)) is not None]
    assert len(set(own)) == 2
    assert "" not in own
    assert common == ["", ""]


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (KeyLimits(tenant="a b"), "tenant"),
        (KeyLimits(regions=frozenset({""})), "regions"),
        (KeyLimits(barred=frozenset(map(str, range(100)))), "barred"),
        (KeyLimits(tenant="acme", share_cache=True), "share_cache"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_field(limits: KeyLimits, field: str) -> None:
    with pytest.raises(ApiError) as refused:
        KeyBook(State(None)).create("x", Role.CLIENT, limits=limits)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        (ClusterTerms("a/b"), "region"),
        (ClusterTerms(prices=Prices(egress_per_gb=-1.0)), "prices.egress_per_gb"),
        (ClusterTerms(prices=Prices(prefill_per_s=float("nan"))), "prices.prefill_per_s"),
        (ClusterTerms(prices=Prices(by_hour=(1.0,))), "prices.by_hour"),
        (ClusterTerms(prices=Prices(by_hour=(-1.0,) * 24)), "prices.by_hour"),
    ],
)
def test_terms_that_cannot_be_are_refused_by_field(model: ServedModel, terms: ClusterTerms, field: str) -> None:
    registry = Registry(State(None), "local", model.fingerprint, 100)
    with pytest.raises(ApiError) as refused:
        registry.register("east", Dial.IN, terms=terms)
    assert refused.value.param == field


def test_two_gateways_without_a_file_have_different_ticket_keys() -> None:
    assert State(None).ticket_key().private_bytes_raw() != State(None).ticket_key().private_bytes_raw()


def test_a_file_that_is_no_state_or_of_a_newer_gateway_is_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"not a database" * 100)
    newer = tmp_path / "newer"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version=99")
    for file in (garbage, newer, tmp_path / "missing" / "state.db"):
        with pytest.raises(ConfigError, match=f"--state {file}"):
            State(file)


DAMAGES = {
    "a role that nobody has": "UPDATE keys SET role = 'emperor'",
    "clusters of a key that are no list": "UPDATE keys SET clusters = '{'",
    "a way to dial that is none": "UPDATE clusters SET dial = 'sideways'",
    "a ticket key of another length": "UPDATE secrets SET value = 'short'",
    "a table that lacks a column": "ALTER TABLE keys DROP COLUMN route_hint",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_with_what_no_gateway_wrote_is_refused_at_start(
    tmp_path: Path, model: ServedModel, config: GatewayConfig, name: str
) -> None:
    file = tmp_path / "state.db"
    whole = State(file)
    whole.ticket_key()
    KeyBook(whole).create("a", Role.ADMIN, clusters=frozenset({"east"}))
    Registry(whole, "local", model.fingerprint, 100).register("east", Dial.IN)
    whole.close()
    with sqlite3.connect(file) as db:
        db.execute(DAMAGES[name])
    with pytest.raises(ConfigError, match=f"--state {file}: .* cannot be read .*; restore it"):
        open_gateway(replace(config, state_file=file))


def test_a_file_that_another_process_holds_is_told_and_not_waited_for(tmp_path: Path, model: ServedModel) -> None:
    state = State(tmp_path / "state.db")
    registry = Registry(state, "local", model.fingerprint, 100)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    with pytest.raises(ApiError, match="locked") as refused:
        registry.register("east", Dial.IN)
    assert (refused.value.status, refused.value.code) == (503, "state_unavailable")
    assert time.monotonic() - began < 2.5
    assert [cluster.name for cluster in registry.clusters] == ["local"]
    other.execute("COMMIT")
    registry.register("east", Dial.IN)
    other.close()
    state.close()


def test_decisions_survive_and_the_newest_of_a_request_id_wins(tmp_path: Path) -> None:
    state = State(tmp_path / "state.db")
    decisions = Decisions(state)
    decisions.add(record(1, "same"))
    decisions.add(record(2, "same"))
    found = decisions.find("same")
    assert found is not None
    assert found["n"] == 2
    decisions.close()
    restarted = Decisions(state)
    assert (restarted.find("same") or {})["n"] == 2
    assert (restarted.find("id1") or {})["n"] == 1
    assert [r["n"] for r in restarted.recent(10)] == [2, 1]
    assert restarted.find("other") is None
    restarted.close()
    state.close()


def test_records_are_bounded_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY", 10)
    monkeypatch.setattr(module, "ON_DISK", 50)
    memory = Decisions(State(None))
    for n in range(30):
        memory.add(record(n))
    assert memory.find("id19") is None
    assert memory.find("id20") is not None
    state = State(tmp_path / "state.db")
    disk = Decisions(state)
    for n in range(200):
        disk.add(record(n))
    disk.close()
    assert state.execute("SELECT count(*), max(seq) FROM decisions") == [(50, 200)]
    assert disk.unwritten == 0
    state.close()


def test_a_writer_that_falls_behind_drops_and_counts_instead_of_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN", 5)
    state = State(tmp_path / "state.db")
    decisions = Decisions(state)
    assert decisions._disk is not None
    with decisions._disk._lock:
        for n in range(20):
            decisions.add(record(n))
    decisions.close()
    assert decisions.unwritten >= 14
    assert decisions.find("id19") is not None
    state.close()


def test_records_wait_a_moment_for_others_but_nobody_who_asks_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER_S", 60.0)
    state = State(tmp_path / "state.db")
    decisions = Decisions(state)
    began = time.monotonic()
    for n in range(3):
        decisions.add(record(n))
    time.sleep(0.05)
    assert state.execute("SELECT count(*) FROM decisions") == [(0,)], "they wait"
    assert len(decisions.page(0)[0]) == 3
    decisions.add(record(3))
    decisions.close()
    assert state.execute("SELECT count(*) FROM decisions") == [(4,)]
    assert time.monotonic() - began < 10
    state.close()


def test_what_is_kept_as_it_was_made_reads_as_what_comes_from_the_disk(tmp_path: Path) -> None:
    state = State(tmp_path / "state.db")
    decisions = Decisions(state)
    facts = RequestFacts("id", 5, SizeFacts(per_token=1.5), allowed_clusters=frozenset({"b", "a"}))
    decisions.add({"id": "id", "request_id": "asked", "facts": facts, "figures": {"ids": (b"x", 1)}})
    own = decisions.find("asked")
    decisions.close()
    again = Decisions(state)
    assert own is not None
    assert json.loads(json.dumps(own)) == again.find("asked")
    assert list(own["facts"]["allowed_clusters"]) == ["a", "b"]
    again.close()
    state.close()
