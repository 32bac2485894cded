"""A gateway and two real vLLM nodes: what one of them read the other one speaks after, and what goes wrong between.

The tests share one stack and run in order: those that end an engine come last.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from deploy.demo import long_prompt
from deploy.stack import free_port
from engines.vllm.process import session, shared_memory
from kvcache.layout import DType, GroupKind, KVLayout
from tests.engines.harness import layout_of
from tests.engines_vllm.harness import blocks_in_use, node_options, server_pid, vllm_metrics
from tests.faults.proxy import SlowProxy
from tests.stacks import RunningStack, alive, eventually, node, running_stack

LENGTHS = (5, 511, 513, 3000, 8000)
TOGETHER = (90, 150, 260, 400, 520, 700, 900, 1100)
TOKENS = 16
BLOCK = 64
LIKELIEST = 20
NOTICED_S = 10.0
BUDGET_S = 31.0
"""Fallbacks are allowed at least one in half a minute."""
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``: the command itself asks for a distribution named vllm, and vLLM for CPU has another name."""
BACK_S = 300.0
AIPERF_VARIABLE = "PRFAAS_TEST_AIPERF"
REMOTE, LOCAL = "east-prefill", "local-decode"


@dataclass
class Bed:
    """The stack, the way between its nodes, and clients of several tenants: caches are not shared between them."""

    stack: RunningStack
    proxy: SlowProxy
    ids: Sequence[int]
    layout: KVLayout
    clients: dict[str, httpx.Client] = field(default_factory=dict)

    def client(self, tenant: str) -> httpx.Client:
        if tenant not in self.clients:
            made = self.stack.http.post("/v1/keys", json={"role": "client", "tenant": tenant, "route_hint": True})
            headers = {"authorization": f"Bearer {made.json()['key']}"}
            self.clients[tenant] = httpx.Client(base_url=self.stack.stack.url, timeout=300, headers=headers)
        return self.clients[tenant]

    def ask(self, prompt: Sequence[int], tenant: str, hint: str, tokens: int = TOKENS) -> httpx.Response:
        body = self.stack.body(prompt, tokens, logprobs=LIKELIEST)
        return self.client(tenant).post("/v1/completions", json=body, headers={"x-prfaas-route-hint": hint})

    def node_pid(self, name: str) -> int:
        return self.stack.stack.processes[name].pid

    def engine_pid(self, name: str) -> int:
        return server_pid(self.node_pid(name))

    def nothing_held(self) -> bool:
        return all(blocks_in_use(self.engine_pid(name)) == 0 for name in (REMOTE, LOCAL))

    def settle(self) -> None:
        """Both engines run, and neither they nor the nodes hold anything."""
        assert eventually(lambda: not self.stack.held(), BACK_S, 0.5), self.stack.held()
        assert eventually(self.nothing_held, 10, 0.2), "vLLM's blocks are still held"


@pytest.fixture(scope="module")
def bed(vllm_python: Path, gemma_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    port = free_port()
    proxy = SlowProxy(port, 1e9)
    options = node_options(vllm_python)
    nodes = (
        node(REMOTE, "east", "prefill", *options, "--kv-port", str(port), "--kv-advertise", f"127.0.0.1:{proxy.port}"),
        node(LOCAL, "local", "decode", *options),
    )
    ids = Tokenizer.from_file(str(gemma_dir / "tokenizer.json")).encode(long_prompt(max(LENGTHS) + 400)).ids
    settings: dict[str, Any] = {"dtype": "bfloat16", "pool_mib": 512, "nodes": nodes, "ready_s": 500.0}
    try:
        with running_stack(gemma_dir, tmp_path_factory.mktemp("logs"), threshold=100, **settings) as stack:
            made = stack.http.post("/v1/keys", json={"role": "admin"}).json()
            stack.http.headers["authorization"] = f"Bearer {made['key']}"
            yield Bed(stack, proxy, ids, layout_of(gemma_dir, DType.BFLOAT16))
    finally:
        proxy.close()


@dataclass(frozen=True)
class Said:
    """An answer's tokens, and the log-probabilities of the likeliest at each."""

    tokens: list[str]
    likeliest: list[dict[str, float]]


def said(answer: httpx.Response) -> Said:
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"])
    return Said(logprobs["tokens"], logprobs["top_logprobs"])


def noise(one: Said, other: Said) -> float:
    """Twice the largest difference of a log-probability, while both say the same."""
    largest = 0.0
    for at, token in enumerate(one.tokens):
        mine, theirs = one.likeliest[at], other.likeliest[at]
        largest = max([largest, *(abs(value - theirs[name]) for name, value in mine.items() if name in theirs)])
        if token != other.tokens[at]:
            break
    return 2 * largest


def check_contract_c(alone: Said, split: Said, bound: float) -> None:
    """They may first differ where the two likeliest are closer than the engine's own noise."""
    differing = [n for n, token in enumerate(alone.tokens) if token != split.tokens[n]]
    if differing:
        best, second = sorted(alone.likeliest[differing[0]].values(), reverse=True)[:2]
        assert best - second < bound, f"diverged at {differing[0]} over {best - second}, noise {bound}"


def bytes_between(layout: KVLayout, start: int, stop: int) -> int:
    """Full attention from ``start`` on, windows whole."""
    full = sum(layer.nbytes for g in layout.groups if g.kind is GroupKind.FULL for layer in g.layers)
    return layout.s_kv(stop) - full * start


@pytest.fixture(scope="module")
def together(bed: Bed) -> tuple[list[Said], float]:
    """What vLLM says alone, of every prompt of ``TOGETHER``, and how far its batches are off that."""
    prompts = [bed.ids[at * 13 : at * 13 + length] for at, length in enumerate(TOGETHER)]
    alone = [said(bed.ask(prompt, "alone", "local")) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as senders:
        batched = list(senders.map(lambda prompt: said(bed.ask(prompt, "batched", "local")), prompts))
    return alone, max(noise(one, other) for one, other in zip(alone, batched, strict=True))


def ask_remote(bed: Bed, start: int, length: int) -> tuple[Sequence[int], httpx.Response]:
    """A prompt that was prefilled remotely, and its answer.

    On a crowded machine the remote way may be given up as late: then another prompt is asked.
    """
    for attempt in range(4):
        prompt = bed.ids[start + attempt : start + attempt + length]
        answer = bed.ask(prompt, "split", "remote")
        if answer.headers.get("x-prfaas-route") == "remote:east":
            return prompt, answer
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 200:
            assert bed.stack.record(answer)["attempts"][0]["cause"] == "late"
        time.sleep(BUDGET_S)
    raise AssertionError("every attempt was late")


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_read_in_one_vllm_is_spoken_after_in_the_other(
    bed: Bed, together: tuple[list[Said], float], length: int
) -> None:
    prompt, answer = ask_remote(bed, length % 300, length)  # none begins like another: nothing is cached anywhere
    split = said(answer)
    (attempt,) = bed.stack.record(answer)["attempts"]
    assert attempt["outcome"] == "finished"
    assert attempt["raw_bytes"] == bed.layout.s_kv(length - 1)
    print(json.dumps({"length": length, **{key: attempt[key] for key in ("prefill_s", "exposed_s", "wire_bytes")}}))
    alone = said(bed.ask(prompt, f"alone-{length}", "local"))
    check_contract_c(alone, split, max(together[1], noise(alone, split)))
    bed.settle()


def test_eight_at_once_are_as_right_as_one(bed: Bed, together: tuple[list[Said], float]) -> None:
    alone, bound = together
    prompts = [bed.ids[at * 13 : at * 13 + length] for at, length in enumerate(TOGETHER)]
    with ThreadPoolExecutor(len(prompts)) as senders:
        answers = list(senders.map(lambda prompt: bed.ask(prompt, "eight", "remote"), prompts))
    assert {answer.headers["x-prfaas-route"] for answer in answers} == {"remote:east"}
    for one, answer in zip(alone, answers, strict=True):
        check_contract_c(one, said(answer), bound)
    bed.settle()


def test_a_second_turn_sends_the_increment(bed: Bed) -> None:
    first = list(bed.ids[500:1200])
    answer = bed.ask(first, "turns", "remote", tokens=70)
    assert answer.status_code == 200, answer.text
    bed.settle()
    spoken = answer.json()["choices"][0]["token_ids"]
    second = [*first, *spoken, *bed.ids[3000:3300]]
    again = bed.ask(second, "turns", "remote")
    assert again.status_code == 200, again.text
    (attempt,) = bed.stack.record(again)["attempts"]
    start, stop = attempt["range"]
    assert start == (len(first) + len(spoken) - 1) // BLOCK * BLOCK, "the prompt and the answer are here already"
    assert attempt["raw_bytes"] == bytes_between(bed.layout, start, stop)
    assert attempt["cached_tokens"] == (len(first) - 1) // BLOCK * BLOCK, "the prefill went on from its own snapshot"
    alone = said(bed.ask(second, "turns-alone", "local"))
    check_contract_c(alone, said(again), noise(alone, said(again)))
    bed.settle()


def test_several_answers_come_from_one_transfer(bed: Bed) -> None:
    body = bed.stack.body(bed.ids[40:640], 8, n=3, seed=5, temperature=0.8)
    answer = bed.client("several").post("/v1/completions", json=body, headers={"x-prfaas-route-hint": "remote"})
    assert answer.status_code == 200, answer.text
    assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [8, 8, 8]
    bed.settle()


def test_vllms_own_metrics_count_what_the_connector_did(bed: Bed) -> None:
    exported = vllm_metrics(bed.engine_pid(REMOTE))
    loaded = vllm_metrics(bed.engine_pid(LOCAL))
    assert exported["vllm:prfaas_exported_bytes_total"] > 0
    assert loaded["vllm:prfaas_loads_total"] > 0
    assert loaded.get("vllm:prfaas_load_failures_total", 0) == 0
    assert loaded["vllm:prfaas_loaded_tokens_total"] > 0
    assert eventually(lambda: (engine_figures(bed, LOCAL) or {}).get("cached_blocks"), 10), "its KV events are read"
    assert engine_figures(bed, LOCAL)["prefix_queries"] > 0
    assert engine_figures(bed, LOCAL)["events_missed"] == 0


def engine_figures(bed: Bed, name: str) -> dict[str, Any]:
    """What a node's vLLM says of itself, as its beats tell it."""
    found: dict[str, Any] = bed.stack.nodes()[name]["heartbeat"]["engine"]
    return found


def test_vllms_own_benchmark_drives_the_gateway(bed: Bed, vllm_python: Path, gemma_dir: Path, tmp_path: Path) -> None:
    command = [
        *(str(vllm_python), "-c", BENCH_SERVE, "--backend", "openai"),
        *("--base-url", bed.stack.stack.url, "--model", bed.stack.model, "--tokenizer", str(gemma_dir)),
        *("--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "12", "--ignore-eos"),
        *("--num-prompts", "8", "--max-concurrency", "4", "--save-result", "--result-filename", "result.json"),
    ]
    secret = bed.client("bench").headers["authorization"].removeprefix("Bearer ")
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OPENAI_API_KEY": secret}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 8
    assert result["total_output_tokens"] == 8 * 12
    bed.settle()


def test_aiperf_drives_the_gateway(bed: Bed, gemma_dir: Path, tmp_path: Path) -> None:
    aiperf = os.environ.get(AIPERF_VARIABLE)
    if not aiperf:
        pytest.skip(f"{AIPERF_VARIABLE} is not set; `sh deploy/test.sh --engines` installs aiperf and sets it")
    secret = bed.client("aiperf").headers["authorization"].removeprefix("Bearer ")
    command = [
        *(aiperf, "profile", "--model", bed.stack.model, "--url", bed.stack.stack.url, "--api-key", secret),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(gemma_dir), "--isl", "300"),
        *("--osl", "12", "--concurrency", "4", "--request-count", "8", "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--output-artifact-dir", str(tmp_path)),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (result,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(result.read_text())
    assert found["request_count"]["avg"] == 8
    assert not found.get("error_summary")
    bed.settle()


# ---- what goes wrong


def await_mid_transfer(bed: Bed, pending: Future[httpx.Response]) -> None:
    before = bed.proxy.forwarded
    assert eventually(lambda: bed.proxy.forwarded - before > 1 << 20 or pending.done(), 60, 0.002)
    assert not pending.done(), pending.result().text


def check_remote_again(bed: Bed, tenant: str) -> None:
    """The remote way is taken again, if not by the first request after the failure."""
    records = []
    for attempt in range(6):
        again = bed.ask(bed.ids[300 + attempt : 900 + attempt], tenant, "remote")
        assert said(again)
        if again.headers["x-prfaas-route"] == "remote:east":
            return
        records.append(bed.stack.record(again))
        time.sleep(10)
    raise AssertionError(records)


def test_a_link_that_is_cut_in_mid_transfer_falls_back_and_keeps_nothing(bed: Bed) -> None:
    time.sleep(BUDGET_S)
    prompt, before = bed.ids[100:4100], bed.stack.failed_first_attempts()
    with ThreadPoolExecutor(1) as sender:
        pending = sender.submit(bed.ask, prompt, "cut", "remote")
        await_mid_transfer(bed, pending)
        bed.proxy.cut()
        struck = time.monotonic()
        assert eventually(lambda: bed.stack.failed_first_attempts() > before, NOTICED_S)
        print(f"noticed after {time.monotonic() - struck:.1f} s")
        answer = pending.result()
    bed.proxy.heal()
    split = said(answer)
    assert answer.headers["x-prfaas-route"] == "local"
    alone = said(bed.ask(prompt, "cut-alone", "local"))
    check_contract_c(alone, split, noise(alone, split))
    bed.settle()


def test_a_producer_that_is_killed_in_mid_transfer_is_noticed_and_comes_back(bed: Bed) -> None:
    time.sleep(BUDGET_S)
    prompt = bed.ids[200:4200]
    before = bed.stack.failed_first_attempts()
    victim = bed.engine_pid(REMOTE)
    with ThreadPoolExecutor(1) as sender:
        pending = sender.submit(bed.ask, prompt, "killed", "remote")
        await_mid_transfer(bed, pending)
        os.kill(victim, signal.SIGKILL)
        struck = time.monotonic()
        assert eventually(lambda: bed.stack.failed_first_attempts() > before, NOTICED_S)
        print(f"noticed after {time.monotonic() - struck:.1f} s")
        answer = pending.result()
    split = said(answer)
    assert answer.headers["x-prfaas-route"] == "local"
    assert bed.stack.record(answer)["attempts"][0]["cause"] == "engine_lost"
    alone = said(bed.ask(prompt, "killed-alone", "local"))
    check_contract_c(alone, split, noise(alone, split))
    bed.settle()
    check_remote_again(bed, "killed")


def test_a_consumer_that_is_killed_ends_its_requests_soon_and_comes_back(bed: Bed) -> None:
    victim = bed.engine_pid(LOCAL)
    with ThreadPoolExecutor(1) as sender:
        pending = sender.submit(bed.ask, bed.ids[300:4300], "consumer", "remote", 200)
        await_mid_transfer(bed, pending)
        os.kill(victim, signal.SIGKILL)
        struck = time.monotonic()
        answer = pending.result()
        print(f"answered {answer.status_code} after {time.monotonic() - struck:.1f} s")
    assert answer.status_code == 503, answer.text
    assert time.monotonic() - struck < 60
    assert eventually(lambda: not alive(victim), 10)
    bed.settle()
    check_remote_again(bed, "consumer")


def test_a_node_that_is_killed_takes_its_vllm_with_it(bed: Bed) -> None:
    pid = bed.engine_pid(REMOTE)
    assert len(list(session(pid))) > 1
    os.kill(bed.node_pid(REMOTE), signal.SIGKILL)
    assert eventually(lambda: not list(session(pid)), 15)


def test_nothing_is_left_when_all_has_ended(bed: Bed) -> None:
    pid = bed.engine_pid(LOCAL)
    files = shared_memory(pid)
    bed.stack.stack.stop()
    assert eventually(lambda: not list(session(pid)), 20)
    assert not [file for file in files if file.exists()], "shared memory of vLLM was left behind"
