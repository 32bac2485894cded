"""The machinery of ``tests.bench.truth`` on a tiny model: a profile, a replay and its simulation. No time is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.truth import figures, per_s_of, profiled, replayed, simulated, summary, trace, traffic_of
from tests.models import VOCAB, tiny_model
from tests.scheduler.profiled import measured
from tests.stacks import running_stack

REQUESTS = 12


def test_a_trace_follows_from_its_seeds() -> None:
    one, again, other = (trace(100, 2.0, 1, ids, VOCAB) for ids in (10, 10, 20))
    assert one == again
    assert [(r.at, len(r.ids), r.output) for r in one] == [(r.at, len(r.ids), r.output) for r in other]
    assert not {r.ids[:32] for r in one} & {r.ids[:32] for r in other}


def test_prompts_that_begin_alike_share_blocks_and_no_others_do() -> None:
    requests = trace(100, 2.0, 1, 10, VOCAB)
    traffic = traffic_of(requests)
    shared = 0
    for n, blocks in enumerate(traffic.blocks):
        for m, others in enumerate(traffic.blocks[:n]):
            same = next((i for i, (a, b) in enumerate(zip(blocks, others, strict=False)) if a != b), None)
            same = min(len(blocks), len(others)) if same is None else same
            shared += same
            assert requests[n].ids[: same * 64] == requests[m].ids[: same * 64]
    assert shared > 20
    assert 0 < traffic.uncached_tokens().sum() < traffic.prompt_tokens.sum() - 1000


def test_the_rate_keeps_the_busier_node_busy_for_that_share() -> None:
    half, whole = per_s_of(measured(), 0.5, 1), per_s_of(measured(), 1.0, 1)
    assert whole == pytest.approx(2 * half)


def test_a_simulation_beyond_the_bounds_does_not_hold() -> None:
    live = {"mean_s": 1.0, "p90_s": 2.0}
    rows = [{"live": live, "simulated": {"mean_s": mean, "p90_s": 2.5}} for mean in (0.5, 1.1, 1.19)]
    assert summary(rows)["holds"]
    assert not summary([*rows, *rows[:1], *rows[:1]])["holds"]


@pytest.mark.slow
def test_a_stack_is_profiled_replayed_and_simulated(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text", tmp_path / "tiny")
    with running_stack(model, tmp_path / "logs", threshold=450) as stack:
        found = profiled(stack, tmp_path, "--longest", "512", "--lengths", "3", "--repeats", "1", "--within", "60")
        requests = trace(REQUESTS, 8.0, 1, 10, VOCAB)
        live, twin = replayed(stack, requests), simulated(found, requests, 450)
        stack.await_idle()
    assert found.source == "probes"
    assert [(site.name, site.nodes) for site in (found.home, *found.clusters)] == [("local", 1), ("east", 1)]
    assert len(live) == len(twin) == REQUESTS
    assert all(0 < answer.ttft_s < 60 for answer in (*live, *twin))
    assert figures(live).keys() == figures(twin).keys()
