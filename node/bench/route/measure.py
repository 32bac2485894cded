"""How long it takes to find a prompt in a full prefix index and to decide where it goes, and what the index takes.

Every prompt that is timed is another one, drawn anywhere from the index: processor caches hold nothing of its way.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from kvcache.chain_cache import ChainCache
from kvcache.hashing import block_hashes
from node.bench.route.fleet import Fleet
from node.bench.route.workload import EVENT_BLOCKS, family, fresh_names, question, reports
from node.bench.texts import documents
from scheduler.decision import Decision
from scheduler.policy import RoutingPolicy
from scheduler.prefix_index import PrefixIndex

WARM_UP = 50
HASH_PASSES = 7
SINGLES = 20_000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: how large an index, whose, how long a prompt, and how many of them."""

    blocks: int
    nodes: int
    clusters: int
    prompt_tokens: int
    block_tokens: int
    questions: int

    @property
    def prompt_blocks(self) -> int:
        """Full blocks of a prompt."""
        return self.prompt_tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """``p50_us`` and ``p99_us`` are of match, facts and decision together, whose medians follow; ``cpu_p50_us`` and
    ``cpu_p99_us`` count this thread's processor time alone, less of what else the machine does.

    ``index_bytes`` is what the process's resident memory grew by; ``updates_per_s`` counts blocks that nodes reported
    in events of 128, a second of processor time, ``single_updates_per_s`` events of one stored or removed block.
    ``hash_us`` names the blocks of a prompt never seen, ``hash_again_us`` of a conversation's next turn.
    """

    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    match_us: float
    facts_us: float
    decision_us: float
    hash_us: float
    hash_again_us: float
    tokenize_us: float | None
    index_blocks: int
    index_bytes: int
    bytes_per_block: float
    updates_per_s: float
    single_updates_per_s: float
    matched_nodes: float
    matched_blocks: float
    remote_share: float

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure(setting: Setting, model_dir: Path | None, say: Say) -> Figures:
    """All figures. Raises ValueError for settings that nothing can be measured of, OSError for a model not there."""
    if setting.prompt_blocks < 1:
        raise ValueError(f"prompt_tokens: {setting.prompt_tokens} are less than a block of {setting.block_tokens}")
    fleet, policy = Fleet(setting.nodes, setting.clusters), RoutingPolicy()
    list(reports(0, family(0, setting.prompt_blocks), fleet.node_ids))  # what the first one loads is not the index's
    gc.collect()
    before = _resident_bytes()
    index = PrefixIndex(setting.blocks, snapshots=True)
    families, updates_per_s = _fill(index, setting, fleet, say)
    gc.collect()
    index_blocks, index_bytes = len(index), _resident_bytes() - before

    rng = np.random.default_rng(3)
    times = np.empty((setting.questions, 4))
    cpu = np.empty(setting.questions)
    matched: list[tuple[int, int, bool]] = []
    for number in range(-WARM_UP, setting.questions):
        names = question(rng, families, setting.prompt_blocks)
        fleet.shuffle(rng)
        spent, decision, found = _ask(index, fleet, policy, setting, names)
        if number >= 0:
            times[number], cpu[number] = spent[:4], spent[4]
            best = max((match.held_blocks for match in found.values()), default=0)
            matched.append((len(found), best, decision.remote))
        if number % 500 == 0:
            say(f"{number} of {setting.questions} prompts routed")
    nodes, blocks, remote = np.mean(matched, axis=0)
    p50, p99 = np.percentile(times[:, 3], (50, 99))
    hash_us, hash_again_us = _hash_us(setting)
    medians = np.median(times, axis=0)
    return Figures(
        p50_us=_round(p50),
        p99_us=_round(p99),
        cpu_p50_us=_round(np.median(cpu)),
        cpu_p99_us=_round(np.percentile(cpu, 99)),
        match_us=_round(medians[0]),
        facts_us=_round(medians[1]),
        decision_us=_round(medians[2]),
        hash_us=hash_us,
        hash_again_us=hash_again_us,
        tokenize_us=None if model_dir is None else _tokenize_us(model_dir, setting.prompt_tokens),
        index_blocks=index_blocks,
        index_bytes=index_bytes,
        bytes_per_block=_round(index_bytes / index_blocks),
        updates_per_s=round(updates_per_s),
        single_updates_per_s=round(_single_updates_per_s(index, fleet.node_ids[0])),
        matched_nodes=_round(nodes),
        matched_blocks=_round(blocks),
        remote_share=round(float(remote), 3),
    )


def _fill(index: PrefixIndex, setting: Setting, fleet: Fleet, say: Say) -> tuple[int, float]:
    """Families until the index is full; how many there are, and blocks reported for each second of processor time."""
    reported, spent, families, said = 0, 0.0, 0, 0
    while not index.tree.runs.evicted and len(index) < setting.blocks:
        for one in reports(families, family(families, setting.prompt_blocks), fleet.node_ids):
            began = time.thread_time()
            one.tell(index)
            spent += time.thread_time() - began
            reported += one.blocks
            if len(index) >= setting.blocks - EVENT_BLOCKS:
                return families + 1, reported / spent
        families += 1
        if len(index) - said >= 1_000_000:
            said = len(index)
            say(f"{said:,} of {setting.blocks:,} blocks stored")
    return families, reported / spent


def _ask(
    index: PrefixIndex, fleet: Fleet, policy: RoutingPolicy, setting: Setting, names: list[bytes]
) -> tuple[tuple[float, ...], Decision, dict[str, Any]]:
    """Microseconds of match, facts, decision and all of it, and of the thread's processor time."""
    cpu = time.thread_time_ns()
    began = time.perf_counter_ns()
    found = index.match(names)
    matched = time.perf_counter_ns()
    facts = fleet.facts("bench", setting.prompt_tokens, setting.block_tokens, found)
    gathered = time.perf_counter_ns()
    decision = policy.decide(facts)
    ended = time.perf_counter_ns()
    cpu = time.thread_time_ns() - cpu
    steps = (matched - began, gathered - matched, ended - gathered, ended - began, cpu)
    return tuple(step / 1000 for step in steps), decision, found


def _single_updates_per_s(index: PrefixIndex, node: str) -> float:
    """One block an event, as generations fill them and as caches evict them, at a prompt's end first."""
    names = fresh_names(np.random.default_rng(4), SINGLES)
    began = time.thread_time()
    before = None
    for name in names:
        index.stored(node, [name], before)
        before = name
    for name in reversed(names):
        index.removed(node, [name])
    return 2 * len(names) / (time.thread_time() - began)


def _hash_us(setting: Setting) -> tuple[float, float]:
    rng = np.random.default_rng(5)
    first, again = [], []
    for _ in range(HASH_PASSES):
        ids: list[int] = rng.integers(0, 200_000, setting.prompt_tokens).tolist()
        began = time.perf_counter()
        block_hashes(ids, setting.block_tokens, fingerprint="bench", salt="tenant")
        first.append(time.perf_counter() - began)
        cache = ChainCache()
        earlier = ids[: setting.prompt_tokens * 15 // 16]
        cache.block_hashes(earlier, setting.block_tokens, fingerprint="bench", salt="tenant")
        began = time.perf_counter()
        cache.block_hashes(ids, setting.block_tokens, fingerprint="bench", salt="tenant")
        again.append(time.perf_counter() - began)
    return _round(np.median(first) * 1e6), _round(np.median(again) * 1e6)


def _tokenize_us(model_dir: Path, tokens: int) -> float:
    """The model's own tokeniser on a text of about as many tokens. The second pass counts: the first fills caches."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise OSError(f"{path} is not there")
    tokenizer = Tokenizer.from_file(str(path))
    text = ""
    for document in documents(20):
        text += document
        if len(text) > 8 * tokens:
            break
    encoding = tokenizer.encode(text)
    if len(encoding.ids) < tokens:
        raise ValueError(f"prompt_tokens: the texts here make {len(encoding.ids)}, ask for no more")
    text = text[: encoding.offsets[tokens - 1][1]]
    began = time.perf_counter()
    tokenizer.encode(text)
    return _round((time.perf_counter() - began) * 1e6)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _round(value: Any) -> float:
    return round(float(value), 1)
