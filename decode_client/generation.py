"""One request being answered: fetch its KV where there is any to fetch, load it, speak, and give everything back.

Several answers to one prompt are spoken from one fetch; they end together where one ends badly.

The task that runs a ``Generation`` owns its pages. They go back when the engine has copied them, or when the engine,
the decoding threads and the wire have all let go of them, however the generation ended.
"""

from __future__ import annotations

import asyncio

from decode_client.answer import Answer, others
from decode_client.context import ClientContext
from decode_client.fetch import Fetch
from decode_client.prefix import Prefix
from decode_client.scratch import Scratch
from engines.protocol import (
    Checkpoint,
    EngineLost,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Loaded,
    Offered,
    Spoken,
    Stored,
    Token,
)
from kvcache.blocks import PageTable
from kvcache.chain import TokenChain
from kvcache.control import AnswerEnded, Finished, GenerateJob
from kvcache.fate import Ending, JobEnded, JobFate
from kvcache.plan import TransferPlan, plan_transfer
from kvcache.threadwork import ThreadWork
from kvcache.ticket import Ticket
from kvcache.tracing import part
from kvcache.transfer import TransferViolation


class Generation:
    """``run`` once; frames come in through ``fetch``, ends at any time.

    ``deadline`` and ``fetch_deadline`` are the loop's time; ``ticket`` is the verified one of the order's source.
    """

    def __init__(
        self,
        context: ClientContext,
        order: GenerateJob,
        ticket: Ticket | None,
        scratch: Scratch,
        deadline: float,
        fetch_deadline: float,
    ) -> None:
        self.job = order.generation
        self.ticket = ticket
        self.fate = JobFate("transfer" if ticket is not None else "queue")
        self.fetch: Fetch | None = None
        self.cancel_asked = False
        self.prefilled_tokens = 0
        self.told = False
        """Whether the answer has been said to its end; what is left is between this node and its engine."""
        self._context = context
        self._order = order
        self._scratch = scratch
        self._deadline = deadline
        self._fetch_deadline = fetch_deadline
        self._owner = f"staging:{order.generation}"
        self._threads = ThreadWork(context.executor)
        self._span = context.tracer.join("generate", order.traceparent)
        self._prefix: Prefix | None = None
        self._cached_tokens = 0
        self._answers = [Answer(context, order, number) for number in range(order.answers)]

    @property
    def untold(self) -> int:
        """How many answers are not said to their end."""
        return sum(not answer.told for answer in self._answers)

    @property
    def speaking(self) -> int:
        """How many answers the engine works on."""
        return sum(answer.run is not None and not answer.run.ended for answer in self._answers)

    @property
    def waiting(self) -> bool:
        """Whether the engine has not seen it yet."""
        return self._answers[0].run is None

    @property
    def tokens_to_prefill(self) -> int:
        """Prompt tokens that this node has still to compute itself."""
        if self.ticket is not None or any(answer.speech.tokens for answer in self._answers):
            return 0
        return len(self._order.token_ids) - (0 if self._prefix is None else self._prefix.cached_tokens)

    async def run(self) -> Ending | None:
        """Answer to the end; None where it was said well. Nothing is held afterwards."""
        ending = await self.fate.run(self._work(), self._deadline)
        if self.told:
            ending = None  # what went wrong afterwards is nothing to those who asked
        if self.fetch is not None and ending is not None:
            self.fetch.abort(ending)
        for answer in self._answers:
            last = None if answer.run is None else await answer.run.stop(self._context.limits.engine_patience_s)
            if isinstance(last, JobCancelled):
                self.prefilled_tokens = max(self.prefilled_tokens, last.prefilled_tokens)
        await self._threads.settle()
        if self.fetch is not None:
            await self.fetch.settle()
        if self._prefix is not None:
            self._prefix.close()
        self._context.room.release(self._owner)
        self._span.end("" if ending is None else f"{ending.stage}: {ending.cause}")
        return ending

    def cancel(self) -> None:
        """The gateway no longer wants it."""
        self.cancel_asked = True
        self.fate.end("cancelled", "by the gateway")

    async def _work(self) -> None:
        order = self._order
        if self._context.room.cache is not None:
            chain = await self._threads.start(self._chain)
            self._prefix = Prefix(self._context, order, self._owner, chain)
        table: PageTable | None = None
        wanted: tuple[Checkpoint, ...] = ()
        if self.ticket is not None:
            with part(self._span, "fetch"):
                table = await self._fetch_kv(self.ticket)
        elif self._prefix is not None:
            async with self._prefix.brought(len(order.token_ids) - 1, self._deadline, resume=True):
                table, wanted = self._prefix.resume()
        engine = self._context.engine()
        self.fate.stage = "load" if self.ticket is not None else "prefill"
        if engine is None:
            raise JobEnded("engine_lost", "the engine is being restarted")
        command = GenerateCommand(
            self.job,
            order.token_ids,
            table.stop if table is not None else 0,
            table.pages if table is not None else (),
            order.sampling,
            wanted,
            self._prefix.keep_from if self._prefix is not None else None,
            order.priority,
            salt=order.salt,
        )
        self._cached_tokens = table.stop if table is not None and self.ticket is None else 0
        for answer, like in zip(self._answers[1:], others(command, order.answers), strict=True):
            answer.start(engine, like, self._on_event)
        self._answers[0].start(engine, command, self._on_event)
        with part(self._span, "speak"):
            await self._follow_all()

    async def _follow_all(self) -> None:
        """Return when all are said; once one fails, nothing more is heard of the others. Raises JobEnded."""
        if len(self._answers) == 1:
            await self._follow(self._answers[0])
            return
        following = [asyncio.create_task(self._follow(answer)) for answer in self._answers]
        try:
            await asyncio.gather(*following)
        finally:
            for task in following:
                task.cancel()

    async def _follow(self, answer: Answer) -> None:
        """Return when this answer is said, and the engine is done with it where that matters. Raises JobEnded."""
        assert answer.run is not None
        await answer.turn.wait()
        if answer.speech.stop_text is None:
            await self._engine_end(answer)
            return
        self._finished(answer, "stop")
        if self._prefix is not None or len(self._answers) > 1:
            answer.run.finish()  # what it has said so far is worth keeping, and others may go on
            await self._engine_end(answer)

    def _chain(self) -> TokenChain:
        """The prompt as the cache knows it. Runs in a thread."""
        order, context = self._order, self._context
        tokens, block = order.token_ids[:-1], context.geometry.block_tokens
        return TokenChain.of(tokens, block, fingerprint=context.fingerprint, salt=order.salt, lora=order.lora)

    async def _fetch_kv(self, ticket: Ticket) -> PageTable:
        """The table of the whole prompt, fetched but for the blocks that are here already."""
        source, context, prefix = self._order.source, self._context, self._prefix
        assert source is not None
        if not (await self._hold(prefix, ticket.start) if prefix is not None else ticket.start == 0):
            raise JobEnded("prefix_gone", f"the first {ticket.start} tokens are not all held here", stage="transfer")
        plan: TransferPlan = await self._threads.start(
            plan_transfer, context.geometry.layout, ticket.start, ticket.stop, ticket.chunk_tokens
        )
        held = None if prefix is None else prefix.lease
        try:
            rank = self._order.priority
            self.fetch = Fetch(context, source, ticket, plan, self.fate, self._scratch, held, rank=rank)
        except TransferViolation as violation:
            raise JobEnded("bad_ticket", str(violation)) from violation
        try:
            async with asyncio.timeout_at(self._fetch_deadline):
                fetched = await self.fetch.run(self._owner, self._fetch_deadline)
        except TimeoutError:
            raise JobEnded("deadline", "the ticket's time is over") from None
        context.report(fetched.report)
        if prefix is None:
            return context.geometry.table(0, ticket.stop, fetched.pages)
        return prefix.fetched(fetched.pages, fetched.codec, source.node_id)

    async def _hold(self, prefix: Prefix, tokens: int) -> bool:
        """Hold the blocks below ``tokens``, of which some may lie in tiers; False where they are not all here."""
        async with prefix.brought(tokens, self._fetch_deadline, resume=False):
            return prefix.hold(tokens, self._prefix_gone)

    def _prefix_gone(self) -> None:
        self.fate.end("prefix_gone", "its held blocks gave way to a job whose turn it was", stage="transfer")

    async def _engine_end(self, answer: Answer) -> None:
        assert answer.run is not None
        try:
            last = await answer.run.wait()
        except EngineLost as lost:
            if answer.told:
                return
            raise JobEnded("engine_lost", str(lost)) from lost
        match last:
            case _ if answer.told:
                return
            case GenerationFinished(reason=reason):
                self._finished(answer, reason)
            case JobFailed(cause=cause, detail=detail):
                raise JobEnded(cause, detail)
            case _:
                raise JobEnded("engine_cancelled", "the engine gave the job up")

    def _finished(self, answer: Answer, reason: str) -> None:
        """This answer is said to its end, and with the last of them all that was asked for."""
        speech = answer.speech
        answer.told = True
        self.told = all(each.told for each in self._answers)
        speech.finish()
        if speech.stop_text is not None:
            reason = "stop"
        several = len(self._answers) > 1
        if several:
            self._context.report(AnswerEnded(self.job, answer.number, reason, speech.stop_text))
        if self.told:
            spoken = sum(each.speech.tokens for each in self._answers)
            prompt, stop_text = len(self._order.token_ids), None if several else speech.stop_text
            self._context.report(Finished(self.job, reason, prompt, spoken, self._cached_tokens, stop_text))

    def _on_event(self, answer: Answer, event: JobEvent) -> None:
        match event:
            case Loaded():
                self._loaded(answer)
            case Token():
                self._token(answer, event)
            case Spoken(reason=reason) if not self.fate.over and not answer.told and answer.speech.stop_text is None:
                self._finished(answer, reason)
            case Offered() if self._prefix is not None and answer.run is not None:
                self._prefix.offered(event, answer.run)
            case Stored() if self._prefix is not None:
                self._prefix.stored(event)

    def _token(self, answer: Answer, token: Token) -> None:
        """What comes after the end is said to nobody, but the engine may still offer blocks that it is in."""
        if self._prefix is not None and not answer.number:
            self._prefix.said(token.token_id)
        if self.fate.over:
            return
        if not answer.speech.tokens:
            self._span.happened("first_token")
        self.fate.stage = "decode"
        answer.speech.say(token)
        if answer.speech.stop_text is not None:
            answer.turn.set()

    def _loaded(self, answer: Answer) -> None:
        """The engine has copied what lay in the pool: all of the prompt, or where it goes on in place."""
        answer.loaded = True
        if not all(each.loaded for each in self._answers):
            return
        if self._prefix is not None:
            self._prefix.loaded()
        self._context.room.release(self._owner)
        if not any(each.speech.tokens for each in self._answers):
            self.fate.stage = "decode" if self.ticket is not None else "prefill"
