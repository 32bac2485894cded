"""The command line of a vLLM server, and the words in which it is asked to sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.sampling import sampling_params, token_logprobs
from engines.vllm.spec import VllmSpec
from kvcache.control import Sampling, TokenLogprob
from kvcache.layout import DType
from tests.engines.vllm.fake_vllm import hybrid_layout


def spec(**changes: Any) -> VllmSpec:
    return VllmSpec(Path("/m"), hybrid_layout(), DType.BFLOAT16, **changes)


def test_the_connector_is_loaded_by_its_module_in_both_roles() -> None:
    config = spec(block_tokens=64).transfer_config(Path("/s"))
    assert config["kv_connector_module_path"] == "engines.vllm.connector"
    assert config["kv_role"] == "kv_both"
    assert config["kv_connector_extra_config"] == {"prfaas_socket": "/s", "prfaas_block_tokens": 64}


def test_another_connector_stands_beside_ours_and_comes_second() -> None:
    config = spec(beside={"kv_connector": "NixlConnector", "kv_role": "kv_both"}).transfer_config(Path("/s"))
    assert config["kv_connector"] == "MultiConnector"
    names = [each["kv_connector"] for each in config["kv_connector_extra_config"]["connectors"]]
    assert names == ["PrfaasConnector", "NixlConnector"]


def test_vllm_computes_one_chunk_of_the_grid_in_a_step() -> None:
    command = spec(chunk_tokens=512, arguments=("--enforce-eager",)).command(Path("/a"), Path("/w"), Path("/e"))
    assert command[command.index("--max-num-batched-tokens") + 1] == "512"
    assert command[command.index("--uds") + 1] == "/a"
    assert command[-1] == "--enforce-eager"
    assert json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector"] == "PrfaasConnector"


@pytest.mark.parametrize("argument", ["--model", "--kv-transfer-config={}", "--max_num_seqs=3", "--port"])
def test_arguments_that_the_node_sets_are_refused_by_name(argument: str) -> None:
    with pytest.raises(ValueError, match=argument.split("=")[0].replace("_", "-")):
        spec(arguments=(argument,))


def test_a_grid_too_fine_for_the_answers_that_run_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens: 8 is below the 16 answers"):
        spec(chunk_tokens=8)


def test_only_our_own_packages_reach_vllms_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/our/venv")
    monkeypatch.setenv("VIRTUAL_ENV", "/our/venv")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    environment = spec(threads=3).environment(Path("/packages"))
    assert environment["PYTHONPATH"] == "/packages"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "VIRTUAL_ENV" not in environment
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1", "what an operator set stays"


def test_a_lone_worker_shares_a_process_and_several_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    assert spec().environment(Path("/p"))["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in spec(arguments=("-tp", "2")).environment(Path("/p"))


def test_sampling_is_said_in_vllms_words() -> None:
    asked = Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=2**64 - 1,
        stop=("never sent",),
        stop_token_ids=(7,),
        ignore_eos=True,
        logprobs=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias=((4, -2.0),),
    )
    assert sampling_params(asked) == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "logprobs": 6,
        "detokenize": False,
        "seed": -1,
        "logit_bias": {"4": -2.0},
    }
    plain = sampling_params(Sampling(max_tokens=1))
    assert plain["logprobs"] is None
    assert "seed" not in plain
    assert sampling_params(Sampling(max_tokens=1, logprobs=-1))["logprobs"] == -1


@pytest.mark.parametrize(("chosen", "others"), [(3, (5, 4)), (5, (5, 4))])
def test_the_chosen_token_comes_first_and_again_only_among_the_likeliest(chosen: int, others: tuple[int, ...]) -> None:
    values = {3: -4.0, 4: -2.0, 5: -1.0, 6: -3.0}
    top = [chosen, *(token for token in (5, 4, 6) if token != chosen)][:3]
    entry = {
        "token_id": chosen,
        "logprob": values[chosen],
        "top_logprobs": [{"token_id": token, "logprob": values[token]} for token in top],
    }
    wanted = [TokenLogprob(token, values[token]) for token in (chosen, *others)]
    assert list(token_logprobs(entry, 2)) == wanted
    assert list(token_logprobs(entry, 0)) == wanted[:1]
