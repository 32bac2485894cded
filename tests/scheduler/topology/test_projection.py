"""The published comparison, from layouts and rates alone, and the pipeline model behind it."""

from __future__ import annotations

import pytest

from kvcache.layout import KVLayout
from kvcache.presets import case_study_1t, dense_70b, gemma3_270m
from scheduler.topology.pipeline import even, pipelined
from scheduler.topology.projection import (
    Architecture,
    layer_bytes,
    limits,
    mixed_speedup,
    project,
    share_for,
)

LLAMA = Architecture("70B", "dense", dense_70b(), 70e9, "")


def test_seventy_billion_parameters_at_four_thousand_tokens_are_as_published() -> None:
    figures = project(LLAMA)
    assert figures.nbytes == 1_342_177_280
    times = {name: figures.ways[name].transfer_s * 1e3 for name in ("nvlink", "infiniband", "tcp")}
    assert times == pytest.approx({"nvlink": 1.49, "infiniband": 26.8, "tcp": 107.0}, rel=0.005)
    assert figures.ways["nvlink"].speedup == pytest.approx(18.0)


@pytest.mark.parametrize("layout", [dense_70b(), gemma3_270m(), case_study_1t()], ids=["dense", "windows", "states"])
@pytest.mark.parametrize("tokens", [1, 700, 4096])
def test_layers_add_up_to_the_cache(layout: KVLayout, tokens: int) -> None:
    assert sum(layer_bytes(layout, tokens)) == layout.s_kv(tokens)


def test_where_eighteen_does_not_hold_it_is_less() -> None:
    found = limits([project(LLAMA)])
    assert all(0.99 < limit.speedup < 18 for limit in found)
    by = {limit.case: limit.speedup for limit in found}
    assert by["two hosts"] == 1.0
    assert by["NVLink counted as RDMA is, one direction"] == pytest.approx(9.0)
    assert by["RDMA over 8 ports at once"] == pytest.approx(2.25)


def test_the_mean_gains_what_the_share_inside_a_domain_allows() -> None:
    assert mixed_speedup(1.0) == pytest.approx(18.0)
    assert mixed_speedup(0.0) == 1.0
    assert mixed_speedup(share_for(3.0)) == pytest.approx(3.0)
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="share"):
            mixed_speedup(wrong)
    with pytest.raises(ValueError, match="speedup"):
        share_for(19.0)


@pytest.mark.parametrize(("compute", "transfer"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (0.0, 1.0)])
def test_the_recursion_agrees_with_the_closed_form_where_layers_are_alike(compute: float, transfer: float) -> None:
    layers = 80
    by_layer = pipelined([compute / layers] * layers, [transfer / layers] * layers)
    assert by_layer.hidden == pytest.approx(even(layers, compute, transfer))


def test_only_the_last_layer_is_exposed_where_the_way_is_fast() -> None:
    found = pipelined([1.0, 1.0, 1.0], [0.5, 0.5, 0.25])
    assert found.exposed_s == 0.25
    assert found.hidden == pytest.approx(0.8)


def test_a_big_layer_delays_those_behind_it() -> None:
    assert pipelined([1.0, 1.0, 1.0], [5.0, 0.5, 0.5]).exposed_s == 4.0


def test_a_way_that_begins_late_is_late_only_where_computing_is_short() -> None:
    assert pipelined([1.0, 1.0], [0.5, 0.5], setup_s=0.5).exposed_s == 0.5
    assert pipelined([1.0, 1.0], [0.5, 0.5], setup_s=9.0).exposed_s == 8.0


def test_nothing_to_send_is_hidden_whole_and_nonsense_is_refused() -> None:
    assert pipelined([1.0], [0.0]).hidden == 1.0
    for compute, transfer, setup in (([1.0], [], 0.0), ([-1.0], [1.0], 0.0), ([1.0], [1.0], -1.0)):
        with pytest.raises(ValueError, match=r"layer|negative"):
            pipelined(compute, transfer, setup)
    with pytest.raises(ValueError, match="tokens"):
        project(LLAMA, 0)
