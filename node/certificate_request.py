"""Asking a gateway for a node's first certificate, over a connection that is checked before it carries the token.

The token names the root that the gateway's own certificate must come from, so the first contact needs no other file.
The roots are fetched from a gateway that is not believed yet and compared with the token; only then is the secret sent,
and not to another node, whose certificate comes from the same root.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from kvcache.node_certificates import NODE_SCHEME
from node.config import ConfigError

_ANSWER_S = 10.0
_MOST_BYTES = 256 << 10
_FINAL = frozenset({400, 401, 403, 404, 409})


class NotEnrolled(Exception):
    """The gateway cannot be reached or does not answer now; trying again may help."""


def ask_for_certificate(gateway: str, root: bytes, token: str, body: Mapping[str, str]) -> dict[str, str]:
    """What the gateway grants: ``certificate`` and ``roots`` (PEM). Blocks for some seconds at most.

    Raises ConfigError for what trying again cannot mend, NotEnrolled otherwise.
    """
    parts = urlsplit(gateway)
    if parts.scheme not in ("https", "wss") or not parts.hostname:
        raise ConfigError(f"--gateway: {gateway!r} must be an https URL: certificates are got and shown over TLS")
    where = (parts.hostname, parts.port or 443, parts.path.rstrip("/"))
    unchecked = ssl.create_default_context()
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    offered = _exchange(where, unchecked, "GET", "/v1/join/roots", None, {})
    trusted = ssl.create_default_context(cadata=_pinned(offered.get("roots", ""), root))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return _exchange(where, trusted, "POST", "/v1/join", msgspec.json.encode(body), headers)


def is_of_a_node(shown: Mapping[str, object] | None) -> bool:
    """Whether a certificate, as ``ssl`` describes one, names a node: no gateway's does."""
    names = (shown or {}).get("subjectAltName", ())
    return any(kind == "URI" and value.startswith(NODE_SCHEME) for kind, value in names)  # type: ignore[attr-defined]


def _exchange(
    where: tuple[str, int, str],
    context: ssl.SSLContext,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
) -> dict[str, str]:
    host, port, prefix = where
    connection = http.client.HTTPSConnection(host, port, timeout=_ANSWER_S, context=context)
    try:
        connection.connect()
        if is_of_a_node(connection.sock.getpeercert()):
            raise ConfigError(f"--gateway: {host}:{port} answers with the certificate of a node")
        connection.request(method, prefix + path, body, dict(headers))
        answer = connection.getresponse()
        data, status = answer.read(_MOST_BYTES), answer.status
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            "--join-token-file: the gateway's certificate is not under the root that the token names, or is not for "
            f"{host} ({error.verify_message})"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise NotEnrolled(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    found = _object(data)
    if status == 200:
        return {name: value for name, value in found.items() if isinstance(value, str)}
    told = found.get("error")
    reason = told.get("message") if isinstance(told, dict) else None
    if status in _FINAL:
        raise ConfigError(f"--join-token-file: the gateway answered {status}: {reason or 'no reason given'}")
    raise NotEnrolled(f"the gateway answered {status}: {reason or 'no reason given'}")


def _object(data: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except msgspec.DecodeError:
        return {}


def _pinned(roots: str, fingerprint: bytes) -> str:
    """The root that the token names. Raises ConfigError where the gateway has another."""
    try:
        found = x509.load_pem_x509_certificates(roots.encode())
    except ValueError:
        found = []
    for root in found:
        if hashlib.sha256(root.public_bytes(serialization.Encoding.DER)).digest() == fingerprint:
            return root.public_bytes(serialization.Encoding.PEM).decode()
    raise ConfigError(
        "--join-token-file: this gateway does not have the root that the token names: it is another gateway, or "
        "someone is in between"
    )
