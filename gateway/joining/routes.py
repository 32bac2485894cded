"""What a node asks before it joins: which roots to believe, and a certificate for its join token."""

from __future__ import annotations

import base64
import binascii
import logging
import time

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.access import bearer
from gateway.answers import json_answer
from gateway.bodies import read_body
from gateway.certificates.authority import AuthorityExpired
from gateway.certificates.issuer import Issuer
from gateway.clusters import ClusterState
from gateway.config import NAME
from gateway.errors import ApiError, bad_field
from gateway.joining.door import Door
from gateway.joining.refusals import Refusals, TurnedAway
from gateway.openai.requests import convert, decode_json
from kvcache.node_certificates import CertificateRequest, NodeName

log = logging.getLogger(__name__)

PENDING_RETRY_S = 5.0
EXPIRED_RETRY_S = 60.0
MOST_BODY_BYTES = 64 << 10
"""Of a request that shows no key: a name, and a request for a certificate in base64."""


class EnrolBody(msgspec.Struct, frozen=True):
    """What a node asks with: its name, and a PKCS #10 request (DER, base64)."""

    node_id: str
    request: str


def add_joining_routes(
    api: FastAPI,
    door: Door,
    issuer: Issuer | None,
    refusals: Refusals,
    max_body_bytes: int,
) -> None:
    """Add them to ``api``. They are open: a node has no key, and shows its token there."""

    @api.get("/v1/join/roots")
    async def roots() -> Response:
        return json_answer({"roots": _issuing(issuer).roots_pem.decode()})

    @api.post("/v1/join")
    async def enrol(request: Request) -> Response:
        signer = _issuing(issuer)
        data = await read_body(request.scope, request.receive, min(max_body_bytes, MOST_BODY_BYTES))
        body: EnrolBody = convert(decode_json(data), EnrolBody)
        if not NAME.fullmatch(body.node_id):
            raise bad_field("node_id", "node_id: letters, digits, dot, dash and underscore, at most 63")
        cluster = door.by_token(bearer(request.scope) or "")
        if isinstance(cluster, TurnedAway):
            refusals.add(body.node_id, "", cluster)
            raise ApiError(401, cluster.reason, code=cluster.cause.value)
        if cluster.state is ClusterState.PENDING:
            reason = f"cluster {cluster.name!r} waits for approval"
            raise ApiError(503, reason, code="cluster_pending", retry_after_s=PENDING_RETRY_S)
        name = NodeName(cluster.name, body.node_id, cluster.security.epoch)
        try:
            asked = CertificateRequest.parse(base64.b64decode(body.request, validate=True))
            issued = signer.issue(name, asked, time.time())
        except AuthorityExpired as error:
            raise ApiError(503, str(error), code="authority_expired", retry_after_s=EXPIRED_RETRY_S) from error
        except (ValueError, binascii.Error) as error:
            raise bad_field("request", str(error)) from error
        log.info("certificate issued node=%s cluster=%s", body.node_id, cluster.name)
        answer = {"certificate": issued.chain.decode(), "roots": signer.roots_pem.decode(), "until": issued.until}
        return json_answer(answer)


def _issuing(issuer: Issuer | None) -> Issuer:
    if issuer is None:
        raise ApiError(
            404, "this gateway issues no certificates (--ca): nodes join with their token alone", code="no_authority"
        )
    return issuer
