"""KV over a wide-area link, by the production path: losses, a cut, and what neither may cost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bench.kv_processes import figures, kv_serving
from tests.wan.direction import LinkSettings
from tests.wan.link import Wan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MakeWan = Callable[[LinkSettings], Wan]
LINK = LinkSettings(rate_bps=200e6, delay_s=0.015)
NBYTES = 16 << 20
LINE_S = NBYTES * 8 / LINK.rate_bps


@pytest.mark.parametrize("tls", [False, True])
def test_kv_arrives_whole_at_nearly_the_line_rate_through_losses(wan_of: MakeWan, tls: bool) -> None:
    wan = wan_of(replace(LINK, loss=0.001))
    with kv_serving(wan.near, NBYTES, tls=tls) as serving:
        found = serving.fetch(wan.far, "raw")
    assert found["verified"]
    assert found["connections"] == 4
    assert found["rtt_s"] == pytest.approx(2 * LINK.delay_s, abs=0.01)
    assert LINE_S < min(found["all_seconds"]) < 1.5 * LINE_S + 0.1
    assert wan.counters()[0].lost > 0


def test_a_link_that_is_silent_for_a_second_in_mid_transfer_costs_little_more_than_that(wan_of: MakeWan) -> None:
    wan = wan_of(LINK)
    with kv_serving(wan.near, 4 * NBYTES) as serving:
        fetching = serving.start_fetch(wan.far, "raw", "--repeats", "1", stderr=subprocess.PIPE)
        while "warm-up" not in fetching.stderr.readline():
            pass
        time.sleep(LINE_S)
        wan.change(replace(LINK, loss=1.0))
        time.sleep(1.0)
        wan.change(LINK)
        found = figures(fetching)
    assert found["verified"]
    assert 4 * LINE_S + 1.0 < found["seconds"] < 2 * 4 * LINE_S + 3.0


def test_a_small_transfer_over_a_warm_link_takes_a_round_trip_and_a_half_at_most(wan_of: MakeWan) -> None:
    link = replace(LINK, rate_bps=1e9)
    wan = wan_of(link)
    with kv_serving(wan.near, 1 << 20) as serving:
        found = serving.fetch(wan.far, "raw", "--repeats", "15")
    assert found["verified"]
    line_s = found["bytes_wire"] * 8 / link.rate_bps
    assert 2 * link.delay_s < min(found["all_seconds"]) - line_s < 1.5 * 2 * link.delay_s
