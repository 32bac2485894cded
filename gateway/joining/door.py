"""Who may open a control stream, and as which node: by certificate, by join token, or from this very machine."""

from __future__ import annotations

import hmac
import time

from cryptography import x509

from gateway.access import bearer, from_this_machine
from gateway.asgi import Scope
from gateway.certificates.issuer import Issuer
from gateway.clusters import Cluster
from gateway.joining.newcomer import Newcomer
from gateway.joining.refusals import Cause, TurnedAway
from gateway.joining.security import NO_SECURITY
from gateway.registry import Registry
from kvcache.control import Join
from kvcache.control.renewal import CertificateIssued
from kvcache.join_token import PREFIX, JoinToken
from kvcache.node_certificates import CertificateRequest, NodeName

CERTIFICATE = "prfaas.certificate"
"""Where the connection's state holds the certificate (DER) that its peer showed and TLS has checked."""


class Door:
    """With an ``issuer`` every node needs a certificate. Without, a cluster's join token or the ``shared`` one will do,
    and where there is no shared one, being on this machine."""

    def __init__(self, registry: Registry, issuer: Issuer | None, shared: str | None) -> None:
        self._registry = registry
        self._issuer = issuer
        self._shared = shared

    def newcomer(self, scope: Scope) -> Newcomer | TurnedAway:
        """What a stream shows before it has said anything."""
        shown = scope.get("state", {}).get(CERTIFICATE)
        if shown is not None and self._issuer is not None:
            return self._by_certificate(x509.load_der_x509_certificate(shown))
        secret = bearer(scope)
        if secret is not None and secret.startswith(PREFIX):
            cluster = self.by_token(secret)
            if isinstance(cluster, TurnedAway):
                return cluster
            if self._issuer is not None:
                return TurnedAway(Cause.CERTIFICATE_NEEDED, "nodes of this gateway ask for a certificate first")
            return Newcomer(cluster.name, epoch=cluster.security.epoch)
        if self._issuer is not None:
            return TurnedAway(Cause.CERTIFICATE_NEEDED, "the node showed no certificate; it joins with a join token")
        if self._shared is not None:
            if secret is None:
                return TurnedAway(Cause.NO_CREDENTIAL, "the node showed no token; give it --join-token-file")
            known = hmac.compare_digest(secret.encode(), self._shared.encode())
            return Newcomer() if known else TurnedAway(Cause.WRONG_TOKEN, "the token is not this gateway's")
        if secret is not None:
            return TurnedAway(Cause.WRONG_TOKEN, "the token is not this gateway's")
        if from_this_machine(scope):
            return Newcomer()
        return TurnedAway(Cause.NO_CREDENTIAL, "nodes of other machines need a token; give it --join-token-file")

    def by_token(self, text: str) -> Cluster | TurnedAway:
        """The cluster whose join token this is."""
        try:
            token = JoinToken.parse(text)
        except ValueError as error:
            return TurnedAway(Cause.WRONG_TOKEN, str(error))
        # Whoever holds no token in force is not told which clusters there are.
        cluster = self._cluster(token.cluster)
        wrong = (NO_SECURITY if cluster is None else cluster.security).admits(token, time.time())
        if cluster is not None and wrong is None:
            return cluster
        cure = f"make another with `prfaas clusters rotate {token.cluster[:63]}`"
        word = "has expired" if wrong == Cause.EXPIRED_TOKEN else "is not the one in force"
        cause = Cause(wrong or Cause.WRONG_TOKEN)
        return TurnedAway(cause, f"the join token of {token.cluster[:63]!r} {word}; {cure}")

    def admits(self, newcomer: Newcomer, join: Join) -> TurnedAway | None:
        """Whether a node is the one that its credentials are of, and these are still in force."""
        if newcomer.cluster not in (None, join.cluster):
            reason = f"the credentials are of cluster {newcomer.cluster!r}, not of {join.cluster[:63]!r}"
            return TurnedAway(Cause.OTHER_CLUSTER, reason)
        if newcomer.node_id not in (None, join.node_id):
            reason = f"the certificate is of node {newcomer.node_id!r}, not of {join.node_id[:63]!r}"
            return TurnedAway(Cause.OTHER_NODE, reason)
        if newcomer.cluster is not None and not self._holds(newcomer):
            reason = f"the credentials of cluster {newcomer.cluster!r} were revoked; join with its new token"
            return TurnedAway(Cause.CERTIFICATE_REVOKED, reason)
        return None

    def renew(self, newcomer: Newcomer, request: bytes) -> tuple[Newcomer, CertificateIssued]:
        """Another certificate for the node of a stream that one opened, and until when the stream may stay now."""
        if self._issuer is None or newcomer.cluster is None or newcomer.node_id is None:
            return newcomer, CertificateIssued(reason="this gateway issued no certificate to this node")
        if not self._holds(newcomer):
            return newcomer, CertificateIssued(reason=f"the credentials of {newcomer.cluster!r} were revoked")
        try:
            name = NodeName(newcomer.cluster, newcomer.node_id, newcomer.epoch)
            issued = self._issuer.issue(name, CertificateRequest.parse(request), time.time())
        except ValueError as error:
            return newcomer, CertificateIssued(reason=str(error))
        renewed = Newcomer(newcomer.cluster, newcomer.node_id, issued.until, newcomer.epoch)
        return renewed, CertificateIssued(issued.chain, self._issuer.roots_pem)

    def _by_certificate(self, certificate: x509.Certificate) -> Newcomer | TurnedAway:
        try:
            name = NodeName.of(certificate)
        except ValueError as error:
            return TurnedAway(Cause.CERTIFICATE_REFUSED, str(error))
        newcomer = Newcomer(name.cluster, name.node_id, certificate.not_valid_after_utc.timestamp(), name.epoch)
        if not self._holds(newcomer):
            return TurnedAway(Cause.CERTIFICATE_REVOKED, f"certificates of {name.uri} were revoked")
        return newcomer

    def _holds(self, newcomer: Newcomer) -> bool:
        """Whether what was shown of a cluster has not been revoked since."""
        cluster = self._cluster(newcomer.cluster)
        return cluster is not None and cluster.security.epoch == newcomer.epoch

    def _cluster(self, name: str | None) -> Cluster | None:
        return next((one for one in self._registry.clusters if one.name == name), None)
