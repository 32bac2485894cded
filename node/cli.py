"""``prfaas node``: one machine of a cluster."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import click

from engines.protocol import EngineLost, Loading
from kvcache.blocks import BLOCK_TOKENS
from kvcache.checkpoints import CheckpointPolicy
from kvcache.layout import DType
from kvcache.logs import LogFormat, set_up_logging
from kvcache.process_options import process_options
from kvcache.transport import InsecureBind
from kvcache.wire import Role
from node import config as parsing
from node.config import ConfigError, NodeConfig, TlsFiles
from node.control import NodeRefused
from node.engines import EMBEDDED, ENGINES, EngineChoice, engine_choice, start_engine
from node.enrolment import enrolled, identity_folder
from node.model import NodeModel
from node.node import Node
from node.tiers import tier_config
from node.topology.machine import ThisMachine

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--role", type=click.Choice(["prefill", "decode"]), required=True, help="What this node does.")
@click.option("--cluster", required=True, help="The cluster that it belongs to.")
@click.option(
    "--gateway",
    "gateways",
    multiple=True,
    required=True,
    help="A gateway's URL; https off the loopback. May be repeated; one that shares its state tells of the others.",
)
@click.option(
    "--model", "model_dir", type=click.Path(file_okay=False, path_type=Path), required=True, help="Model directory."
)
@click.option("--model-name", help="The name it is served under; default: the directory's.")
@click.option(
    "--dtype",
    type=click.Choice([d.value for d in DType]),
    default=DType.BFLOAT16.value,
    show_default=True,
    help="Of the KV cache and of the computation; the same on all nodes.",
)
@click.option("--node-id", help="Default: made from host, role and a random part.")
@click.option("--kv-host", help="Address to bind the KV port to; default 127.0.0.1.")
@click.option("--kv-port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--kv-advertise", metavar="HOST:PORT", help="Where peers reach the KV port, if not where it is bound.")
@click.option("--dial", type=click.Choice(["in", "out"]), help="in: open a KV port; out: only dial, open none.")
@click.option(
    "--kv-connections",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    help="Kept to each KV peer that this node dials; transfers stripe over them.",
)
@click.option("--pool-mib", type=click.IntRange(1, 1 << 22), default=512, show_default=True, help="Host pool of KV.")
@click.option("--engine", type=click.Choice(ENGINES), default=EMBEDDED, show_default=True, help="What computes.")
@click.option(
    "--engine-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="vLLM: the Python of the venv that it is installed in.",
)
@click.option("--engine-args", default="", help="vLLM: further arguments of its server, as one text.")
@click.option("--engine-connector", type=_FILE, help="vLLM: JSON of another KV connector to run beside ours.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Of the engine.")
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1, 1 << 20),
    default=256,
    show_default=True,
    help="Of a prompt, computed at once; the same on all nodes.",
)
@click.option("--max-queue", type=click.IntRange(1, 1 << 16), default=32, show_default=True, help="Jobs that may wait.")
@click.option(
    "--max-running", type=click.IntRange(1, 1 << 12), default=16, show_default=True, help="Answers spoken at once."
)
@click.option(
    "--shared-memory/--no-shared-memory",
    default=True,
    show_default=True,
    help="KV to and from other nodes of this host, of the same user, goes through memory.",
)
@click.option(
    "--nixl",
    is_flag=True,
    help="KV to and from hosts with RDMA in common goes by NIXL: only where all of them trust each other.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    show_default=True,
    help="Keep KV of finished work in what the pool has to spare, for prompts that begin alike.",
)
@click.option(
    "--tier-disk",
    type=click.Path(file_okay=False, path_type=Path),
    help="A directory for files of what the pool lets go of; private to this node. Best on a local NVMe disk.",
)
@click.option("--tier-disk-mib", type=click.IntRange(1, 1 << 32), help="How much of it to use.  [default: 4096]")
@click.option("--tier-disk-keep", is_flag=True, help="Keep the files over an orderly stop, too.")
@click.option("--tier-cxl-mib", type=click.IntRange(0, 1 << 32), default=0, help="CXL memory to use; none by default.")
@click.option(
    "--tier-cxl-numa", type=click.IntRange(0, 1023), help="Its NUMA node.  [default: the first of CXL memory]"
)
@click.option(
    "--snapshot-interval",
    type=click.IntRange(0, 1 << 20),
    default=CheckpointPolicy().interval,
    show_default=True,
    help="Tokens between snapshots of windows and states on a prompt's way; there is one at its end in any case.",
)
@click.option(
    "--kv-events-endpoint", metavar="tcp://HOST:PORT", help="Publish events of the prefix cache over ZMQ, as vLLM does."
)
@click.option("--kv-events-replay-endpoint", metavar="tcp://HOST:PORT", help="Where missed ones can be asked for.")
@click.option(
    "--kv-events-insecure-network",
    is_flag=True,
    help="Let both be off the loopback: they ask for no credentials, and prompts' token ids can be read there.",
)
@click.option("--place", metavar="region=R,zone=Z,rack=K,host=H", help="Where this machine stands; any of the four.")
@click.option("--pod-labels", type=_FILE, help="A file of the Kubernetes downward API with topology labels.")
@click.option("--join-token-file", type=_FILE, help="One line: the join token of the cluster, or of the gateway.")
@click.option(
    "--identity-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Private folder that keeps the certificate got for the join token.  [default: asked for at every start]",
)
@click.option("--gateway-ca", type=_FILE, help="Root of the gateway's certificate, if not a public one.")
@click.option("--kv-tls-cert", type=_FILE, help="PEM certificate shown to KV peers, where none comes by a token.")
@click.option("--kv-tls-key", type=_FILE, help="PEM private key of --kv-tls-cert.")
@click.option("--kv-tls-ca", type=_FILE, help="Root that KV peers are checked against.")
@process_options
def node(
    role: str,
    cluster: str,
    gateways: tuple[str, ...],
    model_dir: Path,
    model_name: str | None,
    dtype: str,
    node_id: str | None,
    kv_host: str | None,
    kv_port: int,
    kv_advertise: str | None,
    dial: str | None,
    kv_connections: int,
    shared_memory: bool,
    nixl: bool,
    pool_mib: int,
    engine: str,
    engine_python: Path | None,
    engine_args: str,
    engine_connector: Path | None,
    threads: int,
    chunk_tokens: int,
    max_queue: int,
    max_running: int,
    prefix_cache: bool,
    tier_disk: Path | None,
    tier_disk_mib: int | None,
    tier_disk_keep: bool,
    tier_cxl_mib: int,
    tier_cxl_numa: int | None,
    snapshot_interval: int,
    kv_events_endpoint: str | None,
    kv_events_replay_endpoint: str | None,
    kv_events_insecure_network: bool,
    place: str | None,
    pod_labels: Path | None,
    join_token_file: Path | None,
    identity_dir: Path | None,
    gateway_ca: Path | None,
    kv_tls_cert: Path | None,
    kv_tls_key: Path | None,
    kv_tls_ca: Path | None,
    otlp_endpoint: str | None,
    log_format: str,
) -> None:
    """Run a node of a cluster until SIGTERM or Ctrl-C."""
    set_up_logging(LogFormat(log_format))
    try:
        role_ = Role[role.upper()]
        port = parsing.kv_port(role_, dial, kv_host, kv_port, kv_advertise)
        join_token = parsing.read_secret(join_token_file, "--join-token-file")
        settings = NodeConfig(
            role=role_,
            cluster=parsing.name(cluster, "--cluster"),
            node_id=parsing.name(node_id, "--node-id") if node_id else parsing.default_node_id(role_),
            stream_urls=tuple(parsing.stream_url(gateway) for gateway in gateways),
            gateway_ca=gateway_ca,
            join_token=join_token,
            model_dir=model_dir,
            model_name=model_name or model_dir.resolve().name,
            dtype=DType(dtype),
            kv_port=port,
            kv_tls=parsing.check_tls(TlsFiles(kv_tls_cert, kv_tls_key, kv_tls_ca), port, join_token),
            kv_connections=kv_connections,
            shared_memory=shared_memory,
            nixl=nixl,
            pool_bytes=pool_mib << 20,
            threads=threads,
            chunk_tokens=chunk_tokens,
            max_queue=max_queue,
            max_running=max_running,
            prefix_cache=prefix_cache,
            tiers=tier_config(
                tier_disk,
                tier_disk_mib,
                tier_disk_keep,
                tier_cxl_mib,
                tier_cxl_numa,
                prefix_cache=prefix_cache,
                machine=ThisMachine(),
            ),
            checkpoints=parsing.checkpoints(snapshot_interval, BLOCK_TOKENS),
            kv_events=parsing.event_endpoints(
                kv_events_endpoint, kv_events_replay_endpoint, kv_events_insecure_network
            ),
            place=parsing.place(place, pod_labels),
            otlp_endpoint=otlp_endpoint,
        )
        choice = engine_choice(engine, engine_python, engine_args, engine_connector)
        with identity_folder(identity_dir) as folder:
            asyncio.run(_run(settings, folder, gateways, choice))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except (NodeRefused, EngineLost, InsecureBind, OSError) as error:
        raise click.ClickException(str(error)) from error


async def _run(config: NodeConfig, folder: Path, gateways: Sequence[str], choice: EngineChoice) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    model = await asyncio.to_thread(NodeModel.read, config.model_dir, config.dtype)
    enrolling = asyncio.create_task(enrolled(config, folder, gateways))
    if not await _unless(stop, enrolling):
        return
    node = Node(config, model, start_engine(choice, config, model, _Progress(config.node_id)), enrolling.result())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, node.reload_certificate)
    try:
        if not await _unless(stop, node.start()):
            return
        announcing = asyncio.create_task(_announce(config, node))
        try:
            await node.run(stop)
        finally:
            announcing.cancel()
    finally:
        await node.close()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None] | asyncio.Task[Any]) -> bool:
    """Do ``work``; False where ``stop`` came first and it was given up."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        return False
    task.result()
    return True


async def _announce(config: NodeConfig, node: Node) -> None:
    await node.joined()
    address = node.kv_address
    where = f"kv {address.host}:{address.port}" if address is not None else "dials only"
    role = config.role.name.lower()
    click.echo(f"prfaas node: {config.node_id} ready ({role}, {config.cluster}, {where})", err=True)


class _Progress:
    """Says on stderr what an engine is loading: every stage once, and every quarter of it."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._said = ("", -1)

    def __call__(self, loading: Loading) -> None:
        step = (loading.stage, int(loading.fraction * 4))
        if step != self._said:
            self._said = step
            click.echo(f"prfaas node: {self._node_id} {loading.stage} {step[1] * 25} %", err=True)
