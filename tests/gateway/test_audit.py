"""The audit log: what of it stays, and what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import audit
from gateway.audit import AuditEntry, AuditLog
from gateway.commands.client import print_table
from gateway.state import State


def entry(actor: str, action: str = "POST /v1/x", outcome: str = "403") -> AuditEntry:
    return AuditEntry(1.0, actor, action, "", outcome)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEPT", 20)
    monkeypatch.setattr(audit, "PRUNE_EVERY", 10)


@pytest.mark.usefixtures("small")
def test_who_floods_the_log_pushes_out_nobody_else_s_entries() -> None:
    log = AuditLog(State(None))
    log.add(entry("admin", "DELETE /v1/clusters/east", "200"))
    for _ in range(95):
        log.add(entry("client"))
    for number in range(5):
        log.refused(f"n{number}", "east", "wrong_token", "")
    found = log.recent(1000)
    assert found[-1].actor == "admin"
    assert len([each for each in found if each.actor == "client"]) <= 20
    assert len([each for each in found if each.actor.startswith("node ")]) == 5


def test_a_log_that_an_older_gateway_began_goes_on(tmp_path: Path) -> None:
    state = State(tmp_path / "state.db")
    state.execute("DROP TABLE audit")
    state.execute("CREATE TABLE audit (id INTEGER PRIMARY KEY AUTOINCREMENT, cluster TEXT, record BLOB)")
    state.close()
    log = AuditLog(State(tmp_path / "state.db"))
    log.add(entry("admin"))
    assert [each.actor for each in log.recent(10)] == ["admin"]


def test_a_table_shows_what_it_is_given_and_takes_nothing_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("who", "why"), [("node [/x]", "[red]no[/red]")], "nothing")
    assert "node [/x]  [red]no[/red]" in capsys.readouterr().out
