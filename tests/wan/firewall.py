"""A site that lets nobody in: packets that open a TCP connection are dropped, but for ports that it leaves open."""

from __future__ import annotations

from collections.abc import Collection

_TCP = 6
_SYN, _ACK = 0x02, 0x10


def opened_port(packet: bytes) -> int | None:
    """The port that an IPv4 packet asks to connect to; None where it asks for no connection."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    tcp = (packet[0] & 0x0F) * 4
    if len(packet) < tcp + 14 or packet[tcp + 13] & (_SYN | _ACK) != _SYN:
        return None
    return int.from_bytes(packet[tcp + 2 : tcp + 4], "big")


def let_through(packets: list[bytes], open_ports: Collection[int]) -> list[bytes]:
    """Those that belong to open connections, or ask for one at a port that is let through."""
    return [packet for packet in packets if (port := opened_port(packet)) is None or port in open_ports]
