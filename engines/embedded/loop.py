"""The engine's one loop: take commands, run at most one prefill chunk, run one decode step for every generation.

Generations of one prompt that came for the sake of one another enter together, over one loaded or prefilled cache that
is forked when it is whole.

So a running stream never waits for more than one chunk, and a cancel is heard within one. Prefills run by priority,
then in order of arrival, one to its end unless a more urgent one comes in between chunks; generations that wait for a
place enter in the same order.
"""

from __future__ import annotations

import logging
import queue
import time
from bisect import insort
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache

from engines.embedded.cache import fork
from engines.embedded.jobs import Limits, Prefill, Row, Unfit, Waiting
from engines.embedded.model import LanguageModel
from engines.embedded.offers import Offer, OfferDesk, copy_states, copy_windows
from engines.embedded.pages import Export, PageMemory
from engines.embedded.prefilling import PrefillWork
from engines.embedded.ragged import join
from engines.embedded.sampling import Sampler
from engines.protocol import (
    CancelCommand,
    Command,
    Exported,
    FinishCommand,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Loaded,
    PrefillCommand,
    PrefillFinished,
    Pulse,
    Spoken,
    StoreCommand,
    Token,
)
from engines.spec import EngineSpec
from kvcache.plan import plan_transfer

logger = logging.getLogger(__name__)


class EngineLoop:
    """Runs jobs on one model. ``inbox`` gives commands; ``send`` takes events and may wait."""

    def __init__(
        self,
        model: LanguageModel,
        end_tokens: tuple[int, ...],
        limits: Limits,
        spec: EngineSpec,
        memory: PageMemory,
        inbox: queue.Queue[Command],
        send: Callable[[JobEvent], None],
    ) -> None:
        self._model = model
        self._end_tokens = end_tokens
        self._limits = limits
        self._spec = spec
        self._memory = memory
        self._inbox = inbox
        self._send = send
        self._arrivals = 0
        self._prefills: list[Prefill] = []
        self._waiting: list[Waiting] = []
        self._rows: list[Row] = []
        self._batch: Cache | None = None
        self._desk = OfferDesk(limits.geometry(memory), memory, send)
        self._work = PrefillWork(model, spec, memory, self._desk)

    @property
    def pulse(self) -> Pulse:
        """What is going on; may be read from another thread."""
        return Pulse(running=len(self._rows), prefill_queue=len(self._prefills))

    @torch.inference_mode()
    def run(self) -> None:
        """Serve for ever; the process ends when the node goes away."""
        while True:
            waiting = any(not one.command.beside for one in self._waiting)
            self.turn(wait=not (self._prefills or self._rows or waiting))

    def turn(self, wait: bool) -> None:
        """One round of the loop. ``wait`` waits for a command first."""
        if wait:
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get_nowait())
        self._admit()
        if self._prefills:
            self._prefill_chunk(min(self._prefills, key=lambda prefill: prefill.rank))
        if self._rows:
            self._decode_step()

    # ---- commands

    def _take(self, command: Command) -> None:
        try:
            if isinstance(command, CancelCommand):
                self._cancel(command.job)
            elif isinstance(command, StoreCommand):
                self._desk.store(command)
            elif isinstance(command, FinishCommand):
                self._finish(command.job)
            elif len(self._prefills) + len(self._waiting) + len(self._rows) >= self._spec.max_jobs:
                raise Unfit("queue_full", f"the engine holds {self._spec.max_jobs} jobs")
            elif isinstance(command, PrefillCommand):
                self._queue_prefill(command)
            else:
                waiting = Waiting(command, self._limits.check_generate(command, self._memory))
                insort(self._waiting, waiting, key=lambda one: one.command.priority)
        except Unfit as unfit:
            self._send(JobFailed(command.job, unfit.cause, str(unfit)))

    def _queue_prefill(self, command: PrefillCommand) -> None:
        table, cached = self._limits.check_prefill(command, self._memory)
        plan = plan_transfer(self._model.layout, command.start, command.stop, self._spec.chunk_tokens)
        export = Export(plan, table, self._memory, lambda n: self._send(Exported(command.job, n)), command.cached)
        prefill = Prefill(
            command.job,
            torch.tensor(command.token_ids[: command.stop]),
            command.stop,
            self._rank(command.priority),
            export=export,
            cached=cached,
            checkpoints=command.checkpoints,
            done=command.cached,
        )
        self._prefills.append(prefill)

    def _rank(self, priority: int) -> tuple[int, int]:
        self._arrivals += 1
        return priority, self._arrivals

    def _cancel(self, job: str) -> None:
        """Forget a job; its pages are not touched again, because nothing of it is under way between two turns."""
        done = next((p.done for p in self._prefills if p.job == job), 0)
        if self._forget(job):
            self._send(JobCancelled(job, done))

    def _finish(self, job: str) -> None:
        row = next((row for row in self._rows if row.job == job), None)
        if row is not None:
            self._rows = [other for other in self._rows if other is not row]
            self._batch = None
            self._end(row, "stop", row.position)

    def _forget(self, job: str) -> bool:
        ending = self._desk.forget(job)
        held = len(self._prefills) + len(self._waiting) + len(self._rows)
        self._prefills = [prefill for prefill in self._prefills if prefill.job != job]
        self._waiting = [waiting for waiting in self._waiting if waiting.command.job != job]
        if any(row.job == job for row in self._rows):
            self._rows = [row for row in self._rows if row.job != job]
            self._batch = None
        return ending or len(self._prefills) + len(self._waiting) + len(self._rows) < held

    # ---- generations enter

    def _admit(self) -> None:
        taken = len(self._rows) + sum(self._answers(prefill.job) for prefill in self._prefills if prefill.then)
        while (waiting := next((one for one in self._waiting if not one.command.beside), None)) is not None:
            command = waiting.command
            answers = self._answers(command.job)
            if taken and taken + answers > self._spec.max_running:
                return
            self._waiting.remove(waiting)
            prefix = len(command.token_ids) - 1
            try:
                cache = self._work.cache(prefix + command.sampling.max_tokens, waiting.table)
            except Exception as error:
                logger.exception("load failed job=%s", command.job)
                self._send(JobFailed(command.job, "engine_error", f"{type(error).__name__} in load"))
                continue
            if waiting.table is not None:
                self._send(Loaded(command.job))
            taken += answers
            if command.loaded == prefix:
                self._speak(command, cache)
                continue
            prefill = Prefill(
                command.job,
                torch.tensor(command.token_ids[:prefix]),
                prefix,
                self._rank(command.priority),
                then=command,
                checkpoints=command.checkpoints,
                cache=cache,
                done=command.loaded,
            )
            self._prefills.append(prefill)

    def _answers(self, job: str) -> int:
        """How many generations speak over the cache of this one: it and those that wait beside it."""
        return 1 + sum(waiting.command.beside == job for waiting in self._waiting)

    def _speak(self, command: GenerateCommand, cache: Cache) -> None:
        """Have it speak, and those that wait beside it, each over a cache of its own."""
        beside = [waiting for waiting in self._waiting if waiting.command.beside == command.job]
        self._waiting = [waiting for waiting in self._waiting if waiting.command.beside != command.job]
        for waiting in beside:
            if waiting.table is not None:
                self._send(Loaded(waiting.command.job))
            self._add_row(waiting.command, fork(cache))
        self._add_row(command, cache)

    def _add_row(self, command: GenerateCommand, cache: Cache) -> None:
        sampler = Sampler(command.sampling, self._end_tokens, command.token_ids)
        last = len(command.token_ids) - 1
        row = Row(
            command.job,
            cache,
            sampler,
            command.token_ids[last],
            last,
            command.sampling.max_tokens,
            command.keep_from,
        )
        self._rows.append(row)
        self._batch = None

    # ---- work

    def _prefill_chunk(self, prefill: Prefill) -> None:
        try:
            self._work.run_chunk(prefill)
        except Exception as error:
            logger.exception("prefill failed job=%s", prefill.job)
            self._forget(prefill.job)
            self._send(JobFailed(prefill.job, "engine_error", f"{type(error).__name__} in prefill"))
            return
        if prefill.done < prefill.stop:
            return
        self._prefills.remove(prefill)
        if prefill.then is not None:
            assert prefill.cache is not None
            self._speak(prefill.then, prefill.cache)
        else:
            self._desk.end(PrefillFinished(prefill.job, time.monotonic() - prefill.started))

    def _decode_step(self) -> None:
        rows = self._rows
        try:
            if self._batch is None:
                self._batch = join([row.cache for row in rows])
            ids = torch.tensor([[row.token] for row in rows])
            positions = torch.tensor([[row.position] for row in rows])
            logits = self._model.logits(self._model.hidden(ids, positions, self._batch)[:, -1])
        except Exception as error:
            logger.exception("decode step failed rows=%d", len(rows))
            self._rows, self._batch = [], None
            for row in rows:
                self._desk.forget(row.job)
                self._send(JobFailed(row.job, "engine_error", f"{type(error).__name__} in decode"))
            return
        going = [row for i, row in enumerate(rows) if self._goes_on(row, logits[i])]
        if len(going) < len(rows):
            self._rows, self._batch = going, None

    def _goes_on(self, row: Row, logits: torch.Tensor) -> bool:
        """Choose the row's next token and say so; False when that was its last."""
        try:
            return self._advance(row, logits)
        except (RuntimeError, ValueError) as error:
            logger.exception("sampling failed job=%s", row.job)
            self._desk.forget(row.job)
            self._send(JobFailed(row.job, "engine_error", f"{type(error).__name__} in sampling"))
            return False

    def _advance(self, row: Row, logits: torch.Tensor) -> bool:
        self._copy_states(row)
        read = row.position + 1
        token = row.sampler.choose(logits)
        if row.sampler.ends(token):
            self._end(row, "stop", read)
            return False
        self._send(Token(row.job, token, row.sampler.logprobs(logits, token)))
        row.token, row.position, row.left = token, read, row.left - 1
        if row.left == 0:
            self._end(row, "length", read)
        return row.left > 0

    def _copy_states(self, row: Row) -> None:
        """States pass a block boundary once: copy them there, if they may be offered at the end."""
        if self._work.has_states and row.keep_from is not None and (row.position + 1) % self._spec.block_tokens == 0:
            row.states = copy_states(self._model.layout, row.cache)

    def _end(self, row: Row, reason: str, read: int) -> None:
        """Say that the answer has ended, and offer the full blocks of the ``read`` tokens that were run."""
        stop = read - read % self._spec.block_tokens
        offers = row.keep_from is not None and stop > row.keep_from
        if offers or self._desk.waits(row.job):
            self._send(Spoken(row.job, reason))
        if offers:
            assert row.keep_from is not None
            self._desk.offer(
                row.job,
                Offer(row.keep_from, stop, row.cache, row.states | copy_windows(self._model.layout, row.cache, stop)),
            )
        self._desk.end(GenerationFinished(row.job, reason))
