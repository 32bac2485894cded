"""Transfers whose codecs are inexact: only where the request allows it, piece by piece, and never in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvcache import codecs
from kvcache.codecs import Transform
from kvcache.codecs.transform import Basis
from kvcache.control import Failed, Finished, TransferDone
from kvcache.digest import kv_digest, wire_digest
from kvcache.layout import GroupKind
from kvcache.plan import Piece, plan_transfer
from kvcache.quality import Quality
from tests import fake_engine
from tests.fake_engine import piece_bytes
from tests.pair import CHUNK, LAYOUT, pair

MIXED = "lossless,state=fp16,full.v=raw"


def small_integers(token_ids: Sequence[int], piece: Piece) -> bytes:
    """What fp16 carries without a change, so that the fake engines can compare."""
    rows = np.frombuffer(piece_bytes(token_ids, piece), dtype="i1").reshape(max(1, piece.stop - piece.start), -1)
    return rows[:, : rows.shape[1] // 4].astype("<f4").tobytes()


async def test_each_tensor_travels_by_the_codec_chosen_for_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "piece_bytes", small_integers)
    async with pair(tokenizer) as nodes:
        job = nodes.job(300, codec=MIXED, quality=Quality.NEAR)
        nodes.start(job)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        done = await nodes.decode.told(TransferDone, job.transfer)
        assert done.codec == MIXED
        plan = plan_transfer(LAYOUT, 0, 299, CHUNK)
        digests, sizes = b"", 0
        for piece in plan.pieces:
            codec = codecs.set_by_name(MIXED).of(plan, piece)
            raw = memoryview(small_integers(job.generate.token_ids, piece))
            encoded = codec.encode([raw], plan.tensor(piece).dtype, plan.shape(piece))
            digests += wire_digest(codec.exact, [raw], encoded)
            sizes += sum(memoryview(part).nbytes for part in encoded)
        assert done.kv_digest == kv_digest(digests)
        assert done.wire_bytes == sizes


@pytest.mark.parametrize(
    ("codec", "quality"), [("int8", Quality.EXACT), (MIXED, Quality.EXACT), ("int4", Quality.NEAR)]
)
async def test_a_codec_beyond_the_requests_quality_is_refused(
    tokenizer: Tokenizer, codec: str, quality: Quality
) -> None:
    async with pair(tokenizer) as nodes:
        job = nodes.job(codec=codec, quality=quality)
        nodes.start(job)
        for side, name in ((nodes.prefill, job.transfer), (nodes.decode, job.generation)):
            failed = await side.told(Failed, name)
            assert "offered are ('raw', 'lossless'" in failed.detail


async def test_what_a_codec_cannot_carry_fails_the_transfer_by_name(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        job = nodes.job(codec="int8", quality=Quality.NEAR)  # the fake engine's random bits hold huge values and NaN
        nodes.start(job)
        failed = await nodes.prefill.told(Failed, job.transfer)
        assert (failed.stage, failed.cause) == ("transfer", "codec")
        assert "only an exact codec carries those" in failed.detail


@pytest.mark.parametrize(("codec", "wrong"), [("int3", "is unknown"), ("raw,mla=raw", "is not GROUP=CODEC")])
async def test_an_unknown_codec_is_refused_before_anything_is_computed(
    tokenizer: Tokenizer, codec: str, wrong: str
) -> None:
    async with pair(tokenizer) as nodes:
        job = nodes.job(codec=codec)
        nodes.prefill.serving.accept(job.prefill)
        failed = await nodes.prefill.told(Failed, job.transfer)
        assert (failed.stage, failed.cause) == ("queue", "codec")
        assert wrong in failed.detail


def plain_transform() -> Transform:
    """Coordinates that are the channels, in steps of one: small integers pass unchanged."""
    bases = {}
    for group in (group for group in LAYOUT.groups if group.kind is not GroupKind.STATE):
        for layer in group.layers:
            for spec in layer.tensors:
                heads, dim = spec.shape
                identity = np.broadcast_to(np.eye(dim), (heads, dim, dim))
                bases[layer.index, spec.name] = Basis.of(np.zeros(spec.shape), identity, identity, 100.0, 1.0)
    return Transform("transform:plain", bases)


@pytest.mark.parametrize(
    ("at_hand", "quality", "fails"),
    [
        ((True, True), Quality.COMPACT, None),
        ((True, True), Quality.NEAR, "offered are ('raw'"),
        ((True, False), Quality.COMPACT, "offered are ('raw'"),
        ((False, True), Quality.COMPACT, "codec 'transform:plain' is unknown"),
    ],
)
async def test_a_transform_carries_where_both_ends_have_its_calibration_and_the_request_is_compact(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    at_hand: tuple[bool, bool],
    quality: Quality,
    fails: str | None,
) -> None:
    monkeypatch.setattr(fake_engine, "piece_bytes", small_integers)
    async with pair(tokenizer) as nodes:
        for service, has in zip((nodes.prefill.serving, nodes.decode.asking), at_hand, strict=True):
            transforms = (plain_transform(),) if has else ()
            service._context = dataclasses.replace(service._context, transforms=transforms)
        for side in (nodes.prefill, nodes.decode):  # a gateway's jobs have the context of when it was trusted
            side.trust(nodes.gateway_key.public_key().public_bytes_raw())
        job = nodes.job(300, codec="transform:plain,state=lossless", quality=quality)
        if fails and not at_hand[0]:
            nodes.prefill.serving.accept(job.prefill)
        else:
            nodes.start(job)
        if fails:
            assert fails in (await nodes.prefill.told(Failed, job.transfer)).detail
        else:
            assert isinstance(await nodes.decode.ended(job.generation), Finished)
            done = await nodes.decode.told(TransferDone, job.transfer)
            assert done.codec == job.prefill.codec
            assert done.wire_bytes < done.raw_bytes
