"""``prfaas bench codec``: figures that mean what their names say, on a cache made up, a tiny model's and Gemma's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from kvcache import codecs
from kvcache.layout import DType, GroupKind
from kvcache.presets import gemma3_270m
from node.bench import codec as bench_codec
from node.bench.captured import Captured, made_up
from node.bench.cli import bench
from node.bench.quality import Agreement, Reader
from node.bench.speed import measure
from node.bench.texts import documents
from tests.bench import gpu_codec
from tests.models import tiny_model

KEYS = {
    *("codec", "exact", "group", "ratio", "encode_gbytes_s", "decode_gbytes_s", "top1_agreement", "mean_kl"),
    *("max_abs_err", "source"),
}
NAMES = {"raw", "lossless", "fp16", "fp8", "int8", "int4"}


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["codec", *arguments])


def test_the_documents_are_many_long_and_the_same_each_time() -> None:
    texts = documents(20)
    assert len(set(texts)) == 20
    assert min(len(text) for text in texts) > 10_000
    assert documents(20) == texts
    with pytest.raises(ValueError, match="1 to 40 can be made, not 41"):
        documents(41)


def test_without_a_model_sizes_and_speeds_are_shown_and_no_quality() -> None:
    result = ran("--json", "--codec", "int8", "--codec", "fp16", "--codec", "lossless")
    rows = json.loads(result.stdout)
    assert all(row.keys() >= KEYS for row in rows)
    assert {(row["codec"], row["group"]) for row in rows} == {
        *((name, group) for name in ("int8", "lossless") for group in ("full", "sliding", "all", "state")),
        ("fp16", "state"),
    }
    assert {row["source"] for row in rows} == {"synthetic"}
    assert {row["top1_agreement"] for row in rows} == {row["mean_kl"] for row in rows} == {None}
    assert all(row["ratio"] > 1 and row["encode_gbytes_s"] > 0 and row["decode_gbytes_s"] > 0 for row in rows)
    assert all((row["max_abs_err"] == 0) == row["exact"] for row in rows)


def test_without_json_a_table_is_printed() -> None:
    result = ran("--codec", "raw")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert sum(line[:2] == ["raw", "True"] for line in lines) == 4


@pytest.mark.parametrize(
    ("arguments", "wrong"), [(("--codec", "int3"), "'int3' is unknown"), (("--model", "/nowhere"), "does not exist")]
)
def test_what_cannot_be_measured_is_named(arguments: tuple[str, ...], wrong: str) -> None:
    result = ran(*arguments)
    assert result.exit_code == 2
    assert wrong in result.output


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    result = ran("--model", str(tmp_path))
    assert result.exit_code == 1
    assert "config.json" in result.output


def test_only_the_chosen_groups_go_through_the_codec() -> None:
    source = made_up(gemma3_270m(), 300, 256)
    landing = Captured.room(gemma3_270m(), (), 300, 256)
    try:
        error = source.through(codecs.set_by_name("int8"), (GroupKind.FULL,), landing)
        for piece in source.plan.pieces:
            same = b"".join(source.views(piece)) == b"".join(landing.views(piece))
            kind = source.plan.layout.groups[piece.group].kind
            assert same == (kind is not GroupKind.FULL)
        full = source.pieces((GroupKind.FULL,))
        worst = max(float(np.abs(source.values(piece) - landing.values(piece)).max()) for piece in full)
        assert error == worst > 0
    finally:
        source.close()
        landing.close()


def test_the_ratio_is_raw_over_wire_bytes_of_the_chosen_groups() -> None:
    source = made_up(gemma3_270m(), 300, 256)
    try:
        chosen, kinds = codecs.set_by_name("int4"), (GroupKind.SLIDING,)
        pieces = source.pieces(kinds)
        wire = 0
        for piece in pieces:
            codec = chosen.of(source.plan, piece)
            parts = codec.encode(source.views(piece), source.plan.tensor(piece).dtype, source.plan.shape(piece))
            wire += sum(memoryview(part).nbytes for part in parts)
        assert measure(chosen, source, kinds, passes=1).ratio == sum(piece.nbytes for piece in pieces) / wire
    finally:
        source.close()


def test_agreement_counts_positions_whose_lead_exceeds_the_noise_and_divergence_all() -> None:
    reference = torch.tensor([[3.0, 0.0, 0.0], [0.4, 0.0, 0.0], [0.0, 3.0, 0.0]])
    found = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.4, 0.0], [3.0, 0.0, 0.0]])
    agreement = Agreement()
    agreement.add(reference, found, 0.5, 0.25)
    agreement.add(reference[:1], found[:1], 0.5, 0.125)
    assert (agreement.counted, agreement.agreed, agreement.positions, agreement.worst_error) == (3, 2, 4, 0.25)
    assert agreement.same == 2
    p, q = reference.double().softmax(-1), found.double().softmax(-1)
    assert agreement.kl_sum == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("gemma3_text", tmp_path_factory.mktemp("models") / "gemma3")


def test_a_models_cache_is_captured_as_it_is_exported_and_reads_as_it_was(tiny: Path) -> None:
    reader = Reader(tiny, DType.FLOAT32, 64)
    ids = [(7 * n) % 300 + 4 for n in range(180)]
    short, long = reader.capture(ids, 100), reader.capture(ids, 150)
    landing = Captured.room(reader.layout, ids, 150, 64)
    try:
        assert torch.allclose(reader.read(short)[50:], reader.read(long), atol=1e-3)
        assert long.through(codecs.set_by_name("lossless"), tuple(GroupKind), landing) == 0
        assert torch.equal(reader.read(landing), reader.read(long))
        assert long.through(codecs.set_by_name("int4"), tuple(GroupKind), landing) > 0
        assert not torch.equal(reader.read(landing), reader.read(long))
        assert 0 <= reader.batch_noise([long, long]) < 1e-2
    finally:
        for captured in (short, long, landing):
            captured.close()


def test_a_model_gets_every_figure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "PREFIX_TOKENS", 200)
    monkeypatch.setattr(bench_codec, "POSITIONS", 20)
    result = ran("--model", str(tiny), "--documents", "2", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert {row["codec"] for row in rows} == NAMES
    for row in rows:
        assert row.keys() >= KEYS
        if row["source"] == "captured":
            assert row["mean_kl"] >= -1e-6
            assert 0 <= row["top1_all"] <= 1
            assert row["exact"] or (row["noise"] >= 0 and 0 <= row["counted"] <= 40)
            assert (row["mean_kl"] == row["max_abs_err"] == 0) == row["exact"]
    by_group = {(row["codec"], row["group"]): row for row in rows if row["source"] == "captured"}
    assert {group for _, group in by_group} == {"full", "sliding", "all"}
    assert by_group["int8", "all"]["mean_kl"] < by_group["int4", "all"]["mean_kl"]


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_codecs_keep_their_promises_on_a_real_cache(gemma_dir: Path) -> None:
    result = ran("--model", str(gemma_dir), "--documents", "2", "--json")
    rows = {(row["codec"], row["group"]): row for row in json.loads(result.stdout)}
    for name, ratio, agreement in (("lossless", 1.43, 1.0), ("int8", 1.95, 0.995), ("int4", 3.5, 0.97)):
        row = rows[name, "all"]
        assert row["ratio"] >= ratio
        assert row["top1_agreement"] >= agreement
        assert row["source"] == "captured"


def test_the_gpu_script_measures_every_codec_and_compares_the_bytes() -> None:
    for codec in (*codecs.TENSOR_CODECS, gpu_codec.some_transform()):
        row = gpu_codec.measure(codec, "cpu", 1)
        assert row["same_bytes"] is True
        assert all(value > 0 for key, value in row.items() if key.endswith("_s"))


def test_the_gpu_script_says_where_there_is_no_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: run the script itself")
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu_codec"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "no CUDA device: nothing was measured\n")
