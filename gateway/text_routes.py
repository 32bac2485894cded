"""``/v1/models``, ``/tokenize`` and ``/detokenize``: the served model and its tokeniser, as vLLM offers it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET, UnsetType

from gateway.answers import caller_of, json_answer, needs
from gateway.errors import ApiError, bad_field
from gateway.keys import Principal, Role
from gateway.model import ServedModel
from gateway.openai.requests import MAX_PROMPT_IDS, chat_messages
from gateway.tokenizing import Tokenizing

BodyOf = Callable[[Request, type[Any]], Awaitable[Any]]
TokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_PROMPT_IDS)]


class TokenizeBody(msgspec.Struct, frozen=True):
    """A text or a conversation to tokenise. ``add_special_tokens`` is by default true for a text alone."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Token ids to turn into text."""

    tokens: TokenIds
    model: str | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """Ids of a text, and where asked for how the vocabulary writes each; None where not."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of some ids."""

    prompt: str


class ModelView(msgspec.Struct, frozen=True):
    """What is served. ``created`` is when this gateway began to. Of what external engines serve only they know more."""

    id: str
    created: int
    max_model_len: int | UnsetType = UNSET
    vocab_size: int | UnsetType = UNSET
    fingerprint: dict[str, str] | UnsetType = UNSET
    object: str = "model"
    owned_by: str = "prfaas"


class ModelList(msgspec.Struct, frozen=True):
    """The models that a key may use."""

    data: list[ModelView]
    object: str = "list"


class ModelViews:
    """How the model of our own nodes is shown, if there is one, and those that ``engines`` have."""

    def __init__(
        self, model: ServedModel, context_tokens: Callable[[], int], engines: Callable[[], Sequence[str]]
    ) -> None:
        self._model = model
        self.context_tokens = context_tokens
        self._engines = engines
        self._started = int(time.time())

    def own(self) -> ModelView | None:
        """As it is now: nodes may know a shorter context."""
        model = self._model
        if not model.exists:
            return None
        return ModelView(model.name, self._started, self.context_tokens(), model.vocab_size, model.fingerprint.parts())

    def others(self, caller: Principal) -> list[ModelView]:
        """What engines serve and this caller may use."""
        names = [name for name in self._engines() if name != self._model.name and caller.may_use(name)]
        return [ModelView(name, self._started, owned_by="engines") for name in names]


def add_text_routes(
    api: FastAPI, model: ServedModel, views: ModelViews, tokenizing: Tokenizing, body_of: BodyOf
) -> None:
    """Add them."""

    def check_model(request: Request, name: str | None) -> None:
        asked = model.name if name is None else name
        if not (model.answers_to(asked) and caller_of(request).may_use(asked)):
            raise ApiError(404, f"the model {asked[:80]!r} does not exist", param="model", code="model_not_found")

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        caller = caller_of(request)
        own = views.own()
        mine = [own] if own is not None and caller.may_use(own.id) else []
        return json_answer(ModelList([*mine, *views.others(caller)]))

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        other = next((one for one in views.others(caller_of(request)) if one.id == name), None)
        if other is not None:
            return json_answer(other)
        check_model(request, name)
        return json_answer(views.own())

    @api.post("/tokenize", dependencies=[needs(Role.CLIENT, Role.OPERATOR)])
    async def tokenize(request: Request) -> Response:
        body: TokenizeBody = await body_of(request, TokenizeBody)
        check_model(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_field("prompt", "give either prompt or messages")
        if body.messages is None:
            if body.add_generation_prompt is not None:
                raise bad_field("add_generation_prompt", "add_generation_prompt goes with messages")
            tokens = await tokenizing.encode(body.prompt or "", body.add_special_tokens is not False)
        else:
            prompts = body.add_generation_prompt is not False
            tokens = await tokenizing.encode_chat(chat_messages(body.messages), prompts, body.add_special_tokens)
        texts = await tokenizing.run(lambda: _pieces(model, tokens)) if body.return_token_strs else None
        return json_answer(Tokenized(len(tokens), views.context_tokens(), tokens, texts))

    @api.post("/detokenize", dependencies=[needs(Role.CLIENT, Role.OPERATOR)])
    async def detokenize(request: Request) -> Response:
        body: DetokenizeBody = await body_of(request, DetokenizeBody)
        check_model(request, body.model)
        wrong = next((at for at, token in enumerate(body.tokens) if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise bad_field(f"tokens[{wrong}]", f"tokens[{wrong}] is not a token id below {model.vocab_size}")
        return json_answer(Detokenized(await tokenizing.decode(body.tokens)))


def _pieces(model: ServedModel, tokens: list[int]) -> list[str]:
    """As the vocabulary writes them, which is what vLLM shows; "" for an id that it does not have."""
    return [model.tokenizer.id_to_token(token) or "" for token in tokens]
