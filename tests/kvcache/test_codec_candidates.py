"""Which sets of codecs a node offers for its model, and how what they do is counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcache import codecs
from kvcache.codecs.candidates import candidates
from kvcache.codecs.meter import CodecMeter
from kvcache.control import CodecWork
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.quality import Quality

CONV, RECURRENT = TensorSpec("conv", DType.BFLOAT16, (4, 4)), TensorSpec("recurrent", DType.FLOAT32, (2, 8, 8))


def layout(dtype: DType, *states: TensorSpec) -> KVLayout:
    keys = tuple(TensorSpec(name, dtype, (2, 8)) for name in ("k", "v"))
    full = GroupSpec(GroupKind.FULL, (LayerSpec(0, keys),))
    return KVLayout((full, GroupSpec(GroupKind.STATE, (LayerSpec(1, states),))) if states else (full,))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (layout(DType.BFLOAT16), ["raw", "lossless", "fp8", "int8", "int4"]),
        (layout(DType.FLOAT32), ["raw", "lossless", "fp16", "fp8", "int8", "int4"]),
        (
            layout(DType.BFLOAT16, RECURRENT),
            ["raw", "lossless", "fp8,state=fp16", "int8,state=fp16", "int4,state=fp16"],
        ),
        (
            layout(DType.BFLOAT16, CONV, RECURRENT),
            ["raw", "lossless"]
            + [f"{name},state.conv=lossless,state.recurrent=fp16" for name in ("fp8", "int8", "int4")],
        ),
        (
            layout(DType.FLOAT32, RECURRENT),
            ["raw", "lossless", "fp16", "fp8,state=fp16", "int8,state=fp16", "int4,state=fp16"],
        ),
    ],
)
def test_every_codec_that_carries_the_cache_is_offered_and_states_are_spared_the_coarse_ones(
    model: KVLayout, names: list[str]
) -> None:
    found = candidates(model)
    assert [each.name for each in found] == names
    for each in found:
        codecs.set_by_name(each.name).check(model)
        assert Quality.needed_for(each.members) is not None


@pytest.mark.parametrize(("members", "level"), [({"raw"}, "exact"), ({"raw", "fp16"}, "near"), ({"int4"}, "compact")])
def test_a_level_allows_what_needs_no_more_than_it(members: set[str], level: str) -> None:
    needed = Quality.needed_for(members)
    assert needed is Quality(level)
    assert [other.allows(needed) for other in Quality] == [members.issubset(other.codecs) for other in Quality]


def test_a_calibration_needs_the_last_level_and_what_nobody_knows_has_none() -> None:
    assert Quality.needed_for({"transform:0a", "raw"}) is Quality.COMPACT
    assert Quality.needed_for({"transform:0a", "int2"}) is None
    assert Quality.needed_for({"int2"}) is None


def test_work_of_many_threads_is_summed_and_work_of_others_is_not_kept() -> None:
    meter = CodecMeter(["raw", "int8"])
    with ThreadPoolExecutor(4) as threads:
        for _ in range(200):
            threads.submit(meter.encoded, "int8", 10, 4, 0.5)
            threads.submit(meter.decoded, "int8", 6, 0.25)
            threads.submit(meter.encoded, "int4", 10, 2, 0.5)
    assert meter.totals() == (CodecWork("int8", 2000, 800, 100.0, 1200, 50.0),)
