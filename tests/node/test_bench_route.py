"""``prfaas bench route``: what it fills an index with is what it finds again, and every figure is there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from node.bench.cli import bench
from node.bench.route.fleet import Fleet
from node.bench.route.measure import Setting, measure
from node.bench.route.workload import family, question, reports
from scheduler.prefix_index import Match, PrefixIndex

KEYS = {"p50_us", "p99_us", "hash_us", "tokenize_us", "index_blocks", "index_bytes"}
SMALL = ("--blocks", "3000", "--nodes", "8", "--clusters", "2", "--prompt-tokens", "2048", "--questions", "50")


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["route", *arguments])


def test_a_family_is_the_same_each_time_and_its_prompts_share_beginnings() -> None:
    prompts = family(3, 500)
    assert [prompt.names for prompt in family(3, 500)] == [prompt.names for prompt in prompts]
    assert all(1 <= len(prompt.names) <= 500 for prompt in prompts)
    branches = [prompt for prompt in prompts if prompt.fork]
    assert branches
    for branch in branches:
        assert any(
            branch.names[: branch.fork] == other.names[: branch.fork] for other in prompts if other is not branch
        )
    names = {name for prompt in prompts for name in prompt.names}
    assert not names & {name for prompt in family(4, 500) for name in prompt.names}


def test_what_was_reported_is_what_is_matched() -> None:
    index = PrefixIndex(100_000, snapshots=True)
    told = list(reports(0, family(0, 300), ["a", "b", "c"]))
    for one in told:
        one.tell(index)
    held: dict[str, set[bytes]] = {"a": set(), "b": set(), "c": set()}
    for one in told:
        held[one.node].update(one.names[: one.blocks])
        if one.hole is not None:
            held[one.node].discard(one.names[one.hole])
    for prompt in family(0, 300):
        expected = {}
        for node, names in held.items():
            count = next((n for n, name in enumerate(prompt.names) if name not in names), len(prompt.names))
            if count:
                expected[node] = count
        assert {node: match.held_blocks for node, match in index.match(prompt.names).items()} == expected


def test_every_question_is_of_full_length_and_of_its_own() -> None:
    rng = np.random.default_rng(1)
    asked = [question(rng, 4, 200) for _ in range(20)]
    assert {len(names) for names in asked} == {200}
    assert len({names[-1] for names in asked}) > 10


def test_facts_hold_what_was_found_for_the_candidates_of_every_cluster() -> None:
    fleet = Fleet(60, 3)
    assert len(fleet.node_ids) == 60
    held = fleet.clusters[2][-1].node_id
    facts = fleet.facts("r", 4096, 16, {held: Match(100, 50)})
    assert [cluster.local for cluster in facts.clusters] == [True, False, False]
    assert all(cluster.nodes for cluster in facts.clusters)
    assert sum(len(cluster.nodes) for cluster in facts.clusters) < 20
    found = {node.node_id: node for node in facts.clusters[2].nodes}[held]
    assert (found.held_tokens, found.cached_tokens) == (1600, 800)


def test_json_has_every_figure() -> None:
    result = ran(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures.keys() >= KEYS
    assert figures["tokenize_us"] is None
    assert 2000 < figures["index_blocks"] <= 3000
    assert 0 < figures["p50_us"] <= figures["p99_us"]
    assert figures["match_us"] + figures["facts_us"] + figures["decision_us"] < 2 * figures["p50_us"]
    assert figures["hash_again_us"] < figures["hash_us"]
    assert figures["matched_nodes"] > 0
    assert figures["matched_blocks"] > 0


def test_without_json_it_prints_every_figure_in_a_line() -> None:
    result = ran(*SMALL)
    assert result.exit_code == 0, result.output
    assert {line.split("  ")[0].replace(" ", "_") for line in result.stdout.splitlines()} >= KEYS


def test_memory_is_measured_and_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([1_000_000, 1_300_000])
    monkeypatch.setattr("node.bench.route.measure._resident_bytes", lambda: next(sizes))
    figures = measure(Setting(3000, 8, 2, 2048, 16, 5), None, lambda _: None)
    assert figures.index_bytes == 300_000
    assert figures.bytes_per_block == pytest.approx(300_000 / figures.index_blocks, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "5", "--clusters", "3"), "3 clusters need at least 6 nodes, not 5"),
        (("--prompt-tokens", "15"), "prompt_tokens: 15 are less than a block of 16"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments: tuple[str, ...], said: str) -> None:
    result = ran("--blocks", "1000", *arguments)
    assert result.exit_code == 1
    assert said in result.output


def test_a_directory_without_a_tokeniser_is_refused(tmp_path: Path) -> None:
    result = ran(*SMALL, "--model", str(tmp_path))
    assert result.exit_code == 1
    assert "tokenizer.json" in result.output
