"""A running node of one role does the other's work once told to, with its pool, its peers and its incarnation."""

from __future__ import annotations

from kvcache.control import ChangeRole, Finished, Heartbeat, PrefillDone, RoleChanged, TransferDone
from kvcache.wire import Role
from tests.node.test_node import both, model, model_dir  # noqa: F401


async def test_two_nodes_swap_their_roles_and_carry_a_request_the_other_way(model_dir, model) -> None:  # noqa: F811
    async with both(model_dir, model) as (gateway, prefill, _):
        joins = {name: gateway.joined(name) for name in ("prefill", "decode")}
        assert all(join.converts and join.role_epoch == 0 and join.max_running == 4 for join in joins.values())
        prefill.engine.gate.clear()
        ticket, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.hears("prefill", Heartbeat, lambda beat: beat.running == 1)
        # What is at hand is finished first; nothing new is taken meanwhile.
        await gateway.send("prefill", ChangeRole(Role.DECODE, 1, joins["prefill"].incarnation, 10.0))
        await gateway.hears("prefill", Heartbeat, lambda beat: beat.detail == "converting" and not beat.accepting)
        prefill.engine.gate.set()
        await gateway.hears("decode", Finished)
        assert await gateway.hears("prefill", RoleChanged) == RoleChanged(1, Role.DECODE, True)
        await gateway.send("decode", ChangeRole(Role.PREFILL, 2, joins["decode"].incarnation, 10.0))
        assert await gateway.hears("decode", RoleChanged) == RoleChanged(2, Role.PREFILL, True)
        # An order of an epoch that has passed is refused.
        await gateway.send("prefill", ChangeRole(Role.PREFILL, 1, joins["prefill"].incarnation, 10.0))
        refused = await gateway.hears("prefill", RoleChanged, lambda answer: not answer.changed)
        assert (refused.cause, refused.role) == ("stale_epoch", Role.DECODE)

        # A new stream of the same process says the role and the epoch that it has now.
        await gateway.stop()
        await gateway.listen()
        await gateway.until(lambda: set(gateway.sockets) == {"prefill", "decode"})
        again = gateway.joined("decode")
        assert (again.role, again.role_epoch, again.incarnation) == (Role.PREFILL, 2, joins["decode"].incarnation)

        gateway.joined = lambda name: _swapped(gateway, name)  # type: ignore[method-assign]
        ticket, prefill_job, generate = gateway.jobs(model)
        await gateway.send("prefill", generate)
        await gateway.send("decode", prefill_job)
        await gateway.hears("decode", PrefillDone, lambda done: done.transfer == ticket.transfer)
        await gateway.hears("prefill", TransferDone, lambda done: done.transfer == ticket.transfer)
        await gateway.hears("prefill", Finished, lambda done: done.generation == generate.generation)


def _swapped(gateway, name):
    """Jobs name nodes by what they were started as."""
    other = {"prefill": "decode", "decode": "prefill"}[name]
    return next(join for join in reversed(gateway.joins) if join.node_id == other)
