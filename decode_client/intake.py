"""One prefix of another prefill node being taken in: fetch it, keep it in the prefix cache, hold nothing afterwards.

Nobody waits for it longer than its deadline, and it waits for nobody: what it needs of the pool must be to spare.
"""

from __future__ import annotations

from decode_client.context import ClientContext
from decode_client.fetch import Fetch, Fetched
from decode_client.scratch import Scratch
from engines.keeping import JobKeeper
from kvcache.chain import TokenChain
from kvcache.control import TakePrefix
from kvcache.fate import Ending, JobEnded, JobFate
from kvcache.kept import Provenance
from kvcache.lease import Lease
from kvcache.plan import plan_transfer
from kvcache.quality import Quality
from kvcache.threadwork import ThreadWork
from kvcache.ticket import Ticket
from kvcache.tiers.hierarchy import brought
from kvcache.transfer import TransferViolation


class Intake:
    """``run`` once; frames come in through ``fetch``, ends at any time. ``deadline`` is the loop's time.

    The task that runs it owns its pages, and a lease of the blocks before them.
    """

    def __init__(
        self, context: ClientContext, order: TakePrefix, ticket: Ticket, scratch: Scratch, deadline: float
    ) -> None:
        self.job = ticket.transfer.hex()
        self.ticket = ticket
        self.fate = JobFate("transfer")
        self.fetch: Fetch | None = None
        self.cancel_asked = False
        self._context = context
        self._order = order
        self._scratch = scratch
        self._deadline = deadline
        self._owner = f"intake:{self.job}"
        self._threads = ThreadWork(context.executor)
        self._before: Lease | None = None

    async def run(self) -> Ending | None:
        """Take it in; None where it is kept. Nothing is held afterwards."""
        ending = await self.fate.run(self._work(), self._deadline)
        if self.fetch is not None and ending is not None:
            self.fetch.abort(ending)
        await self._threads.settle()
        if self.fetch is not None:
            await self.fetch.settle()
        self._context.room.release(self._owner)
        if self._before is not None:
            self._before.release()
        return ending

    def cancel(self) -> None:
        """The gateway no longer wants it."""
        self.cancel_asked = True
        self.fate.end("cancelled", "by the gateway")

    async def _work(self) -> None:
        context, ticket, source = self._context, self.ticket, self._order.source
        cache = context.room.cache
        if cache is None:
            raise JobEnded("no_cache", "this node keeps nothing (--no-prefix-cache)")
        chain = await self._threads.start(self._chain)
        async with brought(
            context.tiers, chain, ticket.start, source.quality, self._deadline, resume=False, needed=True
        ):
            self._before = before = cache.lease(chain.hashes, ticket.start, source.quality, resume=False)
        if before is None:
            raise JobEnded("prefix_gone", f"the first {ticket.start} tokens are not all held here")
        layout = context.geometry.layout
        plan = await self._threads.start(plan_transfer, layout, ticket.start, ticket.stop, ticket.chunk_tokens)
        try:
            self.fetch = Fetch(context, source, ticket, plan, self.fate, self._scratch, spare=True)
        except TransferViolation as violation:
            raise JobEnded("bad_ticket", str(violation)) from violation
        fetched = await self.fetch.run(self._owner, self._deadline)
        self._keep(fetched, chain, before)
        context.report(fetched.report)

    def _chain(self) -> TokenChain:
        """The prefix as the cache knows it. Runs in a thread."""
        order, context = self._order, self._context
        block = context.geometry.block_tokens
        return TokenChain.of(order.token_ids, block, fingerprint=context.fingerprint, salt=order.salt, lora=order.lora)

    def _keep(self, fetched: Fetched, chain: TokenChain, before: Lease) -> None:
        """Blocks, and the windows and states at their end, as exact as what they came by."""
        context, ticket = self._context, self.ticket
        quality = Quality.needed_for(fetched.codec.members) or Quality.COMPACT
        provenance = Provenance(quality, (fetched.codec.name,), self._order.source.node_id)
        table = context.geometry.table(ticket.start, ticket.stop, fetched.pages)
        keeper = JobKeeper(context.room, context.geometry, self._owner, chain, before, provenance)
        keeper.keep_table(table, ticket.stop, done=True)
