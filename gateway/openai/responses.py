"""Responses of the two endpoints, whole or as SSE chunks, from what a decode node sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.openai.requests import GenerationRequest
from gateway.tokentext import TextOffsets, TokenText
from kvcache.control import AnswerEnded, Delta, Finished, TokenLogprob

_encode = msgspec.json.Encoder().encode
SSE_DONE = b"data: [DONE]\n\n"
_HERE = "text"
"""Whatever stands in its place is the last text of an event."""


def sse(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(payload) + b"\n\n"


def usage_of(finished: Finished) -> dict[str, Any]:
    """The usage object; cached tokens inside the details, as clients expect them. The prompt counts once."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


class Choice:
    """One of the answers while it comes."""

    def __init__(self, index: int, token_text: TokenText) -> None:
        self.index = index
        self.offsets = TextOffsets(token_text)
        self.opened = False
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.entries: list[tuple[TokenLogprob, ...]] = []
        self.ended: AnswerEnded | Finished | None = None
        self.around: tuple[bytes, bytes] | None = None
        """What stands before and after the text in an event that tells nothing else, once one was made."""


class Answer:
    """Formats the answers to one request. Streaming callers use ``chunk`` and ``end``; others ``add`` and ``whole``."""

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
        prefix = "chatcmpl" if request.chat else "cmpl"
        kind = "chat.completion" if request.chat else "text_completion"
        self._id, self._kind = f"{prefix}-{answer_id}", kind
        self._base = {"created": created, "model": request.model, "system_fingerprint": system_fingerprint}
        self._choices = [Choice(index, token_text) for index in range(request.n)]
        self._only_text = request.logprobs is None and not request.return_token_ids

    def add(self, part: Delta | AnswerEnded) -> None:
        """Keep a part for ``whole``."""
        choice = self._choices[part.answer]
        if isinstance(part, AnswerEnded):
            choice.ended = part
            return
        choice.texts.append(part.text)
        choice.token_ids += part.token_ids
        choice.entries += part.logprobs or ()

    def whole(self, finished: Finished) -> bytes:
        """The body of an answer that is not streamed."""
        body: dict[str, Any] = {"id": self._id, "object": self._kind, **self._base}
        if self._request.return_token_ids and self._request.chat:
            body["prompt_token_ids"] = list(self._prompt_ids)
        body["choices"] = [self._whole(choice, choice.ended or finished) for choice in self._choices]
        body["usage"] = usage_of(finished)
        return _encode(body)

    def chunk(self, part: Delta | AnswerEnded) -> bytes:
        """The events for new text or tokens; empty where there is nothing that this client asked to see."""
        choice = self._choices[part.answer]
        if isinstance(part, AnswerEnded):
            choice.ended = part
            return self._opening(choice) + self._ending(choice, part)
        if self._only_text and choice.opened:
            return self._text_event(choice, part.text) if part.text else b""
        wanted = part.text or (
            part.token_ids and (self._request.logprobs is not None or self._request.return_token_ids)
        )
        opening = self._opening(choice)
        if not wanted:
            return opening
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs(choice, part.logprobs or ())
        shown = self._choice(choice, {"content": part.text}, part.text, logprobs, None)
        if self._request.return_token_ids:
            shown["token_ids"] = list(part.token_ids)
        return opening + self._event([shown])

    def _text_event(self, choice: Choice, text: str) -> bytes:
        """As ``_event`` makes it; of the events of one answer only the text differs."""
        if choice.around is None:
            whole = self._event([self._choice(choice, {"content": _HERE}, _HERE, None, None)])
            before, _, after = whole.rpartition(_encode(_HERE))
            choice.around = before, after
        before, after = choice.around
        return b"%s%s%s" % (before, _encode(text), after)

    def end(self, finished: Finished) -> bytes:
        """The events that close a stream: the finish reasons, usage where asked for, and ``[DONE]``."""
        events = b""
        for choice in self._choices:
            if choice.ended is None:
                events += self._opening(choice) + self._ending(choice, finished)
        if self._request.include_usage:
            events += self._event([], usage_of(finished))
        return events + SSE_DONE

    def _whole(self, choice: Choice, ended: AnswerEnded | Finished) -> dict[str, Any]:
        logprobs = None if self._request.logprobs is None else self._logprobs(choice, choice.entries)
        shown: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": ended.reason}
        shown["stop_reason"] = ended.stop_text
        text = "".join(choice.texts)
        if self._request.chat:
            shown["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            shown["text"] = text
        if self._request.return_token_ids:
            shown["token_ids"] = choice.token_ids
            if not self._request.chat:
                shown["prompt_token_ids"] = list(self._prompt_ids)
        return shown

    def _ending(self, choice: Choice, ended: AnswerEnded | Finished) -> bytes:
        shown = self._choice(choice, {}, "", None, ended.reason)
        shown["stop_reason"] = ended.stop_text
        return self._event([shown])

    def _opening(self, choice: Choice) -> bytes:
        """A chat stream begins with the role; where token ids were asked for, a stream begins with the prompt's."""
        if choice.opened:
            return b""
        choice.opened = True
        if not self._request.chat and not self._request.return_token_ids:
            return b""
        shown = self._choice(choice, {"role": "assistant", "content": ""}, "", None, None)
        extra: dict[str, Any] = {}
        if self._request.return_token_ids:
            (extra if self._request.chat else shown)["prompt_token_ids"] = list(self._prompt_ids)
        return self._event([shown], **extra)

    def _choice(
        self, choice: Choice, chat_delta: dict[str, Any], text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": finish}
        if self._request.chat:
            shown["delta"] = chat_delta
        else:
            shown["text"] = text
        return shown

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **extra: Any) -> bytes:
        kind = "chat.completion.chunk" if self._request.chat else self._kind
        payload: dict[str, Any] = {"id": self._id, "object": kind, **self._base, **extra, "choices": choices}
        if self._request.include_usage:
            payload["usage"] = usage
        return sse(payload)

    def _logprobs(self, choice: Choice, entries: Sequence[Sequence[TokenLogprob]]) -> dict[str, Any]:
        """``entries`` holds, per token, the chosen one first and then the likeliest."""
        if self._request.chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        chosen = [entry[0] for entry in entries]
        asked = self._request.logprobs
        return {
            "tokens": [self._text.text_of(one.token_id) for one in chosen],
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": [self._top_texts(entry) for entry in entries] if asked else None,
            "text_offset": choice.offsets.advance([one.token_id for one in chosen]),
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
