"""Small transfers by the thousand over the connections that were there at the beginning."""

import gc
import os
from pathlib import Path

import pytest

from kvcache.control import Finished
from tests.pair import Pair, pair

TRANSFERS = int(os.environ.get("PRFAAS_SMALL_TRANSFERS", "2000"))
WARM_UP = 300
AT_ONCE = 8
GROWTH_BYTES = 8 << 20


def sockets(port: int) -> set[tuple[str, str]]:
    """Both addresses of every TCP socket with an end at ``port``, those in TIME_WAIT included."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {(row[1], row[2]) for row in rows if f":{port:04X}" in (row[1][-5:], row[2][-5:]) and row[3] != "0A"}


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def transfer_all(nodes: Pair, count: int) -> set[tuple[str, str]]:
    """``count`` transfers to the last token, a few at once; which sockets there were. The test keeps nothing else."""
    seen: set[tuple[str, str]] = set()
    for begin in range(0, count, AT_ONCE):
        jobs = [nodes.job(2 + n % 7, seconds=10.0) for n in range(begin, min(count, begin + AT_ONCE))]
        for job in jobs:
            nodes.start(job)
        for job in jobs:
            assert isinstance(await nodes.decode.ended(job.generation), Finished)
        await nodes.idle()
        for side in (nodes.prefill, nodes.decode):
            for kept in (side.reports, side.engine.prefilled, side.engine.generated, side.engine.priorities):
                kept.clear()
        if begin % (16 * AT_ONCE) == 0:
            seen |= sockets(nodes.prefill.port)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(120 + TRANSFERS // 20)
async def test_small_transfers_take_no_new_port_and_leave_no_descriptor_and_no_memory_behind(tokenizer):
    """2,000 by default; PRFAAS_SMALL_TRANSFERS=50000 for the long run."""
    async with pair(tokenizer) as nodes:
        await transfer_all(nodes, WARM_UP)
        before, opened, memory = sockets(nodes.prefill.port), descriptors(), resident_bytes()
        assert len(before) == 2 * nodes.prefill.endpoint._limits.connections
        seen = await transfer_all(nodes, TRANSFERS)
        grown = resident_bytes() - memory
        print(f"transfers={TRANSFERS} sockets={len(seen)} descriptors={opened} resident_growth_kib={grown >> 10}")
        assert seen | sockets(nodes.prefill.port) == before
        assert descriptors() <= opened
        assert grown < GROWTH_BYTES
