"""The door: what a key and its tenant may use is looked at before a request costs anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.admission_metrics import AdmissionMetrics
from gateway.budgets import Budgets
from gateway.errors import ApiError
from gateway.keys import Principal
from gateway.rate_headers import rate_headers
from gateway.shared.slices import Slices
from gateway.tenants import Tenants
from gateway.terms import TenantTerms
from scheduler.admission.limits import NO_LIMITS, Limit, Limits, Refusal, Usage
from scheduler.admission.work import ExpectedOutputs

MOST_HOLDERS = 4096
_WORDS = {
    Limit.REQUESTS: "requests a minute",
    Limit.TOKENS: "tokens a minute, answers included",
    Limit.CONCURRENCY: "requests at once",
}


class Admission:
    """Limits of keys and tenants. One of these serves all requests of a gateway.

    ``slices`` are what this gateway may let in of them, where several share them.
    """

    def __init__(
        self, tenants: Tenants, metrics: AdmissionMetrics, budgets: Budgets, slices: Slices | None = None
    ) -> None:
        self._tenants = tenants
        self._metrics = metrics
        self.budgets = budgets
        self._slices = slices
        self._usages: dict[tuple[str, str], Usage] = {}
        self.outputs = ExpectedOutputs()

    @property
    def shared(self) -> bool:
        """Whether ``prepare`` has anything to do."""
        return self._slices is not None

    async def prepare(self, principal: Principal) -> None:
        """Before ``begin``: make sure of slices of the limits, and of what others know of a budget.

        Returns at once but where nothing is left of a slice, or a key was quiet here.
        """
        if self._slices is None:
            return
        await self.budgets.prepare(principal)
        now = asyncio.get_running_loop().time()
        account = principal.account
        limited = [
            ((kind, name), usage)
            for kind, name, limits in _holders(principal, account, self._tenants.of(account))
            if (usage := self._usage(kind, name, limits, now)) is not None
        ]
        if limited:
            await self._slices.before(limited)

    def begin(self, principal: Principal, now: float) -> Pass:
        """Let a request in; its pass must be ended. Raises ApiError 429 naming the limit."""
        self.budgets.check(principal)
        account = principal.account
        terms = self._tenants.of(account)
        usages = [
            (kind, usage)
            for kind, name, limits in _holders(principal, account, terms)
            if (usage := self._usage(kind, name, limits, now)) is not None
        ]
        for kind, usage in usages:
            self._check(kind, usage.refusal(now), usages, now)
        for _, usage in usages:
            usage.begin(now)
        return Pass(self, principal, account, terms.weight, usages)

    def check_tokens(self, usages: list[tuple[str, Usage]], tokens: int, now: float) -> None:
        """Raise ApiError 429 where one of the holders may not use so many now."""
        for kind, usage in usages:
            self._check(kind, usage.token_refusal(tokens, now), (), now)

    def _check(self, kind: str, refusal: Refusal | None, usages: Sequence[tuple[str, Usage]], now: float) -> None:
        """``usages`` are those that the answer has not told yet."""
        if refusal is None:
            return
        self._metrics.refused.labels(refusal.limit.value).inc()
        raise ApiError(
            429,
            f"this {kind} may use {refusal.value} {_WORDS[refusal.limit]} ({refusal.limit.value}) and does; try again "
            f"in {refusal.retry_after_s:.1f} s, or have the limit raised",
            code="rate_limit_exceeded",
            retry_after_s=refusal.retry_after_s,
            told=rate_headers([usage for _, usage in usages], now),
        )

    def _usage(self, kind: str, name: str, limits: Limits, now: float) -> Usage | None:
        """What a holder uses; None where nothing limits it and nothing did while it used something."""
        found = self._usages.get((kind, name))
        if found is None:
            if limits == NO_LIMITS:
                return None
            found = self._usages[kind, name] = Usage(limits, now)
            if len(self._usages) > MOST_HOLDERS:
                self._usages = {who: usage for who, usage in self._usages.items() if not usage.unused(now)}
                self._usages[kind, name] = found
        found.follow(limits, now)
        return found


class Pass:
    """One request that was let in: its place among what its key and tenant use, until ``end``."""

    def __init__(
        self, admission: Admission, principal: Principal, account: str, weight: float, usages: list[tuple[str, Usage]]
    ) -> None:
        self.account = account
        self._principal = principal
        self.weight = weight
        self._admission = admission
        self._usages = usages
        self._reserved = 0
        self._prompt = 0
        self._ended = False

    @property
    def counts_tokens(self) -> bool:
        """Whether how many tokens it is decides what else may be used."""
        return self._principal.limits.token_budget is not None or any(
            usage.limits.tokens_per_minute is not None for _, usage in self._usages
        )

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """What is left to use, as OpenAI's answers say it; of the key or its tenant, whichever has less."""
        return rate_headers([usage for _, usage in self._usages], now)

    def reserve(self, prompt_tokens: int, most_output: int, bounded: bool, now: float) -> int:
        """Take the tokens that it will need; returns the output expected. Raises ApiError 429.

        An answer that the client ``bounded`` counts whole until its length is known.
        """
        expected = self._admission.outputs.expect(self.account, most_output)
        tokens = prompt_tokens + (most_output if bounded else expected)
        self._admission.check_tokens(self._usages, tokens, now)
        for _, usage in self._usages:
            usage.spend(tokens, now)
        self._reserved, self._prompt = tokens, prompt_tokens
        return expected

    def end(self, spoken: int | None, whole: bool, now: float, prompt_tokens: int | None = None) -> None:
        """It is over after that many tokens of its answer, None where none came. Idempotent.

        ``whole``: that was all of the answer, so others of this account may turn out as long. ``prompt_tokens`` are
        those of its prompt where they were not known before.
        """
        if self._ended:
            return
        self._ended = True
        if whole and spoken is not None:
            self._admission.outputs.saw(self.account, spoken)
        used = 0 if spoken is None else (self._prompt if prompt_tokens is None else prompt_tokens) + spoken
        self._admission.budgets.spend(self._principal, used)
        for _, usage in self._usages:
            if self._reserved:
                usage.spend(used - self._reserved, now)
            usage.end()


def _holders(principal: Principal, account: str, terms: TenantTerms) -> tuple[tuple[str, str, Limits], ...]:
    """Whose limits count for a request: the key's, and those of its tenant together."""
    return ("key", principal.key_id, principal.limits.rates), ("tenant", account, terms.rates)
