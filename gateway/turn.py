"""One request's turn: sent at once where there is room, else when its turn has come; and what its account owes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.building import Prompted
from gateway.errors import ApiError
from gateway.waiting import WaitingRoom
from kvcache.control import Finished
from scheduler.admission.fair_queue import Waiting, rank
from scheduler.admission.holding import SHORT_S, displaced, held_back, waits_for_room
from scheduler.admission.work import Yardstick
from scheduler.decision import Decision, Reason
from scheduler.facts import RequestFacts


@dataclass(frozen=True, slots=True)
class Way:
    """A way to send a request: what is decided now, and how to go by a decision. Both may raise ApiError.

    ``refused`` hears the decision that a request which waited in vain was turned away with. ``last``: the way comes
    after all others that are not.
    """

    choose: Callable[[], Decision]
    start: Callable[[Decision], None]
    refused: Callable[[Decision], None]
    last: bool = False


class Turn:
    """Of one request, which may take several ways one after the other. Call ``end`` in any case."""

    def __init__(
        self, room: WaitingRoom, prompted: Prompted, began: float, deadline: float, engines_of: str = ""
    ) -> None:
        """``engines_of`` is the model whose external engines it waits for, "" for our own nodes."""
        self._room = room
        self._engines_of = engines_of
        self._p = prompted
        self._began = began
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._yardstick: Yardstick | None = None
        self._work_s = 0.0
        self._charged_s: float | None = None
        self._on_nodes: list[float] = []
        self._waits_since: float | None = None
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """How long it has waited in the queue so far."""
        return self._waited_s + (0.0 if self._waits_since is None else self._loop.time() - self._waits_since)

    async def go(self, way: Way) -> None:
        """Return when the request was sent by this way. Raises ApiError."""
        decision = way.choose()
        yardstick = self._yardstick = Yardstick(decision.facts)
        work_s, p = yardstick.expected_s(self._p.expected_output), self._p
        away = yardstick.uncached_tokens > decision.facts.threshold_tokens
        needs = (self._engines_of, _placed_like(p.facts), away, yardstick.prefill_s > SHORT_S)
        last = way.last or displaced(decision) or self._room.anybody_last(needs)
        self._work_s = work_s
        hopeless = decision.chosen is None and not self._waits(decision)
        if hopeless or not (self._room.anybody_before(last) or self._waits(decision)):
            way.start(decision)
            self._room.passed(p.account, work_s, p.weight)
            self._charged_s = None
            return
        turned_away: Decision | None = decision

        def start() -> bool:
            nonlocal turned_away
            found = way.choose()
            if self._waits(found):
                turned_away = found
                return False
            turned_away = None
            way.start(found)
            return True

        order = rank(self._began, work_s, p.priority)
        entry = Waiting(p.account, work_s, len(p.token_ids), order, p.weight, needs, last)
        before = self._waits_since = self._loop.time()
        try:
            await self._room.wait(entry, start, self._patience_s(entry))
        except ApiError:
            if turned_away is not None:
                way.refused(turned_away)
            raise
        finally:
            self._waits_since = None
            self._waited_s += self._loop.time() - before
        self._charged_s = work_s

    def rank(self, last: bool) -> int:
        """The rank in nodes' queues of what is sent now."""
        self._on_nodes.append(self._work_s)
        return self._room.send(self._p.account, self._work_s, self._p.weight, last)

    def check_slo(self, predicted_s: float | None) -> None:
        """Raise ApiError where a way of that predicted TTFT would be too late for the client."""
        slo = self._p.ttft_slo_s
        if slo is None or predicted_s is None:
            return
        expected = self._loop.time() - self._began + predicted_s
        if expected > slo:
            raise self._beyond_slo(slo, expected, f"{expected:.3g} s")

    def end(self, done: Finished | None) -> None:
        """It is over. Its account is charged for what was done; where nobody waited nothing is owed."""
        if done is not None and self._yardstick is not None and self._charged_s is not None:
            spent = self._yardstick.spent_s(done.cached_tokens, done.completion_tokens)
            self._room.settle(self._p.account, spent - self._charged_s, self._p.weight)
        for work_s in self._on_nodes:
            self._room.back(self._p.account, work_s)

    def _waits(self, decision: Decision) -> bool:
        """Whether it is only for want of room that the request can't be sent now, or is better not."""
        if decision.reason is Reason.NO_DECODE_NODE and self._room.expecting:
            return True
        return waits_for_room(decision) or held_back(decision)

    def _patience_s(self, entry: Waiting) -> float:
        """How long it may wait. Raises ApiError where its first token would come later than its client wants it."""
        left = self._deadline - self._loop.time()
        slo = self._p.ttft_slo_s
        if slo is None:
            return left
        left = min(left, self._began + slo - self._loop.time())
        expected = self._room.wait_s(entry)
        if expected is not None and expected > left:
            raise self._beyond_slo(slo, expected, f"{expected:.3g} s in the queue")
        return left

    def _beyond_slo(self, slo: float, expected_s: float, what: str) -> ApiError:
        text = f"the first token is predicted later than the {slo:g} s that the request allows: {what}"
        return self._room.refused("slo_unattainable", 503, text, expected_s)


def _placed_like(facts: RequestFacts) -> tuple[object, ...]:
    """What two requests have in common that can be placed on the same nodes."""
    where = (facts.allowed_clusters, facts.barred_clusters, facts.regions, facts.trusted_only)
    return (facts.hint, facts.hint_cluster, facts.lora, *where)
