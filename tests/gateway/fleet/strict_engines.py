"""Engines that speak one dialect each as strictly as the real ones: they refuse what those refuse, wait where those
wait, and count what they keep. Two of a pair share a ``Wire``: what the real ones have between them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.fleet.http_engine import Call, HttpEngine, Refuse, answer_of

PREFILL_NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


@dataclass
class Wire:
    """KV between engines. ``kept``: by prefill, until fetched or expired; ``rooms``: who has come to a meeting."""

    kept: dict[str, float] = field(default_factory=dict)
    sent: dict[str, asyncio.Event] = field(default_factory=dict)
    rooms: dict[int, dict[str, asyncio.Event]] = field(default_factory=dict)
    expired_reads: int = 0
    recomputed: int = 0

    def holds(self) -> int:
        """Requests whose KV is kept for somebody now."""
        now = time.monotonic()
        return sum(until > now for until in self.kept.values())


class Prefilled(HttpEngine):
    """What vLLM's prefill engines of all dialects check."""

    def __init__(self, wire: Wire, **config: Any) -> None:
        super().__init__(**config)
        self.wire = wire

    def check_prefill(self, call: Call) -> dict[str, Any]:
        body = call.body
        self.refuse_unless(body.get("stream") is False, "prefill: stream must be false")
        self.refuse_unless(body.get("max_tokens") == 1, "prefill: max_tokens must be 1")
        self.refuse_unless(body.get("max_completion_tokens", 1) == 1, "prefill: max_completion_tokens must be 1")
        for name in ("stream_options", "min_tokens", "n"):
            self.refuse_unless(name not in body, f"prefill: {name} must not be sent")
        self.refuse_unless("x-request-id" in call.headers, "prefill: no X-Request-Id")
        self.refuse_unless(len(call.prompts) == 1, "prefill: one prompt at a time, its KV has one name")
        params = body.get("kv_transfer_params")
        self.refuse_unless(isinstance(params, dict), "prefill: no kv_transfer_params")
        assert isinstance(params, dict)
        self.refuse_unless(
            params.get("do_remote_decode") is True and params.get("do_remote_prefill") is False,
            "prefill: must be told that decode is remote",
        )
        if self.config.get("ranks", 1) > 1:
            self.refuse_unless("x-data-parallel-rank" in call.headers, "prefill: no X-data-parallel-rank")
        return params

    def finish(self, call: Call) -> str:
        """Ended by its length unless the first token ends the answer, and ending is not ignored."""
        tokens, _ = answer_of(call.prompts[0], 1)
        return "length" if tokens or call.body.get("ignore_eos") else "stop"


class NixlPrefill(Prefilled):
    """Keeps what it computed under a lease, and says where."""

    mode = "pull"
    lease_s = 30.0
    hands_over = True

    async def generate(self, call: Call) -> dict[str, Any]:
        params = self.check_prefill(call)
        self.refuse_unless({k: v for k, v in params.items() if k[0] == "r"} == PREFILL_NULLS, "prefill: other params")
        await call.unless_left(asyncio.sleep(self.config.get("prefill_s", 0.0)))
        answer = self.speak(call)
        assert isinstance(answer, dict)
        answer["choices"][0]["finish_reason"] = self.finish(call)
        answer["kv_transfer_params"] = None
        if self.hands_over:
            name = f"cmpl-{call.headers['x-request-id']}-0-{len(self.calls):08x}"
            self.wire.kept[name] = time.monotonic() + self.lease_s
            rank = call.headers.get("x-data-parallel-rank", "0")
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2, 3], [4]],
                "remote_engine_id": f"{self.url}-rank{rank}",
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": len(call.prompts[0]),
                "remote_blocks_expiry_time": None,
                "transfer_mode": self.mode,
            }
        return answer


class NixlDecode(HttpEngine):
    """Fetches by the name it is given. It believes what it is told: KV that is gone is somebody else's."""

    needs_blocks = True

    def __init__(self, wire: Wire, **config: Any) -> None:
        super().__init__(**config)
        self.wire = wire

    async def generate(self, call: Call) -> Any:
        params = call.body.get("kv_transfer_params")
        if params is None:
            return self.speak(call)
        self.refuse_unless(isinstance(params, dict) and params.get("do_remote_prefill") is True, "decode: params")
        name = params.get("remote_request_id")
        if call.body.get("model") != "tiny":
            self.wire.kept.pop(name, None)  # its rejection tells the prefill engine
            raise Refuse(404, f"the model {call.body.get('model')!r} does not exist")
        complete = all(params.get(one) is not None for one in ("remote_engine_id", "remote_host", "remote_port"))
        if self.needs_blocks and params.get("remote_block_ids") in ([], [[]], None):
            self.violations.append("decode: an empty list of blocks kills the engine")
        if not self.needs_blocks and "remote_block_ids" in params:
            self.violations.append("decode: a pushed transfer must not name blocks")
        if not complete or name is None or params.get("tp_size") is None:
            self.wire.recomputed += 1
            return self.speak(call)
        until = self.wire.kept.pop(name, 0.0)
        stale = until < time.monotonic()
        self.wire.expired_reads += stale
        await call.unless_left(asyncio.sleep(self.config.get("transfer_s", 0.0)))
        everything = sum(len(one) for one in call.prompts)  # what came over is counted as cached
        return self.speak(call, cached=everything, spoil=stale)


class NixlPushPrefill(NixlPrefill):
    mode = "push"


class NixlPushDecode(NixlDecode):
    needs_blocks = False


class MooncakePrefill(Prefilled):
    """Sends to whoever asked for a transfer's name, once it has computed, and only what ended by its length."""

    async def generate(self, call: Call) -> dict[str, Any]:
        params = self.check_prefill(call)
        self.refuse_unless(
            set(params) == {"do_remote_decode", "do_remote_prefill", "transfer_id"}, "prefill: other params"
        )
        transfer = params["transfer_id"]
        await call.unless_left(asyncio.sleep(self.config.get("prefill_s", 0.0)))
        answer = self.speak(call)
        assert isinstance(answer, dict)
        answer["choices"][0]["finish_reason"] = self.finish(call)
        if self.finish(call) == "length":
            self.wire.kept[transfer] = time.monotonic() + 480.0
            self.wire.sent.setdefault(transfer, asyncio.Event()).set()
        return answer

    def engine_id(self, rank: int) -> str:
        return f"{self.url}-rank{rank}"

    async def other(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/query":
            ranks = range(self.config.get("ranks", 1))
            return 200, {str(rank): {"engine_id": self.engine_id(rank), "worker_addr": {}} for rank in ranks}
        return await super().other(method, path, body)


class MooncakeDecode(HttpEngine):
    """Waits for what it was told would come, however long that takes."""

    def __init__(self, wire: Wire, **config: Any) -> None:
        super().__init__(**config)
        self.wire = wire
        self.known: list[str] = []
        """Engine ids that bootstrap servers name."""

    async def generate(self, call: Call) -> Any:
        params = call.body.get("kv_transfer_params")
        if params is None:
            return self.speak(call)
        fields = {"do_remote_decode", "do_remote_prefill", "remote_bootstrap_addr", "remote_engine_id", "transfer_id"}
        self.refuse_unless(isinstance(params, dict) and set(params) == fields, "decode: other params")
        transfer = params["transfer_id"]
        if call.body.get("model") != "tiny":
            self.wire.kept.pop(transfer, None)
            raise Refuse(404, "no such model")
        self.refuse_unless(params["remote_bootstrap_addr"].startswith("http://"), "decode: bootstrap address")
        if self.known and params["remote_engine_id"] not in self.known:
            raise Refuse(500, f"remote engine_id {params['remote_engine_id']} not found from bootstrap server")
        await call.unless_left(self.wire.sent.setdefault(transfer, asyncio.Event()).wait())
        self.wire.kept.pop(transfer, None)
        return self.speak(call, cached=sum(len(one) for one in call.prompts))


class SglangEngine(HttpEngine):
    """Either side: the same request comes to both, and each waits in the room for the other."""

    role = ""
    other_role = ""

    def __init__(self, wire: Wire, **config: Any) -> None:
        super().__init__(**config)
        self.wire = wire
        self.aborts: list[str] = []

    def rooms(self, call: Call) -> list[int]:
        body = call.body
        fields = [body.get(f"bootstrap_{name}") for name in ("host", "port", "room")]
        self.refuse_unless(all(one is not None for one in fields), f"{self.role}: bootstrap fields are missing")
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        if several:
            right = all(isinstance(one, list) and len(one) == len(prompt) for one in fields)
            self.refuse_unless(right, f"{self.role}: a batch needs lists of its size")
            rooms = list(fields[2])
        else:
            self.refuse_unless(not any(isinstance(one, list) for one in fields), f"{self.role}: lists for one prompt")
            rooms = [fields[2]]
        self.refuse_unless(len(set(rooms)) == len(rooms), f"{self.role}: two prompts in one room")
        self.refuse_unless(all(type(room) is int and 0 <= room < 1 << 63 for room in rooms), f"{self.role}: room")
        ranks = self.config.get("ranks", 1)
        if ranks > 1 and self.role == "prefill":
            self.refuse_unless(
                all(room % ranks == body.get("routed_dp_rank") for room in rooms), "prefill: room and rank differ"
            )
        self.refuse_unless(not body.get("n") or body["n"] == 1, f"{self.role}: samples would share a room")
        return rooms

    async def meet(self, call: Call) -> None:
        for room in self.rooms(call):
            come = self.wire.rooms.setdefault(room, {})
            come.setdefault(self.role, asyncio.Event()).set()
            await call.unless_left(come.setdefault(self.other_role, asyncio.Event()).wait())

    async def other(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/abort_request" and method == "POST":
            self.aborts.append(body["rid"])
            for call in self.calls:
                rid = call.body.get("rid")
                if rid == body["rid"] or (isinstance(rid, list) and body["rid"] in rid):
                    call.aborted.set()
            return 200, {}
        return await super().other(method, path, body)

    @staticmethod
    def logprobs(tokens: list[str]) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "token_logprobs": [-0.5] * len(tokens),
            "top_logprobs": [{token: -0.5} for token in tokens],
            "text_offset": [-1] * len(tokens),
        }


class SglangPrefill(SglangEngine):
    role, other_role = "prefill", "decode"

    async def generate(self, call: Call) -> Any:
        await self.meet(call)
        answer = self.speak(call)
        assert isinstance(answer, dict)
        spoken = [answer_of(prompt, 1)[0] for prompt in call.prompts]
        answer["usage"]["completion_tokens"] = sum(map(len, spoken))
        for choice, prompt, first in zip(answer["choices"], call.prompts, spoken, strict=True):
            choice["text"] = "".join(first)
            if call.body.get("echo") and call.body.get("logprobs") is not None:
                choice["logprobs"] = self.logprobs([*prompt, *first])
        return answer


class SglangDecode(SglangEngine):
    role, other_role = "decode", "prefill"

    async def generate(self, call: Call) -> Any:
        await self.meet(call)
        # the KV comes once prefill has computed
        await call.unless_left(asyncio.sleep(0.01))
        return self.speak(call, cached=sum(len(one) for one in call.prompts))

    def _choice(self, call: Call, index: int, text: str, finish: str | None) -> dict[str, Any]:
        choice = super()._choice(call, index, text, finish)
        if call.body.get("echo") and call.body.get("logprobs") is not None:
            choice["logprobs"] = self.logprobs([token + " " for token in text.split()])
        return choice


def plain(value: Any) -> Any:
    """As it goes over a wire."""
    return json.loads(json.dumps(value))
