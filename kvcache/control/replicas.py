"""What gateways that share their state tell nodes of each other: a node holds one stream to every one of them."""

from __future__ import annotations

import msgspec

MAX_GATEWAYS = 64
"""That share one state; a node holds no more streams than this."""


class Siblings(msgspec.Struct, frozen=True, tag=True):
    """URLs of the other gateways that share the state of this one, as an operator would name them to a node.

    Said whenever they change. Where a node will not speak with one (in the clear, off the loopback), it says so and
    stays with the others. Only for nodes whose Join says that they know it.
    """

    urls: tuple[str, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Another gateway answers at this one's address from now on, and this one ends when its answers have.

    A node joins the other one there and goes on serving this one. Only for nodes whose Join says ``siblings``.
    """


class Already(msgspec.Struct, frozen=True, tag=True):
    """Instead of Welcome: the node's Join names this gateway among those that it holds a stream to.

    Two addresses may lead to one gateway, and one address may lead to several in turn.
    """

    gateway: str
