"""Join tokens of clusters: made here, told once, kept as digests."""

from __future__ import annotations

import time

from gateway.certificates.issuer import Issuer
from gateway.clusters import Cluster
from gateway.errors import bad_field
from gateway.registry import Registry
from kvcache.join_token import JoinToken

HOUR_S = 3600.0
TOKEN_HOURS = 24.0
MAX_HOURS = 24 * 365.0


class JoinTokens:
    """With an issuer of certificates, tokens also say which root the gateway's own comes from."""

    def __init__(self, registry: Registry, issuer: Issuer | None) -> None:
        self._registry = registry
        self._issuer = issuer

    def make(self, cluster: Cluster, hours: float = TOKEN_HOURS, revoke: bool = False) -> dict[str, str | float]:
        """A new token, the only one in force from now on, and until when, as answers say it.

        ``revoke``: certificates of all who joined before are revoked, and they are dismissed. Raises ApiError 400.
        """
        if not 0 < hours <= MAX_HOURS:
            raise bad_field("hours", f"hours must lie in (0, {MAX_HOURS:g}], got {hours}")
        token = JoinToken.fresh(cluster.name, b"" if self._issuer is None else self._issuer.root)
        before, until = cluster.security.revoked() if revoke else cluster.security, time.time() + hours * HOUR_S
        self._registry.secure(cluster.name, before.with_token(token, until))
        if revoke:
            for session in self._registry.nodes(cluster.name):
                session.lose("credentials_revoked")
        return {"join_token": str(token), "join_token_until": until}
