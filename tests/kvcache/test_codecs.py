"""The exact codecs: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import codecs
from kvcache.codecs import Codec, CodecError, UnknownCodec
from kvcache.layout import DType

BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
HEADER = 12


def parts_of(data: bytes | bytearray, cuts: list[int]) -> list[memoryview]:
    view = memoryview(data)
    return [view[a:b] for a, b in pairwise([0, *sorted(cuts), len(data)])]


def wire(codec: Codec, raw: bytes, dtype: DType, shape: tuple[int, ...]) -> bytes:
    return b"".join(codec.encode([memoryview(raw)], dtype, shape))


def decoded(codec: Codec, payload: bytes, dtype: DType, shape: tuple[int, ...]) -> bytes:
    out = bytearray(prod(shape) * dtype.itemsize)
    codec.decode(memoryview(payload), [memoryview(out)], dtype, shape)
    return bytes(out)


def cache_like(tokens: int, channels: int, seed: int = 0) -> np.ndarray:
    """Gaussian values whose scale differs by channel, as fp32."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((tokens, channels)) * np.exp2(rng.normal(0, 2, channels))).astype(np.float32)


def bf16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("name", codecs.EXACT)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_exact_codec_returns_every_bit_however_the_bytes_are_cut(name: str, data: st.DataObject) -> None:
    codec = codecs.by_name(name)
    dtype = data.draw(st.sampled_from(list(DType)))
    shape = (data.draw(st.integers(1, 80)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40)))
    size = prod(shape) * dtype.itemsize
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    narrow = data.draw(st.booleans())
    raw = rng.integers(0, 4 if narrow else 256, size, np.uint8).tobytes()
    cuts = st.lists(st.integers(0, size), max_size=4)
    encoded = codec.encode(parts_of(raw, data.draw(cuts)), dtype, shape)
    payload = b"".join(encoded)
    assert len(payload) <= codec.max_wire_bytes(size)
    out = bytearray(size)
    arrived = parts_of(payload, data.draw(st.lists(st.integers(0, len(payload)), max_size=3)))
    codec.decode(arrived, parts_of(out, data.draw(cuts)), dtype, shape)
    assert out == raw


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(65536, 1), (256, 256), (1, 65536)])
def test_every_16_bit_pattern_survives(dtype: DType, shape: tuple[int, ...]) -> None:
    raw = np.arange(65536, dtype=np.uint16).tobytes()
    codec = codecs.by_name("lossless")
    assert decoded(codec, wire(codec, raw, dtype, shape), dtype, shape) == raw


def test_special_fp32_patterns_survive() -> None:
    words = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x007FFFFF, 0x3F800000]
    raw = np.array(words * 100, np.uint32).tobytes()
    codec = codecs.by_name("lossless")
    payload = wire(codec, raw, FP32, (100, 10))
    assert len(payload) < len(raw)
    assert decoded(codec, payload, FP32, (100, 10)) == raw


def test_lossless_shrinks_cache_like_values() -> None:
    codec = codecs.by_name("lossless")
    values = cache_like(256, 256)
    for dtype, raw, least in (
        (BF16, bf16(values), 1.45),
        (FP16, values.astype(np.float16).tobytes(), 1.1),
        (FP32, values.tobytes(), 1.18),
    ):
        payload = wire(codec, raw, dtype, (256, 1, 256))
        assert len(raw) / len(payload) > least, dtype
        assert decoded(codec, payload, dtype, (256, 1, 256)) == raw


def test_channel_means_are_taken_out_where_they_pay() -> None:
    values = bf16(cache_like(256, 256))
    codec = codecs.by_name("lossless")
    by_channel = len(wire(codec, values, BF16, (256, 256)))
    flat = len(wire(codec, values, BF16, (1, 65536)))
    assert by_channel < 0.95 * flat


def test_noise_is_stored_and_not_copied() -> None:
    raw = np.random.default_rng(1).integers(0, 65536, 1000, np.uint16).tobytes()
    view = memoryview(raw)
    encoded = codecs.by_name("lossless").encode([view[:100], view[100:]], BF16, (1000,))
    assert len(b"".join(encoded)) == len(raw) + HEADER
    assert isinstance(encoded[1], memoryview)
    assert encoded[1].obj is raw


def test_raw_sends_the_views_themselves() -> None:
    views = [memoryview(b"abcd"), memoryview(b"ef")]
    assert codecs.by_name("raw").encode(views, BF16, (3,)) is views


def test_payloads_of_version_1_stay_readable() -> None:
    stored = bytes.fromhex("4b4c01000000000000000000803f00c0")
    assert decoded(codecs.by_name("lossless"), stored, BF16, (2,)) == bytes.fromhex("803f00c0")
    # 64 times 1.0: a zstd frame that repeats the exponent 7f, then mantissas and signs.
    plain = bytes.fromhex("4b4c0101000000000a00000028b52ffd20400302007f") + bytes(64)
    assert decoded(codecs.by_name("lossless"), plain, BF16, (64,)) == bytes.fromhex("803f" * 64)
    # 32 rows of 1.0 and -2.0: means 7f and 80 less their centre 7f, then 64 zeros; the signs of the second column.
    centred = bytes.fromhex("4b4c01027f0000000f00000028b52ffd2042100000000103020000" + "0001" * 32)
    assert decoded(codecs.by_name("lossless"), centred, BF16, (32, 2)) == bytes.fromhex("803f00c0" * 32)


@pytest.mark.parametrize("name", codecs.EXACT)
def test_a_payload_of_the_wrong_length_is_refused(name: str) -> None:
    codec = codecs.by_name(name)
    payload = wire(codec, bf16(cache_like(64, 16)), BF16, (64, 16))
    for damaged in (b"", payload[:1], payload[:20], payload[:-1], payload + b"\0", payload + payload):
        with pytest.raises(CodecError):
            decoded(codec, damaged, BF16, (64, 16))


@pytest.mark.parametrize("shape", [(63, 16), (64, 15), (64, 32)])
@pytest.mark.parametrize("name", codecs.EXACT)
def test_a_payload_of_another_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    codec = codecs.by_name(name)
    payload = wire(codec, bf16(cache_like(64, 16)), BF16, (64, 16))
    with pytest.raises(CodecError):
        decoded(codec, payload, BF16, shape)


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (2, 2), (3, 0), (3, 1), (3, 3), (8, 0), (11, 255), (12, 0)])
def test_a_damaged_header_is_refused(offset: int, value: int) -> None:
    codec = codecs.by_name("lossless")
    payload = bytearray(wire(codec, bf16(cache_like(64, 16)), BF16, (64, 16)))
    assert payload[offset] != value
    payload[offset] = value
    with pytest.raises(CodecError):
        decoded(codec, bytes(payload), BF16, (64, 16))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_raises_codec_error_or_yields_wrong_bytes_and_nothing_worse(data: st.DataObject) -> None:
    codec = codecs.by_name("lossless")
    payload = bytearray(wire(codec, bf16(cache_like(64, 16)), BF16, (64, 16)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decoded(codec, bytes(payload), BF16, (64, 16))


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=200))
def test_rubbish_is_refused(payload: bytes) -> None:
    with pytest.raises(CodecError):
        decoded(codecs.by_name("lossless"), payload, BF16, (64, 16))


@pytest.mark.parametrize("claimed", [1 << 40, 0])
def test_a_frame_that_claims_another_size_is_refused_before_anything_is_allocated(claimed: int) -> None:
    frame = bytes.fromhex("28b52ffde0") + struct.pack("<Q", claimed) + bytes.fromhex("010000")
    assert zstandard.frame_content_size(frame) == claimed
    payload = struct.pack("<2sBBB3xI", b"KL", 1, 1, 0, len(frame)) + frame + bytes(1024)
    with pytest.raises(CodecError, match=f"a frame of {claimed} bytes, expected 1024"):
        decoded(codecs.by_name("lossless"), payload, BF16, (64, 16))


def test_a_frame_without_a_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024))
    payload = struct.pack("<2sBBB3xI", b"KL", 1, 1, 0, len(frame)) + frame + bytes(1024)
    with pytest.raises(CodecError, match="a frame of"):
        decoded(codecs.by_name("lossless"), payload, BF16, (64, 16))


def test_bytes_behind_the_frame_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1024)) + b"\0\0\0"
    payload = struct.pack("<2sBBB3xI", b"KL", 1, 1, 0, len(frame)) + frame + bytes(1024)
    with pytest.raises(CodecError):
        decoded(codecs.by_name("lossless"), payload, BF16, (64, 16))


@pytest.mark.parametrize("name", codecs.EXACT)
def test_views_of_the_wrong_size_are_the_callers_fault(name: str) -> None:
    codec = codecs.by_name(name)
    with pytest.raises(ValueError, match=r"views: 3 bytes, but \(2,\) of bfloat16 takes 4"):
        codec.encode([memoryview(b"abc")], BF16, (2,))
    with pytest.raises(ValueError, match="out: 5 bytes"):
        codec.decode(memoryview(b"abcd"), [memoryview(bytearray(5))], BF16, (2,))
    with pytest.raises(ValueError, match="views: 0 bytes"):
        codec.encode([], BF16, (0, 2))


def test_one_codec_serves_many_threads() -> None:
    codec = codecs.by_name("lossless")
    pieces = [bf16(cache_like(256, 64, seed)) for seed in range(32)]

    def there_and_back(raw: bytes) -> bytes:
        return decoded(codec, wire(codec, raw, BF16, (256, 64)), BF16, (256, 64))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(there_and_back, pieces)) == pieces


def test_an_unknown_codec_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(UnknownCodec, match="'int3' is unknown; known are raw, lossless"):
        codecs.by_name("int3")
    assert codecs.EXACT == ("raw", "lossless")
