"""The loop inside this process, turn by turn: who runs when, what is refused, what a cancel leaves behind."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engines.embedded.jobs import Limits
from engines.embedded.loop import EngineLoop
from engines.embedded.model import LanguageModel, load
from engines.embedded.pages import PageMemory
from engines.protocol import (
    CancelCommand,
    Command,
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Loaded,
    PrefillCommand,
    PrefillFinished,
    Token,
)
from engines.spec import EngineSpec
from kvcache.control import Sampling
from kvcache.layout import DType
from tests.engines.harness import CHUNK, GREEDY, Room, prompt
from tests.models import EOS, VOCAB

CONTEXT = 2048


@dataclass
class Stage:
    """A loop whose turns the test takes, and what it said."""

    loop: EngineLoop
    room: Room
    inbox: queue.Queue[Command]
    events: list[JobEvent] = field(default_factory=list)

    def give(self, *commands: Command) -> None:
        for command in commands:
            self.inbox.put(command)

    @torch.inference_mode()
    def turn(self) -> list[JobEvent]:
        """One turn; returns what it said."""
        before = len(self.events)
        self.loop.turn(wait=False)
        return self.events[before:]

    def finish(self) -> None:
        """Turn until nothing happens any more."""
        while self.turn() or self.loop.pulse.prefill_queue:
            pass

    def of(self, job: str) -> list[JobEvent]:
        return [event for event in self.events if event.job == job]

    def prefill(self, job: str, length: int, priority: int = 0) -> PrefillCommand:
        table = self.room.table(job, length - 1)
        return PrefillCommand(job, prompt(length), 0, length - 1, table.pages, priority)


def speak(job: str, length: int, sampling: Sampling = GREEDY) -> GenerateCommand:
    return GenerateCommand(job, prompt(length), 0, (), sampling)


MakeStage = Callable[..., Stage]


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> LanguageModel:
    path = model_dir(request.param)
    with torch.inference_mode():
        return load(EngineSpec(path, DType.FLOAT32), json.loads((path / "config.json").read_text()))


@pytest.fixture
def stage(model: LanguageModel) -> Iterator[MakeStage]:
    rooms: list[Room] = []

    def make(**options: Any) -> Stage:
        room = Room.create(model.layout, pages=400)
        rooms.append(room)
        inbox: queue.Queue[Command] = queue.Queue()
        events: list[JobEvent] = []
        spec = EngineSpec(Path(), DType.FLOAT32, **options)
        limits = Limits(model.layout, 64, model.vocab_size, CONTEXT)
        loop = EngineLoop(model, (EOS,), limits, spec, PageMemory(room.pool), inbox, events.append)
        return Stage(loop, room, inbox, events)

    yield make
    for room in rooms:
        room.pool.close()


def test_a_long_prefill_lets_every_running_stream_speak_between_two_chunks(stage: MakeStage) -> None:
    s = stage()
    s.give(speak("a", 1), speak("b", 1))
    s.turn()
    s.give(s.prefill("long", 4 * CHUNK + 1))
    for _ in range(4):
        said = s.turn()
        assert [event.job for event in said if isinstance(event, Token)] == ["a", "b"]
        assert any(isinstance(event, Exported) for event in said)
    assert isinstance(s.of("long")[-1], PrefillFinished)


def test_every_layer_of_every_chunk_is_reported_with_the_plans_count(stage: MakeStage) -> None:
    s = stage()
    s.give(s.prefill("p", 2 * CHUNK + 10))
    s.finish()
    plan = s.room.plan(2 * CHUNK + 9)
    layers = [(piece.chunk, plan.layout.groups[piece.group].layers[piece.layer].index) for piece in plan.pieces]
    last = [piece.seq + 1 for piece in plan.pieces if layers[piece.seq : piece.seq + 2] != [layers[piece.seq]] * 2]
    assert [event.next_seq for event in s.of("p") if isinstance(event, Exported)] == last
    assert isinstance(s.of("p")[-1], PrefillFinished)


def test_prefills_run_by_priority_and_then_in_order_of_arrival(stage: MakeStage) -> None:
    s = stage()
    s.give(s.prefill("late", 300, priority=1), s.prefill("first", 300), s.prefill("second", 300))
    s.finish()
    ended = [event.job for event in s.events if isinstance(event, PrefillFinished)]
    assert ended == ["first", "second", "late"]


def test_an_urgent_prefill_comes_in_between_the_chunks_of_another(stage: MakeStage) -> None:
    s = stage()
    s.give(s.prefill("slow", 4 * CHUNK, priority=5))
    s.turn()
    s.give(s.prefill("urgent", 100))
    s.turn()
    assert isinstance(s.of("urgent")[-1], PrefillFinished)
    s.finish()
    assert isinstance(s.of("slow")[-1], PrefillFinished)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_cancelled_prefill_ends_within_a_chunk_and_says_how_far_it_came(stage: MakeStage, turns: int) -> None:
    s = stage()
    s.give(s.prefill("p", 5 * CHUNK))
    for _ in range(turns):
        s.turn()
    s.give(CancelCommand("p"))
    assert s.turn() == [JobCancelled("p", turns * CHUNK)]
    before = bytes(s.room.pool.buffer)
    s.finish()
    assert s.of("p")[-1] == JobCancelled("p", turns * CHUNK)
    assert bytes(s.room.pool.buffer) == before, "nothing of a cancelled job is touched"


def test_a_cancelled_generation_leaves_its_neighbours_as_they_were(stage: MakeStage) -> None:
    s, alone = stage(), stage()
    alone.give(speak("stays", 70))
    alone.finish()
    s.give(speak("goes", 50), speak("stays", 70))
    for _ in range(5):
        s.turn()
    s.give(CancelCommand("goes"), CancelCommand("never heard of"))
    s.finish()
    assert s.of("goes")[-1] == JobCancelled("goes", 0)
    assert s.of("stays") == alone.of("stays")
    assert not s.of("never heard of")


def test_a_generation_that_waits_for_a_place_can_be_cancelled(stage: MakeStage) -> None:
    s = stage(max_running=1)
    s.give(speak("runs", 3), speak("waits", 3))
    s.turn()
    s.give(CancelCommand("waits"))
    s.finish()
    assert s.of("waits") == [JobCancelled("waits", 0)]
    assert s.of("runs")[-1] == GenerationFinished("runs", "length")


def test_no_more_than_max_running_generations_speak_at_once_and_all_of_them_end(stage: MakeStage) -> None:
    s = stage(max_running=2)
    s.give(*(speak(f"g{n}", 1 + 40 * n) for n in range(5)))
    while s.turn() or s.loop.pulse.prefill_queue:
        assert s.loop.pulse.running <= 2
    assert all(s.of(f"g{n}")[-1] == GenerationFinished(f"g{n}", "length") for n in range(5))


def test_a_loaded_generation_gives_its_pages_back_before_it_speaks(stage: MakeStage) -> None:
    s = stage()
    job = s.prefill("p", 200)
    s.give(job)
    s.finish()
    s.give(GenerateCommand("g", job.token_ids, 199, job.pages, GREEDY))
    assert s.turn()[0] == Loaded("g")
    s.room.pool.buffer[:] = bytes(len(s.room.pool.buffer))
    s.finish()
    s.give(speak("in place", 200))
    s.finish()
    assert [e.token_id for e in s.of("g") if isinstance(e, Token)] == [
        e.token_id for e in s.of("in place") if isinstance(e, Token)
    ]


def test_an_end_token_stops_the_answer_and_is_not_part_of_it(stage: MakeStage) -> None:
    s = stage()
    s.give(speak("free", 30))
    s.finish()
    tokens = [event.token_id for event in s.of("free") if isinstance(event, Token)]
    stop = msgspec.structs.replace(GREEDY, stop_token_ids=(tokens[4],))
    s.give(speak("stopped", 30, stop))
    s.finish()
    assert [e.token_id for e in s.of("stopped") if isinstance(e, Token)] == tokens[: tokens.index(tokens[4])]
    assert s.of("stopped")[-1] == GenerationFinished("stopped", "stop")


def bad_commands(s: Stage) -> dict[str, tuple[Command, str]]:
    good, talk = s.prefill("p", 100), speak("p", 100)
    change = msgspec.structs.replace
    return {
        "context": (change(talk, token_ids=prompt(CONTEXT)), "context"),
        "long prefill": (change(good, token_ids=prompt(CONTEXT + 1)), "context"),
        "vocabulary": (change(good, token_ids=(*prompt(99), VOCAB)), "vocabulary"),
        "negative": (change(talk, token_ids=(-1, 5)), "vocabulary"),
        "no tokens": (change(talk, token_ids=()), "at least one token"),
        "range": (change(good, stop=101), "range"),
        "empty range": (change(good, start=99), "range"),
        "few pages": (change(good, pages=good.pages[1:]), "pages"),
        "foreign page": (change(good, pages=(*good.pages[1:], 400)), "outside the pool"),
        "negative page": (change(good, pages=(*good.pages[1:], -1)), "outside the pool"),
        "page twice": (change(good, pages=(*good.pages[1:], good.pages[1])), "twice"),
        "loaded": (change(talk, loaded=50, pages=good.pages), "loaded"),
        "max_tokens": (change(talk, sampling=Sampling(max_tokens=0)), "max_tokens"),
        "temperature": (change(talk, sampling=Sampling(max_tokens=1, temperature=float("nan"))), "temperature"),
        "top_p": (change(talk, sampling=Sampling(max_tokens=1, top_p=0.0)), "top_p"),
        "top_k": (change(talk, sampling=Sampling(max_tokens=1, top_k=-1)), "top_k"),
        "logprobs": (change(talk, sampling=Sampling(max_tokens=1, logprobs=VOCAB + 1)), "logprobs"),
        "seed": (change(talk, sampling=Sampling(max_tokens=1, seed=2**64)), "seed"),
    }


def test_what_does_not_fit_is_refused_by_name_and_the_engine_goes_on(stage: MakeStage) -> None:
    s = stage()
    for case, (command, names) in bad_commands(s).items():
        s.give(command)
        (event,) = s.turn()
        assert isinstance(event, JobFailed), case
        assert names in event.detail, (case, event)
    s.give(speak("good", 20))
    s.finish()
    assert s.of("good")[-1] == GenerationFinished("good", "length")


def test_jobs_beyond_the_bound_are_refused(stage: MakeStage) -> None:
    s = stage(max_running=1, max_queue=2)
    s.give(*(speak(f"g{n}", 3) for n in range(4)))
    s.turn()
    assert s.of("g3") == [JobFailed("g3", "queue_full", "the engine holds 3 jobs")]
    s.finish()
    assert all(isinstance(s.of(f"g{n}")[-1], GenerationFinished) for n in range(3))


def test_generations_that_wait_for_a_place_enter_by_priority_then_in_order_of_arrival(stage: MakeStage) -> None:
    s = stage(max_running=1)
    s.give(speak("running", 3))
    s.turn()
    later = {"a": 5, "b": 5, "urgent": 1}
    s.give(*(msgspec.structs.replace(speak(name, 3), priority=priority) for name, priority in later.items()))
    s.finish()
    ended = [event.job for event in s.events if isinstance(event, GenerationFinished)]
    assert ended == ["running", "urgent", "a", "b"]


def test_a_step_that_raises_fails_its_jobs_and_no_others(stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stage()
    s.give(s.prefill("p", 3 * CHUNK), speak("g", 1))
    s.turn()
    with monkeypatch.context() as broken:
        broken.setattr(LanguageModel, "logits", lambda *_: 1 / 0)
        assert s.turn()[-1] == JobFailed("g", "engine_error", "ZeroDivisionError in decode")
    with monkeypatch.context() as broken:
        broken.setattr(LanguageModel, "hidden", lambda *_: 1 / 0)
        assert s.turn() == [JobFailed("p", "engine_error", "ZeroDivisionError in prefill")]
    s.give(speak("good", 20))
    s.finish()
    assert s.of("good")[-1] == GenerationFinished("good", "length")


def test_logits_that_are_no_numbers_fail_one_generation(stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stage()
    s.give(speak("random", 1, replace_temperature(1.0)), speak("greedy", 1))
    whole = LanguageModel.logits

    def half_broken(self: LanguageModel, hidden: torch.Tensor) -> torch.Tensor:
        out = whole(self, hidden)
        out[0] = float("nan")
        return out

    with monkeypatch.context() as broken:
        broken.setattr(LanguageModel, "logits", half_broken)
        said = s.turn()
    assert said[0] == JobFailed("random", "engine_error", "RuntimeError in sampling")
    s.finish()
    assert s.of("greedy")[-1] == GenerationFinished("greedy", "length")


def replace_temperature(temperature: float) -> Sampling:
    return msgspec.structs.replace(GREEDY, temperature=temperature)


def test_a_spec_names_the_field_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        EngineSpec(Path(), DType.FLOAT32, chunk_tokens=0)


def beside(command: GenerateCommand, number: int, **sampling: Any) -> GenerateCommand:
    changed = msgspec.structs.replace(command.sampling, **sampling)
    return msgspec.structs.replace(
        command, job=f"{command.job}#{number}", beside=command.job, sampling=changed, keep_from=None
    )


def test_answers_to_one_prompt_are_prefilled_once_and_each_is_what_it_is_alone(stage: MakeStage) -> None:
    s, alone = stage(), stage()
    sampled = Sampling(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    first = speak("a", CHUNK + 40, sampled)
    s.give(beside(first, 1, seed=2), beside(first, 2, temperature=0.0), first)
    s.finish()
    for job, sampling in (("a", {}), ("a#1", {"seed": 2}), ("a#2", {"temperature": 0.0})):
        alone.give(speak(job, CHUNK + 40, msgspec.structs.replace(sampled, **sampling)))
    alone.finish()
    for job in ("a", "a#1", "a#2"):
        assert tokens(s, job) == tokens(alone, job)
        assert isinstance(s.of(job)[-1], GenerationFinished)
    assert len({tuple(tokens(s, job)) for job in ("a", "a#1", "a#2")}) == 3


def test_answers_over_loaded_kv_give_their_pages_back_each(stage: MakeStage) -> None:
    s = stage()
    s.give(s.prefill("p", CHUNK + 1))
    s.finish()
    table = s.room.geometry.table(0, CHUNK, s.room.owners._owned["p"])
    first = GenerateCommand("a", prompt(CHUNK + 1), CHUNK, table.pages, GREEDY)
    s.give(beside(first, 1), first)
    s.finish()
    for job in ("a", "a#1"):
        assert isinstance(s.of(job)[0], Loaded)
        assert len(tokens(s, job)) == GREEDY.max_tokens
    assert tokens(s, "a") == tokens(s, "a#1")


def test_answers_enter_when_there_is_a_place_for_all_of_them(stage: MakeStage) -> None:
    s = stage(max_running=3)
    s.give(speak("before", 4))
    s.turn()
    first = speak("a", 5)
    s.give(beside(first, 1), beside(first, 2), first)
    s.turn()
    assert s.loop.pulse.running == 1
    s.finish()
    assert all(len(tokens(s, job)) == GREEDY.max_tokens for job in ("before", "a", "a#1", "a#2"))


def test_an_answer_that_waits_beside_another_can_be_cancelled(stage: MakeStage) -> None:
    s = stage()
    first = speak("a", 2 * CHUNK)
    s.give(beside(first, 1), first)
    s.turn()
    s.give(CancelCommand("a#1"))
    s.finish()
    assert isinstance(s.of("a#1")[-1], JobCancelled)
    assert len(tokens(s, "a")) == GREEDY.max_tokens


def tokens(s: Stage, job: str) -> list[int]:
    return [event.token_id for event in s.of(job) if isinstance(event, Token)]
