"""``prfaas up``: the whole path on this machine, from nothing to a checked answer."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from deploy.demo import DemoFailed, Run, as_json, run_demo, show
from deploy.gemma import MODEL_DIRECTORY, ModelUnavailable, cache_home, ensure_gemma
from deploy.progress import Progress
from deploy.reference import ReferenceFailed
from deploy.stack import Stack, StackFailed, StackSpec, free_port
from engines.protocol import EngineLost
from kvcache.layout import DType

WATCH_S = 0.5
SHOW_REMOTE = ("--remote-slack", "5")
"""On one machine the remote way is never the quicker one: what is shown here is that it works."""


@click.command()
@click.option("--once", is_flag=True, help="Stop after the demonstration; the exit status says whether all was equal.")
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model directory (config.json, safetensors, tokenizer.json). Default: Gemma 3 270M, fetched once.",
)
@click.option("--json", "as_json_", is_flag=True, help="Print the demonstration's figures as JSON on stdout.")
@click.option("--port", default=8000, show_default=True, help="Gateway's port; 0: a free one.")
@click.option("--threshold", default=1000, show_default=True, help="Longer prompts (in tokens) are prefilled remotely.")
@click.option("--fallback", type=click.Choice(["local", "fail"]), default="local", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--pool-mib", default=256, show_default=True, help="Host KV pool of each node, in MiB.")
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Default: under the cache folder.")
def up(
    once: bool,
    model_dir: Path | None,
    as_json_: bool,
    port: int,
    threshold: int,
    fallback: str,
    dtype: str,
    pool_mib: int,
    log_dir: Path | None,
) -> None:
    """Start a gateway, a remote prefill node, a local prefill node and a local decode node, and show what they do.

    A short and a long prompt are sent through the OpenAI API and compared with one engine alone; then the gateway
    stays up until Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    progress = Progress(Console(stderr=True))
    try:
        model = model_dir.resolve() if model_dir else ensure_gemma(cache_home() / MODEL_DIRECTORY, progress)
        port = port or free_port()
        spec = StackSpec(
            model_dir=model,
            model_name=model.name,
            log_dir=log_dir or cache_home() / "logs" / str(port),
            dtype=dtype,
            port=port,
            threshold=threshold,
            fallback=fallback,
            pool_mib=pool_mib,
            gateway_options=(*_chat_template(model), *SHOW_REMOTE),
        )
        with Stack(spec, progress) as stack:
            good = _demonstrate(stack, progress, as_json_)
            if not once and good:
                _stay(stack, progress)
    except (ModelUnavailable, StackFailed, DemoFailed, ReferenceFailed, EngineLost) as error:
        progress.note(f"prfaas up: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        progress.note("stopped")
        sys.exit(130 if once else 0)
    if not good:
        progress.note("prfaas up: the answers are not equal to one engine's")
        sys.exit(1)


def _demonstrate(stack: Stack, progress: Progress, json_wanted: bool) -> bool:
    spec = stack.spec
    runs: list[Run] = asyncio.run(
        run_demo(stack.url, spec.model_name, spec.model_dir, DType(spec.dtype), spec.threshold, progress)
    )
    if json_wanted:
        click.echo(json.dumps(as_json(runs), indent=2))
    else:
        show(runs, Console())
    return all(run.good for run in runs)


def _chat_template(model_dir: Path) -> tuple[str, ...]:
    """Gateway options that give a model without a chat template a plain one.

    A file that cannot be read is left to the gateway, which refuses it by name.
    """
    try:
        settings = json.loads((model_dir / "tokenizer_config.json").read_bytes())
        own = not isinstance(settings, dict) or settings.get("chat_template")
    except FileNotFoundError:
        own = None
    except (OSError, ValueError):
        return ()
    if own or (model_dir / "chat_template.jinja").is_file():
        return ()
    return ("--chat-template", str(Path(__file__).with_name("chat.jinja")))


def _stay(stack: Stack, progress: Progress) -> None:
    """Keep the stack up until a signal comes or one of its processes ends."""
    progress.note(
        f"\nup at {stack.url}/v1 (model {stack.spec.model_name}, logs in {stack.spec.log_dir}); Ctrl-C stops it.\n"
        f"  try:  curl {stack.url}/v1/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{stack.spec.model_name}", "prompt": "The capital of France is", "max_tokens": 16}}\''
    )
    while True:
        stack.check()
        time.sleep(WATCH_S)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
