"""Traces of requests to a mixture of experts: made up in four kinds of skew, or read from a file's lines.

Sizes of the made-up ones are those of DeepSeek-V3: 70,272 bytes of cache a token, and 8 of its experts in 58 layers
that each get 7,168 fp8 values and send back as many in bf16.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from scheduler.placement.fleet import Fleet

KV_BYTES_PER_TOKEN = 70_272
EXCHANGE_BYTES_PER_TOKEN = 58 * 8 * 7168 * 3
DECODE_S_PER_TOKEN = 1e-4
"""What one answer's token takes of a GPU that speaks many at once, without its exchange. Assumed."""
MAX_REQUESTS = 1_000_000


class Skew(StrEnum):
    """What is uneven. ``FEW``: some experts, on any GPU. ``DOMAIN``: one domain's experts. ``TOPICS``: each request's
    own domain. ``SHIFTING``: one domain's for a while, then another's, while most caches lie on a few GPUs.
    """

    FEW = "few_experts"
    DOMAIN = "one_domain"
    TOPICS = "by_topic"
    SHIFTING = "shifting"


class Request(msgspec.Struct, frozen=True):
    """One line of a trace. ``experts`` has its prompt's tokens per expert, ``answer_experts`` its answer's if known."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    cached_on: int
    experts: tuple[float, ...]
    answer_experts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How made-up requests come: ``rate`` a second, so many of them."""

    rate: float
    count: int


def made_up(skew: Skew, fleet: Fleet, arrivals: Arrivals, rng: random.Random) -> list[Request]:
    """A trace of one kind. Equal for equal states of ``rng``."""
    requests, now = [], 0.0
    experts = len(fleet.gpu_of)
    few = rng.sample(range(experts), max(1, experts // 16))
    crowded = rng.sample(range(len(fleet.domain_of)), max(1, len(fleet.domain_of) // 4))
    for number in range(arrivals.count):
        now += rng.expovariate(arrivals.rate)
        weights = _weights(skew, fleet, few, number / arrivals.count, rng)
        prompt = min(131_072, int(rng.lognormvariate(8.7, 1.0)) + 64)
        output = min(4096, int(rng.lognormvariate(5.3, 0.7)) + 8)
        crowd = skew is Skew.SHIFTING and rng.random() < 0.8
        cached_on = rng.choice(crowded) if crowd else rng.randrange(len(fleet.domain_of))
        requests.append(
            Request(now, prompt, output, cached_on, _counts(weights, prompt, rng), _counts(weights, output, rng))
        )
    return requests


def read(lines: Iterable[bytes], fleet: Fleet) -> list[Request]:
    """A trace of one JSON object a line, in order of time. Raises ValueError naming the line and what is wrong."""
    found: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=Request)
            _check(request, fleet, found[-1].at_s if found else 0.0)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from error
        found.append(request)
        if len(found) > MAX_REQUESTS:
            raise ValueError(f"line {number}: more than {MAX_REQUESTS} requests")
    if not found:
        raise ValueError("the trace has no requests")
    return found


def _check(request: Request, fleet: Fleet, since: float) -> None:
    if request.at_s < since:
        raise ValueError(f"at_s: {request.at_s} is before the request above")
    if min(request.prompt_tokens, request.output_tokens) < 1:
        raise ValueError("prompt_tokens and output_tokens must be positive")
    if not 0 <= request.cached_on < len(fleet.domain_of):
        raise ValueError(f"cached_on: {request.cached_on} is none of the {len(fleet.domain_of)} GPUs")
    fleet.domain_loads(request.experts)
    if request.answer_experts:
        fleet.domain_loads(request.answer_experts)


def _weights(skew: Skew, fleet: Fleet, few: Sequence[int], progress: float, rng: random.Random) -> list[float]:
    """How likely a token is to go to each expert."""
    domains = list(fleet.domains)
    match skew:
        case Skew.FEW:
            hot = set(few)
            return [16.0 if expert in hot else 1.0 for expert in range(len(fleet.gpu_of))]
        case Skew.DOMAIN:
            domain, heat = domains[0], 4.0
        case Skew.TOPICS:
            domain, heat = rng.choice(domains), 12.0
        case Skew.SHIFTING:
            domain, heat = domains[int(progress * 3 * len(domains)) % len(domains)], 4.0
    return [heat if fleet.domain_of[gpu] == domain else 1.0 for gpu in fleet.gpu_of]


def _counts(weights: Sequence[float], tokens: int, rng: random.Random) -> tuple[float, ...]:
    """Tokens per expert: expected numbers with the noise of a count, which is what a router's choices show."""
    total = sum(weights)
    expected = [tokens * 8 * weight / total for weight in weights]
    return tuple(max(0.0, round(rng.gauss(mean, mean**0.5))) for mean in expected)
