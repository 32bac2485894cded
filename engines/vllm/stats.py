"""What a worker has done since it was last asked, as plain counts that add up over workers and steps."""

from __future__ import annotations

import threading

COUNTS = {
    "exported_bytes": "KV written into the node's pool",
    "loads": "Loads of KV from the node's pool that ended well",
    "load_failures": "Loads of KV from the node's pool that failed",
    "loaded_tokens": "Tokens loaded from the node's pool",
    "load_seconds": "Seconds that loads took",
    "broken_jobs": "Jobs whose KV could not be copied",
}
"""Names and what they mean. All only ever grow."""


class Tally:
    """Counts for one worker; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def exported(self, nbytes: int) -> None:
        """KV went into the pool."""
        self._add(exported_bytes=nbytes)

    def loaded(self, done: bool, tokens: int, seconds: float) -> None:
        """A load is over."""
        if done:
            self._add(loads=1, loaded_tokens=tokens, load_seconds=seconds)
        else:
            self._add(load_failures=1)

    def broken(self) -> None:
        """A job could not be copied."""
        self._add(broken_jobs=1)

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def _add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count
