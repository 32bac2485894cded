import struct

import pytest

from tests.wan.firewall import let_through, opened_port


def tcp(flags: int, port: int = 7443, options: int = 0) -> bytes:
    header = bytes([0x45 + options, 0, 0, 40]) + bytes(4) + bytes([64, 6, 0, 0]) + bytes(8) + bytes(4 * options)
    return header + struct.pack(">HHIIBBHHH", 1234, port, 0, 0, 0x50, flags, 0, 0, 0)


@pytest.mark.parametrize("options", [0, 3])
def test_what_asks_for_a_connection_says_at_which_port(options: int) -> None:
    assert opened_port(tcp(0x02, 8443, options)) == 8443


@pytest.mark.parametrize("packet", [tcp(0x12), tcp(0x10), tcp(0x18), b"", b"\x60" + bytes(60), tcp(0x02)[:30]])
def test_what_belongs_to_a_connection_or_is_no_tcp_asks_for_none(packet: bytes) -> None:
    assert opened_port(packet) is None


def test_only_ports_that_are_left_open_can_be_connected_to() -> None:
    asks, goes_on = [tcp(0x02, port) for port in (1, 2)], tcp(0x10, 1)
    assert let_through([*asks, goes_on], (2,)) == [asks[1], goes_on]
    assert let_through([*asks, goes_on], ()) == [goes_on]
