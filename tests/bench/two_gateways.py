"""Two gateways over one real Redis: what they let in together, and what the death of one costs.

    python -m tests.bench.two_gateways [--seconds 60] [--json]

A redis-server, two gateways, a prefill and a decode node (tiny random-weight llama), each a process; the nodes are told
of the first gateway alone. Figures, each with what it must be:

- ``requests``, ``tokens``: what one key is let in with over both gateways in ``--seconds``, both asked for more than
  the whole limit, over the limit itself: within 5 % of it (in less than a minute more may come at once than that).
- ``uneven``: the same with one gateway asked ten times as often as the other.
- ``budget``: tokens that one key used of its whole budget over both, over that budget, once both refuse it: not less,
  and at most 5 % more, for what was let in before it was known.
- ``concurrency``: the most streams of one key that were open at once, over its limit: at most 1.
- ``killed``: each gateway in turn gets kill -9 with streams open on both. Its own break; of the other's ``lost`` must
  be 0. ``prefix_hit`` is the share of a known prompt that the other, and then the killed one's successor, reused.
- ``redis_stopped``: requests while Redis is stopped by SIGSTOP, then gone, then empty: ``failed`` must be 0.

The exit status is 1 where a figure is not what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from scheduler.admission.limits import BURST_S, MINUTE_S
from tests.models import tiny_model
from tests.redis_server import REDIS
from tests.stacks import eventually, some_ids
from tests.two_gateways import FIRST, SECOND, TwoGateways, two_gateways

WITHIN = 0.05
PROMPT_TOKENS, OUTPUT_TOKENS = 3, 1
BLOCK = 64
KNOWN = 8 * BLOCK


class Load:
    """Threads that ask one gateway with one key, as fast as they are told."""

    def __init__(self, both: TwoGateways, name: str, key: str, per_s: float, threads: int = 4) -> None:
        self.passed = self.refused = self.failed = 0
        self.causes: set[str] = set()
        self._both, self._name, self._key = both, name, key
        self._pause = threads / per_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(threads)]

    def start(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> Load:
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)
        return self

    def _run(self, number: int) -> None:
        body = self._both.body(some_ids(PROMPT_TOKENS, seed=number), OUTPUT_TOKENS)
        url, headers = self._both.urls[self._name] + "/v1/completions", {"Authorization": f"Bearer {self._key}"}
        with httpx.Client(timeout=30.0) as http:
            due = time.monotonic()
            while not self._stop.is_set():
                due = max(due + self._pause, time.monotonic() - 1.0)
                try:
                    answer = http.post(url, json=body, headers=headers)
                    self._count(answer.status_code, answer.text)
                except httpx.HTTPError as error:
                    self._count(0, repr(error))
                self._stop.wait(max(0.0, due - time.monotonic()))

    def _count(self, status: int, text: str) -> None:
        with self._lock:
            self.passed += status == 200
            self.refused += status == 429
            if status not in (200, 429):
                self.failed += 1
                self.causes.add(f"{status}: {text[:120]}")


def rates(
    both: TwoGateways, seconds: float, limits: dict[str, int], a_minute: float, offered: tuple[float, float]
) -> dict[str, Any]:
    """One key of these limits on both gateways; ``a_minute`` requests may pass in a minute."""
    key = both.key(**limits)
    began = time.monotonic()
    loads = [Load(both, name, key, per_s).start() for name, per_s in zip(both.urls, offered, strict=True)]
    time.sleep(seconds)
    for load in loads:
        load.stop()
    took = time.monotonic() - began
    passed = sum(load.passed for load in loads)
    return {
        "seconds": round(took, 1),
        "passed": [load.passed for load in loads],
        "refused": [load.refused for load in loads],
        "failed": sum(load.failed for load in loads),
        "causes": sorted(set().union(*(load.causes for load in loads))),
        "of_limit": round(passed / (a_minute / MINUTE_S * took), 4),
    }


def budget(both: TwoGateways, seconds: float, offered: float = 14.0) -> dict[str, Any]:
    """One key on both gateways, with as many tokens as go in so many seconds, until nothing more passes."""
    a_request = PROMPT_TOKENS + OUTPUT_TOKENS
    tokens = int(seconds * 2 * offered * a_request)
    key = both.key(token_budget=tokens)
    loads = [Load(both, name, key, offered).start() for name in both.urls]

    def refused() -> bool:
        return all(load.refused > 20 for load in loads)

    assert eventually(refused, 4 * seconds + 30)
    for load in loads:
        load.stop()
    return {
        "budget": tokens,
        "passed": [load.passed for load in loads],
        "failed": sum(load.failed for load in loads),
        "of_budget": round(sum(load.passed for load in loads) * a_request / tokens, 4),
    }


def concurrency(both: TwoGateways, seconds: float, limit: int = 6) -> dict[str, Any]:
    """Streams of one key on both gateways, begun whenever one ended or was refused."""
    key = both.key(concurrency=limit)
    streams, most, deadline = [], 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        for name in both.urls:
            open_here = sum(s.gateway == name and s.ended is None for s in streams)
            if open_here < limit:
                streams.append(both.stream(name, some_ids(8, seed=len(streams)), 40, key))
        time.sleep(0.05)
        most = max(most, sum(s.status == 200 and s.ended is None for s in streams))
    assert eventually(lambda: all(s.ended for s in streams), 60.0)
    return {
        "limit": limit,
        "most_at_once": most,
        "answered": sum(s.done for s in streams),
        "refused": sum(s.status == 429 for s in streams),
        "failed": sum(s.status not in (200, 429) or (s.status == 200 and not s.done) for s in streams),
    }


def killed(both: TwoGateways, victim: str, seed: int) -> dict[str, Any]:
    """kill -9 one with streams open on both; then the other, and the next process, must know what nodes hold."""
    other = SECOND if victim == FIRST else FIRST
    known = some_ids(KNOWN + 10, seed=seed)
    reused(both, victim, known)
    streams = [both.stream(name, some_ids(12, seed=seed + n), 1500) for name in both.urls for n in range(3)]
    assert eventually(lambda: all(s.chunks > 3 for s in streams), 30.0), streams
    both.kill(victim)
    died = time.monotonic()
    assert eventually(lambda: both.nodes(other)["decode"]["jobs"] == 3, 10.0)
    hit = reused(both, other, known)
    left = time.monotonic() - died
    assert eventually(lambda: all(s.ended for s in streams), 120.0)
    both.start(victim)
    both.await_nodes(victim)
    again = reused(both, victim, known)
    return {
        "victim": victim,
        "its_streams_broken": sum(s.gateway == victim and not s.done for s in streams),
        "others_lost": sum(s.gateway == other and not s.done for s in streams),
        "others_ended": [s.finish for s in streams if s.gateway == other],
        "prefix_hit": hit,
        "answered_after_s": round(left, 2),
        "prefix_hit_of_successor": again,
    }


def reused(both: TwoGateways, name: str, prompt: list[int]) -> float:
    """What share of a prompt's full blocks was not computed again."""
    answer = both.complete(name, prompt, 2)
    assert answer.status_code == 200, (name, answer.status_code, answer.text)
    details = answer.json()["usage"]["prompt_tokens_details"]
    return round(float(details["cached_tokens"]) / KNOWN, 3)


def without_redis(both: TwoGateways) -> dict[str, Any]:
    """Requests while Redis is stopped, gone, and empty again; operators' changes meanwhile; and afterwards."""
    key = both.key()
    loads = [Load(both, name, key, 10.0).start() for name in both.urls]
    found: dict[str, Any] = {}
    both.redis.stall()
    time.sleep(5.0)
    refused = both.call("POST", FIRST, "/v1/keys", json={"role": "client"})
    found["change_refused"] = [refused.status_code, refused.json()["error"]["code"]]
    found["ready"] = [both.call("GET", name, "/ready").json() for name in both.urls]
    both.redis.go_on()
    assert eventually(lambda: "degraded" not in both.call("GET", FIRST, "/ready").json(), 10.0)
    both.redis.kill()
    time.sleep(3.0)
    both.redis.restart()
    empty = time.monotonic()

    def recovered() -> bool:
        answers = [both.call("GET", name, "/ready").json() for name in both.urls]
        return all("degraded" not in one for one in answers)

    assert eventually(recovered, 10.0)
    found["recovered_after_s"] = round(time.monotonic() - empty, 2)
    both.key()
    for load in loads:
        load.stop()
    found["passed"] = sum(load.passed for load in loads)
    found["failed"] = sum(load.failed + load.refused for load in loads)
    found["causes"] = sorted(set().union(*(load.causes for load in loads)))
    return found


def measure(both: TwoGateways, seconds: float) -> dict[str, Any]:
    """All figures."""
    a_request = PROMPT_TOKENS + OUTPUT_TOKENS
    found: dict[str, Any] = {
        "requests": rates(both, seconds, {"requests_per_minute": 600}, 600, (14, 14)),
        "tokens": rates(both, seconds, {"tokens_per_minute": 600 * a_request}, 600, (14, 14)),
        "uneven": rates(both, seconds, {"requests_per_minute": 600}, 600, (14, 1.4)),
        "budget": budget(both, min(seconds, 20.0)),
        "concurrency": concurrency(both, min(seconds, 15.0)),
        "killed": [killed(both, victim, 100 + 10 * n) for n, victim in enumerate((SECOND, FIRST))],
        "redis_stopped": without_redis(both),
    }
    found["misses"] = misses(found)
    return found


def misses(found: dict[str, Any]) -> list[str]:
    """Which figures are not what they must be."""
    limits = ("requests", "tokens", "uneven")
    wrong = [name for name in limits if found[name]["failed"] or not fits(found[name])]
    if found["budget"]["failed"] or not 1 <= found["budget"]["of_budget"] <= 1 + WITHIN:
        wrong.append("budget")
    if found["concurrency"]["most_at_once"] > found["concurrency"]["limit"] or found["concurrency"]["failed"]:
        wrong.append("concurrency")
    for one in found["killed"]:
        if one["others_lost"] or one["prefix_hit"] < 1 or one["prefix_hit_of_successor"] < 1:
            wrong.append(f"killed {one['victim']}")
    if found["redis_stopped"]["failed"] or found["redis_stopped"]["change_refused"] != [503, "redis_unavailable"]:
        wrong.append("redis_stopped")
    return wrong


def fits(figures: dict[str, Any]) -> bool:
    """Whether a limit held, and was used: what may come at once of a whole minute is a twentieth of it."""
    at_once = BURST_S / figures["seconds"]
    return 1 - WITHIN <= figures["of_limit"] <= 1 + max(WITHIN, at_once)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="Of each run against a rate.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if REDIS is None:
        print("redis-server is not installed", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", Path(folder) / "model")
        with two_gateways(model, Path(folder) / "logs") as both:
            found = measure(both, options.seconds)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, figures in found.items():
            print(f"{name}: {figures}")
    return 1 if found["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
