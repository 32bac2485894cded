"""Whether what a node says of a job can be so: counters, estimators and answers would keep nonsense for long."""

from __future__ import annotations

from kvcache.control import AnswerEnded, AnswerPart, Delta, Finished, GenerateJob, PrefillDone, TransferDone

FINISH_REASONS = ("stop", "length")
MAX_TOKEN_ID = 1 << 31
MAX_COUNT = 1 << 31
MAX_SECONDS = 1e6
SPARE_CHARS = 8192
"""Characters of a Delta beyond those of its tokens: what was held back while it could have become a stop string."""
MAX_TOKEN_CHARS = 1024


def computed(done: PrefillDone, tokens: int) -> bool:
    """Whether a prefill of so many tokens can have gone like this."""
    return 0 <= done.tokens <= tokens and 0 <= done.compute_s <= MAX_SECONDS


def transferred(done: TransferDone, most_bytes: int) -> bool:
    """Whether a transfer of at most so many raw bytes can have gone like this."""
    times = (done.transfer_s, done.exposed_s)
    sizes = 0 < done.raw_bytes <= most_bytes and 0 < done.wire_bytes <= 2 * most_bytes + SPARE_CHARS
    sizes = sizes and 0 <= done.backlog_bytes <= done.raw_bytes
    return sizes and len(done.kv_digest) <= 64 and all(0 <= seconds <= MAX_SECONDS for seconds in times)


class AnswerCheck:
    """Follows the answers of one generation and tells what is wrong with their next part."""

    def __init__(self, job: GenerateJob) -> None:
        self._left = [job.sampling.max_tokens] * job.answers
        self._going = set(range(job.answers))
        self._most = job.sampling.max_tokens * job.answers
        self._logprobs = job.sampling.logprobs is not None

    def wrong(self, item: AnswerPart) -> str | None:
        """The field that cannot be as it is, or None."""
        if isinstance(item, Delta):
            return self._wrong_delta(item)
        if item.reason not in FINISH_REASONS:
            return "reason"
        if isinstance(item, AnswerEnded):
            if len(self._left) == 1 or item.answer not in self._going:
                return "answer"
            self._going.discard(item.answer)
            return None
        return self._wrong_end(item)

    def _wrong_delta(self, delta: Delta) -> str | None:
        if delta.answer not in self._going:
            return "answer"
        count = len(delta.token_ids)
        self._left[delta.answer] -= count
        if self._left[delta.answer] < 0:
            return "more tokens than were asked for"
        for token in delta.token_ids:  # mostly one, once for every token that is spoken
            if not 0 <= token < MAX_TOKEN_ID:
                return "token_ids"
        if len(delta.text) > SPARE_CHARS + count * MAX_TOKEN_CHARS:
            return "text"
        if not self._logprobs and not delta.logprobs:
            return None
        entries = delta.logprobs or ()
        if len(entries) != (count if self._logprobs else 0) or not all(entries):
            return "logprobs"
        if not all(0 <= one.token_id < MAX_TOKEN_ID for entry in entries for one in entry):
            return "logprobs"
        return None

    def _wrong_end(self, end: Finished) -> str | None:
        if len(self._left) > 1 and self._going:
            return "before all answers ended"
        if not 0 <= end.cached_tokens <= end.prompt_tokens <= MAX_COUNT:
            return "prompt_tokens"
        return None if 0 <= end.completion_tokens <= self._most else "completion_tokens"
