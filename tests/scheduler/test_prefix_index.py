from __future__ import annotations

import random

import pytest

from scheduler import coverage
from scheduler.prefix_index import Match, PrefixIndex
from tests.scheduler.prompts import Prompts, names

ABC = names("a", "b", "c")
LONG = names(*range(10))


def index(capacity: int = 10_000, *, snapshots: bool = False, history_s: float = 8.0) -> PrefixIndex:
    return PrefixIndex(capacity, snapshots=snapshots, history_s=history_s)


def held(found: dict[str, Match]) -> dict[str, int]:
    return {node: match.held_blocks for node, match in found.items()}


def check_integrity(one: PrefixIndex) -> None:
    """What must hold between runs, slots, coverages and forks."""
    runs, table = one.tree.runs, one.tree.table
    live = [run for run in runs.all if run is not None]
    assert len(live) == len(runs)
    assert sum(len(run.slots) for run in live) == len(table) <= table.capacity
    forks: dict[int, dict[int, int]] = {}
    for run in live:
        assert run.slots
        assert [(table.run_of[s], table.offset_of[s]) for s in run.slots] == [
            (run.ident, n) for n in range(len(run.slots))
        ]
        values = [*run.held.values(), *(run.snapshots or {}).values()]
        assert all(value and coverage.extent(value) <= len(run.slots) for value in values)
        if run.parent is not None:
            assert runs.all[run.parent.ident] is run.parent
            assert run.at < len(run.parent.slots)
            counts = forks.setdefault(run.parent.ident, {})
            counts[run.at] = counts.get(run.at, 0) + 1
        assert (run.above is not None) == any(run in waiting for waiting in runs.floating.values())
    assert all((run.forks or {}) == forks.get(run.ident, {}) for run in live)


def test_the_longest_match_of_each_node() -> None:
    one = index()
    one.stored("long", ABC, None)
    one.stored("short", ABC[:1], None)
    one.stored("other", names("x"), None)
    assert one.match(ABC) == {"long": Match(3, 3), "short": Match(1, 1)}
    assert held(one.match(names("a", "b", "z"))) == {"long": 2, "short": 1}
    assert one.match(names("z")) == {}
    assert one.match([]) == {}


def test_a_block_that_is_missing_ends_a_match_until_it_is_back() -> None:
    one = index()
    one.stored("n", LONG, None)
    one.removed("n", [LONG[5]])
    assert held(one.match(LONG)) == {"n": 5}
    one.stored("n", [LONG[5]], LONG[4])
    assert held(one.match(LONG)) == {"n": 10}


def test_a_hole_whose_block_nobody_has_keeps_its_place() -> None:
    one = index()
    one.stored("n", LONG, None)
    one.removed("n", LONG[:6])
    assert one.match(LONG) == {}
    one.stored("m", LONG[:8], None)
    assert held(one.match(LONG)) == {"m": 8}
    one.stored("n", LONG[:6], None)
    assert held(one.match(LONG)) == {"n": 10, "m": 8}


def test_blocks_whose_parent_is_unknown_count_when_it_comes() -> None:
    one = index()
    one.stored("n", LONG[6:], LONG[5])
    one.stored("n", LONG[3:5], LONG[2])
    one.stored("n", LONG[:3], None)
    assert held(one.match(LONG)) == {"n": 5}
    one.stored("m", [LONG[5]], LONG[4])
    assert held(one.match(LONG)) == {"n": 5}
    one.stored("n", [LONG[5]], LONG[4])
    assert held(one.match(LONG)) == {"n": 10}
    check_integrity(one)


def test_blocks_whose_parent_never_comes_go_with_their_node() -> None:
    one = index()
    one.stored("n", LONG[6:], LONG[5])
    one.removed("n", LONG[6:])
    assert len(one) == 0
    assert not one.tree.runs.floating


def test_one_can_resume_at_the_last_snapshot_before_the_first_hole() -> None:
    one = index(snapshots=True)
    one.stored("n", LONG, None)
    assert one.match(LONG) == {"n": Match(10, 0)}
    one.snapshot("n", LONG[3])
    one.snapshot("n", LONG[8])
    assert one.match(LONG) == {"n": Match(10, 9)}
    assert one.match(LONG[:8]) == {"n": Match(8, 4)}
    one.removed("n", [LONG[6]])
    assert one.match(LONG) == {"n": Match(6, 4)}
    one.removed_snapshot("n", [LONG[3]])
    assert one.match(LONG) == {"n": Match(6, 0)}
    one.stored("n", [LONG[6]], LONG[5])
    assert one.match(LONG) == {"n": Match(10, 9)}


def test_a_snapshot_is_its_own_nodes_and_not_its_neighbours() -> None:
    one = index(snapshots=True)
    one.stored("n", ABC, None)
    one.stored("m", ABC, None)
    one.snapshot("m", ABC[1])
    assert one.match(ABC) == {"n": Match(3, 0), "m": Match(3, 2)}


@pytest.mark.parametrize("gone", [PrefixIndex.cleared, PrefixIndex.forget])
def test_a_cleared_or_forgotten_node_holds_nothing_at_once_and_its_memory_comes_back(gone) -> None:  # type: ignore[no-untyped-def]
    one = index(snapshots=True)
    for number in range(50):
        one.stored("n", names(number, "a", "b"), None)
        one.snapshot("n", names(number, "a")[-1])
    one.stored("m", names(7, "a"), None)
    gone(one, "n")
    assert held(one.match(names(7, "a", "b"))) == {"m": 2}
    one.stored("n", names(7), None)
    assert held(one.match(names(7, "a", "b"))) == {"m": 2, "n": 1}
    while one.tidy(10):
        check_integrity(one)
    assert len(one) == 2


def test_sweeping_happens_with_the_events() -> None:
    one = index()
    for number in range(50):
        one.stored("n", names(number), None)
    one.cleared("n")
    for _ in range(100):
        one.stored("m", ABC, None)
    assert len(one) == 3


def test_it_agrees_with_sets_of_names_whatever_happens() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        prompts = Prompts(rng)
        one = index(snapshots=True)
        nodes = ["n0", "n1", "n2", "n3"]
        blocks: dict[str, set[bytes]] = {node: set() for node in nodes}
        snapshots: dict[str, set[bytes]] = {node: set() for node in nodes}
        for _ in range(150):
            node, what = rng.choice(nodes), rng.random()
            if what < 0.5:
                prompt = prompts.fresh()
                first = rng.choice([0, 0, rng.randrange(len(prompt))])
                some = prompt[first : rng.randint(first, len(prompt))]
                one.stored(node, some, prompt[first - 1] if first else None)
                blocks[node].update(some)
                if some and rng.random() < 0.5:
                    at = rng.choice(some)
                    one.snapshot(node, at)
                    snapshots[node].add(at)
            elif what < 0.85:
                prompt = prompts.earlier()
                gone = rng.choice([prompt[::-1], prompt[rng.randint(0, len(prompt)) :], prompt[:2]])
                one.removed(node, gone)
                blocks[node].difference_update(gone)
            elif what < 0.95:
                some = sorted(snapshots[node])[:3]
                one.removed_snapshot(node, some)
                snapshots[node].difference_update(some)
            else:
                rng.choice([one.cleared, one.forget])(node)
                blocks[node].clear()
                snapshots[node].clear()
            asked = rng.choice([prompts.earlier, prompts.fresh])()
            expected = {}
            for one_node in nodes:
                count = next((n for n, name in enumerate(asked) if name not in blocks[one_node]), len(asked))
                last = max((n + 1 for n in range(count) if asked[n] in snapshots[one_node]), default=0)
                if count:
                    expected[one_node] = Match(count, last)
            assert one.match(asked) == expected
        check_integrity(one)
        for node in nodes:
            one.forget(node)
        while one.tidy():
            pass
        assert len(one) == len(one.tree.runs) == one.tree.runs.nbytes == 0


@pytest.mark.parametrize("capacity", [1, 7, 50, 300])
def test_beyond_its_capacity_it_says_less_and_never_more(capacity: int) -> None:
    rng = random.Random(capacity)
    prompts = Prompts(rng)
    one = index(capacity)
    blocks: dict[str, set[bytes]] = {"n": set(), "m": set()}
    for _ in range(200):
        node = rng.choice(sorted(blocks))
        prompt = prompts.fresh(40)
        one.stored(node, prompt, None)
        blocks[node].update(prompt)
        if rng.random() < 0.3:
            gone = rng.sample(prompt, rng.randint(0, len(prompt)))
            one.removed(node, gone)
            blocks[node].difference_update(gone)
        check_integrity(one)
        for found, match in one.match(prompts.earlier()).items():
            assert match.held_blocks <= len(blocks[found])
        asked = prompts.earlier()
        assert all(set(asked[: m.held_blocks]) <= blocks[n] for n, m in one.match(asked).items())
    assert one.tree.runs.evicted > 0


def test_what_was_matched_of_late_stays_and_what_was_not_goes() -> None:
    one = index(1000)
    old = [names(number, *range(9)) for number in range(100)]
    for prompt in old:
        one.stored("n", prompt, None)
    for number in range(100, 150):
        one.match(old[5])
        one.stored("n", names(number, *range(9)), None)
    assert held(one.match(old[5])) == {"n": 10}
    assert sum(bool(one.match(prompt)) for prompt in old) < 60


def test_what_another_node_stored_of_late_stays() -> None:
    one = index(1000)
    old = [names(number, *range(9)) for number in range(100)]
    for prompt in old:
        one.stored("n", prompt, None)
    for number in range(100, 150):
        one.stored(f"m{number}", old[5], None)
        one.stored("n", names(number, *range(9)), None)
    assert held(one.match(old[5]))["n"] == 10


def test_a_way_with_many_forks_takes_few_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    one = index()
    way = names(*range(1000))
    for block in range(600):
        one.stored(
            "n", [*way[block : block + 1], *names(*range(block + 1), "away")[-1:]], way[block - 1] if block else None
        )
    find, asked = one.tree.table.find, []

    def counted(name: bytes) -> int:
        asked.append(name)
        return find(name)

    monkeypatch.setattr(one.tree.table, "find", counted)
    assert held(one.match(way)) == {"n": 600}
    assert len(asked) < 40


def test_a_shared_beginning_outlives_its_branches() -> None:
    one = index(60)
    trunk = names(*range(20))
    for number in range(100):
        one.stored("n", names(*range(20), number, number), None)
        assert one.match(trunk)["n"].held_blocks == 20


def test_prompts_of_one_block_are_bounded_by_what_they_take() -> None:
    one = index(20_000)
    for number in range(8000):
        one.stored("n", [number.to_bytes(16, "little")], None)
    assert one.tree.runs.evicted > 0
    assert one.tree.runs.nbytes <= 20_000 * 100 + (1 << 16)


def test_names_that_do_not_follow_each_other_break_nothing() -> None:
    rng = random.Random(3)
    known = [rng.randbytes(16) for _ in range(60)]
    one = index(40, snapshots=True)
    for _ in range(300):
        some = rng.choices(known, k=rng.randint(1, 30))
        one.stored(rng.choice("nm"), some, rng.choice([None, rng.choice(known)]))
        one.snapshot("n", rng.choice(known))
        one.removed("n", rng.sample(known, 5))
        one.match(some)
        check_integrity(one)


def test_a_run_longer_than_one_can_be_goes_on_in_another() -> None:
    one = index(100_000)
    blocks = [number.to_bytes(16, "little") for number in range(70_000)]
    one.stored("n", blocks, None)
    assert held(one.match(blocks)) == {"n": 70_000}


def test_what_was_sent_to_a_node_without_events_is_remembered_for_a_while() -> None:
    one = index(snapshots=True)
    one.sent("n", ABC, now=100.0)
    one.sent("n", names("x"), now=107.0)
    assert one.match(ABC) == {"n": Match(3, 3)}
    one.expire(107.9)
    assert one.match(ABC) == {"n": Match(3, 3)}
    one.expire(108.0)
    assert one.match(ABC) == {}
    assert one.match(names("x", "y")) == {"n": Match(1, 1)}


def test_what_was_sent_to_a_forgotten_node_is_forgotten() -> None:
    one = index()
    one.sent("n", ABC, now=1.0)
    one.forget("n")
    assert one.match(ABC) == {}


def test_a_prompt_that_is_sent_again_is_remembered_from_then_on() -> None:
    one = index()
    for now in range(0, 100, 3):
        one.sent("n", ABC, now=float(now))
        assert held(one.match(ABC)) == {"n": 3}
    assert len(one.spans) <= 5


def test_the_first_event_of_a_node_replaces_what_was_guessed() -> None:
    one = index()
    one.sent("n", ABC, now=1.0)
    one.removed("n", [])
    assert one.match(ABC) == {}
    one.sent("n", ABC, now=1.0)
    assert one.match(ABC) == {}
    one.stored("n", ABC[:1], None)
    assert held(one.match(ABC)) == {"n": 1}
    one.forget("n")
    one.sent("n", ABC, now=1.0)
    assert held(one.match(ABC)) == {"n": 3}


@pytest.mark.parametrize("name", [b"", b"short", b"seventeen bytes.."])
def test_a_name_of_another_length_is_refused(name: bytes) -> None:
    one = index()
    with pytest.raises(ValueError, match="16 bytes"):
        one.stored("n", [ABC[0], name], None)
    with pytest.raises(ValueError, match="16 bytes"):
        one.match([name])


def test_a_history_of_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="history_s"):
        index(history_s=0.0)
