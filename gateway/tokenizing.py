"""Tokenising off the event loop, in a bounded pool of threads.

Only the tokeniser's batch calls release the GIL. Any other call would hold up the event loop as long as it runs, with a
prompt of some megabytes for seconds: long enough to lose every node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.errors import ApiError, bad_field

T = TypeVar("T")

SHORT_CHARS = 2048
"""A text up to this length is tokenised at once: to hand it to a thread and back would take as much again."""


class Tokenizing:
    """Text to ids and back. At most ``max_waiting`` calls wait or run, short texts aside; more are answered 503."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, threads: int = 2, max_waiting: int = 256
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._max_waiting = max_waiting
        self._waiting = 0

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the tokeniser's own post-processor adds BOS where the model wants one."""
        if len(text) <= SHORT_CHARS:
            return self._ids(text, add_special_tokens)
        return await self.run(lambda: self._ids(text, add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        A template that writes BOS itself gets no second one; under any other the tokeniser adds what it adds to a text,
        unless ``add_special_tokens`` says.
        """
        template = self.template
        if template is None:
            raise bad_field(
                "messages",
                "this model has no chat template: send a prompt to /v1/completions, or start the gateway with "
                "--chat-template FILE",
                code="no_chat_template",
            )

        def work() -> list[int]:
            text = template.render(messages, add_generation_prompt)
            if add_special_tokens is not None:
                return self._ids(text, add_special_tokens)
            written = bool(template.bos) and text.startswith(template.bos)
            return self._ids(text, not written)

        try:
            return await self.run(work)
        except ChatTemplateError as error:
            raise bad_field("messages", f"the chat template refuses these messages: {error}") from error

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self.run(lambda: self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)[0])

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    async def run(self, work: Callable[[], T]) -> T:
        """Do any work on tokens in these threads. Raises ApiError 503 where too much waits already."""
        if self._waiting >= self._max_waiting:
            raise ApiError(503, "too many requests wait to be tokenised", code="overloaded", retry_after_s=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
