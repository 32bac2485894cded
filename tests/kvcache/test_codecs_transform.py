"""The calibrated transform: the same bits everywhere, an error set by its step, none but the calibration named."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import codecs
from kvcache.codecs import CodecError, Transform, UnknownCodec, calibration
from kvcache.codecs.calibration import CalibrationError
from kvcache.codecs.transform import _CLASSES, Basis, TransformCodec, _packed, _unpacked
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import plan_transfer
from kvcache.quality import TRANSFORM_PREFIX
from tests.kvcache.test_codecs import bf16, decoded, parts_of, wire
from tests.kvcache.test_codecs_inexact import as_bytes, as_floats

BF16, FP32 = DType.BFLOAT16, DType.FLOAT32
HEADS, DIM = 2, 16


def mixing(seed: int = 0) -> np.ndarray:
    """What makes the channels of a head correlated."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((HEADS, DIM, DIM)) * np.exp2(-np.arange(DIM))[:, None]


def sample(rows: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((HEADS, rows, DIM)) @ mixing() + 3
    return np.ascontiguousarray(mixed.swapaxes(0, 1)).astype(np.float32)


def basis(step: float = 0.05) -> Basis:
    seen = sample(4000).astype(np.float64)
    means = seen.mean(0)
    centred = (seen - means).swapaxes(0, 1)
    _, axes = np.linalg.eigh(centred.swapaxes(1, 2) @ centred)
    axes = axes[:, :, ::-1]
    return Basis.of(means, axes, axes.swapaxes(1, 2), 20.0, step)


CODEC = TransformCodec("transform:test", basis())


@pytest.mark.parametrize("step", [0.02, 0.1, 0.5])
def test_the_error_follows_from_the_step(step: float) -> None:
    codec, values = TransformCodec("t", basis(step)), sample(500, 7)
    payload = wire(codec, values.tobytes(), FP32, values.shape)
    after = as_floats(decoded(codec, payload, FP32, values.shape), FP32).reshape(values.shape)
    error = after - values
    # uniform in a step for coordinates above it, less where a coordinate is below it and becomes zero
    assert np.sqrt((error**2).mean()) <= 1.05 * step / 12**0.5
    assert np.linalg.norm(error, axis=2).max() <= step / 2 * DIM**0.5 + 1e-3


def test_correlated_channels_shrink_to_what_is_independent_in_them() -> None:
    raw = bf16(sample(256, 3))
    transformed = len(wire(TransformCodec("t", basis(0.2)), raw, BF16, (256, HEADS, DIM)))
    plain = len(wire(codecs.by_name("int4"), raw, BF16, (256, HEADS, DIM)))
    assert len(raw) / transformed > 5
    assert transformed < 0.6 * plain


def test_an_outlier_far_beyond_the_calibration_is_carried() -> None:
    values = sample(64)
    values[5, 1, 3] += 400.0
    payload = wire(CODEC, values.tobytes(), FP32, values.shape)
    after = as_floats(decoded(CODEC, payload, FP32, values.shape), FP32).reshape(values.shape)
    assert np.abs(after - values).max() < 0.2


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), seed=st.integers(0, 99), dtype=st.sampled_from(list(DType)))
def test_torch_and_numpy_make_and_read_the_same_bytes(rows: int, seed: int, dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    raw, shape = as_bytes(sample(rows, seed), dtype), (rows, HEADS, DIM)
    payload = wire(CODEC, raw, dtype, shape)
    assert len(payload) <= CODEC.max_wire_bytes(len(raw))
    words = torch.frombuffer(bytearray(raw), dtype=torch.int32 if dtype is FP32 else torch.int16)
    assert b"".join(CODEC.encode_tensor(words, dtype, shape)) == payload
    out = bytearray(len(raw))
    CODEC.decode(parts_of(payload, [2, 9]), parts_of(out, [7]), dtype, shape)
    assert CODEC.decode_tensor(memoryview(payload), dtype, shape, words).numpy().tobytes() == out


@pytest.mark.parametrize("packing", _CLASSES[1:])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 30])
def test_every_class_holds_its_values(packing: object, count: int) -> None:
    values = np.random.default_rng(count).integers(-packing.top, packing.top + 1, count).astype(np.int32)
    values[0], values[-1] = packing.top, -packing.top
    assert (_unpacked(_packed(values, packing), count, packing) == values).all()


def test_a_piece_of_means_alone_is_a_few_bytes() -> None:
    values = np.broadcast_to(basis().means, (256, HEADS, DIM)).astype(np.float32)
    assert len(wire(CODEC, values.tobytes(), FP32, values.shape)) < 64


def test_another_shape_or_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CodecError, match=r"calibrated for \(tokens, 2, 16\), not for \(4, 32\)"):
        CODEC.encode([memoryview(bytes(256))], BF16, (4, 32))
    with pytest.raises(CodecError, match="calibrated for"):
        decoded(CODEC, wire(CODEC, sample(4).tobytes(), FP32, (4, HEADS, DIM)), FP32, (4, DIM, HEADS))
    values = sample(4)
    values[0, 0, 0] = np.nan
    with pytest.raises(CodecError, match="only an exact codec"):
        wire(CODEC, values.tobytes(), FP32, values.shape)


def test_a_payload_of_another_length_version_or_row_count_is_refused() -> None:
    shape = (40, HEADS, DIM)
    payload = wire(CODEC, sample(40).tobytes(), FP32, shape)
    for damaged in (b"", payload[:3], payload[:6], payload[:20], payload[:-1], payload + b"\0", payload * 2):
        with pytest.raises(CodecError):
            decoded(CODEC, damaged, FP32, shape)
    with pytest.raises(CodecError, match="no header of version 1"):
        decoded(CODEC, b"KT\2" + payload[3:], FP32, shape)
    with pytest.raises(CodecError):
        decoded(CODEC, payload, FP32, (41, HEADS, DIM))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_raises_codec_error_or_yields_finite_values_and_nothing_worse(data: st.DataObject) -> None:
    payload = bytearray(wire(CODEC, sample(40).tobytes(), FP32, (40, HEADS, DIM)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        assert np.isfinite(as_floats(decoded(CODEC, bytes(payload), FP32, (40, HEADS, DIM)), FP32)).all()


@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=200))
def test_rubbish_is_refused(payload: bytes) -> None:
    with pytest.raises(CodecError):
        decoded(CODEC, b"KT\1\0" + payload, FP32, (40, HEADS, DIM))


# ---- the calibration


KEY = TensorSpec("k", BF16, (HEADS, DIM))
LAYOUT = KVLayout((GroupSpec(GroupKind.FULL, (LayerSpec(3, (KEY, TensorSpec("v", BF16, (HEADS, DIM)))),)),))
PLAN = plan_transfer(LAYOUT, 0, 40, 64)


def test_a_calibration_survives_the_disk_and_is_named_by_what_it_holds(tmp_path: Path) -> None:
    path = calibration.save({(3, "k"): basis()}, tmp_path)
    read = calibration.load(path)
    assert read.name == TRANSFORM_PREFIX + path.stem.removeprefix("kv-transform-")
    payloads = [
        wire(codec, bf16(sample(40)), BF16, (40, HEADS, DIM))
        for codec in (read.codec(3, KEY), Transform(read.name, {(3, "k"): basis()}).codec(3, KEY))
    ]
    assert payloads[0] == payloads[1]
    assert calibration.save({(3, "k"): basis()}, tmp_path) == path
    assert calibration.save({(3, "k"): basis(0.06)}, tmp_path) != path
    assert {transform.name for transform in calibration.load_all(tmp_path)} > {read.name}
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    path = calibration.save({(3, "k"): basis()}, tmp_path)
    other = path.rename(tmp_path / "kv-transform-0123456789abcdef.npz")
    with pytest.raises(CalibrationError, match="holds calibration"):
        calibration.load(other)
    for content in (b"", b"PK\3\4 no", other.read_bytes()[:2000]):
        other.write_bytes(content)
        with pytest.raises(CalibrationError):
            calibration.load(other)


@pytest.mark.parametrize(
    ("part", "array"),
    [
        ("forward", np.zeros((HEADS, DIM, DIM + 1), "<i4")),
        ("forward", np.full((HEADS, DIM, DIM), 1 << 20, "<i4")),
        ("means", np.full((HEADS, DIM), np.inf, "<f4")),
        ("means", np.zeros(3, "<f4")),
        ("scales", np.zeros(2)),
        ("scales", None),
        ("means", np.array([object()])),
    ],
)
def test_a_calibration_that_would_break_the_arithmetic_is_refused(
    tmp_path: Path, part: str, array: np.ndarray | None
) -> None:
    path = calibration.save({(3, "k"): basis()}, tmp_path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays.pop(f"3.k.{part}")
    if array is not None:
        arrays[f"3.k.{part}"] = array
    if array is None or array.dtype != object:
        path = path.with_name(f"kv-transform-{calibration._id(arrays)}.npz")
    np.savez(path, **arrays)
    with pytest.raises(CalibrationError):
        calibration.load(path)


def test_a_transform_is_known_only_where_it_is_at_hand_and_only_for_what_it_was_calibrated_for() -> None:
    whole = Transform("transform:ab", {(3, "k"): basis(), (3, "v"): basis(0.1)})
    found = codecs.set_by_name("transform:ab", [whole])
    found.check(LAYOUT)
    assert (found.exact, found.members) == (False, {"transform:ab"})
    assert found.of(PLAN, PLAN.pieces[0]) is not found.of(PLAN, PLAN.pieces[1])
    assert {found.of(PLAN, piece).name for piece in PLAN.pieces} == {"transform:ab"}
    with pytest.raises(UnknownCodec, match="'transform:ab' is unknown"):
        codecs.set_by_name("transform:ab")
    half = Transform("transform:ab", {(3, "k"): basis()})
    with pytest.raises(CodecError, match="v of layer 3"):
        codecs.set_by_name("transform:ab", [half]).check(LAYOUT)
    codecs.set_by_name("transform:ab,full.v=int8", [half]).check(LAYOUT)
    states = KVLayout((GroupSpec(GroupKind.STATE, (LayerSpec(3, (KEY,)),)),))
    with pytest.raises(CodecError, match="what grows with tokens; add ,state=CODEC"):
        found.check(states)
