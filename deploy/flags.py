"""The reference of flags and configuration files, from the code that reads them: ``python -m deploy.flags``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from types import ModuleType
from typing import Any

import click

from gateway import rebalance_config
from gateway.commands import operate
from gateway.commands.run import gateway
from gateway.conversions import ConversionLimits
from gateway.fleet import config as fleet_config
from gateway.live import LIVE, flag_of
from gateway.shared.settings import PASSWORD_VARIABLE
from node.cli import node
from scheduler.controller.settings import ControllerSettings

_HEAD = """\
# Configuration

This page is made from the code: `python -m deploy.flags > docs/configuration.md`. What the flags are for is told in
[operators.md](operators.md), [planners.md](planners.md) and [deployment.md](deployment.md). Every other command tells
the same of itself with `--help`.
"""
_FILE = """
A gateway takes its flags from a TOML file as well: the keys of `--config FILE` are the flags without their dashes in
front, a list where a flag may be repeated, `true` for one without a value. What the command line says outweighs the
file. On SIGHUP and by `prfaas reload` the gateway reads it again, and the file of `--engines`.

```toml
model = "/models/gemma"
threshold = "auto"
queue-timeout = 30
cors-origin = ["https://console.example.org"]
```
"""
_FIXED = (
    "Where the file asks for a change of anything else, nothing is changed, and the answer names it. `--threshold "
    "auto` can neither begin nor end that way."
)


def reference() -> str:
    """The whole page, as Markdown."""
    return "\n".join(
        [
            _HEAD,
            "## prfaas gateway\n",
            *_flags("gateway", gateway),
            "\n## The file of --config\n" + _FILE,
            textwrap.fill(
                f"Of these a running gateway takes what is new: {_live()}. {_FIXED}", 120, break_on_hyphens=False
            ),
            "",
            "## prfaas node\n",
            *_flags("node", node),
            "\n## The file of --engines\n",
            _example(fleet_config),
            "\n## The file of --rebalance-config\n",
            _example(rebalance_config),
            "\nIn `[controller]`, with these defaults:\n",
            *_settings(ControllerSettings, without=("mode",)),
            "\n" + _prose(ControllerSettings),
            "\nIn `[limits]`:\n",
            *_settings(ConversionLimits),
            "\n" + _prose(ConversionLimits),
            "\n## Environment\n",
            *_table(("variable", "meaning"), _environment()),
            "",
        ]
    )


def _flags(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    options = [each for each in command.params if isinstance(each, click.Option)]
    return _table(("flag", "default", "meaning"), (_flag(each, context) for each in options))


def _flag(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    names = " / ".join((*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" {_takes(option, context)}"
    return f"`{_cell(names + value)}`", _default(option, context), _cell(option.help or "")


def _takes(option: click.Option, context: click.Context) -> str:
    """What its value is: a metavar, and of numbers the bounds."""
    kind = option.type
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return option.make_metavar(context).strip("[]") if option.metavar is None else option.metavar
    low = "" if kind.min is None else f"{kind.min:g}{'<' if kind.min_open else '<='}"
    high = "" if kind.max is None else f"<={kind.max}"
    return f"{low}N{high}"


def _default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    value = option.get_default(context, call=False)
    if option.is_flag and option.secondary_opts:
        return f"`{option.opts[0] if value else option.secondary_opts[0]}`"
    if option.is_flag or option.multiple or value is None or value == "" or not _plain(value):
        return ""
    return f"`{value}`"


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _example(module: ModuleType) -> str:
    """The file that a module's docstring shows after ``::``, and what is said of it after that."""
    told = inspect.cleandoc(module.__doc__ or "").partition("::\n")[2]
    lines = told.strip("\n").splitlines()
    end = next((at for at, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    shown = inspect.cleandoc("\n".join(lines[:end]))
    rest = _markdown("\n".join(lines[end:]).strip())
    return f"```toml\n{shown}\n```" + (f"\n\n{rest}" if rest else "")


def _live() -> str:
    flags = {flag for name in LIVE for flag in re.findall(r"--[\w-]+", flag_of(name))}
    return ", ".join(f"`{flag}`" for flag in sorted(flags))


def _settings(kind: type, without: Sequence[str] = ()) -> Iterator[str]:
    rows = ((f"`{each.name}`", f"`{_value(each)}`") for each in fields(kind) if each.name not in without)
    return _table(("key", "default"), rows)


def _value(field: Field[Any]) -> Any:
    return "" if field.default is MISSING else field.default


def _prose(kind: type) -> str:
    return _markdown(inspect.cleandoc(kind.__doc__ or ""))


def _markdown(text: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def _environment() -> Iterator[tuple[str, str]]:
    for name, command in (("gateway", gateway), ("node", node)):
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.envvar, str):
                yield f"`{option.envvar}`", f"`{option.opts[0]}` of `prfaas {name}`"
    yield f"`{PASSWORD_VARIABLE}`", "the password of the Redis, where `--redis-password-file` is not given"
    for option in operate.status.params:
        if isinstance(option, click.Option) and isinstance(option.envvar, str):
            yield f"`{option.envvar}`", f"`{option.opts[0]}` of commands that talk to a gateway"
    yield "`PRFAAS_CACHE`", "where the quickstart keeps the converted model and its logs; `~/.cache/prfaas` by default"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print(reference(), end="")
