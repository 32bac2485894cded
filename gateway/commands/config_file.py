"""``--config FILE``: a TOML file whose keys are a command's options, read again when the process is told to.

What is given on the command line outweighs the file. A file that names something unknown, or cannot be read, changes
nothing and says why.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from gateway.config import ConfigError

NAME = "config"
_GIVEN = "prfaas.given"


class FiledCommand(click.Command):
    """A command with ``--config``; ``reread`` gives its parameters anew."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(
            click.Option(
                [f"--{NAME}"],
                type=click.Path(dir_okay=False, path_type=Path),
                is_eager=True,
                expose_value=False,
                callback=_take_defaults,
                help="TOML file whose keys are these options; read again on SIGHUP and by `prfaas reload`.",
            )
        )

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Keep what was given, to parse it again with what the file holds by then."""
        given = list(args)
        context = super().make_context(info_name, args, parent, **extra)
        context.meta[_GIVEN] = given
        return context

    def reread(self, context: click.Context) -> Callable[[], dict[str, Any]]:
        """Parses the same arguments again, and the file as it is then. Raises ConfigError."""
        given: Sequence[str] = context.meta[_GIVEN]

        def again() -> dict[str, Any]:
            try:
                with self.make_context(context.info_name, list(given), context.parent) as parsed:
                    return dict(parsed.params)
            except click.UsageError as error:
                raise ConfigError(error.format_message()) from error

        return again


def _take_defaults(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Have the file's values stand where nothing is given on the command line."""
    if file is None:
        return
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"--{NAME} {file}: {error}") from error
    options = {
        flag.removeprefix("--"): parameter
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and parameter.name not in (NAME, "help")
        for flag in parameter.opts
    }
    defaults: dict[str, Any] = {}
    for key, value in found.items():
        option = options.get(key)
        if option is None or option.name is None:
            raise click.UsageError(f"--{NAME} {file}: there is no option --{key}{_perhaps(key, list(options))}")
        if isinstance(value, dict) or isinstance(value, list) is not option.multiple:
            kind = "a list" if option.multiple else "a single value"
            raise click.UsageError(f"--{NAME} {file}: {key} must be {kind}")
        _check(context, option, value, f"--{NAME} {file}: {key}")
        defaults[option.name] = value
    context.default_map = defaults


def _check(context: click.Context, option: click.Option, value: Any, where: str) -> None:
    """Have the file named where a value in it is wrong; a flag that overrides it does not hide that."""
    try:
        option.process_value(context, value)
    except click.BadParameter as error:
        raise click.UsageError(f"{where}: {error.message}") from error


def _perhaps(key: str, known: list[str]) -> str:
    near = get_close_matches(key.replace("_", "-"), known, 1)
    return f"; did you mean {near[0]}?" if near else ""
