"""A generation, from the order to its end: how tokens are chosen, and what a node says as they come."""

from __future__ import annotations

import msgspec

from kvcache.control.peers import KvSource
from kvcache.quality import Quality


class Sampling(msgspec.Struct, frozen=True):
    """How to choose tokens. ``temperature`` 0 is greedy; ``seed`` None draws from the system's entropy.

    ``logprobs`` None asks for none, n for the n likeliest beside the chosen one, -1 for the whole vocabulary.

    ``logit_bias`` is added to the logits of tokens, as (id, bias) pairs. ``repetition_penalty`` weakens tokens of the
    prompt and of the answer, the other two those of the answer: once for being there, and for each time. ``min_p`` bars
    what is less likely than that share of the likeliest. Engines before ``Join.max_answers`` know none of these.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen, or what is unlikely is barred."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.min_p)
        return any(penalties) or self.repetition_penalty != 1 or bool(self.logit_bias)


class GenerateJob(msgspec.Struct, frozen=True, tag=True):
    """Decode one request; ``source`` None prefills in place. ``deadline`` is Unix seconds for the whole job.

    ``salt`` and ``lora`` go into the names of the prompt's blocks; ``quality`` bounds what is used of the cached ones.
    Of those that wait for room or for a place among the running, the least ``priority`` is first. ``answers`` to this
    one prompt are spoken, from seed, seed + 1 and so on; ``traceparent`` is as in PrefillJob.
    """

    generation: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    source: KvSource | None
    deadline: float
    salt: str = ""
    lora: str = ""
    quality: Quality = Quality.EXACT
    priority: int = 0
    answers: int = 1
    traceparent: str = ""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of the vocabulary and its log-probability under the model, before temperature and truncation."""

    token_id: int
    logprob: float


class Delta(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one generation and the text that became certain with them (held back inside a stop string).

    ``answer`` counts from 0, where there are several to one prompt.
    """

    generation: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    answer: int = 0


class AnswerEnded(msgspec.Struct, frozen=True, tag=True):
    """One of several answers to one prompt ended well, as Finished says of a single one. Finished comes after all."""

    generation: str
    answer: int
    reason: str
    stop_text: str | None = None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The generation ended well. ``reason`` is stop or length; ``stop_text`` names the stop string that matched.

    ``cached_tokens`` of the prompt were not prefilled in place because their KV was here already. Of several answers
    ``completion_tokens`` is the sum, and how each ended was said before.
    """

    generation: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_text: str | None = None


AnswerPart = Delta | AnswerEnded | Finished
"""What a node says of a generation that goes well, up to Finished."""
