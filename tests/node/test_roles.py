"""A role changes on a newer order alone, and only with nothing at hand."""

import asyncio

import pytest

from kvcache.control import ChangeRole, RoleChanged
from kvcache.wire import Role
from node.roles import NodeRole


class Jobs:
    """What is at hand, and what was answered."""

    def __init__(self):
        self.done = asyncio.Event()
        self.done.set()
        self.heard = asyncio.Event()
        self.heard.set()
        self.answers: list[RoleChanged] = []
        self.changes = 0
        self.role = NodeRole(Role.DECODE, "one", self.done.wait, self._answered, self._changed, self._noticed)

    def _changed(self):
        self.changes += 1

    def _answered(self, gateway, answer):
        self.answers.append(answer)

    async def _noticed(self):
        await self.heard.wait()

    def order(self, role, epoch, incarnation="one", settle_s=5.0):
        self.role.order(ChangeRole(role, epoch, incarnation, settle_s))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_node_with_nothing_at_hand_changes_at_once_and_says_so():
    jobs = Jobs()
    jobs.order(Role.PREFILL, 3)
    assert jobs.role.changing
    await settle()
    assert jobs.answers == [RoleChanged(3, Role.PREFILL, True)]
    assert (jobs.role.role, jobs.role.epoch, jobs.role.changing) == (Role.PREFILL, 3, False)
    assert jobs.changes == 2


@pytest.mark.parametrize("epoch", [2, 3])
async def test_an_order_of_an_epoch_that_was_obeyed_or_passed_is_refused(epoch):
    jobs = Jobs()
    jobs.order(Role.PREFILL, 3)
    await settle()
    jobs.order(Role.DECODE, epoch)
    await settle()
    assert (jobs.answers[1].changed, jobs.answers[1].cause) == (False, "stale_epoch")
    assert jobs.role.role is Role.PREFILL


async def test_an_order_for_an_earlier_process_of_that_name_is_refused():
    jobs = Jobs()
    jobs.order(Role.PREFILL, 3, incarnation="zero")
    await settle()
    assert [answer.cause for answer in jobs.answers] == ["incarnation"]
    assert (jobs.role.role, jobs.role.epoch) == (Role.DECODE, 0)


async def test_jobs_at_hand_are_waited_for_and_too_long_ones_refuse_the_order():
    jobs = Jobs()
    jobs.done.clear()
    jobs.order(Role.PREFILL, 1, settle_s=0.02)
    await settle()
    assert jobs.answers == []
    await asyncio.sleep(0.05)
    assert [answer.cause for answer in jobs.answers] == ["busy"]
    assert (jobs.role.role, jobs.role.changing) == (Role.DECODE, False)
    jobs.order(Role.PREFILL, 2)
    jobs.done.set()
    await settle()
    assert jobs.role.role is Role.PREFILL


async def test_a_waiting_order_gives_way_to_a_newer_one_and_to_the_loss_of_the_gateway():
    jobs = Jobs()
    jobs.done.clear()
    jobs.order(Role.PREFILL, 1)
    jobs.order(Role.DECODE, 2)
    jobs.done.set()
    await settle()
    assert jobs.answers == [RoleChanged(2, Role.DECODE, True)]
    jobs.done.clear()
    jobs.order(Role.PREFILL, 3)
    jobs.role.cancel()
    jobs.done.set()
    await settle()
    assert (jobs.role.role, jobs.role.changing) == (Role.DECODE, False)
