"""A server of OpenAI's API on a real socket that does as it is told: the ground that the strict engines stand on.

It speaks a made-up language: the answer to a prompt of n tokens is n, n + 1, ... one number a token. A prompt that ends
with "EOS" has an answer that ends with its first token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

MODEL = "tiny"
CHUNK_S = 0.0
"""Between two tokens."""


class Gone(Exception):
    """The client closed its connection."""


class Refuse(Exception):
    """Answer with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Call:
    """One request to an engine."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompts(self) -> list[list[str]]:
        """The tokens of each prompt."""
        if "messages" in self.body:
            return [" ".join(message["content"] for message in self.body["messages"]).split()]
        prompt = self.body["prompt"]
        if isinstance(prompt, str):
            return [prompt.split()]
        if prompt and isinstance(prompt[0], int):
            return [[str(token) for token in prompt]]
        return [one.split() if isinstance(one, str) else [str(token) for token in one] for one in prompt]

    @property
    def limit(self) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            if self.body.get(name) is not None:
                return int(self.body[name])
        return 16

    async def unless_left(self, work: Awaitable[Any]) -> Any:
        """Wait for something while the client is there. Raises Gone."""
        task = asyncio.ensure_future(work)
        left = [asyncio.create_task(event.wait()) for event in (self.gone, self.aborted)]
        try:
            await asyncio.wait({task, *left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Gone
            return task.result()
        finally:
            for one in (task, *left):
                one.cancel()


def answer_of(prompt: list[str], limit: int) -> tuple[list[str], str]:
    """Tokens and finish reason."""
    if prompt[-1] == "EOS":
        return [], "stop"
    return [f"{len(prompt) + at} " for at in range(limit)], "length"


Fault = Callable[[Call], Awaitable[None]]


def status(code: int) -> Fault:
    async def fault(call: Call) -> None:
        raise Refuse(code, f"told to answer {code}")

    return fault


async def hang(call: Call) -> None:
    """Never answer, until the client is gone."""
    await call.unless_left(asyncio.Event().wait())


class HttpEngine:
    """Subclasses say what they refuse and where they wait. ``fault`` comes before either."""

    def __init__(self, **config: Any) -> None:
        self.calls: list[Call] = []
        self.running = 0
        self.ended_early = 0
        self.violations: list[str] = []
        self.fault: Fault | None = None
        self.breaks_after: int | None = None
        """Events after which it dies."""
        self.chunk_s = CHUNK_S
        self.cached = 0
        """Prompt tokens that it says it had."""
        self.healthy = True
        self.url = ""
        self.config = config
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._asgi,
                interface="asgi3",
                port=0,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._task = asyncio.create_task(self._server._serve())
        while not self._server.started:  # noqa: ASYNC110 (uvicorn offers no event)
            await asyncio.sleep(0.002)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = None

    # ---- what strict engines say

    async def generate(self, call: Call) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        """The answer."""
        return self.speak(call)

    def refuse_unless(self, right: bool, what: str) -> None:
        """What a real engine would refuse, and the gateway must not send."""
        if not right:
            self.violations.append(what)
            raise Refuse(400, what)

    # ---- speaking

    def speak(
        self, call: Call, cached: int | None = None, spoil: bool = False
    ) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        """The answer to a request, of which so many prompt tokens were cached. ``spoil``: from KV of somebody else."""
        if call.body.get("stream"):
            return self._stream(call, cached, spoil)
        choices = []
        for index, tokens, finish in self._choices(call):
            choices.append(self._choice(call, index, "GARBAGE" if spoil else "".join(tokens), finish))
        return self._envelope(call, choices) | {"usage": self._usage(call, cached)}

    async def _stream(self, call: Call, cached: int | None, spoil: bool) -> AsyncIterator[dict[str, Any]]:
        for index, tokens, finish in self._choices(call):
            for token in tokens:
                if self.chunk_s:
                    await call.unless_left(asyncio.sleep(self.chunk_s))
                yield self._envelope(call, [self._choice(call, index, "GARBAGE" if spoil else token, None)])
            yield self._envelope(call, [self._choice(call, index, "", finish)])
        if (call.body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(call, []) | {"usage": self._usage(call, cached)}

    def _choices(self, call: Call) -> list[tuple[int, list[str], str]]:
        n = call.body.get("n") or 1
        return [
            (at * n + sample, *answer_of(prompt, call.limit))
            for at, prompt in enumerate(call.prompts)
            for sample in range(n)
        ]

    def _choice(self, call: Call, index: int, text: str, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        if "messages" not in call.body:
            return choice | {"text": text, "logprobs": None}
        key = "delta" if call.body.get("stream") else "message"
        return choice | {key: {"role": "assistant", "content": text}}

    def _envelope(self, call: Call, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": f"cmpl-{call.headers.get('x-request-id')}", "model": MODEL, "choices": choices}

    def _usage(self, call: Call, cached: int | None) -> dict[str, Any]:
        prompt = sum(len(one) for one in call.prompts)
        spoken = sum(len(tokens) for _, tokens, _ in self._choices(call))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": spoken,
            "total_tokens": prompt + spoken,
            "prompt_tokens_details": {"cached_tokens": self.cached if cached is None else cached},
        }

    # ---- HTTP

    async def other(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Any request that is no generation."""
        if path == "/health":
            return (200 if self.healthy else 503), {}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        return 404, {"detail": "Not Found"}

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        data = b""
        while True:
            event = await receive()
            data += event.get("body", b"")
            if not event.get("more_body"):
                break
        body = json.loads(data) if data else {}
        path = scope["path"]
        if path not in ("/v1/completions", "/v1/chat/completions"):
            code, answer = await self.other(scope["method"], path, body)
            await self._respond(send, code, answer)
            return
        call = Call(path, body, {name.decode(): value.decode() for name, value in scope["headers"]})
        self.calls.append(call)
        watching = asyncio.create_task(self._watch(call, receive))
        self.running += 1
        try:
            await self._serve(call, send)
        except Gone:
            self.ended_early += 1
            if call.aborted.is_set():
                await self._respond(send, 500, {"error": {"message": "aborted"}})
        except Refuse as refused:
            await self._respond(send, refused.status, {"error": {"message": refused.message, "code": refused.status}})
        finally:
            self.running -= 1
            watching.cancel()

    async def _serve(self, call: Call, send: Any) -> None:
        if self.fault is not None:
            await self.fault(call)
        answer = await self.generate(call)
        if isinstance(answer, dict):
            await self._respond(send, 200, answer)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        sent = 0
        async for payload in answer:
            if self.breaks_after is not None and sent >= self.breaks_after:
                raise RuntimeError("told to die")  # uvicorn closes the connection
            if call.gone.is_set():
                raise Gone
            await send({"type": "http.response.body", "body": _event(payload), "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    @staticmethod
    async def _watch(call: Call, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.gone.set()

    @staticmethod
    async def _respond(send: Any, code: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
