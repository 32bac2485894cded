"""From a decision to an attempt: who dials whom, the signed tickets, and the jobs."""

from __future__ import annotations

import asyncio
import time

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.attempts import Attempt, PrefillLeg, new_transfer
from gateway.interconnect import Interconnects
from gateway.moving import CODEC, MoveOrders, PrefixMove, patience_s
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import GenerateJob, KvPeer, KvSource, PrefillJob, Sampling, SharePrefix, TakePrefix
from kvcache.quality import Quality
from kvcache.ticket import Ticket, sign_ticket
from kvcache.tracing import NO_SPAN, Span
from scheduler.decision import Move, Option
from scheduler.facts import RequestFacts

MOVE_TICKET_S = 5.0
"""How much longer than an attempt waits for a prefix its ticket lasts: the nodes' clocks may differ from this one."""


class Prompted(msgspec.Struct, frozen=True):
    """A request ready to be routed. ``facts.request_id`` is internal and unique; ``request_id`` is the client's.

    ``names`` are those of the full blocks of the prompt less its last token. ``session`` is what the client calls
    the conversation. ``measures``: it is no traffic, but sent to measure the stack.

    ``account`` is whose work it is, of that ``weight`` beside others'; ``priority`` orders it among its account's own,
    the least first; ``expected_output`` tokens will probably be spoken. ``ttft_slo_s`` is how late the first token may
    come, None where the client did not say. ``answers`` to the one prompt are wanted. ``span`` is that of the whole
    request.
    """

    request_id: str
    endpoint: str
    facts: RequestFacts
    token_ids: tuple[int, ...]
    sampling: Sampling
    names: tuple[bytes, ...] = ()
    session: str | None = None
    measures: bool = False
    account: str = ""
    weight: float = 1.0
    priority: int = 0
    expected_output: int = 1
    ttft_slo_s: float | None = None
    answers: int = 1
    span: Span = NO_SPAN


class AttemptBuilder:
    """Builds the attempts of requests; ``fingerprint`` is the digest that tickets carry."""

    def __init__(
        self, registry: Registry, ticket_key: Ed25519PrivateKey, fingerprint: str, interconnects: Interconnects
    ) -> None:
        self._registry = registry
        self._interconnects = interconnects
        self._ticket_key = ticket_key
        self._fingerprint = fingerprint

    def build(self, prompted: Prompted, option: Option, number: int, priority: int, left_s: float) -> Attempt:
        """The attempt of that number, not yet dispatched. Its tickets and jobs expire after ``left_s``."""
        transfer = new_transfer()
        now = time.time()
        deadline = now + max(0.001, left_s)
        decode = self._node(option.decode_node)
        prefill = None if option.prefill_node is None else self._node(option.prefill_node)
        span = _span(prompted, option, number)
        leg, source = None, None
        if prefill is not None:
            leg, source = self._leg(
                prompted, option, number, transfer, prefill, decode, priority, now, deadline, span.traceparent
            )
        job = GenerateJob(
            generation=f"{prompted.facts.request_id}.{number}",
            token_ids=prompted.token_ids,
            sampling=prompted.sampling,
            source=source,
            deadline=deadline,
            salt=prompted.facts.tenant,
            lora=prompted.facts.lora,
            quality=prompted.facts.quality,
            priority=priority,
            answers=prompted.answers,
            traceparent=span.traceparent,
        )
        before = None
        if prefill is not None and option.move is not None:
            before = self._move(prompted, option.move, number, prefill, now, deadline)
        return Attempt(number, option, transfer, leg, decode, job, prompted.facts.quality, before, span)

    def _leg(
        self,
        prompted: Prompted,
        option: Option,
        number: int,
        transfer: bytes,
        prefill: NodeSession,
        decode: NodeSession,
        priority: int,
        now: float,
        deadline: float,
        traceparent: str,
    ) -> tuple[PrefillLeg, KvSource]:
        stop = len(prompted.token_ids) - 1
        chunk = prefill.join.model.chunk_tokens
        ticket = self._ticket(
            prompted, number, transfer, prefill, decode, (option.start, stop), option.transfer_bytes, now, deadline
        )
        dial = _dial(prefill, decode)
        facts = prompted.facts
        context = (facts.tenant, facts.lora, traceparent)
        ways = self._interconnects.order(prefill, decode, option.wire_bytes)
        job = PrefillJob(ticket, prompted.token_ids, option.codec, priority, dial, *context, transports=ways.transports)
        link = self._registry.link(prefill.join.cluster)
        leg = PrefillLeg(prefill, job, link, ways, option.start, stop, chunk, *_expected(prefill, option, stop, chunk))
        return leg, _source(ticket, prefill, facts.quality)

    def _move(
        self, prompted: Prompted, move: Move, number: int, target: NodeSession, now: float, deadline: float
    ) -> PrefixMove:
        source, transfer, facts = self._node(move.source_node), new_transfer(), prompted.facts
        deadline = min(deadline, now + patience_s(move) + MOVE_TICKET_S)
        covered = (move.start, move.stop)
        ticket = self._ticket(prompted, number, transfer, source, target, covered, move.nbytes, now, deadline)
        tokens = prompted.token_ids[: move.stop]
        ways = self._interconnects.order(source, target, move.nbytes)
        dial = _dial(source, target)
        share = SharePrefix(ticket, tokens, CODEC, dial, facts.tenant, facts.lora, transports=ways.transports)
        take = TakePrefix(_source(ticket, source, facts.quality), tokens, facts.tenant, facts.lora)
        local = move.source_cluster == self._registry.local_cluster
        link = self._registry.outward(target.join.cluster) if local else self._registry.link(move.source_cluster)
        return PrefixMove(MoveOrders(transfer, source, target, share, take, link, ways), move)

    def _ticket(
        self,
        prompted: Prompted,
        number: int,
        transfer: bytes,
        source: NodeSession,
        target: NodeSession,
        covered: tuple[int, int],
        byte_cap: int,
        now: float,
        deadline: float,
    ) -> bytes:
        return sign_ticket(
            Ticket(
                transfer=transfer,
                request_id=prompted.facts.request_id,
                attempt=number,
                prefill_node=source.node_id,
                prefill_incarnation=source.incarnation,
                decode_key=target.join.public_key,
                fingerprint=self._fingerprint,
                start=covered[0],
                stop=covered[1],
                chunk_tokens=source.join.model.chunk_tokens,
                byte_cap=byte_cap,
                issued=now,
                deadline=deadline,
            ),
            self._ticket_key,
        )

    def _node(self, node_id: str) -> NodeSession:
        node = self._registry.node(node_id)
        assert node is not None, "a decision names nodes that its facts held, and no await lies between"
        return node


def _span(prompted: Prompted, option: Option, number: int) -> Span:
    names = {"cluster": option.cluster, "prefill_node": option.prefill_node, "decode_node": option.decode_node}
    attributes: dict[str, str | int] = {f"prfaas.{name}": value for name, value in names.items() if value is not None}
    return prompted.span.child("attempt", attributes | {"prfaas.attempt": number})


def _expected(prefill: NodeSession, option: Option, stop: int, chunk: int) -> tuple[float | None, float]:
    """How long the job takes there once its turn has come, with what of its prompt must be read first; and a chunk.

    What is predicted of it less what was sent there from here before: only that gives signs to this gateway.
    """
    curve, predicted = prefill.speed.curve, option.predicted_ttft_s
    if curve is None or predicted is None:
        return None, 0.0
    before = prefill.sent_s(asyncio.get_running_loop().time(), last=False)
    return max(curve.seconds(option.cached_tokens, stop), predicted - before), curve.seconds(max(0, stop - chunk), stop)


def _dial(source: NodeSession, target: NodeSession) -> KvPeer | None:
    """Whom the sending node must dial; None where it is dialled."""
    accepts, answers = source.join.kv_address, target.join.kv_address
    if accepts is not None:
        return None
    assert answers is not None, "two that only dial were refused at their join, or are not asked for a move"
    return KvPeer(target.node_id, target.incarnation, target.join.public_key, answers)


def _source(ticket: bytes, node: NodeSession, quality: Quality) -> KvSource:
    return KvSource(ticket, node.node_id, node.incarnation, node.join.public_key, node.join.kv_address, quality)
