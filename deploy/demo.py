"""The main job, shown and checked: a short prompt that stays at home and a long one that is prefilled elsewhere.

Both go through the OpenAI API; both answers, and the KV that travelled for them, are compared with one engine alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from deploy.progress import Progress
from deploy.reference import ReferenceEngine, TransferRange
from kvcache.layout import DType

SHORT_PROMPT = "The capital of France is"
MAX_TOKENS = 32
LONG_FACTOR = 1.5
REQUEST_S = 300.0
CHUNK_TOKENS = 256


class DemoFailed(Exception):
    """The stack answered, but not with what the demonstration needs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One request as the API and its decision record tell it. Times are seconds, sizes bytes.

    ``tokens_per_s`` is None where the tokens came too fast to tell.
    """

    name: str
    request_id: str
    route: str
    reason: str
    prompt_tokens: int
    tokens: int
    ttft_s: float
    tokens_per_s: float | None
    raw_bytes: int
    wire_bytes: int
    exposed_s: float
    text: str
    kv_equal: bool | None
    tokens_equal: bool

    @property
    def good(self) -> bool:
        """Nothing differs; ``kv_equal`` None says that no KV travelled."""
        return self.tokens_equal and self.kv_equal is not False


@dataclass(frozen=True, slots=True)
class _Answer:
    """One completion and its record."""

    name: str
    completion: dict[str, Any]
    record: dict[str, Any]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.completion["choices"][0]["prompt_token_ids"])

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.completion["choices"][0]["token_ids"])

    @property
    def transfer(self) -> dict[str, Any] | None:
        """The attempt whose KV was committed, if any was."""
        done = [attempt for attempt in self.record["attempts"] if attempt.get("kv_digest")]
        return done[-1] if done else None


def long_prompt(about_tokens: int) -> str:
    """A station's log of at least ``about_tokens`` tokens, the same at every call, that ends in a question."""
    weather = ("calm and clear", "windy with rain", "foggy until noon", "bright and very cold")
    found = ("two seals on the ice", "a broken antenna", "fresh fox tracks", "nothing unusual", "a drifting buoy")
    days = [
        f"Day {day}: the morning was {weather[day % 4]}; the pressure was {980 + day * 7 % 50} hPa. "
        f"On the walk to hut {day % 9 + 1} we saw {found[day % 5]}.\n"
        for day in range(1, about_tokens // 35 + 2)
    ]
    return "The log of the northern station, kept by its crew.\n" + "".join(days) + "On the last day the crew wrote:"


async def run_demo(
    url: str, model: str, model_dir: Path, dtype: DType, threshold: int, progress: Progress
) -> list[Run]:
    """Send both prompts and compare. Raises DemoFailed where the stack does not answer."""
    prompts = {"short": SHORT_PROMPT, "long": long_prompt(int(threshold * LONG_FACTOR))}
    answers = []
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as client:
        for name, prompt in prompts.items():
            with progress.step(f"sending a {name} prompt") as step:
                answer = await _ask(client, model, name, prompt)
                step.detail = f"{len(answer.prompt_ids)} tokens, {answer.record['route']}"
            answers.append(answer)
    with progress.step("computing the same with one engine alone"):
        return await _compare(answers, model_dir, dtype)


async def _ask(client: httpx.AsyncClient, model: str, name: str, prompt: str) -> _Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = await client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    if answer.status_code != 200:
        raise DemoFailed(f"the {name} prompt was answered with HTTP {answer.status_code}: {answer.text}")
    record = await client.get(f"/v1/decisions/{answer.headers['x-request-id']}")
    if record.status_code != 200:
        raise DemoFailed(f"the {name} prompt has no decision record: HTTP {record.status_code}: {record.text}")
    return _Answer(name, answer.json(), record.json())


async def _compare(answers: Sequence[_Answer], model_dir: Path, dtype: DType) -> list[Run]:
    grid = max((answer.transfer["chunk_tokens"] for answer in answers if answer.transfer), default=CHUNK_TOKENS)
    longest = max(len(answer.prompt_ids) for answer in answers)
    runs = []
    async with ReferenceEngine(model_dir, dtype, longest, grid) as engine:
        for answer in answers:
            kv_equal = None
            if (transfer := answer.transfer) is not None:
                start, stop = transfer["range"]
                extent = TransferRange(start, stop, transfer["chunk_tokens"])
                kv_equal = (await engine.digest(answer.prompt_ids, extent)).hex() == transfer["kv_digest"]
            tokens_equal = await engine.speak(answer.prompt_ids, MAX_TOKENS) == answer.token_ids
            runs.append(_run(answer, kv_equal, tokens_equal))
    return runs


def _run(answer: _Answer, kv_equal: bool | None, tokens_equal: bool) -> Run:
    record, transfer = answer.record, answer.transfer or {}
    return Run(
        name=answer.name,
        request_id=record["request_id"],
        route=record["route"],
        reason=record["decision"]["reason"],
        prompt_tokens=len(answer.prompt_ids),
        tokens=len(answer.token_ids),
        ttft_s=record["ttft_s"],
        tokens_per_s=record["tokens_per_s"],
        raw_bytes=transfer.get("raw_bytes", 0),
        wire_bytes=transfer.get("wire_bytes", 0),
        exposed_s=transfer.get("exposed_s", 0.0),
        text=answer.completion["choices"][0]["text"],
        kv_equal=kv_equal,
        tokens_equal=tokens_equal,
    )


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs as plain values, with the verdict."""
    return [asdict(run) | {"good": run.good} for run in runs]


def show(runs: Sequence[Run], console: Console) -> None:
    """Print the runs as a table, one column each: a terminal of 80 columns holds it."""
    table = Table(title="The same answer, wherever the prompt was read")
    table.add_column("")
    for run in runs:
        table.add_column(f"{run.name} prompt", justify="right")
    rows = {
        "route": [run.route for run in runs],
        "because": [run.reason for run in runs],
        "prompt tokens": [f"{run.prompt_tokens:,}" for run in runs],
        "time to first token": [f"{run.ttft_s:.2f} s" for run in runs],
        "tokens per second": ["-" if run.tokens_per_s is None else f"{run.tokens_per_s:.1f}" for run in runs],
        "KV bytes": [_mib(run.raw_bytes) for run in runs],
        "KV on the wire": [_mib(run.wire_bytes) for run in runs],
        "exposed transfer time": [f"{run.exposed_s * 1000:.0f} ms" if run.raw_bytes else "-" for run in runs],
        "KV equals one engine's": [_verdict(run.kv_equal) for run in runs],
        "tokens equal one engine's": [_verdict(run.tokens_equal) for run in runs],
    }
    for title, cells in rows.items():
        table.add_row(title, *cells)
    console.print(table)
    for run in runs:
        console.print(f"{run.name}: {run.text.strip()!r}", highlight=False, markup=False, soft_wrap=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size else "-"


def _verdict(equal: bool | None) -> str:
    return {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "-"}[equal]
