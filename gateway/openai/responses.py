"""Responses of the two endpoints, whole or as SSE chunks, from what a decode node sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.openai.requests import GenerationRequest
from gateway.tokentext import TextOffsets, TokenText
from kvcache.control import Delta, Finished, TokenLogprob

_encode = msgspec.json.Encoder().encode
SSE_DONE = b"data: [DONE]\n\n"


def sse(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(payload) + b"\n\n"


def usage_of(finished: Finished) -> dict[str, Any]:
    """The usage object; cached tokens as clients expect them, inside the details."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


class Answer:
    """Formats one answer. Streaming callers use ``chunk``; the others add every delta and then ask for ``whole``."""

    def __init__(
        self,
        request: GenerationRequest,
        answer_id: str,
        created: int,
        system_fingerprint: str,
        prompt_ids: Sequence[int],
        token_text: TokenText,
    ) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._text = token_text
        self._offsets = TextOffsets(token_text)
        prefix = "chatcmpl" if request.chat else "cmpl"
        kind = "chat.completion" if request.chat else "text_completion"
        self._id, self._kind = f"{prefix}-{answer_id}", kind
        self._base = {"created": created, "model": request.model, "system_fingerprint": system_fingerprint}
        self._deltas: list[Delta] = []
        self._opened = False

    def add(self, delta: Delta) -> None:
        """Keep a delta for ``whole``."""
        self._deltas.append(delta)

    def whole(self, finished: Finished) -> bytes:
        """The body of an answer that is not streamed."""
        text = "".join(delta.text for delta in self._deltas)
        token_ids = [token for delta in self._deltas for token in delta.token_ids]
        entries = [entry for delta in self._deltas for entry in delta.logprobs or ()]
        logprobs = None if self._request.logprobs is None else self._logprobs(entries)
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": finished.reason}
        choice["stop_reason"] = finished.stop_text
        if self._request.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        body: dict[str, Any] = {"id": self._id, "object": self._kind, **self._base}
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
            (body if self._request.chat else choice)["prompt_token_ids"] = list(self._prompt_ids)
        body["choices"] = [choice]
        body["usage"] = usage_of(finished)
        return _encode(body)

    def chunk(self, delta: Delta) -> bytes:
        """The events for new text or tokens; empty where there is nothing that this client asked to see."""
        wanted = delta.text or (
            delta.token_ids and (self._request.logprobs is not None or self._request.return_token_ids)
        )
        opening = self._opening()
        if not wanted:
            return opening
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs(delta.logprobs or ())
        choice = self._choice({"content": delta.text}, delta.text, logprobs, None)
        if self._request.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return opening + self._event([choice])

    def end(self, finished: Finished) -> bytes:
        """The events that close a stream: the finish reason, usage where asked for, and ``[DONE]``."""
        choice = self._choice({}, "", None, finished.reason)
        choice["stop_reason"] = finished.stop_text
        events = self._opening() + self._event([choice])
        if self._request.include_usage:
            events += self._event([], usage_of(finished))
        return events + SSE_DONE

    def _opening(self) -> bytes:
        """A chat stream begins with the role; where token ids were asked for, a stream begins with the prompt's."""
        if self._opened:
            return b""
        self._opened = True
        if not self._request.chat and not self._request.return_token_ids:
            return b""
        choice = self._choice({"role": "assistant", "content": ""}, "", None, None)
        extra: dict[str, Any] = {}
        if self._request.return_token_ids:
            (extra if self._request.chat else choice)["prompt_token_ids"] = list(self._prompt_ids)
        return self._event([choice], **extra)

    def _choice(
        self, chat_delta: dict[str, Any], text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        if self._request.chat:
            choice["delta"] = chat_delta
        else:
            choice["text"] = text
        return choice

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **extra: Any) -> bytes:
        kind = "chat.completion.chunk" if self._request.chat else self._kind
        payload: dict[str, Any] = {"id": self._id, "object": kind, **self._base, **extra, "choices": choices}
        if self._request.include_usage:
            payload["usage"] = usage
        return sse(payload)

    def _logprobs(self, entries: Sequence[Sequence[TokenLogprob]]) -> dict[str, Any]:
        """``entries`` holds, per token, the chosen one first and then the likeliest."""
        if self._request.chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        chosen = [entry[0] for entry in entries]
        asked = self._request.logprobs
        return {
            "tokens": [self._text.text_of(one.token_id) for one in chosen],
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": [self._top_texts(entry) for entry in entries] if asked else None,
            "text_offset": self._offsets.advance([one.token_id for one in chosen]),
        }

    def _top_texts(self, entry: Sequence[TokenLogprob]) -> dict[str, float]:
        """The likeliest tokens by their text; the chosen one is always among them, as in the real API."""
        top: dict[str, float] = {}
        for one in (*entry[1:], entry[0]):
            top.setdefault(self._text.text_of(one.token_id), one.logprob)
        return top

    def _chat_entry(self, entry: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._chat_token(entry[0]) | {"top_logprobs": [self._chat_token(one) for one in entry[1:]]}

    def _chat_token(self, one: TokenLogprob) -> dict[str, Any]:
        data = self._text.bytes_of(one.token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": one.logprob, "bytes": list(data)}
