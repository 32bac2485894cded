"""A sequence of tokens as a cache knows it: its full blocks by name, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.hashing import chain_root, more_hashes


@dataclass(frozen=True, slots=True)
class TokenChain:
    """``hashes`` names every full block of ``token_ids``, each with all before it, the first one with ``root``."""

    token_ids: tuple[int, ...]
    block_tokens: int
    salt: str
    lora: str
    root: bytes
    hashes: tuple[bytes, ...]

    @classmethod
    def of(
        cls, token_ids: Sequence[int], block_tokens: int, *, fingerprint: str, salt: str, lora: str = ""
    ) -> TokenChain:
        """The chain of ``token_ids``. Raises ValueError for ids outside 32 unsigned bits."""
        root = chain_root(fingerprint, salt=salt, lora=lora)
        return cls((), block_tokens, salt, lora, root, ()).extended(token_ids)

    def extended(self, token_ids: Sequence[int]) -> TokenChain:
        """The chain of these tokens and ``token_ids`` behind them; blocks that are here are not hashed again."""
        ids = (*self.token_ids, *token_ids)
        tail = ids[len(self.hashes) * self.block_tokens :]
        more = more_hashes(self.hashes[-1] if self.hashes else self.root, tail, self.block_tokens)
        return TokenChain(ids, self.block_tokens, self.salt, self.lora, self.root, (*self.hashes, *more))

    def block(self, index: int) -> tuple[int, ...]:
        """The tokens of one block."""
        return self.token_ids[index * self.block_tokens : (index + 1) * self.block_tokens]

    def parent(self, index: int) -> bytes | None:
        """The name of the block before, None before the first."""
        return self.hashes[index - 1] if index else None
