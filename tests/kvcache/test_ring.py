"""A ring keeps every byte in its order, whatever the sizes, and believes neither side more than it can know."""

import random

import pytest

from kvcache.transport.ring import RingError, RingReader, RingWriter


def ring(nbytes: int) -> tuple[RingWriter, RingReader]:
    memory = memoryview(bytearray(nbytes))
    return RingWriter(memory), RingReader(memory)


@pytest.mark.parametrize("nbytes", [1, 7, 64, 4096])
def test_what_is_put_is_taken_in_its_order_in_odd_lengths_and_round_the_end(nbytes: int) -> None:
    writer, reader = ring(nbytes)
    dice = random.Random(nbytes)
    source = dice.randbytes(5000)
    sent, got = 0, bytearray()
    while len(got) < len(source):
        end = min(len(source), sent + dice.randrange(0, 200))
        cut = dice.randrange(sent, end + 1)
        count = writer.put([memoryview(source)[sent:cut], memoryview(b""), memoryview(source)[cut:end]])
        sent += count
        if count:
            reader.arrived(count)
        room = [memoryview(bytearray(dice.randrange(0, 90))) for _ in range(2)]
        taken = reader.take(room)
        got += b"".join(room)[:taken] if taken > len(room[0]) else bytes(room[0][:taken])
        if back := reader.give_back():
            writer.freed(back)
    assert bytes(got) == source


def test_no_more_is_put_than_there_is_room_for() -> None:
    writer, reader = ring(10)
    assert writer.put([memoryview(bytes(25))]) == 10
    assert writer.put([memoryview(b"x")]) == 0
    reader.arrived(10)
    reader.take([memoryview(bytearray(4))])
    writer.freed(reader.give_back())
    assert writer.put([memoryview(bytes(25))]) == 4


@pytest.mark.parametrize("count", [0, 4])
def test_more_than_was_written_is_not_given_back(count: int) -> None:
    writer, _ = ring(10)
    writer.put([memoryview(b"abc")])
    with pytest.raises(RingError, match="3 were written"):
        writer.freed(count)


def test_more_than_there_was_room_for_does_not_arrive_though_it_was_taken_meanwhile() -> None:
    _, reader = ring(100)
    reader.arrived(90)
    reader.take([memoryview(bytearray(10))])
    assert reader.give_back() == 0  # the writer does not know yet
    with pytest.raises(RingError, match="no room"):
        reader.arrived(11)
    reader.arrived(10)


def test_a_reader_tells_little_by_little_only_when_there_is_no_more() -> None:
    _, reader = ring(100)
    reader.arrived(30)
    told = []
    for _ in range(30):
        reader.take([memoryview(bytearray(1))])
        told.append(reader.give_back())
    assert [(n, count) for n, count in enumerate(told, 1) if count] == [(25, 25), (30, 5)]
