"""``prfaas calibrate``: coordinates in which harm is length, and a file that nodes and benches find by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvcache.codecs import calibration
from kvcache.layout import DType
from node.bench import codec as bench_codec
from node.bench.cli import bench
from node.bench.quality import Reader
from node.bench.texts import documents, other_documents
from node.calibration.bases import Moments, basis
from node.calibration.cli import calibrate
from node.calibration.observe import Observer
from node.config import ConfigError
from node.model import NodeModel
from tests.models import tiny_model


def seen(rows: np.ndarray) -> Moments:
    moments = Moments.none(*rows.shape[1:])
    moments.add(rows[:100])
    moments.add(rows[100:])
    return moments


def correlated(rows: int = 3000, dim: int = 8) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((rows, 1, dim)) @ rng.standard_normal((dim, dim)) + 2).astype(np.float32)


def test_moments_are_those_of_all_rows() -> None:
    rows = correlated()
    means, covariance = seen(rows).covariance()
    assert np.allclose(means, rows.mean(0), atol=1e-5)
    assert np.allclose(covariance[0], np.cov(rows[:, 0].T, bias=True), atol=1e-3)


@pytest.mark.parametrize("harmful", [False, True])
def test_coordinates_are_uncorrelated_and_an_errors_harm_is_its_length(harmful: bool) -> None:
    rows = correlated()
    rng = np.random.default_rng(1)
    queries = rng.standard_normal((500, 8)) * np.exp2(np.arange(8))
    harm = (queries.T @ queries)[None] if harmful else None
    found = basis(seen(rows), harm, 0.5)
    steps = found.steps(rows)[0].T.astype(np.float64)
    correlation = np.corrcoef((steps[:, :4]).T)
    assert np.abs(correlation - np.eye(4)).max() < 0.1
    assert np.abs(found.values(found.steps(rows)) - rows).max() < 1.5 * rows.std()
    errors = rng.integers(-3, 4, (200, 8)).astype(np.float64)
    moved = errors @ found.inverse[0] * found.from_steps
    weight = np.eye(8) if harm is None else harm[0] / np.trace(harm[0]) * 8 + 0.05 * np.eye(8)
    costs = np.einsum("ni,ij,nj->n", moved, weight, moved) / (errors**2).sum(1)
    assert costs.max() / costs.min() < 1.01


def test_a_tensor_that_never_varied_is_refused() -> None:
    with pytest.raises(ValueError, match="never varied"):
        basis(seen(np.ones((200, 1, 8), np.float32)), None, 0.5)


def test_calibration_reads_nothing_that_the_bench_asks_about() -> None:
    asked = {text[:10_000] for text in documents(20)}
    read = other_documents()
    assert len(set(read)) == 20
    assert not any(text[1000:2000] in other for text in asked for other in (one[:10_000] for one in read))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("gemma3_text", tmp_path_factory.mktemp("models") / "gemma3")


def test_queries_and_output_projections_are_counted_in(tiny: Path) -> None:
    reader = Reader(tiny, DType.FLOAT32, 64)
    observer = Observer(reader)
    observer.read([(7 * n) % 300 + 4 for n in range(200)])
    layers = {layer.index for group in reader.layout.groups for layer in group.layers}
    assert observer._queries.keys() == observer._outputs.keys() == layers
    assert observer.bases().keys() == {(layer, name) for layer in layers for name in ("k", "v")}
    before = {layer: moment.clone() for layer, moment in observer._queries.items()}
    reader.capture([(5 * n) % 300 + 4 for n in range(100)], 100).close()
    assert all((observer._queries[layer] == moment).all() for layer, moment in before.items()), "still observed"


def test_a_calibration_is_found_beside_the_model_and_measured(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text(other_documents()[0][:12_000])
    result = CliRunner().invoke(calibrate, ["--model", str(tiny), "--dtype", "float32", "--text", str(text)])
    assert result.exit_code == 0, result.output
    name = result.stdout.strip().splitlines()[-1]
    (path,) = tiny.glob("kv-transform-*.npz")
    assert name == calibration.load(path).name
    assert [transform.name for transform in NodeModel.read(tiny, DType.FLOAT32).transforms] == [name]
    monkeypatch.setattr(bench_codec, "PREFIX_TOKENS", 200)
    monkeypatch.setattr(bench_codec, "POSITIONS", 20)
    options = ["codec", "--model", str(tiny), "--dtype", "float32", "--documents", "2", "--codec", name, "--json"]
    rows = json.loads(CliRunner().invoke(bench, options).stdout)
    assert {row["codec"] for row in rows} == {name}
    assert all(row["ratio"] > 4 and 0 < row["mean_kl"] < 1 for row in rows)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="run prfaas calibrate"):
        NodeModel.read(tiny, DType.FLOAT32)
