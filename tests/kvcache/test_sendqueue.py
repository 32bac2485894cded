"""Which frame goes next, and what happens to it when its connection does not survive."""

from __future__ import annotations

import random

import pytest

from kvcache.transport.order import MAX_KNOWN, SendOrder
from kvcache.transport.sendqueue import BATCH_BYTES, SendBatch, SendQueue

A, B, C = b"A", b"B", b"C"


def test_the_transfer_with_the_least_left_goes_first() -> None:
    order = SendOrder()
    order.wants(A, 1000)
    order.wants(B, 10)
    order.wants(C, 500)
    assert order.first([A, B, C]) == B
    order.forget(B)
    assert order.first([A, C]) == C
    order.sent(A, 600)
    assert order.first([A, C]) == A


def test_nobody_is_overtaken_by_more_than_he_has_left() -> None:
    """However many short ones come, a long one has its turn once they have sent as much as it wants to send."""
    order = SendOrder()
    order.wants(A, 100_000)
    overtaken, short = 0, 0
    while True:
        short += 1
        order.wants(b"%d" % short, 1000)
        first = order.first([A, b"%d" % short])
        if first == A:
            break
        order.sent(first, 1000)
        overtaken += 1000
    assert 90_000 <= overtaken <= 100_000
    for _ in range(100):
        short += 1
        order.wants(b"%d" % short, 1000)
        assert order.first([A, b"%d" % short]) == A
        order.sent(A, 1000)
    assert A not in order._came


def test_what_is_known_of_transfers_is_bounded() -> None:
    order = SendOrder()
    for n in range(3 * MAX_KNOWN):
        order.wants(n.to_bytes(4, "big"), 10)
    assert len(order) == len(order._left) == MAX_KNOWN


def drain(queue: SendQueue, batch: SendBatch) -> bytes:
    out = b""
    while views := batch.gather(queue):
        out += b"".join(views)
        batch.sent(sum(map(len, views)))
    return out


def test_control_frames_overtake_data_and_frames_of_a_transfer_keep_their_order() -> None:
    queue = SendQueue()
    for name in ("A1", "A2", "B1", "A3", "B2"):
        queue.push_data(name[:1].encode(), name.encode(), [], {"A": 100, "B": 50}[name[0]])
    queue.push_control(b"ctl")
    assert queue.control_bytes == 3
    assert drain(queue, SendBatch()) == b"ctlB1B2A1A2A3"
    assert queue.control_bytes == 0
    assert not queue


@pytest.mark.parametrize("seed", range(20))
def test_frames_cut_anywhere_arrive_whole_and_finish_in_order(seed: int) -> None:
    dice = random.Random(seed)
    queue, batch = SendQueue(), SendBatch()
    frames = [dice.randbytes(dice.choice([1, 50, 3000, BATCH_BYTES])) for _ in range(12)]
    items = [queue.push_data(A, frame[:1], [memoryview(frame[1:])], 1) for frame in frames]
    out, finished = b"", []
    while views := batch.gather(queue):
        stream = b"".join(views)
        count = dice.randint(1, len(stream))
        out += stream[:count]
        finished += batch.sent(count)
        assert batch.between_frames == (len(out) in {sum(map(len, frames[:n])) for n in range(13)})
    assert out == b"".join(frames)
    assert finished == items


def test_what_a_lost_connection_had_taken_goes_back_whole_and_first() -> None:
    queue, batch = SendQueue(), SendBatch()
    queue.push_control(b"control")
    for name in (b"A1", b"A2", b"A3"):
        queue.push_data(A, name, [memoryview(b"x" * 100)], 1)
    batch.push_own(b"ping")
    batch.gather(queue)
    assert not queue
    batch.sent(4 + 7 + 102 + 50)
    queue.push_data(A, b"A4", [], 1)
    queue.put_back(batch.clear())
    assert not batch
    assert drain(queue, SendBatch()) == b"A2" + b"x" * 100 + b"A3" + b"x" * 100 + b"A4"


def test_a_dropped_frame_is_finished_from_a_copy_and_never_sent_again() -> None:
    queue, batch = SendQueue(), SendBatch()
    memory = bytearray(b"y" * 1000)
    item = queue.push_data(A, b"head", [memoryview(memory)], 1)
    other = queue.push_data(A, b"next", [], 1)
    batch.gather(queue)
    batch.sent(500)
    batch.drop(item)
    memory[:] = b"z" * 1000
    assert b"".join(batch.gather(queue)) == b"y" * 504 + b"next"
    queue.put_back(batch.clear())
    assert queue.take() is other
    assert queue.take() is None


def test_a_frame_that_waits_is_taken_out_without_a_trace() -> None:
    queue = SendQueue()
    first, second = (queue.push_data(A, name, [], 1) for name in (b"1", b"2"))
    assert queue.remove(first)
    assert not queue.remove(first)
    assert drain(queue, SendBatch()) == b"2"
    assert not queue.remove(second)
    assert not queue
