"""Sets of codecs and levels of quality: who may use what, said in names."""

from __future__ import annotations

import pytest

from kvcache import codecs
from kvcache.codecs import CodecError, UnknownCodec
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import Piece, plan_transfer
from kvcache.quality import Quality
from kvcache.ticket import Ticket
from kvcache.transfer import IncomingTransfer, OutgoingTransfer, TransferViolation
from kvcache.wire import Data

KEYS = (TensorSpec("k", DType.BFLOAT16, (2, 8)), TensorSpec("v", DType.BFLOAT16, (2, 8)))
STATES = (TensorSpec("conv", DType.BFLOAT16, (4, 4)), TensorSpec("recurrent", DType.FLOAT32, (2, 8, 8)))
LAYOUT = KVLayout(
    (GroupSpec(GroupKind.FULL, (LayerSpec(0, KEYS),)), GroupSpec(GroupKind.STATE, (LayerSpec(1, STATES),)))
)
PLAN = plan_transfer(LAYOUT, 0, 10, 8)
T = b"t" * 16


def chosen(name: str) -> dict[str, str]:
    found = codecs.set_by_name(name)
    return {PLAN.tensor(piece).name: found.of(PLAN, piece).name for piece in PLAN.pieces}


def test_one_name_serves_all_tensors() -> None:
    assert set(chosen("int8").values()) == {"int8"}


def test_a_tensors_choice_goes_before_its_groups_and_that_before_the_default() -> None:
    assert chosen("int8,full=int4,full.v=fp8,state.recurrent=fp16") == {
        "k": "int4",
        "v": "fp8",
        "conv": "int8",
        "recurrent": "fp16",
    }


def test_a_sets_members_are_all_it_may_use() -> None:
    assert codecs.set_by_name("int8,state=fp16,full.v=int8").members == {"int8", "fp16"}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("", "codec '' is unknown"),
        ("int3", "codec 'int3' is unknown"),
        ("int8,state=int3", "codec 'int3' is unknown"),
        ("int8,mla=raw", "'mla=raw' is not GROUP=CODEC"),
        ("int8,state", "'state' is not"),
        ("int8,state.=raw", r"'state\.=raw' is not"),
        ("int8,.k=raw", r"'\.k=raw' is not"),
        ("int8,", "'' is not"),
        ("int8,state=raw,state=fp16", "state is chosen twice"),
        ("raw" * 100, "a name of 300 characters"),
    ],
)
def test_a_name_that_does_not_parse_is_refused(name: str, wrong: str) -> None:
    with pytest.raises(UnknownCodec, match=wrong):
        codecs.set_by_name(name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fp16", r"fp16 does not carry bfloat16, which full\.k is; add ,full\.k=CODEC"),
        ("int8,state=fp16", r"fp16 does not carry bfloat16, which state\.conv is"),
        ("raw,sliding=int8", "the model's cache has no sliding"),
        ("raw,full.latent=int8", r"the model's cache has no full\.latent"),
    ],
)
def test_a_set_that_does_not_fit_the_cache_is_refused(name: str, wrong: str) -> None:
    with pytest.raises(CodecError, match=wrong):
        codecs.set_by_name(name).check(LAYOUT)


def test_a_set_that_fits_the_cache_passes() -> None:
    codecs.set_by_name("int8,state=lossless,state.recurrent=fp16").check(LAYOUT)


def test_each_level_of_quality_allows_what_the_stricter_one_does_and_exact_only_what_is() -> None:
    assert Quality.EXACT.codecs == codecs.EXACT
    assert all(codecs.by_name(name).exact for name in Quality.EXACT.codecs)
    assert set(Quality.EXACT.codecs) < set(Quality.NEAR.codecs) < set(Quality.COMPACT.codecs)
    assert "int4" not in Quality.NEAR.codecs
    for level in Quality:
        assert [codecs.by_name(name).name for name in level.codecs] == list(level.codecs)


def incoming(quality: Quality) -> IncomingTransfer:
    return IncomingTransfer(PLAN, ticket(), quality.codecs)


def ticket() -> Ticket:
    return Ticket(T, "r", 1, "p", "p-1", b"k" * 32, "f", 0, 10, 8, PLAN.nbytes, 0.0, 1.0)


def test_a_header_names_its_own_pieces_codec_and_its_size_is_bounded_by_that() -> None:
    name = "raw,state.recurrent=fp16"
    sender, receiver = OutgoingTransfer(PLAN, ticket()), incoming(Quality.NEAR)
    receiver.check_announce(sender.announce(name))
    for piece in PLAN.pieces:
        codec = codecs.set_by_name(name).of(PLAN, piece)
        size = codec.max_wire_bytes(piece.nbytes)
        if PLAN.tensor(piece).name == "recurrent":
            with pytest.raises(TransferViolation, match="wire_bytes"):
                receiver.check_data(header_of(piece, "fp16", size + 1))
            with pytest.raises(TransferViolation, match="codec: 'raw'"):
                receiver.check_data(header_of(piece, "raw", piece.nbytes))
        receiver.check_data(sender.header(piece, codec.name, size, bytes(16)))


def header_of(piece: Piece, codec: str, size: int) -> Data:
    sender = OutgoingTransfer(PLAN, ticket())
    for earlier in PLAN.pieces[: piece.seq]:
        sender.header(earlier, codec, 1, bytes(16))
    return sender.header(piece, codec, size, bytes(16))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("int8", "was not offered"),
        ("raw,state.recurrent=fp16", "was not offered"),
        ("raw,full=int3", "unknown"),
        ("raw,sliding=raw", "has no sliding"),
    ],
)
def test_an_announced_set_must_be_offered_known_and_fit(name: str, wrong: str) -> None:
    with pytest.raises(TransferViolation, match=wrong) as caught:
        incoming(Quality.EXACT).check_announce(OutgoingTransfer(PLAN, ticket()).announce(name))
    assert caught.value.field == "codec"
