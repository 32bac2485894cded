"""Architectures that are admitted beside those of test_contract: split, carried and spoken in batches, in this process.

Prefill in one loop and pool, the bytes carried over, all rows of different lengths spoken together in another loop,
against plain transformers in fp32.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engines.embedded.allowed import ARCHITECTURES
from engines.embedded.jobs import Limits
from engines.embedded.loop import EngineLoop
from engines.embedded.model import LanguageModel, load
from engines.embedded.pages import PageMemory
from engines.protocol import Command, GenerateCommand, GenerationFinished, JobEvent, PrefillCommand, Token
from engines.spec import EngineSpec
from gateway.model import load_model
from kvcache.layout import DType
from tests.engines import test_contract
from tests.engines.harness import GREEDY_LOGPROBS, Room, Spoken, prompt
from tests.models import CONTEXT, EOS
from tests.plain import PlainModel

HERE = ["kimi_linear", "bamba", "granitemoehybrid"]
LENGTHS = (1, 2, 64, 65, 257, 513, 1000)


@dataclass
class Side:
    """One loop with a pool of its own."""

    model: LanguageModel
    room: Room
    inbox: queue.Queue[Command] = field(default_factory=queue.Queue)
    events: list[JobEvent] = field(default_factory=list)

    @torch.inference_mode()
    def run(self, *commands: Command) -> None:
        """Give all commands at once and turn until the last of them has ended."""
        spec = EngineSpec(Path(), DType.FLOAT32)
        limits = Limits(self.model.layout, 64, self.model.vocab_size, 2048)
        memory = PageMemory(self.room.pool)
        loop = EngineLoop(self.model, (EOS,), limits, spec, memory, self.inbox, self.events.append)
        for command in commands:
            self.inbox.put(command)
        before = -1
        while len(self.events) > before or loop.pulse.prefill_queue:
            before = len(self.events)
            loop.turn(wait=False)

    def spoken(self, job: str) -> Spoken:
        """What one generation said."""
        tokens = [event for event in self.events if isinstance(event, Token) and event.job == job]
        assert GenerationFinished(job, "length") in self.events, self.events[-1]
        return Spoken([token.token_id for token in tokens], [token.logprobs for token in tokens], "length", True)


@dataclass
class Sides:
    """Two engines with equal weights, and plain transformers."""

    near: Side
    far: Side
    plain: PlainModel

    def carry(self, job: str, ids: tuple[int, ...]) -> GenerateCommand:
        """Prefill on the near side and carry the bytes; the command that speaks from them on the far side."""
        stop = len(ids) - 1
        if not stop:
            return GenerateCommand(job, ids, 0, (), GREEDY_LOGPROBS)
        table, other = self.near.room.table(job, stop), self.far.room.table(job, stop)
        self.near.run(PrefillCommand(job, ids, 0, stop, table.pages))
        plan = self.near.room.plan(stop)
        pieces = self.near.room.pieces(table, plan)
        assert sum(map(len, pieces)) == self.near.model.layout.s_kv(stop)
        self.far.room.fill(other, plan, pieces)
        return GenerateCommand(job, ids, stop, other.pages, GREEDY_LOGPROBS)


@pytest.fixture(scope="module", params=HERE)
def sides(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> Iterator[Sides]:
    path = model_dir(request.param)
    with torch.inference_mode():
        model = load(EngineSpec(path, DType.FLOAT32), json.loads((path / "config.json").read_text()))
    near, far = Room.create(model.layout, pages=600), Room.create(model.layout, pages=700)
    far.owners.allocate("another", 37)
    yield Sides(Side(model, near), Side(model, far), PlainModel(path))
    near.pool.close()
    far.pool.close()


def test_every_admitted_architecture_is_held_against_transformers() -> None:
    held = {name.partition(":")[0] for name in test_contract.MODELS} | set(HERE)
    assert held | {"gemma3"} == set(ARCHITECTURES), "gemma3 is gemma3_text inside a multimodal config: test_model"


@pytest.mark.parametrize("name", HERE)
def test_a_gateway_serves_what_an_engine_does(name: str, model_dir: Callable[[str], Path]) -> None:
    assert load_model(model_dir(name), "tiny", DType.FLOAT32).context_tokens == CONTEXT


def test_split_prompts_of_all_lengths_speak_together_as_plain_transformers_do_alone(sides: Sides) -> None:
    prompts = {f"split-{length}": prompt(length) for length in LENGTHS}
    sides.far.run(*[sides.carry(job, ids) for job, ids in prompts.items()])
    for job, ids in prompts.items():
        spoken = sides.far.spoken(job)
        expected = sides.plain.speak(ids, len(spoken.tokens))
        assert spoken.tokens == expected.token_ids, job
        chosen = [step[0].logprob for step in spoken.logprobs if step]
        assert chosen == pytest.approx(expected.logprobs, abs=1e-3), job


def test_a_prefill_in_place_equals_a_loaded_one_bit_by_bit(sides: Sides) -> None:
    ids = prompt(600)
    sides.far.run(sides.carry("loaded", ids))
    sides.far.run(GenerateCommand("in-place", ids, 0, (), GREEDY_LOGPROBS))
    loaded, in_place = sides.far.spoken("loaded"), sides.far.spoken("in-place")
    assert in_place.tokens == loaded.tokens
    assert torch.equal(in_place.vector(0), loaded.vector(0))
