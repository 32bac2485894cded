"""Where a session was served before."""

from __future__ import annotations

from gateway.affinity import Affinity


def test_a_session_finds_the_nodes_that_served_it_last() -> None:
    affinity = Affinity()
    affinity.served("acme", "s", ["p1", "d1"], 0.0)
    affinity.served("acme", "s", ["p2", "d1"], 1.0)
    assert affinity.nodes("acme", "s", 2.0) == {"p2", "d1"}


def test_a_session_of_another_tenant_is_another_session() -> None:
    affinity = Affinity()
    affinity.served("acme", "s", ["p1"], 0.0)
    assert affinity.nodes("other", "s", 0.0) == set()


def test_a_request_without_a_session_is_kept_nowhere() -> None:
    affinity = Affinity()
    affinity.served("acme", None, ["p1"], 0.0)
    assert affinity.nodes("acme", None, 0.0) == set()


def test_old_and_superfluous_sessions_are_forgotten() -> None:
    affinity = Affinity(most=2, forget_after_s=10.0)
    for at, name in enumerate("abc"):
        affinity.served("", name, [name], float(at))
    assert [affinity.nodes("", name, 3.0) for name in "abc"] == [set(), {"b"}, {"c"}]
    assert affinity.nodes("", "b", 12.0) == set()
