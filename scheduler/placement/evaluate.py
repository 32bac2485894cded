"""What a trace costs under each policy. Modelled: a GPU decodes one request after another, each for its own time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.placement.fleet import Fleet, Work
from scheduler.placement.policies import Placement, Policy, place
from scheduler.placement.statistics import ExpertStatistics
from scheduler.placement.trace import (
    DECODE_S_PER_TOKEN,
    EXCHANGE_BYTES_PER_TOKEN,
    KV_BYTES_PER_TOKEN,
    Request,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean seconds a request, in all and by part, and every decision in order of the trace."""

    policy: Policy
    mean_s: float
    kv_s: float
    exchange_s: float
    queue_s: float
    decisions: tuple[Placement, ...]

    @property
    def by(self) -> Mapping[Policy, int]:
        """How many requests each thought decided."""
        return Counter(decision.by for decision in self.decisions)


def evaluate(fleet: Fleet, trace: Sequence[Request], policy: Policy) -> Evaluation:
    """Run a trace. A policy sees what prompts' tokens showed of experts; the cost is what the answers' tokens need.

    Raises ValueError for an empty trace.
    """
    if not trace:
        raise ValueError("the trace has no requests")
    free_at = [0.0] * len(fleet.domain_of)
    statistics = ExpertStatistics(len(fleet.gpu_of))
    kv_s = exchange_s = queue_s = 0.0
    decisions = []
    for request in trace:
        work = Work(
            request.prompt_tokens * KV_BYTES_PER_TOKEN,
            request.cached_on,
            request.output_tokens * EXCHANGE_BYTES_PER_TOKEN,
            request.experts,
        )
        queues = [max(0.0, at - request.at_s) for at in free_at]
        statistics.observe(request.experts)
        placement = place(fleet, work, queues, statistics.tokens, policy)
        gpu = placement.chosen.gpu
        loads = fleet.domain_loads(request.answer_experts or request.experts)
        exchange = fleet.exchange_s(work.exchange_bytes, loads[fleet.domain_of[gpu]])
        begins = max(request.at_s + placement.chosen.kv_s, free_at[gpu])
        free_at[gpu] = begins + exchange + request.output_tokens * DECODE_S_PER_TOKEN
        kv_s += placement.chosen.kv_s
        exchange_s += exchange
        queue_s += begins - request.at_s - placement.chosen.kv_s
        decisions.append(placement)
    count = len(trace)
    mean = (kv_s + exchange_s + queue_s) / count
    return Evaluation(policy, mean, kv_s / count, exchange_s / count, queue_s / count, tuple(decisions))
