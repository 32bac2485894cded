"""Chunked bodies are read strictly, however they are cut, and whole chunks are passed on untouched."""

from __future__ import annotations

import pytest

from gateway.upstream.framing import MAX_LINE, MAX_TRAILER_BYTES, BadChunk, Chunked


class Kept:
    def __init__(self) -> None:
        self.framed: list[bytes] = []
        self.data: list[bytes] = []

    def on_chunks(self, framed: bytes) -> None:
        self.framed.append(framed)

    def on_data(self, data: bytes) -> None:
        self.data.append(data)


BODY = b"5\r\nhello\r\n6;name=value\r\n world\r\n0\r\nx: y\r\n\r\n"


@pytest.mark.parametrize("step", range(1, len(BODY) + 1))
def test_however_a_body_is_cut_its_content_is_the_same(step: int) -> None:
    kept = Kept()
    chunked = Chunked(kept, verbatim=False)
    ends = [chunked.feed(BODY[at : at + step]) for at in range(0, len(BODY), step)]
    assert b"".join(kept.data) == b"hello world"
    assert ends == [None] * (len(ends) - 1) + [b""]


@pytest.mark.parametrize("step", range(1, len(BODY) + 1))
def test_whole_chunks_pass_untouched_and_the_rest_is_taken_apart(step: int) -> None:
    kept = Kept()
    chunked = Chunked(kept, verbatim=True)
    ends = [chunked.feed(BODY[at : at + step]) for at in range(0, len(BODY), step)]
    content = b"".join(one.split(b"\r\n")[1] for one in kept.framed) + b"".join(kept.data)
    assert content == b"hello world"
    assert ends[-1] == b""
    assert not any(b"name" in one for one in kept.framed)


def test_several_whole_chunks_are_one_piece_and_a_part_behind_them_is_not_in_it() -> None:
    kept = Kept()
    chunked = Chunked(kept, verbatim=True)
    assert chunked.feed(b"1\r\na\r\n2\r\nbc\r\n3\r\nd") is None
    assert kept.framed == [b"1\r\na\r\n2\r\nbc\r\n"]
    assert chunked.feed(b"ef\r\n") is None
    assert chunked.feed(b"1\r\ng\r\n0\r\n\r\n") == b""
    assert b"".join(kept.data) == b"def"
    assert kept.framed[1:] == [b"1\r\ng\r\n"]


def test_what_lies_beyond_the_end_is_handed_back() -> None:
    assert Chunked(Kept(), verbatim=True).feed(b"1\r\na\r\n0\r\n\r\nHTTP/1.1 200") == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "bad",
    [
        b"x\r\n",
        b"-1\r\n\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b" 1\r\na\r\n",
        b"\r\n",
        b"1\na\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"ffffffffffffffff\r\n",
        b"1;" + b"e" * MAX_LINE,
        b"0\r\n" + b"x: y\r\n" * (MAX_TRAILER_BYTES // 4 + 1),
    ],
)
@pytest.mark.parametrize("verbatim", [True, False])
def test_what_is_no_chunk_is_refused(bad: bytes, verbatim: bool) -> None:
    with pytest.raises(BadChunk):
        Chunked(Kept(), verbatim).feed(bad)


def test_who_stops_in_the_middle_hears_no_more() -> None:
    class Leaver(Kept):
        def on_data(self, data: bytes) -> None:
            super().on_data(data)
            chunked.stop()

    kept = Leaver()
    chunked = Chunked(kept, verbatim=False)
    assert chunked.feed(BODY) is None
    assert kept.data == [b"hello"]
