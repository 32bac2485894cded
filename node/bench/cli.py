"""``prfaas bench``: one sub-command for each thing that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from kvcache import codecs
from kvcache.codecs import calibration
from kvcache.layout import DType
from node.bench.kv.cli import kv
from node.bench.relay.cli import relay
from node.bench.route.cli import route


@click.group()
def bench() -> None:
    """Measure this machine with the code that serves."""


bench.add_command(kv)
bench.add_command(route)
bench.add_command(relay)


@bench.command()
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice([d.value for d in DType]), default=DType.BFLOAT16.value, show_default=True)
@click.option("--documents", type=click.IntRange(2, 40), default=20, show_default=True, help="Texts to read.")
@click.option("--codec", "names", multiple=True, help="Only this, or a set as in int8,full.v=int4; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def codec(model_dir: Path | None, dtype: str, documents: int, names: tuple[str, ...], as_json: bool) -> None:
    """Measure the KV codecs: ratio, speed per core, and with --model what they do to its answers.

    For each of 20 texts a prefix of 2,048 tokens is prefilled and its cache sent through every codec, full attention
    and windows apart and together; then the text's next 100 positions are compared. Without --model the cache is made
    up and only size, speed and error are shown. Calibrations of the transform codec that lie beside the model
    (prfaas calibrate) are measured too.
    """
    from node.bench.codec import captured_rows, synthetic_rows

    console = Console(stderr=True)
    try:
        transforms = calibration.load_all(model_dir) if model_dir else []
        every = [*(codec.name for codec in codecs.ALL), *(transform.name for transform in transforms)]
        chosen = [codecs.set_by_name(name, transforms) for name in names or every]
    except codecs.UnknownCodec as error:
        raise click.UsageError(f"--codec: {error}") from error
    except calibration.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        try:
            if model_dir is None:
                found = list(synthetic_rows(chosen, say))
            else:
                found = list(captured_rows(chosen, model_dir, DType(dtype), documents, say))
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error
    rows = [row.plain() for row in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(*(Column(key.replace("_", " "), overflow="fold") for key in rows[0]), box=None)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
