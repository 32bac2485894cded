"""Requests of /v1/completions and /v1/chat/completions: parsed strictly, refused with the name of the field."""

from __future__ import annotations

import gc
import re
from typing import Annotated, Any, TypeVar

import msgspec

from gateway.errors import ApiError, bad_field
from gateway.openai.refused import refuse_unsupported
from kvcache.control import Sampling

MAX_PROMPT_IDS = 1 << 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_ANSWERS = 16
MAX_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
MaxTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]
Answers = Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWERS)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], msgspec.Meta(max_length=MAX_BIASES)]
StopTexts = Annotated[list[str], msgspec.Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], msgspec.Meta(max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage`` asks for a last chunk with usage and no choices."""

    include_usage: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: str | StopTexts | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    n: Answers | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None


class CompletionBody(_Common, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    max_tokens: MaxTokens | None = None
    logprobs: TopLogprobs | None = None


class ChatBody(_Common, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the gateway's own terms, before tokenising.

    One of ``text``, ``token_ids`` and ``messages`` is set. ``max_tokens`` None means as many as the context holds;
    ``max_tokens_field`` names the field that set it, empty where it is a default.
    ``logprobs`` None asks for none, n for the n likeliest beside the chosen token. Of two requests that wait, the one
    of lower ``priority`` is the more urgent. ``n`` answers to the prompt are wanted.
    """

    chat: bool
    model: str
    text: str | None
    token_ids: tuple[int, ...] | None
    messages: tuple[dict[str, Any], ...] | None
    max_tokens: int | None
    max_tokens_field: str
    sampling: Sampling
    stream: bool
    include_usage: bool
    logprobs: int | None
    return_token_ids: bool
    priority: int
    n: int = 1

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt, for errors."""
        return "messages" if self.chat else "prompt"

    @property
    def newest_field(self) -> str:
        """The field of ``n``, penalties, ``min_p`` and ``logit_bias`` that is in use, for errors."""
        neutral = Sampling(max_tokens=1)
        if self.n > 1:
            return "n"
        return next(name for name in _NEWEST if getattr(self.sampling, name) != getattr(neutral, name))


_NEWEST = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
_B = TypeVar("_B", CompletionBody, ChatBody)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_MISSING = re.compile(r"missing required field `([^`]+)`")


def parse_completion(data: bytes) -> GenerationRequest:
    """Parse a completion body. Raises ApiError 400 naming the field."""
    body = _parse(data, CompletionBody)
    text, token_ids = _prompt(body.prompt)
    return GenerationRequest(
        chat=False,
        text=text,
        token_ids=token_ids,
        messages=None,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        max_tokens_field="" if body.max_tokens is None else "max_tokens",
        logprobs=body.logprobs,
        **_shared(body, body.logprobs),
    )


def parse_chat(data: bytes) -> GenerationRequest:
    """Parse a chat body. Raises ApiError 400 naming the field."""
    body = _parse(data, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return GenerationRequest(
        chat=True,
        text=None,
        token_ids=None,
        messages=chat_messages(body.messages),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=logprobs,
        **_shared(body, logprobs),
    )


def decode_json(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError 400 for anything else.

    A body of brackets makes millions of lists. The garbage collector, which would look at all of them again and again
    while they are made, would hold up the event loop for longer than it takes to lose a node.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        plain = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    finally:
        if collecting:
            gc.enable()
    if not isinstance(plain, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return plain


def convert(plain: dict[str, Any], kind: type[Any]) -> Any:
    """Validate decoded JSON. Raises ApiError 400 whose ``param`` is the path of the offending field."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _named(error) from error


def _parse(data: bytes, kind: type[_B]) -> _B:
    plain = decode_json(data)
    refuse_unsupported(plain)
    body: _B = convert(plain, kind)
    return body


def _named(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    path, missing = _PATH.search(text), _MISSING.search(text)
    where = path[1] if path else ""
    if missing:
        where = f"{where}.{missing[1]}" if where else missing[1]
    reason = _PATH.sub("", text)
    return bad_field(where, f"{where}: {reason}" if where else reason)


def _shared(body: _Common, logprobs: int | None) -> dict[str, Any]:
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise bad_field("stop", f"a stop text has 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "stream_options needs stream: true")
    return {
        "model": body.model,
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "return_token_ids": bool(body.return_token_ids),
        "priority": body.priority or 0,
        "n": body.n or 1,
        "sampling": Sampling(
            max_tokens=1,  # set once the prompt is tokenised and the room in the context is known
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            seed=body.seed,
            stop=tuple(stops),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=_biases(body.logit_bias or {}),
        ),
    }


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Token ids are keys of an object, and so texts; each has one way to be written."""
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise bad_field(f"logit_bias.{key[:40]}", f"logit_bias.{key[:40]}: {key[:40]!r} is no token id")
    return tuple((int(key), bias) for key, bias in given.items())


def _prompt(prompt: str | list[Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """A text or token ids; a batch of exactly one is the same as its only member."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise bad_field("prompt", f"one prompt per request, got {len(prompt)}", code="unsupported_parameter")
        prompt = prompt[0]
    if not prompt:
        raise bad_field("prompt", "the prompt is empty")
    if isinstance(prompt, str):
        return prompt, None
    if len(prompt) > MAX_PROMPT_IDS:
        raise bad_field("prompt", f"prompt: {len(prompt)} token ids, at most {MAX_PROMPT_IDS} are read")
    for at, token in enumerate(prompt):
        if type(token) is not int:
            raise bad_field(f"prompt[{at}]", f"prompt[{at}]: expected a token id, got {type(token).__name__}")
    return None, tuple(prompt)


_ROLES = ("system", "developer", "user", "assistant")


def chat_messages(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Messages with plain text contents; text parts are joined. Raises ApiError 400 naming the field."""
    if not messages:
        raise bad_field("messages", "messages is empty")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise bad_field(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(name):
            raise bad_field(f"{where}.{name}", f"{where}.{name} is not supported here", code="unsupported_parameter")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    if not isinstance(content, str):
        raise bad_field(f"{where}.content", f"{where}.content must be a text or a list of text parts")
    speaker = message.get("name")
    if speaker is not None and not isinstance(speaker, str):
        raise bad_field(f"{where}.name", f"{where}.name must be a text")
    return {"role": role, "content": content} | ({} if speaker is None else {"name": speaker})


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise bad_field(
            f"{where}.type", f"{where}: only parts of type text are supported", code="unsupported_parameter"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_field(f"{where}.text", f"{where}.text must be a text")
    return text
