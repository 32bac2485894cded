"""Types the commands of a page: short ones for good, those that run on only as far as their own parser goes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import httpx
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands.configuring import configure
from tests.docs.pages import ROOT

RUNS_ON = {
    "gateway": "serves until it is told to stop",
    "node": "serves until it is told to stop; needs a model",
    "up": "serves until it is told to stop; needs a model",
    "egress": "serves until it is told to stop",
    "calibrate": "needs a model with weights",
    "bench relay": "opens a thousand streams for a minute",
    "bench kv serve": "serves until it is told to stop",
    "bench kv fetch": "needs the process that serves",
    "profile": "measures a stack that computes, for two minutes",
}
"""What is parsed by the real command and no more, and why."""
NOT_HERE = {
    "docker": "installs an image, and starts containers",
    "helm": "installs into a Kubernetes cluster; tests/deploy lints and renders the chart",
    "kubectl": "writes into a Kubernetes cluster",
    "systemctl": "starts services of the machine; tests/deploy checks the units",
}
"""Programs that change the machine or another one, and why they are not run."""
MISSES = {
    "plan approve": "proposal 1 is not open",
    "plan refuse": "proposal 1 is not open",
    "reload": "was not started by `prfaas gateway`",
}
"""Commands that reach the gateway and are answered that there is nothing to do: what the answer says."""
_CAT = re.compile(r"\$\(cat ([\w./-]+)\)")


class Untypable(AssertionError):
    """A line of a page that does not work as it stands."""


@dataclass
class Shell:
    """One reader who types a page's lines one after the other, in a folder of its own.

    ``url`` is the live gateway's and ``key`` an admin's there: they stand for what the page exports. ``words`` are for
    its placeholders, and ``made`` has what commands that are not run would have written, by file.
    """

    folder: Path
    url: str
    key: str
    words: Mapping[str, str]
    made: Mapping[str, bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def type(self, text: str) -> None:
        """Do what a line says. Raises Untypable."""
        words = [self.words.get(word, word) for word in shlex.split(_CAT.sub(self._cat, text), comments=True)]
        into = None
        if ">" in words:
            at = words.index(">")
            words, into = words[:at], words[at + 1]
        said = self._run(words)
        if into is not None:
            (self.folder / into).write_text(said)

    def _cat(self, found: re.Match[str]) -> str:
        file = self.folder / found[1]
        if not file.is_file():
            raise Untypable(f"{found[1]}: no line before has made it")
        return file.read_text().strip()

    def _run(self, words: list[str]) -> str:
        match words:
            case ["prfaas", *rest]:
                return self._prfaas(rest)
            case ["export", *settings]:
                self.environment |= dict(setting.split("=", 1) for setting in settings)
            case ["sh", script, *options]:
                _mentions((ROOT / script), options)
            case ["python", "-m", module, *options]:
                _mentions(ROOT / f"{module.replace('.', '/')}.py", options)
            case ["curl", *rest]:
                self._curl(rest)
            case [program, *rest] if program in NOT_HERE:
                for word in rest:
                    if word.startswith("deploy/") and not (ROOT / word).exists():
                        raise Untypable(f"{word} is not there")
            case _:
                raise Untypable(f"{words[0]} is a command that this test does not know")
        return ""

    def _prfaas(self, arguments: list[str]) -> str:
        command, name, rest = found(arguments)
        if name in RUNS_ON:
            self._parse(command, name, rest)
            return ""
        environment = self.environment | {"PRFAAS_KEY": self.key, "PRFAAS_GATEWAY": self.url}
        root = environment.pop("PRFAAS_CA", None)
        if root is not None and not (self.folder / root).is_file():
            raise Untypable(f"{root}: no line before has made it")
        done = CliRunner().invoke(command, rest, env=environment, prog_name=f"prfaas {name}")
        if name in MISSES:
            if done.exit_code != 1 or MISSES[name] not in done.output:
                raise Untypable(f"prfaas {name}: {done.output}")
        elif done.exit_code != 0:
            raise Untypable(f"prfaas {shlex.join(arguments)}: {done.output or done.exception!r}")
        return done.stdout

    def _parse(self, command: click.Command, name: str, arguments: list[str]) -> None:
        """As the command itself would, with files that its paths lead to."""
        options = {flag: option for option in command.params for flag in option.opts}
        plain = list(arguments)
        for at, flag in enumerate(arguments[:-1]):
            option = options.get(flag)
            if option is not None and isinstance(option.type, click.Path):
                plain[at + 1] = self._file(plain[at + 1], option.type)
        try:
            params = command.make_context(name, plain).params
            if name == "gateway":
                configure(**{key: value for key, value in params.items() if key != "log_format"})
        except (click.ClickException, ValueError) as error:
            raise Untypable(f"prfaas {name}: {getattr(error, 'message', error)}") from error

    def _file(self, name: str, kind: click.Path) -> str:
        path = self.folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not kind.file_okay:
            path.mkdir(exist_ok=True)
        elif not path.exists():
            path.write_bytes(self.made.get(name, b"secret"))
        return str(path)

    def _curl(self, words: list[str]) -> None:
        headers, body, urls, rest = {"authorization": f"Bearer {self.key}"}, None, [], iter(words)
        for word in rest:
            if word == "-H":
                name, _, value = next(rest).partition(":")
                headers[name.strip()] = value.strip()
            elif word == "-d":
                body = json.loads(next(rest))
            elif word.startswith("-"):
                raise Untypable(f"curl {word} is not known to this test")
            else:
                urls.append(word)
        if isinstance(body, dict) and "model" in body:
            body["model"] = self.words["MODEL"]
        for url in urls:
            path = httpx.URL(url).raw_path.decode()
            answer = httpx.request("GET" if body is None else "POST", self.url + path, headers=headers, json=body)
            if answer.status_code != 200:
                raise Untypable(f"curl {path}: {answer.status_code} {answer.text}")


def found(arguments: list[str]) -> tuple[click.Command, str, list[str]]:
    """The command that the first words name, its name, and what follows them. Raises Untypable."""
    command, names, rest = _top(arguments[0]), arguments[:1], arguments[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(click.Context(command), rest[0])
        if inner is None:
            raise Untypable(f"prfaas {' '.join(names)} has no {rest[0]}")
        command, names, rest = inner, [*names, rest[0]], rest[1:]
    return command, " ".join(names), rest


def _top(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    if command is None:
        target = _entries().get(name)
        if target is None:
            raise Untypable(f"there is no prfaas {name}")
        module, _, attribute = target.partition(":")
        command = getattr(import_module(module), attribute)
    return command


def _entries() -> dict[str, str]:
    """Commands of other rooms, as the package announces them: it need not be installed here."""
    packaging: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return packaging["project"]["entry-points"]["prfaas.commands"]


def every_command() -> Iterator[str]:
    """The names of all commands, those of groups with their group's."""
    for name in [*main.list_commands(click.Context(main)), *_entries()]:
        yield from _names(_top(name), name)


def _names(command: click.Command, name: str) -> Iterator[str]:
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield name
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _names(inner, f"{name} {inner.name}")


def _mentions(file: Path, options: list[str]) -> None:
    if not file.is_file():
        file = file.with_suffix("") / "__main__.py"
    if not file.is_file():
        raise Untypable(f"{file} is not there")
    told = file.read_text()
    for option in options:
        if option.startswith("--") and option not in told:
            raise Untypable(f"{file.name} knows no {option}")
