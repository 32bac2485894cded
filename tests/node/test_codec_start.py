"""What a node measures of its codecs before it joins, and what it says of them afterwards."""

from __future__ import annotations

import time

import pytest

from kvcache.codecs.candidates import candidates
from kvcache.control import Heartbeat, TransferDone
from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config
from kvcache.presets import gemma3_270m
from node.codec_start import measure
from tests.node.test_node import both, model, model_dir  # noqa: F401 (fixtures)

HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


@pytest.mark.parametrize("layout", [gemma3_270m(), layout_from_config(HYBRID, DType.FLOAT32)], ids=["gemma", "hybrid"])
def test_each_set_is_measured_both_ways_within_moments(layout: KVLayout) -> None:
    sets = candidates(layout)
    began = time.thread_time()
    measured = {work.codec: work for work in measure(layout, 256, sets)}
    assert time.thread_time() - began < 2.0
    assert list(measured) == [each.name for each in sets]
    for work in measured.values():
        assert work.encoded_bytes == work.decoded_bytes > 0
        assert work.encode_s > 0
        assert work.decode_s > 0
    sizes = {name.partition(",")[0]: work.wire_bytes for name, work in measured.items()}
    assert sizes["raw"] == measured["raw"].encoded_bytes
    assert sizes["raw"] > sizes["lossless"] > sizes["int8"] > sizes["int4"]


async def test_a_node_joins_with_its_measurement_and_its_beats_say_what_transfers_did(model_dir, model):  # noqa: F811
    async with both(model_dir, model) as (gateway, _, _):
        names = [each.name for each in candidates(model.layout)]
        for node in ("prefill", "decode"):
            assert [work.codec for work in gateway.joined(node).codecs] == names
            assert 1 <= gateway.joined(node).encoders <= 2
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        done = await gateway.hears("decode", TransferDone)
        sent = await gateway.hears("prefill", Heartbeat, lambda beat: counted(beat, "encoded_bytes", done.raw_bytes))
        [work] = sent.codecs
        assert (work.codec, work.wire_bytes, work.decoded_bytes) == ("lossless", done.wire_bytes, 0)
        assert work.encode_s > 0
        taken = await gateway.hears("decode", Heartbeat, lambda beat: counted(beat, "decoded_bytes", done.raw_bytes))
        [work] = taken.codecs
        assert (work.codec, work.encoded_bytes) == ("lossless", 0)
        assert work.decode_s > 0


def counted(beat: Heartbeat, field: str, nbytes: int) -> bool:
    return any(getattr(work, field) == nbytes for work in beat.codecs)
