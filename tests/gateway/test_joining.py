"""Who may join, and who is turned away: real TLS, real certificates, strict fake nodes."""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
import websockets
from click.testing import CliRunner

from gateway.app import Gateway
from gateway.certificates import files
from gateway.certificates.authority import create_root
from gateway.clusters import Cluster, Dial
from gateway.commands.certs import certs
from gateway.config import ConfigError, GatewayConfig
from gateway.front import Front
from gateway.joining.handshakes import count_refused
from gateway.joining.newcomer import Newcomer
from gateway.joining.stream_protocol import StreamProtocol
from gateway.joining.tokens import JoinTokens
from gateway.keys import Role as KeyRole
from gateway.model import ServedModel
from gateway.registry import Registry
from gateway.serve import followed, tls_options
from gateway.state import State
from kvcache import control
from kvcache.certificate_files import CertificateFiles
from kvcache.control import Heartbeat, ModelInfo, Refused
from kvcache.control.renewal import CertificateIssued, RenewCertificate
from kvcache.join_token import JoinToken
from kvcache.node_certificates import CertificateRequest, NodeName, key_pem, new_key, request_for
from kvcache.wire import Role
from node.certificate_request import NotEnrolled
from node.config import ConfigError as NodeConfigError
from node.config import TlsFiles
from node.enrolment import Certificate, Enrolment
from node.renewal import Renewal
from node.tls import gateway_context
from tests.gateway.conftest import Open
from tests.gateway.fakes import FakeNode, never


@dataclass
class Installation:
    """A gateway with certificates of its own, and what its operators and nodes do with it."""

    gateway: Gateway
    url: str
    folder: Path
    info: ModelInfo
    client: httpx.AsyncClient
    shown: CertificateFiles

    @property
    def ca(self) -> Path:
        return self.folder / "ca"

    async def register(self, name: str, **terms: Any) -> str:
        """Register a cluster as admin; its join token."""
        answer = await self.client.post("/v1/clusters", json={"name": name, **terms})
        assert answer.status_code == 201, answer.text
        token: str = answer.json()["join_token"]
        return token

    async def rotate(self, name: str, **how: Any) -> str:
        answer = await self.client.post(f"/v1/clusters/{name}/rotate", json=how)
        assert answer.status_code == 200, answer.text
        token: str = answer.json()["join_token"]
        return token

    async def enrol(self, node_id: str, token: str) -> tuple[Enrolment, Certificate]:
        enrolment = Enrolment(self.folder / f"id-{node_id}", node_id, ["127.0.0.1"])
        return enrolment, await enrolment.enrol(self.url, JoinToken.parse(token), token)

    def node(self, name: str, certificate: TlsFiles | None, cluster: str = "east", **options: Any) -> FakeNode:
        trust = gateway_context(self.ca / files.ROOT, certificate)
        return FakeNode(self.url, name, Role.PREFILL, self.info, cluster=cluster, tls=trust, **options)

    def refused(self, cause: str) -> float:
        """How many nodes were turned away for a cause, as /metrics counts them."""
        line = f'prfaas_nodes_refused_total{{cause="{cause}"}}'
        text = self.gateway.metrics.render().decode()
        return next(float(each.split()[-1]) for each in text.splitlines() if each.startswith(line))

    async def audited(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.client.get("/v1/audit")).json()["entries"]
        return found


@pytest.fixture
async def place(
    config: GatewayConfig, model: ServedModel, info: ModelInfo, tmp_path: Path
) -> AsyncIterator[Installation]:
    where = ["--root", str(tmp_path / "offline"), "--out", str(tmp_path / "ca"), "--host", "127.0.0.1"]
    assert CliRunner().invoke(certs, ["create", *where]).exit_code == 0
    ca = tmp_path / "ca"
    tls = {"tls_cert": ca / files.GATEWAY, "tls_key": ca / files.GATEWAY_KEY, "ca_dir": ca}
    changed = replace(config, node_certificate_s=3600.0, **tls)
    gateway = Gateway(changed, model, State(None))
    options = tls_options(changed)
    server = uvicorn.Server(uvicorn.Config(gateway, port=0, http=Front, ws=StreamProtocol, log_config=None, **options))
    server.config.load()
    assert server.config.ssl is not None
    count_refused(server.config.ssl, gateway.refusals)
    shown = followed(changed, server.config.ssl)
    assert shown is not None
    task = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
        await asyncio.sleep(0.005)
    url = f"https://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    trust = ssl.create_default_context(cafile=str(ca / files.ROOT))
    async with httpx.AsyncClient(base_url=url, verify=trust, timeout=30.0) as client:
        yield Installation(gateway, url, tmp_path, info, client, shown)
    server.should_exit = True
    await task
    gateway.close()


async def turned_away(node: FakeNode) -> str:
    """What a node that may not join is told: the field of a Refused, or how its stream could not be opened."""
    try:
        await node.start()
    except (websockets.InvalidStatus, websockets.InvalidMessage, ssl.SSLError, ConnectionError) as error:
        return type(error).__name__
    assert node.refused is not None
    return node.refused.field


async def test_a_node_joins_with_the_certificate_that_its_token_got_it(place: Installation) -> None:
    enrolment, certificate = await place.enrol("p1", await place.register("east"))
    assert certificate.name == NodeName("east", "p1", 0)
    assert 3000 < certificate.ends - time.time() <= 3600
    node = await place.node("p1", enrolment.files).start()
    assert node.refused is None
    assert [each.node_id for each in place.gateway.registry.nodes("east")] == ["p1"]
    await node.stop()


async def test_a_node_with_a_wrong_token_gets_nothing_and_it_is_logged_and_counted(
    place: Installation, caplog: pytest.LogCaptureFixture
) -> None:
    right = JoinToken.parse(await place.register("east"))
    wrong = JoinToken("east", b"x" * 32, right.root)
    with caplog.at_level(logging.WARNING), pytest.raises(NodeConfigError, match="not the one in force"):
        await place.enrol("p1", str(wrong))
    assert place.refused("wrong_token") == 1
    assert "cause=wrong_token" in caplog.text
    assert str(wrong)[15:] not in caplog.text
    entry = (await place.audited())[0]
    assert (entry["action"], entry["outcome"], entry["actor"]) == ("join", "wrong_token", "node p1")


async def test_a_token_that_has_expired_is_refused(place: Installation) -> None:
    await place.register("east")
    token = await place.rotate("east", hours=1e-7)
    await asyncio.sleep(0.01)
    with pytest.raises(NodeConfigError, match="has expired; make another with `prfaas clusters rotate east`"):
        await place.enrol("p1", token)
    assert place.refused("expired_token") == 1


async def test_a_token_works_no_more_once_another_is_made_but_who_joined_stays(place: Installation) -> None:
    first = await place.register("east")
    enrolment, _ = await place.enrol("p1", first)
    node = await place.node("p1", enrolment.files).start()
    second = await place.rotate("east")
    with pytest.raises(NodeConfigError, match="not the one in force"):
        await place.enrol("p2", first)
    await place.enrol("p2", second)
    assert [each.node_id for each in place.gateway.registry.nodes("east")] == ["p1"]
    await node.stop()


async def test_a_token_alone_opens_no_stream_where_certificates_are_needed(place: Installation) -> None:
    token = await place.register("east")
    assert await turned_away(place.node("p1", None, token=token)) == "InvalidStatus"
    assert await turned_away(place.node("p1", None)) == "InvalidStatus"
    assert place.refused("certificate_needed") == 2


async def test_revoking_dismisses_a_cluster_s_nodes_and_refuses_their_certificates(place: Installation) -> None:
    enrolment, _ = await place.enrol("p1", await place.register("east"))
    node = await place.node("p1", enrolment.files).start()
    token = await place.rotate("east", revoke=True)
    async with asyncio.timeout(5):
        while place.gateway.registry.nodes("east"):  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.01)
    await node.stop()
    assert await turned_away(place.node("p1", enrolment.files)) == "InvalidStatus"
    assert place.refused("certificate_revoked") == 1
    again, certificate = await place.enrol("p1", token)
    assert certificate.name.epoch == 1
    back = await place.node("p1", again.files).start()
    assert back.refused is None
    await back.stop()


async def test_a_removed_cluster_s_certificates_stay_revoked_when_it_is_registered_again(place: Installation) -> None:
    enrolment, _ = await place.enrol("p1", await place.register("east"))
    assert (await place.client.delete("/v1/clusters/east")).status_code == 200
    assert await turned_away(place.node("p1", enrolment.files)) == "InvalidStatus"
    await place.register("east")
    assert await turned_away(place.node("p1", enrolment.files)) == "InvalidStatus"
    assert place.refused("certificate_revoked") == 2


async def test_a_certificate_of_another_cluster_or_node_does_not_do(place: Installation) -> None:
    await place.register("west")
    enrolment, _ = await place.enrol("p1", await place.register("east"))
    assert await turned_away(place.node("p1", enrolment.files, cluster="west")) == "cluster"
    assert await turned_away(place.node("p2", enrolment.files)) == "node_id"
    assert (place.refused("other_cluster"), place.refused("other_node")) == (1, 1)


async def test_a_certificate_that_has_ended_or_of_another_root_does_not_pass_tls(place: Installation) -> None:
    await place.register("east")
    key, now = new_key(), time.time()
    request = CertificateRequest.parse(request_for(key, []))
    ours = files.read(place.ca, files.INTERMEDIATE, files.INTERMEDIATE_KEY)
    stranger = create_root("stranger", now, 1)
    for signer, begun in ((ours, now - 7200), (stranger, now)):
        name = NodeName("east", "p1", 0)
        certificate = signer.node(name, request, begun, 3600)
        path, own = place.folder / "shown.pem", place.folder / "key.pem"
        path.write_bytes(files.pem(certificate, signer.certificate))
        own.write_bytes(key_pem(key))
        assert await turned_away(place.node("p1", TlsFiles(path, own, place.ca / files.ROOT))) != "certificate"
    assert not place.gateway.registry.nodes("east")
    assert place.refused("certificate_refused") == 2


async def test_a_stream_ends_with_its_certificate_unless_that_is_renewed_over_it(place: Installation) -> None:
    enrolment, _ = await place.enrol("p1", await place.register("east"))
    node = await place.node("p1", enrolment.files).start()
    session = place.gateway.registry.node("p1")
    assert session is not None
    session.credentials = replace(session.credentials, until=time.time() + 0.3)
    await node.send(RenewCertificate(enrolment.request()))
    async with asyncio.timeout(5):
        while not node.jobs(CertificateIssued):  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.01)
    issued = node.jobs(CertificateIssued)[0]
    renewed = enrolment.take(issued.chain, issued.roots)
    assert session.credentials.until == renewed.ends
    session.credentials = replace(session.credentials, until=time.time() - 1)
    async with asyncio.timeout(10):
        while place.gateway.registry.node("p1") is not None:
            await node.heartbeat()
            await asyncio.sleep(0.05)
    assert session.lost == "certificate_expired"
    await node.stop()


async def rotated(place: Installation) -> None:
    """What an operator's `prfaas certs rotate` does, and what the running gateway does then."""
    where = ["--root", str(place.folder / "offline"), "--out", str(place.ca), "--host", "127.0.0.1"]
    assert CliRunner().invoke(certs, ["rotate", *where]).exit_code == 0
    place.shown.load()


async def test_another_root_takes_over_while_gateway_and_nodes_run(place: Installation) -> None:
    enrolment, certificate = await place.enrol("p1", await place.register("east"))
    own = gateway_context(None, enrolment.files)
    assert own is not None
    node = FakeNode(place.url, "p1", Role.PREFILL, place.info, cluster="east", tls=own)
    await node.start()
    root = create_root("prfaas root", time.time(), 10)
    files.write(place.folder / "offline", files.ROOT, files.ROOT_KEY, [root.certificate], root)
    await rotated(place)
    renewal = Renewal(
        enrolment,
        certificate,
        CertificateFiles(enrolment.files.cert, enrolment.files.key, [own], enrolment.files.ca, [own]),  # type: ignore[arg-type]
        lambda asked: None,
        never,
    )
    await node.send(RenewCertificate(enrolment.request()))
    async with asyncio.timeout(5):
        while not node.jobs(CertificateIssued):  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.01)
    renewal.issued(node.jobs(CertificateIssued)[0])
    await node.stop()
    await rotated(place)
    again = await FakeNode(place.url, "p1", Role.PREFILL, place.info, cluster="east", tls=own).start()
    assert again.refused is None
    await again.stop()
    trust = ssl.create_default_context(cadata=files.pem(root.certificate).decode())
    async with httpx.AsyncClient(base_url=place.url, verify=trust) as client:
        token = (await client.post("/v1/clusters/east/rotate", json={})).json()["join_token"]
    newer, _ = await place.enrol("p2", token)
    joined = await place.node("p2", newer.files).start()
    assert joined.refused is None
    await joined.stop()


async def test_a_node_that_shows_what_is_revoked_before_it_joins_does_not_join(place: Installation) -> None:
    enrolment, _ = await place.enrol("p1", await place.register("east"))
    node = place.node("p1", enrolment.files)
    async with websockets.connect(node.url, ssl=node.tls) as stream:
        await place.rotate("east", revoke=True)
        await stream.send(control.encode(node.join))
        answer = control.decode_to_node(await stream.recv())  # type: ignore[arg-type]
    assert isinstance(answer, Refused)
    assert answer.field == "certificate"
    assert place.refused("certificate_revoked") == 1
    revoked = Newcomer("east", "p1", time.time() + 60, 0)
    assert place.gateway._streams._door.renew(revoked, enrolment.request())[1].reason


async def test_an_authority_that_has_ended_makes_nodes_wait_and_not_give_up(
    place: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await place.register("east")
    issuer = place.gateway._streams._door._issuer
    assert issuer is not None
    ended = files.read(place.folder / "offline", files.ROOT, files.ROOT_KEY).intermediate("x", time.time() - 9000, 0.1)
    monkeypatch.setattr(issuer, "_authority", ended)
    with pytest.raises(NotEnrolled, match=r"503.*prfaas certs rotate"):
        await place.enrol("p1", token)


async def test_who_has_no_token_learns_nothing_of_clusters_and_is_not_listened_to_for_long(place: Installation) -> None:
    await place.register("east")
    told = []
    for name in ("east", "nowhere"):
        headers = {"Authorization": f"Bearer {JoinToken.fresh(name)}"}
        answer = await place.client.post("/v1/join", json={"node_id": "p1", "request": ""}, headers=headers)
        told.append((answer.status_code, answer.text.replace(name, "X")))
    assert told[0] == told[1]
    large = await place.client.post("/v1/join", content=b" " * 100_000)
    assert large.status_code == 413


async def test_a_heartbeat_of_a_node_that_has_not_joined_is_refused(place: Installation) -> None:
    enrolment, _ = await place.enrol("p1", await place.register("east"))
    node = place.node("p1", enrolment.files)
    node.join = Heartbeat(True, 0, 0, 0, 1, 1, 1.0, 1.0, 0)  # type: ignore[assignment]
    assert await turned_away(node) == "join"
    assert place.refused("not_joined") == 1


async def test_a_cluster_that_its_operator_registers_waits_for_an_admin(place: Installation) -> None:
    place.gateway.keys.create("root", KeyRole.ADMIN, False, None)
    _, secret = place.gateway.keys.create("of east", KeyRole.OPERATOR, False, frozenset({"east"}))
    theirs = {"Authorization": f"Bearer {secret}"}
    made = await place.client.post("/v1/clusters", json={"name": "east"}, headers=theirs)
    assert (made.status_code, made.json()["state"]) == (201, "pending")
    with pytest.raises(NotEnrolled, match="503"):
        await place.enrol("p1", made.json()["join_token"])
    approving = await place.client.post("/v1/clusters/east/approve", headers=theirs)
    assert approving.status_code == 403
    place.gateway.registry.approve("east")
    _, certificate = await place.enrol("p1", made.json()["join_token"])
    assert certificate.name.cluster == "east"


async def test_a_gateway_in_between_is_noticed_before_the_token_is_sent(place: Installation) -> None:
    token = JoinToken.parse(await place.register("east"))
    other = JoinToken(token.cluster, token.secret, b"r" * 32)
    with pytest.raises(NodeConfigError, match="does not have the root"):
        await place.enrol("p1", str(other))
    assert place.refused("wrong_token") == 0


async def test_an_enrolment_request_that_is_none_names_its_field(place: Installation) -> None:
    token = await place.register("east")
    headers = {"Authorization": f"Bearer {token}"}
    for body, field in (
        ({"node_id": "p1", "request": "!!"}, "request"),
        ({"node_id": "p1", "request": base64.b64encode(b"none").decode()}, "request"),
        ({"node_id": "a b", "request": ""}, "node_id"),
        ({"request": ""}, "node_id"),
    ):
        answer = await place.client.post("/v1/join", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_a_node_starts_again_with_the_certificate_that_it_kept(place: Installation) -> None:
    token = await place.register("east")
    enrolment, certificate = await place.enrol("p1", token)
    again = Enrolment(place.folder / "id-p1", "p1", [])
    assert again.kept("east", time.time()) == certificate
    assert again.kept("west", time.time()) is None
    assert again.kept("east", certificate.ends + 1) is None
    for name in ("node.pem", "node-key.pem"):
        assert (place.folder / "id-p1" / name).stat().st_mode & 0o777 == 0o600
    (place.folder / "id-p1" / "node.pem").write_text("torn")
    assert again.kept("east", time.time()) is None
    await again.enrol(place.url, JoinToken.parse(token), token)
    again.forget()
    again.forget()
    assert again.kept("east", time.time()) is None
    del enrolment


# ---- without certificates


async def test_without_certificates_a_cluster_s_token_admits_its_nodes_and_no_others(stage: Open) -> None:
    one = await stage()
    tokens = {}
    for name in ("east", "west"):
        tokens[name] = (await one.client.post("/v1/clusters", json={"name": name})).json()["join_token"]
    assert (await one.node("p", Role.PREFILL, cluster="east", token=tokens["east"])).refused is None
    other = await FakeNode(one.url, "q", Role.PREFILL, one.info, cluster="east", token=tokens["west"]).start()
    assert other.refused is not None
    assert other.refused.field == "cluster"


async def test_a_gateway_without_certificates_says_so(stage: Open) -> None:
    one = await stage()
    answer = await one.client.get("/v1/join/roots")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_authority")


@pytest.mark.parametrize("host", ["10.1.2.3", "kv.east.example"])
async def test_a_node_may_only_say_that_it_is_where_its_cluster_was_registered(stage: Open, host: str) -> None:
    one = await stage()
    body = {"name": "east", "endpoints": ["10.1.0.0/16", "kv.east.example"]}
    assert (await one.client.post("/v1/clusters", json=body)).status_code == 201
    terms = one.gateway.registry.cluster("east").terms
    assert terms.reaches(host)
    assert not terms.reaches("10.2.0.1")
    assert not terms.reaches("kv.west.example")
    away = await FakeNode(one.url, "p", Role.PREFILL, one.info, cluster="east").start()
    assert away.refused is not None
    assert away.refused.field == "kv_address"


async def test_a_cluster_serves_the_models_that_it_was_registered_for(stage: Open) -> None:
    one = await stage()
    await one.client.post("/v1/clusters", json={"name": "east", "models": ["other"]})
    away = await FakeNode(one.url, "p", Role.PREFILL, one.info, cluster="east").start()
    assert away.refused is not None
    assert (away.refused.field, "other only" in away.refused.reason) == ("model", True)


async def test_a_node_of_another_cluster_does_not_take_a_node_s_place_by_what_its_peers_know(stage: Open) -> None:
    one = await stage()
    one.register("east")
    decode = await one.node("d", Role.DECODE)
    thief = FakeNode(one.url, "d", Role.PREFILL, one.info, cluster="east", incarnation=decode.join.incarnation)
    thief.join = msgspec.structs.replace(thief.join, public_key=decode.join.public_key)
    await thief.start()
    assert thief.refused is not None
    assert thief.refused.field == "node_id"
    assert [(each.node_id, each.join.cluster) for each in one.gateway.registry.nodes()] == [("d", "local")]


async def test_what_a_stranger_calls_itself_is_safe_on_a_terminal(stage: Open) -> None:
    one = await stage()
    await FakeNode(one.url, "\x1b]0;owned\x07", Role.PREFILL, one.info, cluster="e\nast").start()
    entry = (await one.client.get("/v1/audit")).json()["entries"][0]
    assert (entry["actor"], entry["cluster"]) == ("node ?]0;owned?", "e?ast")
    assert entry["detail"].isprintable()


async def test_an_operator_of_one_cluster_sees_and_changes_only_that_one(stage: Open) -> None:
    one = await stage()
    for name in ("east", "west"):
        await one.client.post("/v1/clusters", json={"name": name})
    await one.node("pe", Role.PREFILL, cluster="east")
    await one.node("pw", Role.PREFILL, cluster="west")
    one.gateway.keys.create("root", KeyRole.ADMIN, False, None)
    _, secret = one.gateway.keys.create("of east", KeyRole.OPERATOR, False, frozenset({"east"}))
    client = httpx.AsyncClient(base_url=one.url, headers={"Authorization": f"Bearer {secret}"})
    async with client:
        clusters = (await client.get("/v1/clusters")).json()["clusters"]
        nodes = (await client.get("/v1/nodes")).json()["nodes"]
        assert ([c["name"] for c in clusters], [n["node_id"] for n in nodes]) == (["east"], ["pe"])
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/drain"), ("POST", "/rotate"), ("GET", "/nodes")):
            answer = await client.request(method, f"/v1/clusters/west{path}", json={})
            assert answer.status_code == 404, path
        for path in ("/v1/status", "/v1/decisions", "/metrics", "/v1/topology"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cluster_scope"), path
        assert (await client.post("/v1/clusters", json={"name": "north"})).status_code == 403
        trusting = await client.patch("/v1/clusters/east", json={"trusted": True})
        assert (trusting.status_code, trusting.json()["error"]["param"]) == (403, "trusted")
        priced = await client.patch("/v1/clusters/east", json={"prices": {"egress_per_gb": 0.01}})
        assert priced.status_code == 200
        assert (await client.post("/v1/clusters/east/drain")).status_code == 200
        entries = (await client.get("/v1/audit")).json()["entries"]
        assert {entry["cluster"] for entry in entries} == {"east"}
        assert entries[0]["action"] == "POST /v1/clusters/east/drain"


async def test_changes_are_audited_with_who_made_them_and_what_came_of_it(stage: Open) -> None:
    one = await stage()
    await one.client.post("/v1/clusters", json={"name": "east"})
    await one.client.post("/v1/clusters/east/approve")
    await one.client.delete("/v1/clusters/nowhere")
    await one.client.post("/tokenize", json={"prompt": "secret words"})
    entries = (await one.client.get("/v1/audit")).json()["entries"]
    assert [(e["actor"], e["action"], e["outcome"]) for e in entries] == [
        ("loopback", "DELETE /v1/clusters/nowhere", "404"),
        ("loopback", "POST /v1/clusters/east/approve", "200"),
        ("loopback", "POST /v1/clusters", "201"),
    ]


def test_certificates_need_tls_and_replace_the_token_of_all(config: GatewayConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-cert"):
        replace(config, ca_dir=tmp_path)
    with pytest.raises(ConfigError, match="--join-token-file"):
        replace(config, ca_dir=tmp_path, tls_cert=tmp_path, tls_key=tmp_path, join_token="t")


def test_what_is_known_of_a_cluster_s_credentials_is_kept(tmp_path: Path, model: ServedModel) -> None:
    state = State(tmp_path / "state.db")
    registry = Registry(state, "local", model.fingerprint, 100)
    for name in ("east", "local"):
        cluster: Cluster = registry.register(name, Dial.IN) if name == "east" else registry.cluster(name)
        JoinTokens(registry, None).make(cluster)
    kept = {cluster.name: cluster.security for cluster in registry.clusters}
    again = Registry(State(tmp_path / "state.db"), "local", model.fingerprint, 100)
    assert {cluster.name: cluster.security for cluster in again.clusters} == kept
    assert all(security.token for security in kept.values())
