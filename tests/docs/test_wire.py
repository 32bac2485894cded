"""docs/wire.md says what the code of the wire says."""

from __future__ import annotations

import re
from typing import Any, get_args

from kvcache import control, ticket, wire
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "wire.md").read_text()


def test_the_table_of_frames_has_every_frame_with_its_number_and_its_fields() -> None:
    told = {
        int(kind): (name, tuple(fields.split(", ")))
        for kind, name, fields in re.findall(r"^\| (\d+) \| (\w+) \| ([\w, ]+) \|$", PAGE, re.MULTILINE)
    }
    assert told == {int(kind): (frame.__name__, frame.__struct_fields__) for kind, frame in wire.type_of_kind.items()}


def test_versions_and_bounds_are_those_of_the_code() -> None:
    assert wire.header.format == ">IBBH"
    assert f"of the wire, {wire.WIRE_VERSION} at present" in PAGE
    assert wire.MAX_HANDSHAKE_BODY == wire.MAX_DATA_HEAD == 4 << 10
    assert wire.MAX_CONTROL_BODY == 1 << 20
    assert wire.MAX_PAYLOAD_BYTES == 1 << 30
    assert control.MAX_MESSAGE_BYTES == 16 << 20
    assert ticket.MAX_TICKET_BYTES == 4 << 10
    assert f"One version byte ({ticket.TICKET_VERSION})" in PAGE


def test_the_table_of_tickets_has_every_field() -> None:
    table = PAGE.split("## Tickets")[1].split("## Control stream")[0]
    told = [name for row in re.findall(r"^\| ([\w, ]+) \|", table, re.MULTILINE) for name in row.split(", ")]
    assert told[1:] == list(ticket.Ticket.__struct_fields__)


def test_every_control_message_is_told_of() -> None:
    section = PAGE.split("## Control stream")[1]
    told = {name for row in re.findall(r"^\| ([A-Z][\w, ]+) \|", section, re.MULTILINE) for name in row.split(", ")}
    assert told == names(control.FromNode) | names(control.ToNode)


def names(union: Any) -> set[str]:
    return {message.__name__ for message in get_args(union)}
