"""Jobs through vLLM's blocks: what is exported and loaded is canonical, byte by byte, whatever the scheduler does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from engines.protocol import Checkpoint, Exported, Loaded, Offered, StoreCommand, Stored
from engines.vllm.bookkeeping import JobParams
from engines.vllm.memory import PoolMemory
from engines.vllm.messages import Broken, Computed, Dismiss, Dismissed, Ended, Enlist, Enlisted
from engines.vllm.working import Working
from kvcache.blocks import PageGeometry, PagePool, PageTable
from kvcache.hostpool import HostPool
from kvcache.layout import GroupKind
from kvcache.plan import TransferPlan, plan_transfer
from tests.engines.vllm.fake_vllm import FakeVllm, content, hybrid_layout

CHUNK, BLOCK = 64, 32


class Server(FakeVllm):
    """A server whose workers say everything to a list."""

    def __init__(self, bed: Bed, **settings: Any) -> None:
        super().__init__(bed.geometry.layout, BLOCK, **settings)
        self.said: list[msgspec.Struct] = []
        memory = PoolMemory(bed.pool)
        self.workers = [Working(bed.geometry, CHUNK, memory, layers, self.hear) for layers in self.layers]
        self.heard: Callable[[msgspec.Struct], None] = self.said.append

    def hear(self, message: msgspec.Struct) -> None:
        self.heard(message)

    def messages(self, kind: type) -> list[Any]:
        """What all workers said of this kind."""
        return [message for message in self.said if isinstance(message, kind)]


class Bed:
    """A pool, and servers on it."""

    def __init__(self, pages: int = 800) -> None:
        self.geometry = PageGeometry.of(hybrid_layout(), BLOCK)
        self.pool = HostPool.create(self.geometry.page_bytes, pages)
        self.owners = PagePool(pages)

    def server(self, **settings: Any) -> Server:
        return Server(self, **settings)

    def table(self, owner: str, start: int, stop: int) -> PageTable:
        return self.geometry.table(start, stop, self.owners.allocate(owner, self.geometry.pages_for(start, stop)))

    def plan(self, start: int, stop: int) -> TransferPlan:
        return plan_transfer(self.geometry.layout, start, stop, CHUNK)

    def read(self, table: PageTable) -> list[bytes]:
        plan = self.plan(table.start, table.stop)
        return [b"".join(self.pool.views(table.extents(piece))) for piece in plan.pieces]

    def expected(self, ids: Sequence[int], start: int, stop: int) -> list[bytes]:
        """The canonical bytes of every piece."""
        found = []
        plan = self.plan(start, stop)
        for piece in plan.pieces:
            layer = plan.layout.groups[piece.group].layers[piece.layer]
            spec = plan.tensor(piece)
            rows = content(ids, layer.index, piece.tensor, piece.start, piece.stop, spec)
            found.append(rows.view(torch.uint8).numpy().tobytes())
        return found

    def fill(self, table: PageTable, ids: Sequence[int]) -> None:
        """What a committed transfer leaves in the pool."""
        plan = self.plan(table.start, table.stop)
        for piece, data in zip(plan.pieces, self.expected(ids, table.start, table.stop), strict=True):
            at = 0
            for view in self.pool.views(table.extents(piece)):
                view[:] = data[at : at + len(view)]
                at += len(view)


@pytest.fixture
def bed() -> Bed:
    return Bed()


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + at * 17) % 97 for at in range(length)]


def enlist(server: Server, order: Enlist) -> None:
    for worker in server.workers:
        worker.enlist(order)
    assert server.messages(Enlisted)[-1] == Enlisted(order.job)


def export(server: Server, bed: Bed, job: str, ids: list[int], start: int = 0, held: int = 0) -> PageTable:
    """Enlist an export of all of ``ids`` and send the request."""
    table = bed.table(job, start, len(ids))
    enlist(server, Enlist(job, start, len(ids), table.pages, held))
    server.add(job, ids, JobParams(job, watched=True))
    return table


def start_load(server: Server, bed: Bed, job: str, ids: list[int], tokens: int, max_tokens: int = 2) -> PageTable:
    """Enlist a load of the first ``tokens`` of ``ids`` and send the request."""
    table = bed.table(job, 0, tokens)
    bed.fill(table, ids)
    enlist(server, Enlist(job, load=tokens, load_pages=table.pages))
    server.add(job, ids, JobParams(job, tokens), max_tokens)
    return table


@pytest.mark.parametrize("length", [1, 15, 16, 17, 39, 40, 41, 64, 65, 200])
@pytest.mark.parametrize("budget", [64, 50, 7])
def test_an_export_is_canonical_whatever_the_steps(bed: Bed, length: int, budget: int) -> None:
    server, ids = bed.server(budget=budget), prompt(length)
    table = export(server, bed, "a", ids)
    server.run()
    assert bed.read(table) == bed.expected(ids, 0, length)
    assert server.messages(Exported)[-1].next_seq == len(bed.plan(0, length).pieces)
    assert len(server.messages(Computed)) == 1


def test_pieces_are_told_layer_by_layer_and_never_before_they_lie_in_the_pool(bed: Bed) -> None:
    server, ids = bed.server(), prompt(200)
    table = export(server, bed, "a", ids)
    told: list[tuple[int, list[bytes]]] = []

    def hear(message: msgspec.Struct) -> None:
        if isinstance(message, Exported):
            told.append((message.next_seq, bed.read(table)))

    server.heard = hear
    server.run()
    expected = bed.expected(ids, 0, 200)
    assert [seq for seq, _ in told] == sorted({seq for seq, _ in told})
    assert len(told) > 4, "the layers of the last chunk are told one by one"
    assert all(found[:seq] == expected[:seq] for seq, found in told)


def test_an_increment_leaves_what_is_held_alone(bed: Bed) -> None:
    server, ids = bed.server(), prompt(150)
    table = bed.table("a", 32, 150)
    enlist(server, Enlist("a", 32, 150, table.pages, held=96))
    server.add("a", ids, JobParams("a", watched=True))
    server.run()
    full = [
        (piece, found == wanted)
        for piece, found, wanted in zip(
            bed.plan(32, 150).pieces, bed.read(table), bed.expected(ids, 32, 150), strict=True
        )
        if bed.geometry.layout.groups[piece.group].kind is GroupKind.FULL
    ]
    assert any(piece.start >= 96 for piece, _ in full)
    assert all(right for piece, right in full if piece.start >= 96)
    assert not any(right for piece, right in full if piece.stop <= 96), "held pieces were written"


def test_what_vllm_had_in_its_own_cache_is_exported_from_there(bed: Bed) -> None:
    server, ids = bed.server(), prompt(150)
    first = server.add("x", ids, None, max_tokens=9)
    server.wait_for(lambda: first.said > 0)
    server.share(first, 128)
    server.shift = 1  # what would be computed anew is something else
    table = export(server, bed, "a", [*ids[:140], 1, 2, 3])
    server.run()
    found, expected = bed.read(table), bed.expected([*ids[:140], 1, 2, 3], 0, 143)
    full = [piece.seq for piece in bed.plan(0, 143).pieces if piece.group == 0 and piece.stop <= 128]
    assert full
    assert all(found[seq] == expected[seq] for seq in full)


@pytest.mark.parametrize("length", [2, 16, 17, 40, 41, 42, 56, 57, 150])
def test_a_load_fills_the_requests_own_blocks_and_leaves_zeros_around(bed: Bed, length: int) -> None:
    server, ids = bed.server(), prompt(length)
    start_load(server, bed, "a", ids, length - 1)
    request = server.requests["a"]
    server.wait_for(lambda: request.status == "running")  # the fake computes the last token and checks what it reads
    layout = bed.geometry.layout
    for g, group in enumerate(layout.groups):
        first = group.first_token(length - 1)
        for n, layer in enumerate(group.layers):
            for t, rows in enumerate(server.held(request, 0, g, n, first, length)):
                assert torch.equal(rows, content(ids, layer.index, t, first, length, layer.tensors[t]))
    for name, blocks in server.layer_blocks(request):
        loaded = [block for block in blocks[: -(-(length - 1) // 16)] if block]
        assert all(bool(server.tensors[0][name][block].isfinite().all()) for block in loaded)
    assert server.messages(Loaded) == [Loaded("a")]


def test_a_load_behind_a_local_hit_writes_no_shared_block(bed: Bed) -> None:
    server, ids = bed.server(), prompt(150)
    first = server.add("x", ids, None, max_tokens=50)
    server.wait_for(lambda: first.said > 0)
    server.share(first, 64)
    shared = {block for blocks in first.blocks for block in blocks[:4]}
    before = {name: tensor.clone() for name, tensor in server.tensors[0].items()}
    start_load(server, bed, "a", [*ids[:140], 5, 5], 141)
    request = server.requests["a"]
    server.wait_for(lambda: request.said > 0)
    assert all(
        torch.equal(tensor[block].nan_to_num(), before[name][block].nan_to_num())
        for name, tensor in server.tensors[0].items()
        for block in shared
    )


def test_nothing_is_loaded_that_vllm_has_itself_and_the_pages_are_given_back(bed: Bed) -> None:
    server, ids = bed.server(), prompt(150)
    first = server.add("x", ids, None, max_tokens=50)
    server.wait_for(lambda: first.said > 0)
    server.share(first, 144)
    start_load(server, bed, "a", ids, 128)
    server.wait_for(lambda: bool(server.messages(Loaded)))
    assert server.workers[0].tally.take().get("loads") is None


def test_what_is_exported_is_not_written_again_after_a_preemption(bed: Bed) -> None:
    server, ids = bed.server(), prompt(200)
    table = export(server, bed, "a", ids)
    server.step()
    server.step()
    exported = server.messages(Exported)[-1].next_seq
    assert 0 < exported < len(bed.plan(0, 200).pieces)
    server.preempt("a")
    server.shift = 1  # computed anew, to other values
    server.run()
    assert bed.read(table)[:exported] == bed.expected(ids, 0, 200)[:exported]
    assert server.messages(Computed) != []


def test_a_preempted_generation_computes_its_prompt_itself_because_its_pages_are_gone(bed: Bed) -> None:
    server, ids = bed.server(), prompt(100)
    table = start_load(server, bed, "a", ids, 99, max_tokens=6)
    request = server.requests["a"]
    server.wait_for(lambda: request.said > 1)
    bed.fill(table, prompt(100, seed=9))  # somebody else's by now
    server.preempt("a")
    server.run()
    assert request.said == 6
    assert len(server.messages(Loaded)) == 1


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_of_an_unknown_job_is_reported_as_failed(bed: Bed, policy: str) -> None:
    server, ids = bed.server(policy=policy), prompt(100)
    request = server.add("a", ids, JobParams("nobody", 99), 2)
    free = server.free_blocks
    server.wait_for(lambda: request in server.finished)
    assert request.failed == (policy == "fail")
    assert server.messages(Broken) != []
    assert server.free_blocks == free


def test_a_dismissed_jobs_pages_are_not_touched_again(bed: Bed) -> None:
    server, ids = bed.server(), prompt(200)
    table = export(server, bed, "a", ids)
    server.step()
    server.workers[0].dismiss(Dismiss("a"))
    assert server.messages(Dismissed) == [Dismissed("a", 64)]
    before = bed.read(table)
    server.run()
    assert bed.read(table) == before


def test_a_load_that_was_dismissed_on_its_way_fails_and_gives_its_blocks_back(bed: Bed) -> None:
    server, ids = bed.server(), prompt(150)
    free = server.free_blocks
    start_load(server, bed, "a", ids, 149)
    for worker in server.workers:
        worker.dismiss(Dismiss("a"))
    request = server.requests["a"]
    server.wait_for(lambda: request in server.finished)
    assert request.failed
    assert server.free_blocks == free


def test_an_abort_in_a_load_frees_the_blocks_once_the_load_is_over(bed: Bed) -> None:
    server, ids = bed.server(), prompt(150)
    free = server.free_blocks
    start_load(server, bed, "a", ids, 149)
    server.step()
    if server.requests["a"].status == "loading":
        server.abort("a")
        server.wait_for(lambda: server.free_blocks == free)


def test_eight_at_once_do_not_mix(bed: Bed) -> None:
    server = bed.server(blocks=400, budget=70)
    prompts = {f"j{n}": prompt(60 + 17 * n, seed=n) for n in range(8)}
    tables = {job: export(server, bed, job, ids) for job, ids in prompts.items()}
    server.run()
    for job, ids in prompts.items():
        assert bed.read(tables[job]) == bed.expected(ids, 0, len(ids))


def test_requests_of_others_are_left_alone(bed: Bed) -> None:
    server = bed.server()
    server.add("other", prompt(100), None, 3)
    odd = server.add("odd", prompt(90), None, 3)
    odd.kv_transfer_params = {"prfaas": {"job": 7}, "do_remote_decode": True}
    server.run()
    assert server.said == []
    assert len(server.finished) == 2


def test_two_ranks_export_shards_of_one_manifest_and_load_theirs(bed: Bed) -> None:
    server, ids = bed.server(ranks=2), prompt(150)
    table = export(server, bed, "a", ids)
    server.run()
    assert bed.read(table) == bed.expected(ids, 0, 150)
    start_load(server, bed, "b", ids, 149)
    request = server.requests["b"]
    server.wait_for(lambda: request.status == "running")
    for rank in range(2):
        k, _ = server.held(request, rank, 0, 0, 0, 150)
        spec = bed.geometry.layout.groups[0].layers[0].tensors[0]
        assert torch.equal(k, content(ids, 5, 0, 0, 150, spec)[:, rank : rank + 1])


def test_a_checkpoint_is_offered_as_it_was_and_stored_where_the_node_says(bed: Bed) -> None:
    server, ids = bed.server(), prompt(200)
    table = bed.table("a", 0, 200)
    wanted = (Checkpoint(64, 64), Checkpoint(192, 192))
    enlist(server, Enlist("a", 0, 200, table.pages, checkpoints=wanted))
    server.add("a", ids, JobParams("a", watched=True))
    server.run()
    assert server.messages(Offered) == [Offered("a", at, at, True) for at in (64, 192)]
    snapshot = bed.table("s", 64, 64)
    server.workers[0].store(StoreCommand("a", 64, snapshot.pages))
    server.workers[0].store(StoreCommand("a", 192, ()))
    assert server.messages(Stored) == [Stored("a", 64, True), Stored("a", 192, False)]
    plan, layout = bed.plan(0, 64), bed.geometry.layout
    for piece, data in zip(plan.pieces, bed.expected(ids, 0, 64), strict=True):
        if layout.groups[piece.group].kind is GroupKind.SLIDING:
            assert b"".join(bed.pool.views(snapshot.extents(piece))) == data


@pytest.mark.parametrize("said", [3, 20, 45])
def test_the_blocks_that_an_answer_filled_are_offered_at_its_end(bed: Bed, said: int) -> None:
    server, ids = bed.server(), prompt(50)
    enlist(server, Enlist("a", keep_from=32))
    request = server.add("a", ids, JobParams("a", watched=True, keep_from=32), max_tokens=said)
    free = server.free_blocks
    server.run()
    stop = (50 + said - 1) // BLOCK * BLOCK
    assert server.messages(Ended) == [Ended("a")]
    assert server.free_blocks == free
    if stop == 32:
        assert server.messages(Offered) == []
        return
    assert server.messages(Offered) == [Offered("a", 32, stop, True)]
    table = bed.table("s", 32, stop)
    server.workers[0].store(StoreCommand("a", stop, table.pages))
    assert server.messages(Stored) == [Stored("a", stop, True)]
    assert bed.read(table) == bed.expected(request.ids, 32, stop)


def test_a_page_outside_the_pool_is_refused(bed: Bed) -> None:
    server = bed.server()
    pages = bed.geometry.pages_for(0, 50)
    server.workers[0].enlist(Enlist("a", 0, 50, tuple(range(800 - pages + 1, 801))))
    server.workers[0].enlist(Enlist("b", 0, 50, (1, 2, 3)))
    refusals = [message.refusal for message in server.messages(Enlisted)]
    assert "outside the pool of 800" in refusals[0]
    assert "takes" in refusals[1]


def test_a_step_that_computes_nothing_waits_a_moment_for_a_load(bed: Bed) -> None:
    server, ids = bed.server(), prompt(100)
    start_load(server, bed, "a", ids, 99)
    began, steps = time.monotonic(), 0
    while not server.messages(Loaded):
        server.step()
        steps += 1
        assert time.monotonic() - began < 5
    assert steps < 200, "an engine that spins takes a processor from whoever loads"
