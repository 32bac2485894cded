"""One request as the requests that its dialect can split, and back to one answer.

KV is handed over once for each prompt and sample, so vLLM's dialects take one prompt and one sample at a time; SGLang's
takes batches of prompts as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.dialects.protocol import Body
from gateway.dialects.sglang import batch

MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Part:
    """``body`` asks for some of the choices: its choice k is number ``offset`` + k * ``stride`` of the whole.

    ``counts_prompt``: no other part counts these prompt tokens.
    """

    body: Body
    offset: int = 0
    stride: int = 1
    counts_prompt: bool = True


def samples(body: Body) -> int:
    """Answers wanted for each prompt."""
    n = body.get("n")
    return n if type(n) is int and n > 0 else 1


def count(body: Body, batches: bool) -> int:
    """How many parts a request has; ``batches``: its dialect takes several prompts at once."""
    return samples(body) * (1 if batches else batch(body) or 1)


def parts(body: Body, batches: bool) -> tuple[Part, ...]:
    """The parts of a request, in the order of their choices. A seed counts up from sample to sample, as engines do."""
    n, prompts = samples(body), batch(body)
    one_by_one = prompts is not None and not batches
    if n == 1 and not one_by_one:
        return (Part(body),)
    plain = {name: value for name, value in body.items() if name not in ("n", "best_of")}
    seed = body.get("seed")
    found = []
    for at, prompt in enumerate(body["prompt"] if one_by_one else (None,)):
        for sample in range(n):
            mine = plain | ({"prompt": prompt} if one_by_one else {})
            if type(seed) is int:
                mine["seed"] = seed + sample
            found.append(Part(mine, at * n + sample, n, sample == 0))
    return tuple(found)


def joined(answers: list[dict[str, Any]], of: tuple[Part, ...]) -> dict[str, Any]:
    """One answer of the parts' answers, each of which has its usage already right."""
    if len(of) == 1:
        return answers[0]
    choices = [
        choice | {"index": part.offset + choice.get("index", 0) * part.stride}
        for part, answer in zip(of, answers, strict=True)
        for choice in answer.get("choices") or ()
    ]
    usages = [answer.get("usage") for answer in answers]
    choices.sort(key=lambda choice: choice["index"])
    return answers[0] | {"choices": choices, "usage": joined_usage(usages, of)}


def joined_usage(usages: list[Any], of: tuple[Part, ...]) -> dict[str, Any] | None:
    """The sum: all that was spoken, and each prompt once. None where a part did not say."""
    if not all(isinstance(usage, dict) for usage in usages):
        return None
    if len(usages) == 1:
        only: dict[str, Any] = usages[0]
        return only
    once = [usage for usage, part in zip(usages, of, strict=True) if part.counts_prompt]
    prompt = sum(usage.get("prompt_tokens") or 0 for usage in once)
    spoken = sum(usage.get("completion_tokens") or 0 for usage in usages)
    total: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": spoken, "total_tokens": prompt + spoken}
    details = [usage.get("prompt_tokens_details") for usage in once]
    if all(isinstance(one, dict) and "cached_tokens" in one for one in details):
        total["prompt_tokens_details"] = {"cached_tokens": sum(one["cached_tokens"] or 0 for one in details)}
    return total
