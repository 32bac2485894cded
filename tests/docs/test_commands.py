"""Every command in README and docs works: typed in the order of its page, against a live gateway with fake nodes."""

from __future__ import annotations

import asyncio
import re
import tomllib
from itertools import product
from pathlib import Path

import click
import pytest

from gateway.commands.run import gateway
from gateway.fleet.config import parse
from gateway.keys import Role as KeyRole
from kvcache.wire import Role
from tests.docs.pages import PAGES, ROOT, prose, shell_lines
from tests.docs.shell import MISSES, NOT_HERE, RUNS_ON, Shell, Untypable, every_command, found
from tests.gateway.conftest import Open, config, info, model, model_dir, stage
from tests.scheduler.profiled import measured

__all__ = ["config", "info", "model", "model_dir", "stage"]

TYPED = [page for page in PAGES if shell_lines(page)]

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*\w|(?<![\w-])-[a-z]\b")
MADE = {"profile.json": measured().encoded(), "gateway.toml": b'model = "models"'}


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.name)
async def test_the_commands_of_a_page_work_one_after_the_other(
    page: Path, stage: Open, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await stage()
    await one.pair()
    await one.node("another", Role.DECODE)
    answers = [await one.complete(words) for words in (3, 20)]
    assert {answer.status_code for answer in answers} == {200}
    _, secret = one.gateway.keys.create("docs", KeyRole.ADMIN)
    key_id, _ = one.gateway.keys.create("spare", KeyRole.CLIENT)
    words = {
        "DIR": str(model_dir),
        "MODEL": "tiny",
        "NODE": "another",
        "REQUEST_ID": answers[0].headers["x-request-id"],
        "KEY_ID": key_id,
    }
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, one.url, secret, words, MADE)
    for line in shell_lines(page):
        try:
            await asyncio.to_thread(shell.type, line.text)
        except Untypable as error:
            raise AssertionError(f"{page.name}: {line.text}\n{error}") from error


def test_what_is_not_run_is_named_with_a_reason_and_is_there() -> None:
    programs = {line.text.split()[0] for page in TYPED for line in shell_lines(page)}
    assert set(NOT_HERE) <= programs
    assert {*RUNS_ON, *MISSES} <= set(every_command())


def test_every_command_and_flag_in_a_sentence_exists(tmp_path: Path) -> None:
    flags = {name: flags_of(name) for name in every_command()}
    wrong = [
        f"{page.name}: {code}"
        for page in PAGES
        for code in re.findall(r"`([^`]+)`", prose(page))
        if not is_known(" ".join(code.split()).replace("\\|", "|"), flags, tmp_path)
    ]
    assert wrong == []


def test_readme_has_every_command() -> None:
    table = PAGES[0].read_text().split("## Commands")[1].split("\n## ")[0]
    missing = [name for name in every_command() if not all(re.search(rf"\b{word}\b", table) for word in name.split())]
    assert missing == []


def flags_of(name: str) -> set[str]:
    command, _, _ = found(name.split())
    return {"--help"} | {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def is_known(code: str, flags: dict[str, set[str]], folder: Path) -> bool:
    """Whether what stands between backquotes names no command, file or flag that is not there."""
    if code.startswith(("sh ", "python -m ")):
        Shell(folder, "", "", {}).type(code.split(" > ")[0])
        return True
    if code.startswith("pytest "):
        return all((ROOT / word).exists() for word in code.split()[1:] if "/" in word)
    named = set(FLAG.findall(code))
    if not code.startswith("prfaas "):
        return named <= set().union(*flags.values(), FLAG.findall((ROOT / "deploy" / "test.sh").read_text()))
    words = re.match(r"prfaas ((?:[a-z][a-z-]*(?:\|[a-z-]+)* ?)*)", code)
    assert words is not None
    alternatives = [meant(one, flags) for one in product(*(word.split("|") for word in words[1].split()))]
    return all(alternatives) and named <= set().union(*(flags[name] for names in alternatives for name in names))


def meant(words: tuple[str, ...], flags: dict[str, set[str]]) -> list[str]:
    """The commands that these words name: one, with whatever it takes after it, or all of a group."""
    for count in range(len(words), 0, -1):
        begun = [name for name in flags if name.split()[:count] == list(words[:count])]
        if begun:
            one = " ".join(words[:count])
            return [one] if one in begun else begun if count == len(words) else []
    return []


@pytest.mark.parametrize(
    "code",
    [
        "prfaas conquer",
        "prfaas clusters conquer",
        "prfaas keys create|conquer",
        "prfaas node --handover FILE",
        "--no-such-flag",
        "pytest tests/nowhere.py",
    ],
)
def test_what_is_not_there_is_not_known(code: str, tmp_path: Path) -> None:
    assert not is_known(code, {name: flags_of(name) for name in every_command()}, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "wget http://example.org/prfaas",
        "prfaas clusters conquer east",
        "prfaas gateway --model DIR --no-such-flag",
        "prfaas gateway --model DIR --ca certificates",
        "prfaas status --key $(cat never-made)",
        "sh deploy/quickstart.sh --no-such-flag",
        "python -m tests.bench.no_such_bench",
        "helm install prfaas deploy/helm/elsewhere",
    ],
)
def test_a_line_that_does_not_work_is_noticed(line: str, tmp_path: Path) -> None:
    with pytest.raises(Untypable):
        Shell(tmp_path, "http://127.0.0.1:9", "", {}).type(line)


def test_examples_of_files_are_what_the_gateway_reads(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "configuration.md").read_text(), re.S | re.M)
    file = tmp_path / "gateway.toml"
    file.write_text(blocks[0])
    assert gateway.make_context("gateway", ["--config", str(file)]).params["queue_timeout"] == 30
    engines = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "operators.md").read_text(), re.S | re.M)
    assert [one.cluster for one in parse(tomllib.loads(engines[0]), "local")] == ["east"]


def test_commands_are_found_by_their_words() -> None:
    command, name, rest = found(["clusters", "drain", "east", "--json"])
    assert (name, rest) == ("clusters drain", ["east", "--json"])
    assert isinstance(command, click.Command)
