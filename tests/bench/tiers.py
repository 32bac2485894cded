"""A working set larger than the host pool: what lies in files is read back instead of being computed again.

    python -m tests.bench.tiers --gemma DIR [--prompts 12] [--tokens 2049] [--pool-mib 40] [--json]

A local prefill node reads ``prompts`` long prompts once, and then each of them again with 65 tokens more, as the next
turn of a conversation has them. Three stacks do the same one after another: with files below the pool, with nothing
below it, and with a pool that holds everything. The decode node keeps nothing, so that every transfer is whole and its
KV digests can be compared: what was read back must be to the byte what was computed anew. One request at a time; times
are medians. The first prompt of a stack warms it up and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.stacks import RunningStack, eventually, node, running_stack, some_ids

MORE_TOKENS = 65
VOCAB = 200_000
WAYS = ("files", "nothing", "memory")


def turn(stack: RunningStack, ids: list[int]) -> dict[str, Any] | None:
    """One request's figures; None where it did not go well, as on a machine with too much else to do."""
    assert eventually(lambda: all(one["accepting"] for one in stack.nodes().values()), 60)
    answer = stack.complete(ids, 1, hint="local")
    if answer.status_code != 200:
        return None
    record = stack.record(answer)
    attempt = record["attempts"][0]
    if len(record["attempts"]) > 1 or "kv_digest" not in attempt:
        return None
    return {
        "ttft_s": record["ttft_s"],
        "prefill_s": attempt["prefill_s"],
        "cached_tokens": attempt.get("cached_tokens", 0),
        "raw_bytes": attempt["raw_bytes"],
        "kv_digest": attempt["kv_digest"],
        "token": answer.json()["choices"][0]["token_ids"],
    }


def run(way: str, arguments: argparse.Namespace, say: Console) -> dict[str, Any]:
    """Both turns of every prompt on one stack."""
    prompts = [some_ids(arguments.tokens, VOCAB, seed) for seed in range(1, arguments.prompts + 1)]
    with tempfile.TemporaryDirectory() as scratch:
        below = ("--tier-disk", f"{scratch}/tier", "--tier-disk-mib", "2048") if way == "files" else ()
        pool_mib = arguments.pool_mib if way != "memory" else 8 * arguments.pool_mib
        nodes = (
            node("prefill", "local", "prefill", *below, "--pool-mib", str(pool_mib)),
            node("decode", "local", "decode", "--no-prefix-cache"),
        )
        settings = {"dtype": arguments.dtype, "pool_mib": 256, "nodes": nodes}
        with running_stack(arguments.gemma, Path(scratch) / "logs", **settings) as stack:
            turn(stack, some_ids(300, VOCAB, 0))
            working_set = 0
            for number, prompt in enumerate(prompts):
                say.print(f"{way}: first turn {number + 1} of {len(prompts)}")
                first = turn(stack, prompt)
                working_set += 0 if first is None else first["raw_bytes"]
            time.sleep(2)  # the last beat tells of all copies
            before = stack.nodes()["prefill"]["heartbeat"]
            turns = []
            for number, prompt in enumerate(prompts):
                say.print(f"{way}: second turn {number + 1} of {len(prompts)}")
                turns.append(turn(stack, prompt + some_ids(MORE_TOKENS, VOCAB, 1000 + number)))
            time.sleep(2)
            after = stack.nodes()["prefill"]["heartbeat"]
    done = [each for each in turns if each is not None]
    found: dict[str, Any] = {
        "way": way,
        "pool_bytes": pool_mib << 20,
        "working_set": working_set / (pool_mib << 20),
        "failed": len(turns) - len(done),
        "hit_share": sum(each["cached_tokens"] > 0 for each in done) / len(done),
        "cached_share": sum(each["cached_tokens"] for each in done) / (len(done) * arguments.tokens),
        "ttft_s": statistics.median(each["ttft_s"] for each in done),
        "prefill_s": statistics.median(each["prefill_s"] for each in done),
        "turns": turns,
    }
    if way == "files":
        (tier,) = after["tiers"]
        (earlier,) = before["tiers"]
        reloads = tier["hits"] - earlier["hits"]
        nbytes = tier["reloaded_bytes"] - earlier["reloaded_bytes"]
        found |= {
            "tier": tier,
            "reload_bytes": nbytes / max(1, reloads),
            "reload_s": nbytes / max(1, reloads) / tier["read_bytes_per_s"] if tier["read_bytes_per_s"] else None,
        }
    return found


def measure(arguments: argparse.Namespace, say: Console) -> dict[str, Any]:
    """All stacks, and whether they agree."""
    runs = {way: run(way, arguments, say) for way in WAYS}
    files, nothing = runs["files"], runs["nothing"]
    each = zip(files["turns"], nothing["turns"], runs["memory"]["turns"], strict=True)
    whole = [(a, b, c) for a, b, c in each if a and b and c]
    same = [a["kv_digest"] == b["kv_digest"] == c["kv_digest"] and a["token"] == b["token"] for a, b, c in whole]
    return {
        "working_set_of_pool": files["working_set"],
        "reload_s": files["reload_s"],
        "recompute_s": nothing["prefill_s"] - files["prefill_s"],
        "ttft_ratio": nothing["ttft_s"] / files["ttft_s"],
        "same_kv_bytes": sum(same),
        "of_turns": len(same),
        "runs": [{name: value for name, value in runs[way].items() if name != "turns"} for way in WAYS],
    }


def show(found: dict[str, Any]) -> None:
    """For people."""
    table = Table("below the pool", "pool MiB", "hits", "tokens not computed", "TTFT s", "prefill s")
    for each in found["runs"]:
        table.add_row(
            each["way"],
            str(each["pool_bytes"] >> 20),
            f"{each['hit_share']:.0%}",
            f"{each['cached_share']:.0%}",
            f"{each['ttft_s']:.3f}",
            f"{each['prefill_s']:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(f"working set {found['working_set_of_pool']:.1f} times the pool")
    console.print(f"reading back {found['reload_s'] * 1e3:.0f} ms, computing again {found['recompute_s'] * 1e3:.0f} ms")
    console.print(f"the same KV bytes in {found['same_kv_bytes']} of {found['of_turns']} turns")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", type=Path, required=True, help="the model's directory")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2049, help="of a first turn; one more than a multiple of 64")
    parser.add_argument("--pool-mib", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments, Console(stderr=True))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
