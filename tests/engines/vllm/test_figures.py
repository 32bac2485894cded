"""What is read of a vLLM server's metrics and KV events."""

from __future__ import annotations

import msgspec
import pytest

from engines.vllm.figures import HeldBlocks, read_metrics
from kvcache.engine_figures import EngineFigures
from kvcache.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    KvEventError,
    encode_batch,
)

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.28e+02
vllm:something_else{le="+Inf"} 7.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def stored(hashes: tuple[int, ...], kind: str, group: int) -> BlockStored:
    tokens = tuple(range(4 * len(hashes)))
    return BlockStored(hashes, None, tokens, 4, None, "GPU", None, group_idx=group, kv_cache_spec_kind=kind)


def batch(*events: KvEvent) -> bytes:
    return encode_batch(EventBatch(1.0, events))


def test_metrics_are_summed_over_engines_and_others_passed_over() -> None:
    found = read_metrics(METRICS)
    assert found == {"running": 3.0, "waiting": 0.0, "kv_used": 0.25, "prefix_hits": 128.0}
    figures = msgspec.convert(found, EngineFigures, strict=False)
    assert (figures.running, figures.kv_used, figures.prefix_hits) == (3, 0.25, 128)


def test_only_full_attention_counts_because_groups_share_their_names() -> None:
    held = HeldBlocks()
    held.batch(0, batch(stored((1, 2, 3), "full_attention", 5), stored((2, 3), "sliding_window", 0)))
    assert len(held) == 3
    held.batch(1, batch(BlockRemoved((2,), "GPU", 0)))
    assert len(held) == 3, "a window let go of it, the full layers hold it"
    held.batch(2, batch(BlockRemoved((2,), "GPU", 5)))
    assert len(held) == 2
    held.batch(3, batch(AllBlocksCleared()))
    assert len(held) == 0


def test_a_gap_is_counted_and_what_was_known_is_forgotten() -> None:
    held = HeldBlocks()
    held.batch(4, batch(stored((1, 2), "full_attention", 0)))
    held.batch(7, batch(stored((9,), "full_attention", 0)))
    assert (len(held), held.missed) == (1, 2)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(KvEventError):
        HeldBlocks().batch(0, b"\xc1")
