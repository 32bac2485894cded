"""How a gateway steers a node beside its jobs: role, rates, probes, events, and that it is to end."""

from __future__ import annotations

import msgspec

from kvcache.wire import Role


class ChangeRole(msgspec.Struct, frozen=True, tag=True):
    """Take no new jobs, finish those at hand within ``settle_s``, then play ``role``.

    ``epoch`` must be above that of every order before, and ``incarnation`` the node's own. Only for nodes whose Join
    says that they know it.
    """

    role: Role
    epoch: int
    incarnation: str
    settle_s: float


class RoleChanged(msgspec.Struct, frozen=True, tag=True):
    """The answer to a ChangeRole: ``role`` is what this node plays now, ``changed`` whether it obeyed.

    ``cause`` of a refusal: stale_epoch, incarnation or busy.
    """

    epoch: int
    role: Role
    changed: bool
    cause: str = ""
    detail: str = ""


class RateLease(msgspec.Struct, frozen=True, tag=True):
    """How fast this node may send KV to all its peers together; 0 is no limit. It stands until the next one comes."""

    egress_bytes_per_s: float


class ProbeLink(msgspec.Struct, frozen=True, tag=True):
    """Measure the idle way to a KV peer with about this many bytes; transfers come first. LinkReports have the result.

    Only for nodes whose Join says that they know it.
    """

    peer_node: str
    nbytes: int


class ReplayKvEvents(msgspec.Struct, frozen=True, tag=True):
    """Send KvEvents from this number on, and go on with new ones.

    A node that has them no longer begins anew: a batch that clears everything, then all that it holds.
    """

    start_seq: int


class KvEvents(msgspec.Struct, frozen=True, tag=True):
    """What changed in this node's prefix cache: a batch as ``kvcache.kv_events`` writes it, and as ZMQ publishes it.

    ``seq`` goes up by one with each, and starts at 0 with each incarnation. None is sent before ReplayKvEvents asks.
    """

    seq: int
    payload: bytes


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new jobs; finish those at hand."""
