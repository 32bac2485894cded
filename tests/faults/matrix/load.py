"""Clients that keep a stack busy: short and long prompts, whole and streamed answers, some that leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx

from tests.faults.matrix.outcome import Kind, Outcome, of_response, of_stream
from tests.stacks import some_ids

GRACE_S = 5.0
"""How long after its deadline a request may take to say so, on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients send. ``deadline_s`` is the gateway's own; ``leaving`` is the share of clients that go away.

    Of the long prompts ``share_away`` ask for a remote cluster, which is slower here: all would stay at home otherwise,
    and nothing would be in the way of what strikes it.
    """

    model: str
    deadline_s: float
    clients: int = 6
    short: int = 40
    long: int = 600
    share_long: float = 0.3
    share_away: float = 0.7
    most_tokens: int = 24
    leaving: float = 0.0


@dataclass(slots=True)
class Load:
    """Runs clients against ``url`` until stopped; ``outcomes`` grows meanwhile."""

    url: str
    traffic: Traffic
    outcomes: list[Outcome] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def counts(self) -> Counter[str]:
        """How many ended in which way, errors by their codes."""
        return Counter(f"{one.kind}:{one.detail}" if one.detail else str(one.kind) for one in self.outcomes)

    async def run(self) -> None:
        """All clients, until ``stop``; requests at hand are seen to their end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.traffic.clients)
        timeout = httpx.Timeout(self.traffic.deadline_s + GRACE_S, connect=5.0)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=timeout) as http:
            await asyncio.gather(*(self._client(http, random.Random(n)) for n in range(self.traffic.clients)))

    def stop(self) -> None:
        """Let no client begin another request."""
        self._stopping.set()

    async def _client(self, http: httpx.AsyncClient, source: random.Random) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            outcome = await self._request(http, source)
            self.outcomes.append(replace(outcome, seconds=loop.time() - began))
            if outcome.kind is not Kind.ANSWER:  # as clients are told to
                await asyncio.sleep(0.3)

    async def _request(self, http: httpx.AsyncClient, source: random.Random) -> Outcome:
        t = self.traffic
        size = t.long if source.random() < t.share_long else t.short
        away = {"x-prfaas-route-hint": "remote"} if size == t.long and source.random() < t.share_away else {}
        tokens = source.randint(2, t.most_tokens)
        body = {
            "model": t.model,
            "prompt": some_ids(size, seed=source.randrange(1 << 30)),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        leaves = source.random() < t.leaving
        work = self._streamed if source.random() < 0.5 else self._whole
        try:
            async with asyncio.timeout(t.deadline_s + GRACE_S):
                if not leaves:
                    return await work(http, body, away, tokens)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(source.expovariate(4.0)):
                        return await work(http, body, away, tokens)
                return Outcome(Kind.LEFT)
        except (TimeoutError, httpx.TimeoutException):
            return Outcome(Kind.HANGS)
        except httpx.TransportError as error:
            return Outcome(Kind.UNREACHABLE, type(error).__name__)

    async def _whole(
        self, http: httpx.AsyncClient, body: dict[str, object], headers: dict[str, str], tokens: int
    ) -> Outcome:
        answer = await http.post("/v1/completions", json=body, headers=headers)
        return replace(of_response(answer.status_code, answer.content, tokens), route=_route(answer))

    async def _streamed(
        self, http: httpx.AsyncClient, body: dict[str, object], headers: dict[str, str], tokens: int
    ) -> Outcome:
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=streamed, headers=headers) as answer:
            if answer.status_code != 200:
                return of_response(answer.status_code, await answer.aread(), tokens)
            outcome = of_stream([line async for line in answer.aiter_lines()], tokens)
            return replace(outcome, route=_route(answer))


def _route(answer: httpx.Response) -> str:
    return answer.headers.get("x-prfaas-route", "")


@contextmanager
def loading(load: Load) -> Iterator[None]:
    """Runs it in a thread beside what the caller does; at the end every request has been seen to its end."""
    thread = threading.Thread(target=lambda: asyncio.run(load.run()), name="load")
    thread.start()
    try:
        yield
    finally:
        load.stop()
        thread.join()
