"""What a tier's bytes lie in, as its user sees it. Every call may block: they run in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.tiers.image import Image, Key


class TierStore(Protocol):
    """Holds images by key. Nobody calls for one key twice at once."""

    @property
    def medium(self) -> str:
        """Where it lies, as KV events say it: CPU for memory of this machine, STORAGE for files."""

    def nbytes(self, image: Image) -> int:
        """What this image takes here."""

    def put(self, image: Image, pages: Sequence[memoryview]) -> None:
        """Hold these bytes, in place of what was held of that key: all of them, or nothing. Raises OSError."""

    def get(self, key: Key, pages: Sequence[memoryview]) -> None:
        """Fill ``pages``. Raises OSError, and Damaged where not all of it is there. What it is nobody has verified."""

    def drop(self, key: Key) -> None:
        """Forget it. Nothing happens where it is not held. Raises OSError."""

    def recover(self, wanted: Callable[[Image], bool]) -> list[Image]:
        """What another process left here and is ``wanted``; all else of it goes. Raises OSError."""

    def close(self, keep: bool) -> None:
        """Let go of everything, and of what it holds unless ``keep``. Idempotent."""
