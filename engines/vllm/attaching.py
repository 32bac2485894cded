"""How a worker inside vLLM reaches its node: connect, map the pool, say what it is, and follow commands from then on.

It ends with its node: where the socket closes nobody can dismiss jobs or free pages any more, and the process exits.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engines.channel import ChannelError, MessageChannel
from engines.protocol import StoreCommand
from engines.vllm.blocks import LayerBlocks
from engines.vllm.memory import PoolMemory
from engines.vllm.messages import (
    GREETING,
    Attached,
    Dismiss,
    Enlist,
    PoolInfo,
    Refusal,
    ToWorker,
    to_worker,
)
from engines.vllm.outbox import Outbox
from engines.vllm.working import Working
from kvcache.blocks import PageGeometry
from kvcache.hostpool import HostPool

CONNECT_S = 10.0

Layers = Callable[[PoolInfo], Mapping[str, LayerBlocks]]
"""This worker's layers, by vLLM's names, for a pool and layout. Raises ValueError, saying why they do not fit."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One worker among those of its server, and what it says of its cache."""

    rank: int
    ranks: int
    packing: str
    block_tokens: tuple[int, ...]


def attach(path: str, identity: Identity, layers: Layers) -> Working:
    """Connect to the node at ``path`` and serve it. Raises OSError, ChannelError, and ValueError for what cannot be."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_S)
    sock.connect(path)
    greeting, fds, _, _ = socket.recv_fds(sock, len(GREETING), 1)
    if greeting != GREETING or len(fds) != 1:
        raise ChannelError("the node passed no pool")
    channel: MessageChannel[ToWorker] = MessageChannel(sock, to_worker)
    info = channel.receive()
    if not isinstance(info, PoolInfo):
        raise ChannelError("the node said nothing of its pool")
    memory = PoolMemory(HostPool(fds[0], info.page_bytes, info.pages))
    geometry = PageGeometry(info.layout, info.block_tokens, info.page_bytes)
    try:
        found = layers(info)
    except ValueError as error:
        channel.send(Refusal(str(error)))
        raise
    outbox = Outbox(channel.send, _leave)
    working = Working(geometry, info.chunk_tokens, memory, found, outbox.put)
    threading.Thread(target=_follow, args=(channel, working), daemon=True, name="prfaas-commands").start()
    outbox.put(Attached(identity.rank, identity.ranks, identity.packing, identity.block_tokens))
    return working


def _follow(channel: MessageChannel[ToWorker], working: Working) -> None:
    while (command := channel.receive()) is not None:
        match command:
            case Enlist():
                working.enlist(command)
            case StoreCommand():
                working.store(command)
            case Dismiss():
                working.dismiss(command)
    _leave()


def _leave() -> None:
    """The node is gone: nothing here may touch its pool for anybody."""
    os._exit(0)
