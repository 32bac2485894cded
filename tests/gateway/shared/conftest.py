"""One redis-server for the tests of a module, empty at the start of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gateway.shared.link import RedisLink
from gateway.shared.redis_url import parse_redis
from tests.redis_server import REDIS, RedisServer, running_redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if REDIS is None:
        pytest.skip("redis-server is not installed")
    with running_redis() as found:
        yield found


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    server.say("FLUSHALL")
    return server


@pytest.fixture
async def link(redis: RedisServer) -> AsyncIterator[Callable[[], RedisLink]]:
    """``link()`` is a connection as each gateway has its own."""
    opened: list[RedisLink] = []

    def another() -> RedisLink:
        opened.append(RedisLink(parse_redis(redis.url)))
        return opened[-1]

    yield another
    for one in opened:
        await one.close()
