"""Checks command lines that deployment files hold with the commands that they are for."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from gateway.commands.run import gateway
from node.cli import node

COMMANDS: dict[str, click.Command] = {"gateway": gateway, "node": node}
SUBSTITUTES = {"$(POD_NAME)": "pod-0"}


def check(arguments: Sequence[str]) -> None:
    """Parse what follows ``prfaas``, as the command itself would. Raises click.UsageError.

    The absolute paths that it names are those of mounts: here they are files and folders made for the moment.
    """
    name, *rest = arguments
    command = COMMANDS[name]
    with tempfile.TemporaryDirectory() as root:
        plain = []
        for argument in rest:
            flag, given, value = argument.partition("=")
            for text, instead in SUBSTITUTES.items():
                value = value.replace(text, instead)
            plain.append(f"{flag}={_mounted(command, flag, value, Path(root))}" if given else argument)
        command.make_context(name, plain)


def _mounted(command: click.Command, flag: str, value: str, root: Path) -> str:
    if not value.startswith("/"):
        return value
    path = root / value.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    option = next((param for param in command.params if flag in param.opts), None)
    if option is not None and isinstance(option.type, click.Path) and not option.type.file_okay:
        path.mkdir(exist_ok=True)
    elif not path.exists():
        path.touch()
    return str(path)
