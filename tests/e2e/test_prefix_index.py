"""The index of a running stack: after a prompt both nodes hold it, after an eviction or a restart they do not."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zmq

from deploy.stack import free_port
from kvcache.engine_names import EngineNames
from kvcache.fingerprint import Fingerprint
from kvcache.held import OwnNames
from kvcache.kv_events import EventBatch, decode_batch
from tests.kvcache.held import HeldSets
from tests.models import tiny_model
from tests.stacks import RunningStack, eventually, node, running_stack, send_signal, some_ids

pytestmark = pytest.mark.slow

EAST, DECODE = "east-prefill", "local-decode"
BLOCK = 64
PROMPT = some_ids(10 * BLOCK + 20, seed=3)
IN_BLOCKS = 10 * BLOCK
REPLAY = f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    path = tmp_path_factory.mktemp("prefixes")
    model = tiny_model("llama", path / "model")
    events = ("--kv-events-endpoint", f"tcp://127.0.0.1:{free_port()}", "--kv-events-replay-endpoint", REPLAY)
    nodes = (node(EAST, "east", "prefill"), node(DECODE, "local", "decode", *events))
    options = {"pool_mib": 4, "gateway_options": ("--state", str(path / "state.db"))}
    with running_stack(model, path / "logs", nodes=nodes, **options) as one:
        yield one


def thought_to_hold(stack: RunningStack, answer: httpx.Response) -> dict[str, tuple[int, int]]:
    """What the decision of a request took each node to hold of its prompt, and to be able to resume after."""
    facts = stack.record(answer)["decision"]["facts"]
    nodes = [*facts["decode_nodes"], *(one for cluster in facts["clusters"] for one in cluster["nodes"])]
    return {one["node_id"]: (one["held_tokens"], one["cached_tokens"]) for one in nodes}


def ask(stack: RunningStack, prompt: list[int] | None = None) -> httpx.Response:
    answer = stack.complete(prompt or PROMPT, 4)
    assert answer.status_code == 200, answer.text
    return answer


def prefix_index(stack: RunningStack) -> dict[str, Any]:
    found: dict[str, Any] = stack.http.get("/v1/status").json()["prefix_index"]
    return found


def settled(stack: RunningStack) -> None:
    """Events are on their way for some milliseconds: wait until no more come."""
    seen = [-1]

    def quiet() -> bool:
        seen.append(prefix_index(stack)["batches"])
        return len(seen) > 3 and len(set(seen[-3:])) == 1

    assert eventually(quiet, 10.0, every_s=0.1)


def test_after_a_remote_prefill_both_nodes_are_known_to_hold_the_prompt(stack: RunningStack) -> None:
    first = ask(stack)
    assert thought_to_hold(stack, first) == {EAST: (0, 0), DECODE: (0, 0)}
    settled(stack)
    second = ask(stack)
    assert thought_to_hold(stack, second) == {EAST: (IN_BLOCKS, IN_BLOCKS), DECODE: (IN_BLOCKS, IN_BLOCKS)}
    assert second.json()["choices"][0]["token_ids"] == first.json()["choices"][0]["token_ids"]


def test_a_stranger_that_reads_zmq_has_the_same_names_from_the_token_ids(stack: RunningStack) -> None:
    parts = stack.http.get("/v1/models").json()["data"][0]["fingerprint"]
    theirs, ours = HeldSets(), HeldSets()
    stranger = EngineNames(BLOCK, Fingerprint.from_parts(parts).digest(), theirs)
    for batch in replayed(REPLAY):
        stranger.apply(batch.events)
        OwnNames(BLOCK, ours).apply(batch.events)
    assert len(theirs.blocks) >= IN_BLOCKS // BLOCK
    assert theirs.blocks == ours.blocks


def replayed(endpoint: str) -> Iterator[EventBatch]:
    """All that a publisher kept."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart((b"", bytes(8)))
        while (frames := dealer.recv_multipart())[-2] != b"\xff" * 8:
            yield decode_batch(frames[-1])


def test_a_restarted_gateway_knows_what_it_knew_without_being_told_again(stack: RunningStack) -> None:
    known = prefix_index(stack)
    gateway = stack.stack.processes["gateway"]
    gateway.terminate()
    gateway.wait(time.monotonic() + 15.0)
    stack.stack.start_gateway()
    stack.await_idle()
    settled(stack)
    again = prefix_index(stack)
    assert again["blocks"] == known["blocks"]
    assert again["nodes"] == known["nodes"]
    assert again["batches"] == 0, "it was all in the snapshot"
    assert thought_to_hold(stack, ask(stack)) == {EAST: (IN_BLOCKS, IN_BLOCKS), DECODE: (IN_BLOCKS, IN_BLOCKS)}


def test_a_killed_nodes_cache_is_forgotten_when_it_comes_back(stack: RunningStack) -> None:
    killed = stack.stack.processes[DECODE]
    send_signal(killed.pid, signal.SIGKILL)
    killed.wait(time.monotonic() + 5.0)
    spec = next(spec for spec in stack.stack.spec.nodes if spec.name == DECODE)
    stack.stack.start_node(spec)
    stack.stack.await_node(spec)
    stack.await_idle()
    assert thought_to_hold(stack, ask(stack)) == {EAST: (IN_BLOCKS, IN_BLOCKS), DECODE: (0, 0)}


def test_what_a_node_evicts_it_is_not_thought_to_hold(stack: RunningStack) -> None:
    for seed in range(20, 32):
        ask(stack, some_ids(12 * BLOCK, seed=seed))
    settled(stack)
    answer = ask(stack)
    thought = thought_to_hold(stack, answer)
    assert all(held < IN_BLOCKS for held, _ in thought.values()), thought
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == thought[EAST][1], "and it is so"
    assert len(stack.record(answer)["attempts"]) == 1
