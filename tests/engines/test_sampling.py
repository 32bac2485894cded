"""Choosing tokens: what each setting leaves possible, and that seeds decide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engines.embedded.sampling import Penalties, Sampler, check_sampling
from kvcache.control import Sampling

EOS = 1


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draws(logits: torch.Tensor, count: int, **options: Any) -> Counter[int]:
    sampler = Sampler(Sampling(max_tokens=count, seed=5, **options), (EOS,))
    return Counter(sampler.choose(logits) for _ in range(count))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(logits_of([0.3, 0.4, 0.3]), 20, temperature=0.0) == {1: 20}


def test_without_limits_tokens_come_as_often_as_they_are_likely() -> None:
    counts = draws(logits_of([0.5, 0.3, 0.2]), 4000)
    assert [counts[n] / 4000 for n in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_a_low_temperature_sharpens() -> None:
    counts = draws(logits_of([0.6, 0.4]), 2000, temperature=0.5)
    assert counts[0] / 2000 == pytest.approx(0.36 / 0.52, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-12, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_temperature_next_to_zero_takes_the_likeliest(temperature: float, limits: dict[str, Any]) -> None:
    assert draws(torch.tensor([7.0, 9.0, float("-inf"), -4.0]), 20, temperature=temperature, **limits) == {1: 20}


def test_top_k_leaves_k_tokens() -> None:
    assert set(draws(logits_of([0.1, 0.2, 0.3, 0.4]), 300, top_k=2)) == {2, 3}
    assert draws(logits_of([0.1, 0.2, 0.3, 0.4]), 20, top_k=1) == {3: 20}


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, {3}), (0.41, {3, 2}), (0.71, {3, 2, 1}), (1.0, {0, 1, 2, 3})])
def test_top_p_leaves_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(draws(logits_of([0.1, 0.2, 0.3, 0.4]), 400, top_p=top_p)) == kept


def test_top_p_counts_within_what_top_k_left() -> None:
    assert set(draws(logits_of([0.1, 0.2, 0.3, 0.4]), 300, top_k=2, top_p=0.55)) == {3}


def test_top_p_reaches_beyond_the_head_of_a_flat_vocabulary() -> None:
    flat = torch.zeros(5000)
    assert len(draws(flat, 3000, top_p=0.9)) > 1024
    sharp = flat.clone()
    sharp[4321] = 20.0
    assert draws(sharp, 50, top_p=0.9) == {4321: 50}


def test_a_seed_decides_whatever_was_drawn_beside_it() -> None:
    logits = torch.zeros(100)
    first, second = (Sampler(Sampling(max_tokens=9, seed=3), ()) for _ in range(2))
    alone = [first.choose(logits) for _ in range(20)]
    other = Sampler(Sampling(max_tokens=9, seed=4), ())
    beside = []
    for _ in range(20):
        other.choose(logits)
        beside.append(second.choose(logits))
    assert beside == alone
    assert alone != [other.choose(logits) for _ in range(20)]


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(1000)
    first, second = (Sampler(Sampling(max_tokens=9), ()) for _ in range(2))
    assert [first.choose(logits) for _ in range(8)] != [second.choose(logits) for _ in range(8)]


def test_end_tokens_and_stop_tokens_end_and_ignore_eos_keeps_the_stop_tokens() -> None:
    both = Sampler(Sampling(max_tokens=1, stop_token_ids=(7,)), (EOS,))
    deaf = Sampler(Sampling(max_tokens=1, stop_token_ids=(7,), ignore_eos=True), (EOS,))
    assert [both.ends(token) for token in (EOS, 7, 8)] == [True, True, False]
    assert [deaf.ends(token) for token in (EOS, 7, 8)] == [False, True, False]


def test_logprobs_give_the_chosen_one_first_and_then_the_likeliest() -> None:
    logits = logits_of([0.1, 0.2, 0.3, 0.4])

    def ids(wanted: int | None, temperature: float = 0.5) -> list[int] | None:
        found = Sampler(Sampling(max_tokens=1, logprobs=wanted, temperature=temperature), ()).logprobs(logits, 1)
        return None if found is None else [entry.token_id for entry in found]

    assert ids(None) is None
    assert ids(0) == [1]
    assert ids(2) == [1, 3, 2]
    assert ids(-1) == [1, 3, 2, 1, 0]
    chosen = Sampler(Sampling(max_tokens=1, logprobs=0, temperature=0.1), ()).logprobs(logits, 1)
    assert chosen is not None
    assert chosen[0].logprob == pytest.approx(-1.6094, abs=1e-3), "before temperature"


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "max_tokens", "logprobs", "seed"])
def test_a_wrong_setting_is_named(field: str) -> None:
    wrong: dict[str, Any] = {"max_tokens": 4, field: -5 if field != "seed" else 2**70}
    with pytest.raises(ValueError, match=field):
        check_sampling(Sampling(**wrong), 100)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(temperature: float) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        draws(torch.tensor([0.0, float("nan"), 1.0]), 1, temperature=temperature)


def adjusted(prompt: list[int], said: list[int], logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits that a sampler chooses by, after a prompt and what it has said."""
    penalties = Penalties(Sampling(max_tokens=9, **options), prompt)
    for token in said:
        penalties.said(token)
    return penalties.applied(logits)


@pytest.mark.parametrize("penalty", [1.3, 0.7, 2.0])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 5
    prompt, said = [3, 9, 9, 40], [9, 12, 63]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + said]), logits[None])[0]
    assert torch.equal(adjusted(prompt, said, logits, repetition_penalty=penalty), wanted)


def test_the_logit_bias_is_transformers_sequence_bias_of_single_tokens() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2))
    biases = {5: 4.5, 6: -100.0, 63: 0.25}
    processor = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    wanted = processor(torch.tensor([[1]]), logits[None])[0]
    assert torch.equal(adjusted([1], [], logits, logit_bias=tuple(biases.items())), wanted)


@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.8}])
def test_min_p_leaves_what_transformers_leaves(min_p: float, limits: dict[str, Any]) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2
    warpers: list[Any] = [TemperatureLogitsWarper(0.7)]
    warpers += [TopKLogitsWarper(limits["top_k"])] if "top_k" in limits else []
    warpers += [TopPLogitsWarper(limits["top_p"])] if "top_p" in limits else []
    scores = LogitsProcessorList([*warpers, MinPLogitsWarper(min_p)])(torch.tensor([[1]]), logits[None])[0]
    wanted = scores.softmax(-1)
    counts = draws(logits, 3000, temperature=0.7, min_p=min_p, **limits)
    assert set(counts) <= set(wanted.nonzero().flatten().tolist())
    for token, probability in enumerate(wanted.tolist()):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.04)


def test_presence_counts_once_and_frequency_each_time_and_neither_the_prompt() -> None:
    logits = torch.zeros(8)
    found = adjusted([1, 2], [2, 3, 3], logits, presence_penalty=0.5, frequency_penalty=0.25)
    assert found.tolist() == [0, 0, -0.75, -1.0, 0, 0, 0, 0]
    assert logits.tolist() == [0] * 8, "the model's own logits stay, for log-probabilities"


def test_a_penalised_sampler_does_not_say_the_same_token_again() -> None:
    logits = torch.tensor([3.0, 2.9, 2.8, -9.0])
    sampler = Sampler(Sampling(max_tokens=9, temperature=0.0, presence_penalty=1.0), (), [0])
    assert [sampler.choose(logits) for _ in range(4)] == [0, 1, 2, 0]
    barred = Sampler(Sampling(max_tokens=9, temperature=0.0, logit_bias=((0, -100.0),)), ())
    assert barred.choose(logits) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((100, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_a_wrong_penalty_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        check_sampling(Sampling(max_tokens=4, **{field: value}), 100)
