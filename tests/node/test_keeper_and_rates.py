"""An engine that is lost is replaced; what a node says of its speed is what it measured."""

import asyncio

import pytest

from engines.protocol import EngineLost
from kvcache.control import Delta, Failed, Finished, PrefillDone
from node.backoff import Backoff
from node.keeper import EngineKeeper
from node.rates import Rates


class Engine:
    """Only lives and dies."""

    def __init__(self):
        self.death = asyncio.get_running_loop().create_future()
        self.closed = False

    async def wait_lost(self):
        return await asyncio.shield(self.death)

    async def close(self):
        self.closed = True


class Starts:
    """Starts engines, or fails to as often as it is told."""

    def __init__(self):
        self.engines = []
        self.failures = 0

    async def __call__(self):
        if self.failures:
            self.failures -= 1
            raise EngineLost("no memory")
        self.engines.append(Engine())
        return self.engines[-1]


async def settled():
    await asyncio.sleep(0.05)


async def test_a_lost_engine_is_replaced_and_both_changes_are_told():
    starts, seen = Starts(), []
    keeper = EngineKeeper(starts, lambda: seen.append((keeper.engine, keeper.detail)), Backoff(0.001, 0.002))
    await keeper.start()
    running = asyncio.create_task(keeper.run())
    starts.failures = 2
    starts.engines[0].death.set_result("killed")
    await settled()
    assert keeper.engine is starts.engines[1]
    assert seen[0] == (None, "engine lost: killed")
    assert seen[1] == (None, "engine does not start: no memory")
    assert seen[-1] == (starts.engines[1], "")
    running.cancel()
    await keeper.close()
    await keeper.close()
    assert starts.engines[1].closed
    assert keeper.engine is None


async def test_a_model_that_never_ran_is_not_tried_again():
    starts = Starts()
    starts.failures = 1
    keeper = EngineKeeper(starts, lambda: None)
    with pytest.raises(EngineLost, match="no memory"):
        await keeper.start()


async def test_an_engine_that_keeps_dying_is_started_ever_more_rarely():
    starts, steps = Starts(), []
    backoff = Backoff(0.001, 0.004, uniform=lambda low, high: steps.append(high) or 0.0)
    keeper = EngineKeeper(starts, lambda: None, backoff)
    await keeper.start()
    running = asyncio.create_task(keeper.run())
    for n in range(4):
        starts.engines[n].death.set_result("again")
        await settled()
    assert steps == [0.001, 0.002, 0.004, 0.004]
    running.cancel()


async def test_rates_come_from_the_engine_until_jobs_say_better():
    rates = Rates()
    rates.measured(100.0, 10.0)
    assert (rates.prefill, rates.decode) == (100.0, 10.0)
    rates.observe(PrefillDone(bytes(16), 1.0, 200))
    assert 100 < rates.prefill < 200
    for _ in range(30):
        rates.observe(PrefillDone(bytes(16), 1.0, 200))
    assert rates.prefill == pytest.approx(200, rel=0.01)
    rates.observe(PrefillDone(bytes(16), 0.0001, 200))
    assert rates.prefill == pytest.approx(200, rel=0.01)


async def test_a_generations_rate_counts_the_tokens_after_its_first():
    rates = Rates()
    rates.observe(Delta("g", "a", (1,)))
    await asyncio.sleep(0.05)
    rates.observe(Finished("g", "length", 10, 11, 0))
    assert 50 < rates.decode <= 10 / 0.05


async def test_failed_generations_are_forgotten():
    rates = Rates()
    rates.observe(Delta("g", "a", (1,)))
    rates.observe(Failed("g", "decode", "deadline", ""))
    rates.observe(Finished("g", "length", 10, 11, 0))
    assert rates.decode == 0.0
    assert rates._first_said == {}
