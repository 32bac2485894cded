"""Whom to exchange KV with, and what must be proved there. An address is never one that a peer chose."""

from __future__ import annotations

import msgspec

from kvcache.quality import Quality


class KvAddress(msgspec.Struct, frozen=True):
    """Where a node's KV port is reached: the advertised address, which may differ from the bound one."""

    host: str
    port: int


class KvPeer(msgspec.Struct, frozen=True):
    """Whom to dial: the registered address, and which node, incarnation and key must be proved there."""

    node_id: str
    incarnation: str
    public_key: bytes
    address: KvAddress


class KvSource(msgspec.Struct, frozen=True):
    """Where a generation's KV comes from: the node that proves this key. ``dial`` None: wait until it dials in.

    ``quality`` bounds the codecs that the decode node offers, and so those that the prefill node may use.
    """

    ticket: bytes
    node_id: str
    incarnation: str
    public_key: bytes
    dial: KvAddress | None
    quality: Quality = Quality.EXACT
