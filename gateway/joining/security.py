"""What a gateway keeps of a cluster's join token and certificates, and of whether it can be believed."""

from __future__ import annotations

import hmac

import msgspec

from kvcache.join_token import JoinToken


class ClusterSecurity(msgspec.Struct, frozen=True):
    """``token`` is the digest of the join token in force, b"" for none; ``token_until`` is when it ends (wall clock).

    Certificates of an ``epoch`` before this one are revoked. ``flagged``: its KV was not what it should have been, and
    nobody who answers for more than this cluster has sent it work again.
    """

    epoch: int = 0
    token: bytes = b""
    token_until: float = 0.0
    flagged: bool = False

    def admits(self, shown: JoinToken, now: float) -> str | None:
        """Why a token that was shown is not the one in force; None where it is."""
        if not self.token or not hmac.compare_digest(self.token, shown.digest):
            return "wrong_token"
        return "expired_token" if now >= self.token_until else None

    def with_token(self, token: JoinToken, until: float) -> ClusterSecurity:
        """With this token alone in force; those who joined stay."""
        return msgspec.structs.replace(self, token=token.digest, token_until=until)

    def revoked(self) -> ClusterSecurity:
        """With neither token nor certificate in force."""
        return ClusterSecurity(self.epoch + 1, flagged=self.flagged)


NO_SECURITY = ClusterSecurity()
