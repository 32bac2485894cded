"""Requests that measure a running stack: prompts of several lengths by every way, and answers many at once.

Their prompts are random token ids, distinct, so that nothing of them is cached; they are marked, so that they are no
part of the observed traffic. One prompt at a time, else it would be the queue that is measured.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click

from gateway.commands.client import Api

HEADERS = {"x-prfaas-measure": "1"}
RECORD_S = 5.0
"""How long the record of an answer may take to be there."""
POLL_S = 0.02
TRIES = 3
"""For one prefill: where the answer was over before its prefill node's word came, its record lacks what is wanted."""
STREAM_PROMPT = 32
DECODE_SHARE = 0.35
"""Of the time, what is kept for measuring decode steps."""
SAFETY = 1.3
FIRST_ID = 16
"""Ids below it are often special tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``lengths`` ascend; each is prefilled by every one of ``ways`` (route hints), ``repeats`` times if there is time.

    Then ``streams`` answers of ``tokens`` tokens are spoken at once, for each of these numbers. All of it takes
    ``within_s`` at most, but for a request that is under way: the longest lengths and numbers are left out first.
    """

    model: str
    vocabulary: int
    ways: tuple[str, ...]
    lengths: tuple[int, ...]
    repeats: int
    streams: tuple[int, ...]
    tokens: int
    within_s: float


@dataclass(slots=True)
class Probes:
    """Records of what was sent, and how much later than the gateway's word the client had each first token."""

    records: list[dict[str, Any]] = field(default_factory=list)
    extra_s: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


class Prober:
    """Sends them. ``say`` is told what is being done and how much of the time has gone, from 0 to 1."""

    def __init__(self, api: Api, plan: Plan, say: Callable[[str, float], None]) -> None:
        self._api = api
        self._plan = plan
        self._say = say
        self._random = random.Random(secrets.randbits(64))  # noqa: S311 (they need only be new)
        self._began = time.monotonic()
        self._probes = Probes()
        self._run = secrets.token_hex(4)
        self._sent = 0

    def measure(self) -> Probes:
        """All of the plan that there is time for. Raises ClickException where the gateway refuses or a node fails."""
        for way in self._plan.ways:  # the first request of a way opens connections, and is forgotten
            self._one(f"trying {way}", self._plan.lengths[0], way)
        self._probes.records.clear()
        for way, length in self._prefills():
            self._one(f"prefill of {length:,} tokens, {way}", length, way)
        for streams in self._plan.streams:
            self._together(streams)
        return self._probes

    def _prefills(self) -> Iterator[tuple[str, int]]:
        """The longest are left out where they would take what is kept for the decode steps."""
        end = self._plan.within_s * (1 - DECODE_SHARE)
        took: dict[tuple[str, int], float] = {}
        for repeat in range(self._plan.repeats):
            for n, length in enumerate(self._plan.lengths):
                for way in self._plan.ways:
                    shorter = took.get((way, self._plan.lengths[n - 1])) if n else None
                    guess = took.get((way, length))
                    if guess is None and shorter is not None:
                        guess = shorter * length / self._plan.lengths[n - 1]
                    if guess is not None and self._gone() + guess * SAFETY > end:
                        if not repeat:
                            self._probes.left_out.append(f"prefill of {length:,} tokens, {way}")
                        continue
                    began = self._gone()
                    yield way, length
                    took[way, length] = self._gone() - began

    def _one(self, what: str, length: int, way: str) -> None:
        self._say(what, self._gone() / self._plan.within_s)
        for left in reversed(range(TRIES)):
            request_id, first_s = self._ask(length, 1, way)
            record = self._record(request_id)
            attempt = record["attempts"][-1]
            if attempt["transfer"] is None or "prefill_s" in attempt or not left:
                self._keep(record, first_s)
                return

    def _together(self, streams: int) -> None:
        """As many answers at once; that there is time for them follows from the ones before."""
        if self._gone() > self._plan.within_s and any(record["tokens_per_s"] for record in self._probes.records):
            self._probes.left_out.append(f"{streams} answers at once")
            return
        self._say(f"{streams} answers at once", min(1.0, self._gone() / self._plan.within_s))
        with ThreadPoolExecutor(streams) as pool:
            asked = [pool.submit(self._ask, STREAM_PROMPT, self._plan.tokens, "local") for _ in range(streams)]
            for each in asked:
                request_id, first_s = each.result()
                self._keep(self._record(request_id), first_s)

    def _ask(self, length: int, tokens: int, way: str) -> tuple[str, float]:
        """One streamed answer to its end: its request id, and when its first token came."""
        self._sent += 1
        request_id = f"profile-{self._run}-{self._sent}"
        ids = [self._random.randrange(FIRST_ID, self._plan.vocabulary) for _ in range(length)]
        body = {"model": self._plan.model, "prompt": ids, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}  # so that each token is an event, with text or without
        headers = HEADERS | {"x-request-id": request_id, "x-prfaas-route-hint": way}
        return request_id, self._api.stream("/v1/completions", body, headers)

    def _record(self, request_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + RECORD_S
        while True:
            try:
                record: dict[str, Any] = self._api.call("GET", f"/v1/decisions/{request_id}")
                return record
            except click.ClickException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def _keep(self, record: dict[str, Any], first_s: float) -> None:
        self._probes.records.append(record)
        self._probes.extra_s[record["request_id"]] = max(0.0, first_s - record["ttft_s"])

    def _gone(self) -> float:
        return time.monotonic() - self._began
