from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from deploy import gemma
from deploy.progress import Progress


def quiet() -> tuple[Progress, StringIO]:
    out = StringIO()
    return Progress(Console(file=out)), out


def finish(work: Path, progress: Progress) -> None:
    (work / "model").mkdir()
    (work / "model" / "terms-notice.json").write_text("{}")


def test_the_terms_are_shown_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress, out = quiet()
    shown = []

    def make(work: Path, progress: Progress) -> None:
        shown.append(gemma.TERMS_URL in out.getvalue())
        finish(work, progress)

    monkeypatch.setattr(gemma, "_make", make)
    gemma.ensure_gemma(tmp_path / "model", progress)
    assert shown == [True]


def test_a_complete_directory_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(gemma, "_make", lambda work, progress: (calls.append(work), finish(work, progress)))
    for _ in range(2):
        assert gemma.ensure_gemma(tmp_path / "model", quiet()[0]) == tmp_path / "model"
    assert len(calls) == 1


def test_a_failed_conversion_leaves_no_directory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Path, progress: Progress) -> None:
        (work / "model").mkdir()
        raise gemma.ModelUnavailable("no room")

    monkeypatch.setattr(gemma, "_make", fail)
    with pytest.raises(gemma.ModelUnavailable):
        gemma.ensure_gemma(tmp_path / "model", quiet()[0])
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_parts_that_do_not_add_up_to_the_pinned_file_are_refused(tmp_path: Path) -> None:
    for part in range(gemma.PARTS):
        data = tmp_path / f"{gemma.PACKAGE}_part{part + 1}" / "data"
        data.mkdir(parents=True)
        (data / f"{gemma.GGUF_NAME}.part{part:02d}").write_bytes(b"tampered")
    with pytest.raises(gemma.ModelUnavailable, match="sha256"):
        gemma._join(tmp_path, tmp_path / "out.gguf")


def test_every_package_of_the_model_is_pinned_by_hash() -> None:
    lines = [line for line in gemma.REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == 1 + gemma.PARTS
    assert all("==1.0.0 --hash=sha256:" in line for line in lines)


@pytest.mark.gemma
def test_the_converted_model_adds_bos_and_knows_about_france(gemma_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(gemma_dir / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is").ids
    assert ids[0] == 2
    model = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.bfloat16)
    assert not hasattr(model.config, "quantization_config")
    said = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert tokenizer.decode(said[len(ids) :]) == " the capital of the country of France."
