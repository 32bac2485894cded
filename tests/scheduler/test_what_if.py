"""What-if: changes are applied and refused by name, and model and simulation answer the same question."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.facts import Prices
from scheduler.report.requests import Window
from scheduler.values import PolicyValues
from scheduler.what_if.answer import Answer, answer
from scheduler.what_if.basis import Basis, NoBasis, case_study, changed, observed
from scheduler.what_if.cases import model_of, modelled
from scheduler.what_if.question import Question
from tests.scheduler.report.windows import SINCE, fleet, served

FEW = 1500


def ask(**changes: object) -> Answer:
    return answer(case_study(), Question(preset="case-study", requests=FEW, **changes), PolicyValues())


def test_the_preset_unchanged_is_the_published_case() -> None:
    found = ask(rate=2.0)
    today, unbalanced, rebalanced = found.cases
    assert today.model == unbalanced.model
    assert today.simulation == unbalanced.simulation
    assert today.model.point.lambda_max == pytest.approx(3.22, rel=0.01)
    assert found.gain == pytest.approx(1.0, abs=0.01)
    assert today.simulation.throughput_req_s == pytest.approx(2.0, rel=0.05)
    assert 0.4 < today.simulation.offloaded_share < 0.6
    assert today.simulation.egress_gbps == pytest.approx(today.model.point.egress_gbps, rel=0.1)
    assert rebalanced.simulation.ttft_p90_s < 10


def test_more_local_nodes_carry_more_and_are_given_their_best_roles() -> None:
    today, unbalanced, rebalanced = ask(add_nodes={"local": 4, "remote": 2}, rate=2.0).cases
    assert sum(rebalanced.model.point.prefill) + sum(rebalanced.model.point.decode) == 12
    assert 3 <= sum(unbalanced.model.point.prefill) <= 7
    assert today.model.point.lambda_max < unbalanced.model.point.lambda_max < rebalanced.model.point.lambda_max


def test_longer_answers_ask_for_more_decode() -> None:
    today, _, rebalanced = ask(output_scale=2.0, rate=1.0).cases
    assert today.model.output_tokens == 1024
    assert rebalanced.model.output_tokens == 2048
    assert sum(rebalanced.model.point.decode) > sum(today.model.point.decode)


def test_a_thin_link_keeps_prompts_at_home_and_prices_are_charged() -> None:
    price = {"*": Prices(egress_per_gb=0.05, prefill_per_s=0.001)}
    wide = ask(prices=price, rate=1.5).cases[-1]
    thin = ask(prices=price, link_gbps={"remote": 4}, rate=1.5).cases[-1]
    assert thin.model.point.threshold > wide.model.point.threshold
    assert thin.simulation.egress_gbps <= 4.05
    assert 0 < thin.model.cost_per_hour < wide.model.cost_per_hour


def test_the_cost_is_egress_and_prefill_at_the_offered_rate() -> None:
    basis = changed(case_study(), Question(prices={"remote": Prices(egress_per_gb=1.0)}))
    model = model_of(basis)
    found = modelled(basis, model, (3,), 19_400.0, 1.0)
    gigabytes = found.point.egress_gbps / 8 * 3600
    assert found.cost_per_hour == pytest.approx(gigabytes)
    seconds = changed(case_study(), Question(prices={"remote": Prices(prefill_per_s=1.0)}))
    per_hour = modelled(seconds, model_of(seconds), (3,), 19_400.0, 1.0).cost_per_hour
    # half of the prompts, 2.5 s of a remote node each
    assert per_hour == pytest.approx(0.4957 * 2.45 * 3600, rel=0.03)


def test_what_is_beyond_the_fleet_is_said_to_be_unsteady() -> None:
    (today, *_) = ask(rate=6.0).cases
    assert not today.simulation.steady
    assert today.model.load > 1.8


def test_a_fixed_split_and_threshold_are_kept() -> None:
    point = ask(prefill=2, threshold=12_000, rate=1.0).cases[-1].model.point
    assert (point.prefill, point.threshold) == ((2,), 12_000.0)


def test_equal_questions_have_equal_answers_and_progress_goes_on_to_the_end() -> None:
    heard: list[float] = []
    question = Question(requests=FEW, rate=2.0)
    first = answer(case_study(), question, PolicyValues(), heard.append)
    assert first == answer(case_study(), question, PolicyValues())
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"add_nodes": {"west": 1}}, "add_nodes.west: no cluster has that name; there are local, remote"),
        ({"link_gbps": {"local": 1.0}}, "link_gbps.local: no cluster"),
        ({"prices": {"west": Prices()}}, "prices.west: no cluster"),
        ({"add_nodes": {"local": -8}}, "add_nodes.local: -8 leaves no local node"),
        ({"add_nodes": {"remote": -4}}, "add_nodes.remote: -4 leaves no node there"),
        ({"prefill": 8}, "prefill: 8 of 8 local nodes leaves none to decode"),
    ],
)
def test_a_question_that_does_not_fit_names_its_field(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        ask(rate=1.0, **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("traffic_scale", 0),
        ("output_scale", 1e9),
        ("rate", -1),
        ("requests", 10**9),
        ("preset", "moon"),
        ("link_gbps", {"*": 0.0}),
        ("prices", {"*": {"egress_per_gb": -1}}),
        ("surprise", 1),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, Question)


def test_a_gateways_traffic_is_drawn_again_as_it_was() -> None:
    requests, window = served(600), Window(SINCE, SINCE + 300, 600)
    basis = observed(fleet(), requests, window, "local", 256, {"east": Prices(0.01)})
    assert (len(basis.lengths), basis.rate) == (600, 2.0)
    found = answer(basis, Question(requests=1200, output_scale=1.0), PolicyValues())
    assert found.cases[0].model.point.offloaded == pytest.approx(0.494, abs=0.01)
    assert found.cases[0].model.priced
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(basis), type=Basis) == basis
    with pytest.raises(NoBasis, match="63 finished requests"):
        observed(fleet(), requests[:63], window, "local", 256, {})
    with pytest.raises(NoBasis, match="no local node"):
        observed(None, requests, window, "local", 256, {})
