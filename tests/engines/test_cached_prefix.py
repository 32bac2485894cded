"""A second turn computed from what was kept of the first equals the same turn computed afresh."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engines.embedded.jobs import Limits
from engines.embedded.loop import EngineLoop
from engines.embedded.model import LanguageModel, load
from engines.embedded.pages import PageMemory
from engines.protocol import (
    CancelCommand,
    Checkpoint,
    Command,
    Exported,
    FinishCommand,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Offered,
    PrefillCommand,
    PrefillFinished,
    Spoken,
    StoreCommand,
    Stored,
    Token,
)
from engines.spec import EngineSpec
from kvcache.blocks import PageTable
from kvcache.control import Sampling
from kvcache.layout import DType, GroupKind
from kvcache.plan import Piece
from kvcache.tables import block_pages, compose, end_pages
from tests.engines.harness import CHUNK, Room, prompt
from tests.models import EOS, VOCAB

MODELS = ["llama", "gemma3_text:64", "qwen3_next", "falcon_h1"]
BLOCK = 64
TALK = Sampling(max_tokens=70, temperature=0.0, ignore_eos=True)
PROBE = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=-1)


@dataclass
class Desk:
    """A loop in this process, a node's answers to its offers, and where they were stored."""

    loop: EngineLoop
    room: Room
    inbox: queue.Queue[Command]
    events: list[JobEvent]
    answers: bool = True
    stored: dict[tuple[str, int], PageTable] = field(default_factory=dict)
    _seen: int = 0
    _offers: dict[tuple[str, int], PageTable] = field(default_factory=dict)

    @torch.inference_mode()
    def run(self, command: Command) -> list[JobEvent]:
        """Run one job to its terminal event; returns its events."""
        before = len(self.events)
        self.inbox.put(command)
        for _ in range(1000):
            self.loop.turn(wait=False)
            for event in self.events[self._seen :]:
                if isinstance(event, Offered) and self.answers:
                    self._answer(event)
                elif isinstance(event, Stored):
                    assert event.written == bool(self._offers[event.job, event.stop].pages)
                    self.stored[event.job, event.stop] = self._offers[event.job, event.stop]
            self._seen = len(self.events)
            said = self.events[before:]
            if said and isinstance(said[-1], PrefillFinished | GenerationFinished | JobFailed):
                return said
        raise AssertionError(f"no end of {command.job}")

    def _answer(self, event: Offered) -> None:
        owner = f"{event.job}@{event.stop}"
        table = self.room.table(owner, event.stop, event.start)
        self._offers[event.job, event.stop] = table
        self.inbox.put(StoreCommand(event.job, event.stop, table.pages))

    def prefill(
        self,
        job: str,
        ids: Sequence[int],
        start: int = 0,
        prefix: PageTable | None = None,
        checkpoints: tuple[Checkpoint, ...] = (),
    ) -> PageTable:
        """Compute and export [start, len(ids) - 1), from ``prefix`` on where there is one."""
        stop = len(ids) - 1
        cached = 0 if prefix is None else prefix.stop
        shared = [] if prefix is None else block_pages(prefix, start // BLOCK, max(start, cached) // BLOCK)
        count = self.room.geometry.pages_for(start, stop) - len(shared) * len(_full(self.room))
        table = compose(self.room.geometry, start, stop, shared, self.room.owners.allocate(job, count))
        pages = () if prefix is None else prefix.pages
        command = PrefillCommand(job, tuple(ids[:stop]), start, stop, table.pages, 0, cached, pages, checkpoints)
        events = self.run(command)
        assert isinstance(events[-1], PrefillFinished), events[-1]
        told = [event.next_seq for event in events if isinstance(event, Exported)]
        assert told == sorted(told)
        assert told[-1] == len(self.room.plan(stop, start).pieces)
        return table

    def speak(self, job: str, ids: Sequence[int], sampling: Sampling, table: PageTable | None, **more: object) -> Said:
        loaded, pages = (0, ()) if table is None else (table.stop, table.pages)
        events = self.run(GenerateCommand(job, tuple(ids), loaded, pages, sampling, **more))  # type: ignore[arg-type]
        assert isinstance(events[-1], GenerationFinished), events[-1]
        tokens = [event for event in events if isinstance(event, Token)]
        return Said([event.token_id for event in tokens], tokens)

    def snapshot_table(self, blocks: Sequence[Sequence[int]], ends: PageTable) -> PageTable:
        """The prefix of these blocks with the windows and states of a stored checkpoint."""
        return compose(self.room.geometry, 0, ends.stop, blocks, end_pages(ends))


@dataclass
class Said:
    tokens: list[int]
    events: list[Token]

    def vector(self, step: int) -> torch.Tensor:
        entries = self.events[step].logprobs
        assert entries is not None
        out = torch.empty(VOCAB)
        for entry in entries[1:]:
            out[entry.token_id] = entry.logprob
        return out

    def check_equal(self, other: Said) -> None:
        assert self.tokens == other.tokens
        assert (self.vector(0) - other.vector(0)).abs().max() < 1e-3


def _full(room: Room) -> list[tuple[int, int]]:
    layout = room.geometry.layout
    return [(g, n) for g, n in room.geometry.layers() if layout.groups[g].kind is GroupKind.FULL]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> LanguageModel:
    path = model_dir(request.param)
    with torch.inference_mode():
        return load(EngineSpec(path, DType.FLOAT32), json.loads((path / "config.json").read_text()))


@pytest.fixture
def desk(model: LanguageModel) -> Iterator[Desk]:
    room = Room.create(model.layout, pages=1500)
    inbox: queue.Queue[Command] = queue.Queue()
    events: list[JobEvent] = []
    limits = Limits(model.layout, BLOCK, model.vocab_size, 8192)
    memory = PageMemory(room.pool)
    loop = EngineLoop(model, (EOS,), limits, EngineSpec(Path(), DType.FLOAT32), memory, inbox, events.append)
    yield Desk(loop, room, inbox, events)
    room.pool.close()


@dataclass
class Turns:
    """A conversation's first turn, done, and the prompt of its second."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    export: PageTable
    held: list[tuple[int, ...]]
    """Full blocks of the first prompt and its answer: the decode node's."""


def first_turn(desk: Desk, length: int = 700) -> Turns:
    """Prefill, with a snapshot at the last block boundary, and speak over the next one."""
    first = prompt(length)
    last = (length - 1) // BLOCK * BLOCK
    export = desk.prefill("one", first, checkpoints=(Checkpoint(last, last),))
    said = desk.speak("talk", first, TALK, export, keep_from=last)
    reached = (length - 1 + TALK.max_tokens) // BLOCK * BLOCK
    answer = desk.stored["talk", reached]
    assert (answer.start, answer.stop) == (last, reached)
    held = block_pages(export, 0, last // BLOCK) + block_pages(answer, last // BLOCK, reached // BLOCK)
    return Turns(first, (*first, *said.tokens, *prompt(150, seed=5)), export, held)


def pieces_close(room: Room, table: PageTable, other: PageTable) -> None:
    """Both tables hold the same KV of the range that they share, as far as rounding goes."""
    start, stop = max(table.start, other.start), table.stop
    for piece in room.plan(stop, start).pieces:
        mine, theirs = (_tensor(room, each, piece) for each in (table, other))
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3)


def _tensor(room: Room, table: PageTable, piece: Piece) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(room.pool.views(table.extents(piece)))), dtype=torch.float32)


@pytest.mark.parametrize("start", [192, 768])
def test_a_prefill_that_goes_on_from_a_snapshot_exports_what_a_whole_one_does(desk: Desk, start: int) -> None:
    turns = first_turn(desk)
    prefix = desk.snapshot_table(turns.held[:10], desk.stored["one", 640])
    before = [desk.room.pieces(table, desk.room.plan(table.stop)) for table in (prefix, turns.export)]
    table = desk.prefill("two", turns.second, start, prefix)
    fresh = desk.prefill("afresh", turns.second, start)
    pieces_close(desk.room, table, fresh)
    after = [desk.room.pieces(each, desk.room.plan(each.stop)) for each in (prefix, turns.export)]
    assert after == before, "kept pages are read, not written"


def test_a_transfer_behind_what_the_decode_node_holds_speaks_as_a_whole_prefill_does(desk: Desk) -> None:
    turns = first_turn(desk)
    held = len(turns.held) * BLOCK
    prefix = desk.snapshot_table(turns.held[:10], desk.stored["one", 640])
    part = desk.prefill("two", turns.second, held, prefix)
    stop = len(turns.second) - 1
    whole = compose(
        desk.room.geometry,
        0,
        stop,
        [*turns.held, *block_pages(part, held // BLOCK, -(-stop // BLOCK))],
        end_pages(part),
    )
    afresh = desk.speak("afresh", turns.second, PROBE, None)
    desk.speak("two", turns.second, PROBE, whole).check_equal(afresh)


def test_a_prefill_in_place_goes_on_from_the_end_of_the_answer(desk: Desk) -> None:
    turns = first_turn(desk)
    reached = len(turns.held) * BLOCK
    prefix = desk.snapshot_table(turns.held, desk.stored["talk", reached])
    afresh = desk.speak("afresh", turns.second, PROBE, None)
    desk.speak("two", turns.second, PROBE, prefix).check_equal(afresh)


def test_checkpoints_on_the_way_and_the_whole_of_an_answer_in_place_can_be_gone_on_from(desk: Desk) -> None:
    ids = prompt(700)
    stops = (0, CHUNK, 2 * CHUNK, 640)
    checkpoints = tuple(Checkpoint(a, b) for a, b in pairwise(stops))
    said = desk.speak("one", ids, TALK, None, checkpoints=checkpoints, keep_from=640)
    tables = [desk.stored["one", stop] for stop in (*stops[1:], 768)]
    blocks = [block for table in tables for block in block_pages(table, table.start // BLOCK, table.stop // BLOCK)]
    longer = (*ids, *said.tokens, *prompt(100, seed=3))
    afresh = desk.speak("afresh", longer, PROBE, None)
    for table in tables:
        prefix = desk.snapshot_table(blocks[: table.stop // BLOCK], table)
        desk.speak(f"from-{table.stop}", longer, PROBE, prefix).check_equal(afresh)


def test_an_offer_that_nobody_takes_holds_up_only_the_terminal_event(desk: Desk) -> None:
    desk.answers = False
    ids = prompt(200)
    table = desk.room.table("one", 199)
    with torch.inference_mode():
        desk.inbox.put(PrefillCommand("one", ids[:199], 0, 199, table.pages, checkpoints=(Checkpoint(128, 192),)))
        for _ in range(3):
            desk.loop.turn(wait=False)
        assert Offered("one", 128, 192, True) in desk.events
        assert not any(isinstance(event, PrefillFinished) for event in desk.events)
        desk.inbox.put(GenerateCommand("talk", ids, 199, table.pages, PROBE, keep_from=192))
        for _ in range(PROBE.max_tokens + 2):
            desk.loop.turn(wait=False)
        said = [event for event in desk.events if event.job == "talk"]
        assert isinstance(said[-1], GenerationFinished), "no new block was filled, so nothing is offered"
        desk.inbox.put(StoreCommand("one", 192, ()))
        desk.loop.turn(wait=False)
        assert desk.events[-2] == Stored("one", 192, False)
        assert isinstance(desk.events[-1], PrefillFinished)


def test_a_generation_that_has_said_enough_offers_what_it_has_read(desk: Desk) -> None:
    desk.answers = False
    ids = prompt(100)
    with torch.inference_mode():
        desk.inbox.put(GenerateCommand("talk", ids, 0, (), TALK, keep_from=64))
        for _ in range(40):
            desk.loop.turn(wait=False)
        desk.inbox.put(FinishCommand("talk"))
        desk.loop.turn(wait=False)
        assert desk.events[-2:] == [Spoken("talk", "stop"), Offered("talk", 64, 128, True)]
        desk.inbox.put(StoreCommand("talk", 128, ()))
        desk.inbox.put(FinishCommand("talk"))
        desk.loop.turn(wait=False)
    assert desk.events[-1] == GenerationFinished("talk", "stop")


def test_a_cancelled_job_offers_nothing_any_more(desk: Desk) -> None:
    desk.answers = False
    ids = prompt(100)
    with torch.inference_mode():
        desk.inbox.put(GenerateCommand("talk", ids, 0, (), TALK, (Checkpoint(0, 64),), 64))
        for _ in range(75):
            desk.loop.turn(wait=False)
        assert [event for event in desk.events if isinstance(event, Spoken)] == [Spoken("talk", "length")]
        assert isinstance(desk.events[-1], Offered)
        desk.inbox.put(CancelCommand("talk"))
        desk.inbox.put(StoreCommand("talk", 64, ()))
        desk.loop.turn(wait=False)
    assert desk.events[-1] == JobCancelled("talk")


def test_a_prefix_that_is_none_is_refused_by_name(desk: Desk) -> None:
    ids, table = prompt(200), desk.room.table("one", 199)
    for change, name in (
        ({"cached": 100}, "cached"),
        ({"cached": 256}, "cached"),
        ({"cached": 64, "cached_pages": (1,)}, "pages"),
        ({"checkpoints": (Checkpoint(0, 100),)}, "checkpoints"),
        ({"checkpoints": (Checkpoint(0, 256),)}, "checkpoints"),
        ({"checkpoints": (Checkpoint(64, 128), Checkpoint(0, 64))}, "checkpoints"),
    ):
        command = PrefillCommand("one", ids[:199], 0, 199, table.pages, **change)  # type: ignore[arg-type]
        (failed,) = desk.run(command)
        assert isinstance(failed, JobFailed)
        assert failed.cause == name
    (failed,) = desk.run(GenerateCommand("one", ids, 0, (), PROBE, keep_from=70))
    assert isinstance(failed, JobFailed)
    assert failed.cause == "keep_from"
