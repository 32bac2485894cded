"""The inexact codecs: bounded error, the same bits in every namespace, and nothing that was not encoded is believed."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import codecs
from kvcache.codecs import CodecError, TensorCodec
from kvcache.codecs.arrays import floats, host_words, words_of
from kvcache.layout import DType
from tests.kvcache.test_codecs import bf16, cache_like, decoded, parts_of, wire

BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
QUANTISED = ("fp8", "int8", "int4")
NAMES = tuple(codec.name for codec in codecs.TENSOR_CODECS)


def named(name: str) -> TensorCodec:
    return next(codec for codec in codecs.TENSOR_CODECS if codec.name == name)


def as_floats(raw: bytes, dtype: DType) -> np.ndarray:
    return floats(host_words(memoryview(raw), dtype), dtype).astype(np.float64)


def as_bytes(values: np.ndarray, dtype: DType) -> bytes:
    return words_of(values.astype(np.float32), dtype).tobytes()


def there_and_back(name: str, raw: bytes, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    codec = codecs.by_name(name)
    payload = wire(codec, raw, dtype, shape)
    assert len(payload) <= codec.max_wire_bytes(len(raw))
    return as_floats(decoded(codec, payload, dtype, shape), dtype).reshape(shape)


def test_all_are_inexact_and_none_is_unlisted() -> None:
    assert NAMES == ("fp16", "fp8", "int8", "int4")
    assert not any(codec.exact for codec in codecs.TENSOR_CODECS)


# ---- what is lost


@pytest.mark.parametrize(("name", "part"), [("int8", 0.006), ("fp8", 0.04), ("int4", 0.13)])
def test_the_error_is_a_small_part_of_each_channels_deviation(name: str, part: float) -> None:
    values = cache_like(256, 64) + 8 * cache_like(1, 64, 1)
    raw = bf16(values)
    error = there_and_back(name, raw, BF16, (256, 1, 64)) - as_floats(raw, BF16).reshape(256, 1, 64)
    # bf16 itself rounds what is decoded, by up to 2**-9 of the mean that was taken out
    rounding = np.abs(values).max(0) * 2.0**-9
    assert (np.sqrt((error[:, 0] ** 2).mean(0)) < part * values.std(0) + rounding).all()


@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_value_is_off_by_more_than_half_a_step_of_the_largest(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DType)))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = 2.0 ** data.draw(st.integers(-12, 12))
    values = rng.standard_normal(shape) * scale + data.draw(st.sampled_from([0, 3])) * scale
    raw = as_bytes(values, dtype)
    before = as_floats(raw, dtype).reshape(shape)
    step = {"int8": 1 / 127, "fp8": 32 / 448, "int4": 0.5}[name]
    allowed = (step * 0.51 + 2.0**-8) * 2 * np.abs(before).max() + 2.0**-24
    assert np.abs(there_and_back(name, raw, dtype, shape) - before).max() <= allowed


@pytest.mark.parametrize("name", QUANTISED)
def test_an_outlier_is_carried_and_its_neighbours_are_not_crushed(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((256, 64))
    values[100, 7] = 60.0
    after = there_and_back(name, bf16(values.astype(np.float32)), BF16, (256, 64))
    assert abs(after[100, 7] - 60.0) < 2.0
    others = np.delete(np.arange(64), 7)
    assert np.sqrt(((after - values)[:, others] ** 2).mean()) < 0.13


@pytest.mark.parametrize("name", [*QUANTISED, "fp16"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e30])
def test_a_constant_piece_stays_what_it_is(name: str, value: float) -> None:
    after = there_and_back(name, np.full((64, 40), value, "<f4").tobytes(), FP32, (64, 40))
    assert np.allclose(after, value, rtol=2.0**-8 if name != "fp16" else 2.0**-11, atol=1e-32)


def test_fp16_keeps_eleven_bits_whatever_the_scale() -> None:
    for scale in (1e-20, 1e-6, 1.0, 1e6, 1e20):
        values = (cache_like(8, 64) * scale).astype(np.float32)
        after = there_and_back("fp16", values.tobytes(), FP32, (8, 64))
        near = np.abs(values) > np.abs(values).max() * 2.0**-28
        assert np.abs(after / values - 1)[near].max() <= 2.0**-11


# ---- what is won


@pytest.mark.parametrize(
    ("name", "dtype", "least"),
    [("fp8", BF16, 2.2), ("int8", BF16, 1.98), ("int4", BF16, 4.2), ("int4", FP32, 8.4), ("fp16", FP32, 2.2)],
)
def test_cache_like_values_shrink(name: str, dtype: DType, least: float) -> None:
    raw = as_bytes(cache_like(256, 256), dtype)
    assert len(raw) / len(wire(codecs.by_name(name), raw, dtype, (256, 1, 256))) > least


@pytest.mark.parametrize(("spread", "axis"), [((1, 64), 1), ((64, 1), 2)])
def test_steps_follow_the_axis_along_which_values_are_spread(spread: tuple[int, int], axis: int) -> None:
    values = np.random.default_rng(0).standard_normal((64, 64)) * np.exp2(np.random.default_rng(1).normal(0, 2, spread))
    assert wire(codecs.by_name("int8"), bf16(values.astype(np.float32)), BF16, (64, 1, 64))[4] == axis


def test_tiny_pieces_are_within_their_bound() -> None:
    for name in QUANTISED:
        for shape in ((1,), (1, 1, 1), (31, 31), (31, 3, 2), (2, 40), (40, 2)):
            there_and_back(name, as_bytes(np.random.default_rng(0).standard_normal(shape), BF16), BF16, shape)


# ---- one arithmetic everywhere


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_torch_and_numpy_make_and_read_the_same_bytes(name: str, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    codec = named(name)
    dtype = data.draw(st.sampled_from(codec.dtypes))
    shape = (data.draw(st.sampled_from([1, 31, 32, 600])), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = rng.standard_normal(shape) * np.exp2(rng.normal(0, 3, shape[2])) + rng.normal(0, 2, shape[1:])
    raw = as_bytes(values, dtype)
    kind = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}[dtype]
    tensor = torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape)
    words = tensor.view(torch.int32 if dtype is FP32 else torch.int16)
    payload = wire(codec, raw, dtype, shape)
    assert b"".join(codec.encode_tensor(words, dtype, shape)) == payload
    back = codec.decode_tensor(memoryview(payload), dtype, shape, words)
    assert isinstance(back, torch.Tensor)
    assert back.numpy().tobytes() == decoded(codec, payload, dtype, shape)


def test_e4m3_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    from kvcache.codecs import quantised

    edges = np.ldexp(np.arange(1, 64), np.arange(-14, 4)[:, None]).ravel()
    values = np.concatenate([edges, np.nextafter(edges.astype(np.float32), np.float32(0)), np.linspace(0, 448, 50001)])
    values = values[values <= 448].astype(np.float32)
    values = np.concatenate([values, -values])
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn)
    codes = quantised._to_e4m3(values)
    assert (codes == wanted.view(torch.uint8).numpy()).all()
    assert (quantised._of_e4m3(codes) == wanted.float().numpy()).all()


def test_rounding_to_bf16_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 100_000).astype(np.int32).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3.38e38)]
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert (words_of(values, BF16) == wanted).all()


def test_payloads_do_not_depend_on_how_the_bytes_are_cut_or_on_the_thread() -> None:
    for codec in codecs.TENSOR_CODECS:
        raws = [cache_like(64, 32, seed).tobytes() for seed in range(16)]
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda raw, codec=codec: wire(codec, raw, FP32, (64, 32)), raws))
        for raw, payload in zip(raws, together, strict=True):
            assert b"".join(codec.encode(parts_of(raw, [5, 1000]), FP32, (64, 32))) == payload
            out = bytearray(len(raw))
            codec.decode(parts_of(payload, [3, 70]), parts_of(out, [1, 4097]), FP32, (64, 32))
            assert out == decoded(codec, payload, FP32, (64, 32))


GOLDEN = {
    "fp16": "4b4801000d0000004b4c01000000000000000000007400f2",
    "fp8": "4b51010300000000933b7efa",
    "int8": "4b51010100000000823c7ea1",
    "int4": "4b51010200000000613f02fe",
}


@pytest.mark.parametrize("name", NAMES)
def test_payloads_of_version_1_stay_readable(name: str) -> None:
    raw = np.array([2.0, -1.5], "<f4").tobytes()
    codec = codecs.by_name(name)
    assert wire(codec, raw, FP32, (2, 1)).hex() == GOLDEN[name]
    after = as_floats(decoded(codec, bytes.fromhex(GOLDEN[name]), FP32, (2, 1)), FP32)
    assert np.abs(after - [2.0, -1.5]).max() < {"fp16": 1e-9, "fp8": 0.08, "int8": 0.01, "int4": 0.5}[name]


# ---- what is refused


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**101])
def test_values_that_cannot_be_carried_are_refused(name: str, bad: float) -> None:
    values = np.ones((40, 40), "<f4")
    values[3, 3] = bad
    with pytest.raises(CodecError, match=f"{name}: the piece holds values up to .*only an exact codec"):
        codecs.by_name(name).encode([memoryview(values.tobytes())], FP32, (40, 40))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp16_refuses_other_dtypes_by_name(dtype: DType) -> None:
    codec = codecs.by_name("fp16")
    for call in (
        lambda: codec.encode([memoryview(bytes(4))], dtype, (2,)),
        lambda: codec.decode(memoryview(bytes(24)), [memoryview(bytearray(4))], dtype, (2,)),
    ):
        with pytest.raises(CodecError, match=f"carries float32 alone, not {dtype}"):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_views_of_the_wrong_size_are_the_callers_fault(name: str) -> None:
    codec = codecs.by_name(name)
    with pytest.raises(ValueError, match="views: 3 bytes"):
        codec.encode([memoryview(b"abc")], FP32, (2,))
    with pytest.raises(ValueError, match="out: 5 bytes"):
        codec.decode(memoryview(b"abcd"), [memoryview(bytearray(5))], FP32, (2,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(64, 16), (1, 1, 3), (2, 40)])
def test_a_payload_of_another_length_or_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    codec = codecs.by_name(name)
    payload = wire(codec, cache_like(prod(shape), 1).tobytes(), FP32, shape)
    for damaged in (b"", payload[:1], payload[:7], payload[:12], payload[:-1], payload + b"\0", payload + payload):
        with pytest.raises(CodecError):
            decoded(codec, damaged, FP32, shape)
    with pytest.raises(CodecError):
        decoded(codec, payload, FP32, (shape[0] + 1, *shape[1:]))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(("offset", "value"), [(0, 0), (1, 72), (2, 2), (3, 0), (3, 9), (4, 0), (4, 3), (5, 0), (5, 2)])
def test_a_damaged_header_is_refused(name: str, offset: int, value: int) -> None:
    codec = codecs.by_name(name)
    payload = bytearray(wire(codec, bf16(cache_like(256, 16)), BF16, (256, 16)))
    assert payload[offset] != value
    payload[offset] = value
    with pytest.raises(CodecError):
        decoded(codec, bytes(payload), BF16, (256, 16))


def test_one_quantised_codec_does_not_read_anothers_payload() -> None:
    payloads = {name: wire(codecs.by_name(name), bf16(cache_like(64, 16)), BF16, (64, 16)) for name in QUANTISED}
    for reader, writer in [*pairwise(QUANTISED), ("fp8", "int4")]:
        with pytest.raises(CodecError, match=f"{reader} payload: header"):
            decoded(codecs.by_name(reader), payloads[writer], BF16, (64, 16))


@pytest.mark.parametrize("step", [0x0000, 0x8000, 0x7F80, 0x7FC0, 0xBF80, 0x7E80])
def test_steps_that_no_encoder_makes_are_refused(step: int) -> None:
    payload = bytes.fromhex(GOLDEN["int8"])[:8] + step.to_bytes(2, "little") + b"\x7f\xa1"
    with pytest.raises(CodecError, match="a step that is not positive or beyond"):
        decoded(codecs.by_name("int8"), payload, FP32, (2, 1))


@pytest.mark.parametrize(("name", "symbol"), [("int8", 0x80), ("int4", 0x80), ("fp8", 0x7F), ("fp8", 0xFF)])
def test_bytes_that_no_encoder_makes_are_refused(name: str, symbol: int) -> None:
    payload = bytes.fromhex(GOLDEN[name])[:-1] + bytes([symbol])
    with pytest.raises(CodecError, match="never makes"):
        decoded(codecs.by_name(name), payload, FP32, (2, 1))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_raises_codec_error_or_yields_finite_values_and_nothing_worse(name: str, data: st.DataObject) -> None:
    codec = codecs.by_name(name)
    payload = bytearray(wire(codec, cache_like(64, 16).tobytes(), FP32, (64, 16)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        assert np.isfinite(as_floats(decoded(codec, bytes(payload), FP32, (64, 16)), FP32)).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=200), magic=st.booleans())
def test_rubbish_is_refused(name: str, payload: bytes, magic: bool) -> None:
    head = bytes.fromhex(GOLDEN[name])[:4] if magic else b""
    with pytest.raises(CodecError):
        decoded(codecs.by_name(name), head + payload, FP32, (64, 16))


def test_codecs_load_without_torch_until_a_tensor_is_handed_in() -> None:
    import subprocess
    import sys

    check = (
        "import sys, numpy as np; from kvcache import codecs; from kvcache.layout import DType\n"
        "for c in codecs.TENSOR_CODECS: c.encode([memoryview(bytes(64))], DType.FLOAT32, (4, 4))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0
