"""The scheduler's side of the connector: which requests are jobs of ours, and what their workers must do in each step.

No I/O and nothing of vLLM: it sees requests and scheduler outputs through the few fields named below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engines.vllm.steps import Blocks, Computing, Ending, Loading, Step

PARAMS = "prfaas"
"""The key of ours in a request's ``kv_transfer_params``: others may stand beside it, for other connectors."""


class Request(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    kv_transfer_params: Mapping[str, Any] | None
    num_computed_tokens: int
    num_prompt_tokens: int


class CachedRequests(Protocol):
    """What is read of those that were scheduled before."""

    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]


class NewRequest(Protocol):
    """What is read of those that are scheduled for the first time."""

    req_id: str
    num_computed_tokens: int


class BlockState(Protocol):
    """Where the block ids of this step's requests come from: as they are now, not as they were handed out."""

    def get_block_ids(self, req_id: str) -> Blocks | None:
        """A request's, None where it is not in this step."""


class ScheduledStep(Protocol):
    """What is read of the scheduler's output."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    kv_connector_block_state: BlockState | None


class JobParams(msgspec.Struct, frozen=True):
    """What a request says of its job: load its first ``load`` tokens; ``watched``: tell the workers of its steps.

    Full blocks from token ``keep_from`` on are kept at its end (None: none).
    """

    job: str
    load: int = 0
    watched: bool = False
    keep_from: int | None = None

    def as_params(self) -> dict[str, Any]:
        """The ``kv_transfer_params`` of a request of this job."""
        return {PARAMS: msgspec.to_builtins(self)}


@dataclass(slots=True)
class _Job:
    said: JobParams
    local: int = 0
    settled: bool = False
    """Whether loading is over: it was done, failed or never needed. A request that starts anew computes everything,

    for the pages that it came from are no longer its own.
    """


class Bookkeeping:
    """All calls come from vLLM's scheduler. Requests without our key are none of ours."""

    def __init__(self, block_tokens: int) -> None:
        """``block_tokens`` is the node's block: what is kept at the end begins and ends at multiples of it."""
        self._block = block_tokens
        self._jobs: dict[str, _Job] = {}
        self._loading: list[Loading] = []
        self._unneeded: list[str] = []
        self._ending: list[Ending] = []

    def matched(self, request: Request, computed: int) -> int:
        """Tokens that can be loaded behind the first ``computed``; 0 where none can. Changes nothing that counts."""
        job = self._job(request)
        if job is None or job.settled:
            return 0
        job.local = computed
        return max(0, min(job.said.load, request.num_prompt_tokens - 1) - computed)

    def allocated(self, request: Request, blocks: Blocks, external: int) -> None:
        """Blocks were taken for a request, ``external`` tokens of which are to be loaded into them."""
        job = self._job(request)
        if job is None or job.settled:
            return
        job.settled = True
        if external:
            end = job.local + external
            self._loading.append(Loading(job.said.job, request.request_id, job.local, end, blocks))
        elif job.said.load:
            self._unneeded.append(job.said.job)

    def step(self, output: ScheduledStep) -> Step:
        """What the workers must do in the step that the scheduler has just made up."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computing = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            job = self._jobs.get(request_id)
            if job is None or not job.said.watched:
                continue
            assert output.kv_connector_block_state is not None, "vLLM tells connectors the blocks of a step"
            blocks = output.kv_connector_block_state.get_block_ids(request_id)
            assert blocks is not None, "a scheduled request has blocks"
            begin = computed[request_id]
            computing.append(Computing(job.said.job, begin, begin + tokens, blocks))
        step = Step(
            tuple(computing),
            tuple(self._loading),
            tuple(self._unneeded),
            tuple(self._ending),
            output.total_num_scheduled_tokens == 0,
        )
        self._loading, self._unneeded, self._ending = [], [], []
        return step

    def finished(self, request: Request, blocks: Blocks) -> bool:
        """A request is over. True where its blocks must stay until a worker has reported its id as sent."""
        job = self._jobs.pop(request.request_id, None)
        if job is None or not job.said.watched:
            return False
        tokens, keep = request.num_computed_tokens, job.said.keep_from
        if keep is not None and tokens // self._block * self._block > keep and any(map(len, blocks)):
            self._ending.append(Ending(job.said.job, request.request_id, tokens, blocks))
            return True
        self._ending.append(Ending(job.said.job, request.request_id))
        return False

    def _job(self, request: Request) -> _Job | None:
        known = self._jobs.get(request.request_id)
        if known is not None:
            return known
        try:
            job = _Job(msgspec.convert((request.kv_transfer_params or {}).get(PARAMS), JobParams))
        except msgspec.ValidationError:
            return None
        self._jobs[request.request_id] = job
        return job
