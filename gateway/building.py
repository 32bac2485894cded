"""From a decision to an attempt: who dials whom, the signed ticket, and the two jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.attempts import Attempt, PrefillLeg, new_transfer
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import GenerateJob, KvPeer, KvSource, PrefillJob, Sampling
from kvcache.ticket import Ticket, sign_ticket
from scheduler.decision import Option
from scheduler.facts import RequestFacts


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request ready to be routed. ``facts.request_id`` is internal and unique; ``request_id`` is the client's.

    ``names`` are those of the full blocks of the prompt less its last token. ``session`` is what the client calls
    the conversation. ``measures``: it is no traffic, but sent to measure the stack.

    ``account`` is whose work it is, of that ``weight`` beside others'; ``priority`` orders it among its account's own,
    the least first; ``expected_output`` tokens will probably be spoken. ``ttft_slo_s`` is how late the first token may
    come, None where the client did not say.
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


class AttemptBuilder:
    """Builds the attempts of requests; ``fingerprint`` is the digest that tickets carry."""

    def __init__(self, registry: Registry, ticket_key: Ed25519PrivateKey, fingerprint: str) -> None:
        self._registry = registry
        self._ticket_key = ticket_key
        self._fingerprint = fingerprint

    def build(self, prompted: Prompted, option: Option, number: int, priority: int, left_s: float) -> Attempt:
        """The attempt of that number, not yet dispatched. Its tickets and jobs expire after ``left_s``."""
        transfer = new_transfer()
        now = time.time()
        deadline = now + max(0.001, left_s)
        decode = self._node(option.decode_node)
        prefill = None if option.prefill_node is None else self._node(option.prefill_node)
        leg, source = None, None
        if prefill is not None:
            leg, source = self._leg(prompted, option, number, transfer, prefill, decode, priority, now, deadline)
        job = GenerateJob(
            generation=f"{prompted.facts.request_id}.{number}",
            token_ids=prompted.token_ids,
            sampling=prompted.sampling,
            source=source,
            deadline=deadline,
            salt=prompted.facts.tenant,
            lora=prompted.facts.lora,
            quality=prompted.facts.quality,
        )
        return Attempt(number, option, transfer, leg, decode, job, prompted.facts.quality)

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
    ) -> tuple[PrefillLeg, KvSource]:
        stop = len(prompted.token_ids) - 1
        chunk = prefill.join.model.chunk_tokens
        ticket = sign_ticket(
            Ticket(
                transfer=transfer,
                request_id=prompted.facts.request_id,
                attempt=number,
                prefill_node=prefill.node_id,
                prefill_incarnation=prefill.incarnation,
                decode_key=decode.join.public_key,
                fingerprint=self._fingerprint,
                start=option.start,
                stop=stop,
                chunk_tokens=chunk,
                byte_cap=option.transfer_bytes,
                issued=now,
                deadline=deadline,
            ),
            self._ticket_key,
        )
        accepts, answers = prefill.join.kv_address, decode.join.kv_address
        assert accepts is not None or answers is not None, "two dialers were refused at their join"
        dial = None
        if accepts is None and answers is not None:
            dial = KvPeer(decode.node_id, decode.incarnation, decode.join.public_key, answers)
        facts = prompted.facts
        job = PrefillJob(ticket, prompted.token_ids, option.codec, priority, dial, salt=facts.tenant, lora=facts.lora)
        link = self._registry.link(prefill.join.cluster)
        leg = PrefillLeg(prefill, job, link, option.start, stop, chunk)
        quality = prompted.facts.quality
        return leg, KvSource(ticket, prefill.node_id, prefill.incarnation, prefill.join.public_key, accepts, quality)

    def _node(self, node_id: str) -> NodeSession:
        node = self._registry.node(node_id)
        assert node is not None, "a decision names nodes that its facts held, and no await lies between"
        return node
