"""From what a client asks for to a request that can be routed: checked, tokenised, its blocks named."""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from gateway import refusals
from gateway import request_headers as said
from gateway.admission import Pass
from gateway.building import Prompted
from gateway.caller import Caller
from gateway.errors import bad_field
from gateway.keys import Principal
from gateway.model import ServedModel
from gateway.openai.requests import GenerationRequest
from gateway.services import Services
from gateway.tokenizing import Tokenizing
from kvcache.blocks import BLOCK_TOKENS
from kvcache.chain_cache import ChainCache
from kvcache.tracing import part
from kvcache.wire import Role
from scheduler.facts import RequestFacts
from scheduler.sizes import size_facts

SHORT_TOKENS = 2048
"""The blocks of a prompt up to this length are named at once: a thread would take longer to begin with it."""


class BlockNames:
    """Names prompts' blocks, as nodes do. One of these serves all requests that come by one way."""

    def __init__(self, model: ServedModel, tokenizing: Tokenizing) -> None:
        self._fingerprint = model.fingerprint.digest()
        self._tokenizing = tokenizing
        self._chains = ChainCache()

    async def of(self, token_ids: tuple[int, ...], facts: RequestFacts) -> tuple[bytes, ...]:
        """Of the prompt's full blocks; its last token is always computed, so it is in none."""
        if len(token_ids) <= BLOCK_TOKENS:
            return ()
        if len(token_ids) <= SHORT_TOKENS:
            return self._of(token_ids, facts)
        return await self._tokenizing.run(lambda: self._of(token_ids, facts))

    def _of(self, token_ids: tuple[int, ...], facts: RequestFacts) -> tuple[bytes, ...]:
        context = {"fingerprint": self._fingerprint, "salt": facts.tenant, "lora": facts.lora}
        return tuple(self._chains.block_hashes(token_ids[:-1], BLOCK_TOKENS, **context))


class Prompting:
    """Everything that can refuse a request to our own nodes before it is routed."""

    def __init__(self, services: Services, tokenizing: Tokenizing) -> None:
        self._s = services
        self._tokenizing = tokenizing
        self._names = BlockNames(services.model, tokenizing)
        self._sizes = size_facts(services.model.layout)

    async def prompted(
        self, caller: Caller, request: GenerationRequest, principal: Principal, admitted: Pass
    ) -> Prompted:
        """The request as it is routed; ``admitted`` holds the tokens that it needs. Raises ApiError."""
        scope = caller.scope
        if not (self._s.model.answers_to(request.model) and principal.may_use(request.model)):
            raise refusals.no_model(request.model)
        hint, hint_cluster = said.route_hint(scope, principal, [one.name for one in self._s.registry.clusters])
        quality, session, slo = said.quality(scope), said.session(scope), said.ttft_slo(scope)
        self._check_sampling(request)
        with part(caller.span, "tokenize"):
            token_ids = await self._token_ids(request)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=self._room(request, len(token_ids)))
        now = asyncio.get_running_loop().time()
        bounded = bool(request.max_tokens_field)
        expected = admitted.reserve(len(token_ids), request.n * sampling.max_tokens, bounded, now)
        facts = RequestFacts(
            request_id=secrets.token_hex(12),
            prompt_tokens=len(token_ids),
            sizes=self._sizes,
            chunk_tokens=self._s.registry.chunk_tokens or 0,
            hint=hint,
            hint_cluster=hint_cluster,
            allowed_clusters=principal.clusters,
            quality=quality,
            barred_clusters=principal.limits.barred,
            regions=principal.limits.regions,
            trusted_only=principal.limits.trusted_only or principal.limits.share_cache,
            tenant=principal.tenant,
            session_nodes=self._s.affinity.nodes(principal.tenant, session, now),
        )
        names = await self._names.of(token_ids, facts)
        return Prompted(
            caller.request_id,
            caller.path,
            facts,
            token_ids,
            sampling,
            names,
            session,
            said.measures(scope),
            admitted.account,
            admitted.weight,
            request.priority,
            expected,
            slo,
            request.n,
            caller.span,
        )

    async def _token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        if request.messages is not None:
            token_ids = tuple(await self._tokenizing.encode_chat(request.messages))
        elif request.text is not None:
            token_ids = tuple(await self._tokenizing.encode(request.text))
        else:
            assert request.token_ids is not None
            token_ids = request.token_ids
            if len(token_ids) >= self._s.registry.context_tokens:
                return token_ids  # too many to look at: they are refused by their number
            vocab = self._s.model.vocab_size
            wrong = next((at for at, token in enumerate(token_ids) if not 0 <= token < vocab), None)
            if wrong is not None:
                where = f"prompt[{wrong}]"
                raise bad_field(where, f"{where}: {token_ids[wrong]} is not a token id below {vocab}")
        if not token_ids:
            raise bad_field(request.prompt_field, "the prompt has no tokens")
        return token_ids

    def _check_sampling(self, request: GenerationRequest) -> None:
        """Raise ApiError for what this model has no token for, or a node that may speak the answer does not know."""
        sampling, vocab = request.sampling, self._s.model.vocab_size
        for token, _ in sampling.logit_bias:
            if token >= vocab:
                raise bad_field(f"logit_bias.{token}", f"logit_bias.{token}: not a token id below {vocab}")
        if request.n == 1 and not sampling.adjusts:
            return
        nodes = self._s.registry.nodes(self._s.registry.local_cluster, Role.DECODE)
        most = min((node.join.max_answers for node in nodes if node.accepting), default=request.n)
        if not most:
            text = "a decode node here knows neither n nor penalties, min_p and logit_bias; leave them out or update it"
            raise bad_field(request.newest_field, text, code="unsupported_parameter")
        if request.n > most:
            raise bad_field("n", f"n is {request.n}; the decode nodes here give at most {most} answers to one prompt")

    def _room(self, request: GenerationRequest, prompt_tokens: int) -> int:
        """How many tokens may be generated. Raises ApiError where prompt and answer do not fit the context."""
        context = self._s.registry.context_tokens
        left = context - prompt_tokens
        if left < 1:
            raise bad_field(
                request.prompt_field,
                f"{request.prompt_field}: {prompt_tokens} tokens; the context is {context}, answer included",
                code="context_length_exceeded",
            )
        if request.max_tokens is None:
            return left
        if request.max_tokens > left and request.max_tokens_field:
            raise bad_field(
                request.max_tokens_field,
                f"{request.max_tokens_field} is {request.max_tokens}, but after a prompt of {prompt_tokens} tokens "
                f"only {left} of the context of {context} are left",
                code="context_length_exceeded",
            )
        return min(left, request.max_tokens)
