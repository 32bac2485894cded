"""TLS contexts from the operator's files: the KV port and KV dials (mutual), and the control stream's root."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from kvcache.certificate_files import CertificateFiles
from node.config import ConfigError, TlsFiles

log = logging.getLogger(__name__)


def listening_context(files: TlsFiles) -> ssl.SSLContext | None:
    """For the KV port: shows this node's certificate and demands one under the same root; None without files."""
    if not files.complete:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, files)
    return context


def dialling_context(files: TlsFiles) -> ssl.SSLContext | None:
    """For dialling KV ports: checks certificate and host name under the operator's root; None without a root."""
    if files.ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, files)
    return context


def gateway_context(ca: Path | None, own: TlsFiles | None = None) -> ssl.SSLContext | None:
    """For the control stream: a root of the operator's own; None leaves the system's roots in force.

    ``own`` is a node's certificate, to be shown, with the roots that the gateway's must come from where ``ca`` is None.
    """
    root = ca or (own.ca if own is not None else None)
    if root is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(root))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--gateway-ca: {root} cannot be used: {error}") from error
    if own is not None and own.cert is not None and own.key is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def operators_certificate(files: TlsFiles, *contexts: ssl.SSLContext | None) -> CertificateFiles | None:
    """The KV port's certificate as those contexts show it, to be taken anew when an operator replaces the files."""
    if files.cert is None or files.key is None:
        return None
    shown = [context for context in contexts if context is not None]
    return CertificateFiles(files.cert, files.key, shown, files.ca, [] if files.ca is None else shown)


def certificate_told(error: OSError | None) -> None:
    """Log what became of a replaced certificate."""
    if error is None:
        log.info("KV certificate replaced")
    else:
        log.error("KV certificate not replaced, the files cannot be used together: %s", error)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_verify_locations(str(files.ca))
        if files.cert is not None and files.key is not None:
            context.load_cert_chain(str(files.cert), str(files.key))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--kv-tls-cert, --kv-tls-key, --kv-tls-ca: {error}") from error
