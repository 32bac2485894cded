"""One answer to a prompt: its job on the engine, what it says, and whether it has said it to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from decode_client.context import ClientContext
from decode_client.detokenizer import Detokenizer
from decode_client.speech import Speech
from engines.protocol import Engine, GenerateCommand, JobEvent
from engines.running import EngineRun
from kvcache.control import GenerateJob

SEEDS = 1 << 63
"""Of these, from 0 up, there are as many; a seed counted up goes on at the least one."""


class Answer:
    """``number`` counts from 0. ``start`` once, then ``turn`` is set where it ends or meets a stop string."""

    def __init__(self, context: ClientContext, order: GenerateJob, number: int) -> None:
        sampling = order.sampling
        detokenizer = Detokenizer(context.tokenizer, order.token_ids, sampling.stop, sampling.include_stop)
        self.number = number
        self.told = False
        """Whether it has been said to its end; what is left is between this node and its engine."""
        self.loaded = False
        """Whether the engine has copied what lay in the pool for it."""
        self.run: EngineRun | None = None
        self.turn = asyncio.Event()
        self.speech = Speech(order.generation, detokenizer, context.report, number)

    def start(self, engine: Engine, command: GenerateCommand, on_event: Callable[[Answer, JobEvent], None]) -> None:
        """Have the engine speak it. Raises ValueError where it still runs a job of that name."""
        self.run = EngineRun(engine, command, lambda event: on_event(self, event))
        self.run.on_end(self.turn.set)


def others(command: GenerateCommand, answers: int) -> list[GenerateCommand]:
    """The commands of the second answer and those after it, which are submitted before that of the first.

    They keep nothing for later prompts: what follows this one differs from answer to answer.
    """
    return [_beside(command, number) for number in range(1, answers)]


def _beside(command: GenerateCommand, number: int) -> GenerateCommand:
    sampling, seed = command.sampling, command.sampling.seed
    if seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=(seed + number + SEEDS) % (2 * SEEDS) - SEEDS)
    return msgspec.structs.replace(
        command,
        job=f"{command.job}#{number}",
        sampling=sampling,
        checkpoints=(),
        keep_from=None,
        beside=command.job,
    )
