"""``prfaas bench route``: its options and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console


@click.command()
@click.option("--blocks", type=click.IntRange(1000, 100_000_000), default=10_000_000, show_default=True)
@click.option("--nodes", type=click.IntRange(2, 10_000), default=200, show_default=True)
@click.option("--clusters", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1, 1 << 22), default=131_072, show_default=True)
@click.option("--block-tokens", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option(
    "--questions", type=click.IntRange(10, 1_000_000), default=2000, show_default=True, help="Prompts routed."
)
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Time its tokeniser, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def route(
    blocks: int,
    nodes: int,
    clusters: int,
    prompt_tokens: int,
    block_tokens: int,
    questions: int,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure routing: find a long prompt in a full prefix index, and decide where it is prefilled.

    The index is filled by events of all nodes: prompts that share beginnings, held by a few nodes each, some with a
    block missing. Then other prompts that follow known ones to any depth are matched and routed, with facts for
    the candidates among the nodes. p50 and p99 are of that; hashing and tokenising come before it and are apart.
    """
    from node.bench.route.measure import Setting, measure

    console = Console(stderr=True)
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        try:
            setting = Setting(blocks, nodes, clusters, prompt_tokens, block_tokens, questions)
            figures = measure(setting, model_dir, say).plain()
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(figures, indent=2))
        return
    for key, value in figures.items():
        click.echo(f"{key.replace('_', ' '):22} {'-' if value is None else f'{value:,}'}")
