from __future__ import annotations

from prefill_service.used import UsedTransfers


def test_a_used_transfer_is_remembered_until_its_deadline_and_forgotten_without_another_one() -> None:
    used = UsedTransfers()
    used.add(b"a", until=10.0, now=0.0)
    used.add(b"b", until=5.0, now=0.0)
    used.forget(now=7.0)
    assert b"a" in used
    assert b"b" not in used
    used.forget(now=10.1)
    assert len(used) == 0
