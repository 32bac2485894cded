"""One request being answered: fetch its KV where there is any to fetch, load it, speak, and give everything back.

The task that runs a ``Generation`` owns its pages. They go back when the engine has copied them, or when the engine,
the decoding threads and the wire have all let go of them, however the generation ended.
"""

from __future__ import annotations

import asyncio

from decode_client.context import ClientContext
from decode_client.detokenizer import Detokenizer
from decode_client.fetch import Fetch
from decode_client.prefix import Prefix
from decode_client.scratch import Scratch
from decode_client.speech import Speech
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
from engines.running import EngineRun
from kvcache.blocks import PageTable
from kvcache.chain import TokenChain
from kvcache.control import Finished, GenerateJob
from kvcache.fate import Ending, JobEnded, JobFate
from kvcache.plan import TransferPlan, plan_transfer
from kvcache.threadwork import ThreadWork
from kvcache.ticket import Ticket
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
        self._run: EngineRun | None = None
        self._prefix: Prefix | None = None
        self._cached_tokens = 0
        self._turn = asyncio.Event()
        sampling = order.sampling
        detokenizer = Detokenizer(context.tokenizer, order.token_ids, sampling.stop, sampling.include_stop)
        self._speech = Speech(order.generation, detokenizer, context.report)

    @property
    def speaking(self) -> bool:
        """Whether the engine works on it."""
        return self._run is not None and not self._run.ended

    @property
    def waiting(self) -> bool:
        """Whether the engine has not seen it yet."""
        return self._run is None

    @property
    def tokens_to_prefill(self) -> int:
        """Prompt tokens that this node has still to compute itself."""
        if self.ticket is not None or self._speech.tokens:
            return 0
        return len(self._order.token_ids) - (0 if self._prefix is None else self._prefix.cached_tokens)

    async def run(self) -> Ending | None:
        """Answer to the end; None where it was said well. Nothing is held afterwards."""
        ending = await self.fate.run(self._work(), self._deadline)
        if self.told:
            ending = None  # what went wrong afterwards is nothing to those who asked
        if self.fetch is not None and ending is not None:
            self.fetch.abort(ending)
        if self._run is not None:
            last = await self._run.stop(self._context.limits.engine_patience_s)
            if isinstance(last, JobCancelled):
                self.prefilled_tokens = last.prefilled_tokens
        await self._threads.settle()
        if self.fetch is not None:
            await self.fetch.settle()
        if self._prefix is not None:
            self._prefix.close()
        self._context.room.release(self._owner)
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
            table = await self._fetch_kv(self.ticket)
        engine = self._context.engine()
        self.fate.stage = "load" if table is not None else "prefill"
        if engine is None:
            raise JobEnded("engine_lost", "the engine is being restarted")
        if self.ticket is None and self._prefix is not None:
            table, wanted = self._prefix.resume()
        command = GenerateCommand(
            self.job,
            order.token_ids,
            table.stop if table is not None else 0,
            table.pages if table is not None else (),
            order.sampling,
            wanted,
            self._prefix.keep_from if self._prefix is not None else None,
            order.priority,
        )
        self._cached_tokens = table.stop if table is not None and self.ticket is None else 0
        self._run = EngineRun(engine, command, self._on_event)
        self._run.on_end(self._turn.set)
        await self._turn.wait()
        if self._speech.stop_text is None:
            await self._engine_end(self._run)
            return
        self._finished("stop")
        if self._prefix is not None:
            self._run.finish()  # what it has said so far is worth keeping
            await self._engine_end(self._run)

    def _chain(self) -> TokenChain:
        """The prompt as the cache knows it. Runs in a thread."""
        order, context = self._order, self._context
        tokens, block = order.token_ids[:-1], context.geometry.block_tokens
        return TokenChain.of(tokens, block, fingerprint=context.fingerprint, salt=order.salt, lora=order.lora)

    async def _fetch_kv(self, ticket: Ticket) -> PageTable:
        """The table of the whole prompt, fetched but for the blocks that are here already."""
        source, context, prefix = self._order.source, self._context, self._prefix
        assert source is not None
        if not (prefix.hold(ticket.start, self._prefix_gone) if prefix is not None else ticket.start == 0):
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

    def _prefix_gone(self) -> None:
        self.fate.end("prefix_gone", "its held blocks gave way to a job whose turn it was", stage="transfer")

    async def _engine_end(self, run: EngineRun) -> None:
        try:
            last = await run.wait()
        except EngineLost as lost:
            if self.told:
                return
            raise JobEnded("engine_lost", str(lost)) from lost
        match last:
            case _ if self.told:
                return
            case GenerationFinished(reason=reason):
                self._finished(reason)
            case JobFailed(cause=cause, detail=detail):
                raise JobEnded(cause, detail)
            case _:
                raise JobEnded("engine_cancelled", "the engine gave the job up")

    def _finished(self, reason: str) -> None:
        speech = self._speech
        self.told = True
        speech.finish()
        if speech.stop_text is not None:
            reason = "stop"
        prompt = len(self._order.token_ids)
        self._context.report(Finished(self.job, reason, prompt, speech.tokens, self._cached_tokens, speech.stop_text))

    def _on_event(self, event: JobEvent) -> None:
        match event:
            case Loaded():
                self._loaded()
            case Token():
                self._token(event)
            case Spoken(reason=reason) if not self.fate.over and self._speech.stop_text is None:
                self._finished(reason)
            case Offered() if self._prefix is not None and self._run is not None:
                self._prefix.offered(event, self._run)
            case Stored() if self._prefix is not None:
                self._prefix.stored(event)

    def _token(self, token: Token) -> None:
        """What comes after the end is said to nobody, but the engine may still offer blocks that it is in."""
        if self._prefix is not None:
            self._prefix.said(token.token_id)
        if self.fate.over:
            return
        self.fate.stage = "decode"
        self._speech.say(token)
        if self._speech.stop_text is not None:
            self._turn.set()

    def _loaded(self) -> None:
        """The engine has copied what lay in the pool: all of the prompt, or where it goes on in place."""
        if self._prefix is not None:
            self._prefix.loaded()
        self._context.room.release(self._owner)
        self.fate.stage = "decode" if self.ticket is not None else "prefill"
