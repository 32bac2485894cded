"""What is taken for this machine alone, and what for all its addresses."""

from __future__ import annotations

import pytest

from kvcache.hosts import is_every_address, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.1.2.3"])
def test_the_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "localhost.example", "127.0.0.1.example", ""])
def test_nothing_else_is_taken_for_the_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_what_binds_every_address_is_recognised(host: str) -> None:
    assert is_every_address(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "::1", "localhost", ""])
def test_one_address_or_a_name_is_not_every_address(host: str) -> None:
    assert not is_every_address(host)
