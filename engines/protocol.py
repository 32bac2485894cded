"""What a node asks of an engine: compute KV into pool pages, or load KV from pool pages and speak.

An engine runs in processes of its own and shares the host pool's memory with the node; only the small messages below
pass between them. The node owns the pages: it may free a job's pages once that job's stream has ended (Loaded frees
those of a generation earlier) or the engine process is dead, never before.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from kvcache.control import Sampling, TokenLogprob
from kvcache.engine_figures import EngineFigures


class Checkpoint(msgspec.Struct, frozen=True):
    """A stretch of a prompt that is worth keeping: blocks [start, stop), and windows and states at ``stop``.

    Both are multiples of the block size and may be equal. Without ``snapshot`` it is the blocks alone.
    """

    start: int
    stop: int
    snapshot: bool = True


class PrefillCommand(msgspec.Struct, frozen=True, tag=True):
    """Compute tokens [``cached``, stop) on the absolute chunk grid and export [start, stop) into ``pages``.

    ``cached`` is a multiple of the block size below ``stop``; what lies below it is read from ``cached_pages``, a table
    of [0, cached). Of ``pages`` nothing below ``cached`` is written: it holds the right bytes already. Each of
    ``checkpoints`` is offered once it is computed. What an engine keeps of its own accord serves only commands of the
    same ``salt``.
    """

    job: str
    token_ids: tuple[int, ...]
    start: int
    stop: int
    pages: tuple[int, ...]
    priority: int = 0
    cached: int = 0
    cached_pages: tuple[int, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    salt: str = ""


class GenerateCommand(msgspec.Struct, frozen=True, tag=True):
    """Speak after ``token_ids``. ``loaded`` tokens of KV lie in ``pages``; the rest is prefilled in place.

    ``loaded`` is len(token_ids) - 1 or a multiple of the block size below it: the engine always runs the last prompt
    token itself, as a step of one token. ``checkpoints`` are offered as they are computed in place, and once the answer
    has ended its full blocks from ``keep_from`` on (None: none of them). Of those that wait the least ``priority`` is
    first.

    ``beside`` names a generation of the same prompt that is submitted after this one: an engine may compute the prompt
    for that one alone and share the result, and one that does not has all that it needs here. Whoever submits them ends
    this one, where that one comes to no token. ``salt`` is as in PrefillCommand.
    """

    job: str
    token_ids: tuple[int, ...]
    loaded: int
    pages: tuple[int, ...]
    sampling: Sampling
    checkpoints: tuple[Checkpoint, ...] = ()
    keep_from: int | None = None
    priority: int = 0
    beside: str = ""
    salt: str = ""


class StoreCommand(msgspec.Struct, frozen=True, tag=True):
    """Answers an Offered: write it into ``pages``, a table of [start, stop), or forget it where there are none.

    Without ``snapshot`` in the offer the table has no place for windows and states.
    """

    job: str
    stop: int
    pages: tuple[int, ...]


class FinishCommand(msgspec.Struct, frozen=True, tag=True):
    """End a generation that has said enough, as an end token would. Nothing happens where it is over."""

    job: str


class CancelCommand(msgspec.Struct, frozen=True, tag=True):
    """End a job within one chunk; its stream ends with JobCancelled."""

    job: str


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when the model is loaded and the self-check has passed."""

    architecture: str
    dtype: str
    context_tokens: int
    vocab_size: int
    chunk_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress before EngineInfo."""

    stage: str
    fraction: float


class Offered(msgspec.Struct, frozen=True, tag=True):
    """Blocks [start, stop), and with ``snapshot`` the windows and states at ``stop``, can be had for the asking.

    The engine goes on meanwhile; only the job's terminal event waits for the StoreCommand.
    """

    job: str
    start: int
    stop: int
    snapshot: bool


class Stored(msgspec.Struct, frozen=True, tag=True):
    """A StoreCommand was followed: the offer lies in its pages, or (``written`` False) nothing was written."""

    job: str
    stop: int
    written: bool


class Spoken(msgspec.Struct, frozen=True, tag=True):
    """The answer has ended as GenerationFinished will say, which comes when all that was offered is stored."""

    job: str
    reason: str


class Exported(msgspec.Struct, frozen=True, tag=True):
    """All pieces of the job's plan below ``next_seq`` lie in the pool and will not be touched again."""

    job: str
    next_seq: int


class PrefillFinished(msgspec.Struct, frozen=True, tag=True):
    """Terminal: all is exported, and stored. ``compute_s`` is from the first chunk's start to the last one's end."""

    job: str
    compute_s: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The generation has copied its KV out of the pool and reads these pages no more."""

    job: str


class Token(msgspec.Struct, frozen=True, tag=True):
    """One sampled token; ``logprobs`` holds the chosen one first, then the likeliest, where asked for."""

    job: str
    token_id: int
    logprobs: tuple[TokenLogprob, ...] | None = None


class GenerationFinished(msgspec.Struct, frozen=True, tag=True):
    """Terminal: ``reason`` is ``stop`` (an end token, not itself emitted as Token) or ``length``."""

    job: str
    reason: str


class JobCancelled(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the engine touches nothing of the job any more."""

    job: str
    prefilled_tokens: int = 0


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: this job went wrong; the engine goes on."""

    job: str
    cause: str
    detail: str


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """Every half second from a thread of the engine process, busy or not; silence means stopped or dead."""

    running: int
    prefill_queue: int


Command = PrefillCommand | GenerateCommand | StoreCommand | FinishCommand | CancelCommand
JobEvent = (
    Exported
    | PrefillFinished
    | Loaded
    | Token
    | Spoken
    | GenerationFinished
    | Offered
    | Stored
    | JobCancelled
    | JobFailed
)
EngineEvent = EngineInfo | Loading | Pulse | JobEvent


class EngineLost(Exception):
    """The engine process died, hung or broke the protocol; it is dead by the time this is raised."""


class JobStream(Protocol):
    """The events of one job, up to and including its terminal one. An async generator satisfies this."""

    def __aiter__(self) -> JobStream:
        """The stream itself."""

    async def __anext__(self) -> JobEvent:
        """The next event. Raises StopAsyncIteration after the terminal one, EngineLost when the engine died."""

    async def aclose(self) -> None:
        """Cancel the job if it still runs and return once the engine touches nothing of it. Idempotent."""


class Engine(Protocol):
    """One engine as its node sees it."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""

    def submit(self, command: PrefillCommand | GenerateCommand) -> JobStream:
        """Start a job at once; its stream ends with the terminal event or raises EngineLost.

        Raises ValueError where a job of that name is still running.
        """

    def store(self, command: StoreCommand) -> None:
        """Answer an offer of a job. Nothing happens where the job is over."""

    def finish(self, job: str) -> None:
        """End a generation as an end token would: what it offers is offered. Nothing happens where it is over."""

    async def cancel(self, job: str) -> None:
        """Ask the job to end within one chunk; its stream then ends with JobCancelled. Unknown jobs are ignored."""

    async def wait_lost(self) -> str:
        """Return, with the cause, when the engine process is dead: never while it is healthy."""

    async def close(self) -> None:
        """End the process and wait for it. Idempotent."""


@runtime_checkable
class TellsFigures(Protocol):
    """An engine that keeps a cache and a queue of its own, and says what is in them."""

    @property
    def figures(self) -> EngineFigures:
        """As they were seen last."""
