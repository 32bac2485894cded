"""The gateways of a node: one control stream to each, also to those that the first of them tells of.

Gateways that share their state act as one. Each gives jobs over its own stream and hears of them over that alone; a
stream that breaks ends the jobs of its gateway and no others. What all must know, such as heartbeats, each is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvcache.control import FromNode, Heartbeat, Join, Order, Welcome
from kvcache.control.replicas import MAX_GATEWAYS, Leaving, Siblings
from node.config import ConfigError, stream_url
from node.control import ControlHandler, ControlStream, NodeRefused

log = logging.getLogger(__name__)

REFUSED_RETRY_S = 30.0
"""How long a gateway that others told of, and that refused this node, is left alone."""
BEAT_GATHER_S = 0.1
"""How long changes of load are gathered before the other gateways are told."""

Dial = Callable[[str, ControlHandler], ControlStream]


class GatewayHandler(Protocol):
    """What the streams ask of their node. A gateway is named by the URL of its stream. All calls return at once."""

    def join(self) -> Join:
        """The first message of every session."""

    def heartbeat(self, gateway: str) -> Heartbeat:
        """This node as it is now, for one gateway."""

    def on_welcome(self, gateway: str, welcome: Welcome) -> None:
        """A session has begun."""

    def on_order(self, gateway: str, order: Order) -> None:
        """A gateway wants something."""

    def on_disconnected(self, gateway: str, cause: str) -> None:
        """A session is over, and with it all that its gateway asked for."""


class Gateways:
    """``run`` keeps one session with every gateway, ``urls`` being those that an operator named."""

    def __init__(self, urls: Sequence[str], handler: GatewayHandler, dial: Dial) -> None:
        self._handler = handler
        self._named = tuple(dict.fromkeys(urls))
        self._dial = dial
        self._sessions: dict[str, _Session] = {}
        self._told_by: dict[str, frozenset[str]] = {}
        self._running: dict[asyncio.Task[None], str] = {}
        self._names: dict[str, str] = {}
        """Of URLs at which one gateway took over from another: the name of the present one's session."""
        self._changed = asyncio.Event()
        self._beat_timer: asyncio.TimerHandle | None = None

    @property
    def joined(self) -> list[str]:
        """Gateways with an open session."""
        return [url for url, session in self._sessions.items() if session.stream.joined]

    def stream(self, gateway: str) -> ControlStream:
        """The stream to a gateway that has ever joined."""
        return self._sessions[gateway].stream

    def send(self, gateway: str, message: FromNode) -> None:
        """Tell one gateway; without a session it is dropped, as its jobs are over anyway."""
        session = self._sessions.get(gateway)
        if session is not None:
            session.stream.send(message)

    def send_all(self, message: FromNode) -> None:
        """Tell every gateway with an open session."""
        for session in self._sessions.values():
            session.stream.send(message)

    async def flush(self, timeout_s: float) -> None:
        """Return when all that was sent is written, or after ``timeout_s``."""
        await asyncio.gather(*(session.stream.flush(timeout_s) for session in self._sessions.values()))

    def beat_now(self) -> None:
        """Send every gateway a heartbeat without waiting for the next second."""
        for session in self._sessions.values():
            session.stream.beat_now()

    def beat_soon(self) -> None:
        """The load has changed: where there are several gateways, each must know what the others put here."""
        if self._beat_timer is None and len(self.joined) > 1:
            self._beat_timer = asyncio.get_running_loop().call_later(BEAT_GATHER_S, self._beat_gathered)

    async def run(self) -> None:
        """Join and rejoin until cancelled. Raises NodeRefused where a gateway that an operator named refuses."""
        try:
            while True:
                self._follow()
                news = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait({news, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                self._changed.clear()
                for task in [task for task in self._running if task.done()]:
                    self._ended(task)
        finally:
            if self._beat_timer is not None:
                self._beat_timer.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _follow(self) -> None:
        """Begin what is wanted, end what nobody speaks of any more and is away."""
        told = {url for urls in self._told_by.values() for url in urls}
        urls = [*self._named, *sorted(told.difference(self._named))][:MAX_GATEWAYS]
        wanted = [self._names.get(url, url) for url in urls]
        for url in wanted:
            if url not in self._sessions:
                log.info("gateway known url=%s", url)
                session = self._sessions[url] = _Session(url, self._handler, self)
                session.stream = self._dial(_url_of(url), session)
                self._running[asyncio.create_task(session.stream.run())] = url
        for task, url in list(self._running.items()):
            if url not in wanted and not self._sessions[url].stream.joined:
                log.info("gateway forgotten url=%s", url)
                task.cancel()
                del self._running[task], self._sessions[url]

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A stream gives up for good only where it was refused. Raises what it raised, for a gateway that was named."""
        url = self._running.pop(task)
        error = task.exception()
        if not isinstance(error, NodeRefused) or _url_of(url) in self._named:
            task.result()
        log.error("gateway url=%s refused this node: %s", url, error)
        asyncio.get_running_loop().call_later(REFUSED_RETRY_S, self._retry, url)

    def _retry(self, url: str) -> None:
        self._sessions.pop(url, None)
        self._changed.set()

    def _beat_gathered(self) -> None:
        self._beat_timer = None
        self.beat_now()

    # ---- what the sessions say

    def ids(self) -> tuple[str, ...]:
        """The gateways with an open session, by the names that they gave themselves."""
        return tuple(s.gateway for s in self._sessions.values() if s.gateway and s.stream.joined)

    def told(self, by: str, siblings: Siblings) -> None:
        """A gateway says which others there are."""
        urls = set()
        for each in siblings.urls[:MAX_GATEWAYS]:
            try:
                urls.add(stream_url(each))
            except ConfigError as error:
                log.warning("sibling of %s is not joined: %s", by, error)
        self._told_by[by] = frozenset(urls)
        self._changed.set()

    def leaves(self, name: str) -> None:
        """Another gateway answers at the URL of this one, which keeps its session until it ends it."""
        url = _url_of(name)
        if self._names.get(url, url) == name:
            turns = int(name.partition("#")[2] or 0)
            self._names[url] = f"{url}#{turns + 1}"
            self._changed.set()

    def lost(self, url: str) -> None:
        """A session is over; what its gateway told of others counts no more."""
        self._told_by.pop(url, None)
        self._changed.set()


def _url_of(name: str) -> str:
    """Where to dial for a session: one that succeeds another at the same URL has a number after it in its name."""
    return name.partition("#")[0]


class _Session:
    """One gateway's side of the node: what its stream hears, under its name."""

    stream: ControlStream

    def __init__(self, url: str, handler: GatewayHandler, gateways: Gateways) -> None:
        self._url = url
        self._handler = handler
        self._gateways = gateways
        self.gateway = ""

    def join(self) -> Join:
        self.gateway = ""
        return msgspec.structs.replace(self._handler.join(), siblings=True, gateways=self._gateways.ids())

    def heartbeat(self) -> Heartbeat:
        return self._handler.heartbeat(self._url)

    def on_welcome(self, welcome: Welcome) -> None:
        self.gateway = welcome.gateway
        self._handler.on_welcome(self._url, welcome)

    def on_order(self, order: Order | Siblings | Leaving) -> None:
        if isinstance(order, Siblings):
            self._gateways.told(self._url, order)
        elif isinstance(order, Leaving):
            self._gateways.leaves(self._url)
        else:
            self._handler.on_order(self._url, order)

    def on_disconnected(self, cause: str) -> None:
        self._handler.on_disconnected(self._url, cause)
        self._gateways.lost(self._url)
