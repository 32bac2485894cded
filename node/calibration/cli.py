"""``prfaas calibrate``: read sample text with a model and write the transform codec's calibration beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from tokenizers import Tokenizer

from kvcache.codecs import calibration
from kvcache.layout import DType

TEXT_TOKENS = 2048
CHUNK_TOKENS = 256


@click.command()
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--dtype", type=click.Choice([d.value for d in DType]), default=DType.BFLOAT16.value, show_default=True)
@click.option("--text", "files", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True)
@click.option("--output", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: --model.")
def calibrate(model_dir: Path, dtype: str, files: tuple[Path, ...], output: Path | None) -> None:
    """Fit the transform codec to a model and print the codec's name.

    Give text like that which will be served with --text, some tens of thousands of tokens; without it Python's own
    reference and library are read.
    """
    from node.bench.quality import Reader
    from node.bench.texts import other_documents
    from node.calibration.observe import Observer

    console = Console(stderr=True)
    texts = [path.read_text(encoding="utf-8") for path in files] or other_documents()
    try:
        observer = Observer(Reader(model_dir, DType(dtype), CHUNK_TOKENS))
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        pieces = list(_cut(tokenizer, texts, whole=bool(files)))
        for number, ids in enumerate(pieces):
            observer.read(ids)
            console.print(f"read {number + 1} of {len(pieces)}", highlight=False)
        path = calibration.save(observer.bases(), output or model_dir)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    click.echo(calibration.load(path).name)


def _cut(tokenizer: Tokenizer, texts: Sequence[str], whole: bool) -> Iterator[list[int]]:
    """Runs of tokens; of each text all, or its first run."""
    for text in texts:
        ids = tokenizer.encode(text).ids
        for start in range(0, len(ids) if whole else 1, TEXT_TOKENS):
            yield ids[start : start + TEXT_TOKENS]
