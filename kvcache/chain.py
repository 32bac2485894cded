"""A sequence of tokens as a cache knows it: its full blocks by name, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.hashing import block_hashes, more_hashes


@dataclass(frozen=True, slots=True)
class TokenChain:
    """``hashes`` names every full block of ``token_ids``, each with all before it; ``salt`` and ``lora`` went in."""

    token_ids: tuple[int, ...]
    block_tokens: int
    salt: str
    lora: str
    fingerprint: str
    hashes: tuple[bytes, ...]

    @classmethod
    def of(
        cls, token_ids: Sequence[int], block_tokens: int, *, fingerprint: str, salt: str, lora: str = ""
    ) -> TokenChain:
        """The chain of ``token_ids``. Raises ValueError as ``block_hashes`` does."""
        hashes = block_hashes(token_ids, block_tokens, fingerprint=fingerprint, salt=salt, lora=lora)
        return cls(tuple(token_ids), block_tokens, salt, lora, fingerprint, tuple(hashes))

    def extended(self, token_ids: Sequence[int]) -> TokenChain:
        """The chain of these tokens and ``token_ids`` behind them; blocks that are here are not hashed again."""
        ids = (*self.token_ids, *token_ids)
        if not self.hashes:
            return TokenChain.of(ids, self.block_tokens, fingerprint=self.fingerprint, salt=self.salt, lora=self.lora)
        tail = ids[len(self.hashes) * self.block_tokens :]
        hashes = (*self.hashes, *more_hashes(self.hashes[-1], tail, self.block_tokens))
        return TokenChain(ids, self.block_tokens, self.salt, self.lora, self.fingerprint, hashes)

    def block(self, index: int) -> tuple[int, ...]:
        """The tokens of one block."""
        return self.token_ids[index * self.block_tokens : (index + 1) * self.block_tokens]

    def parent(self, index: int) -> bytes | None:
        """The name of the block before, None before the first."""
        return self.hashes[index - 1] if index else None
