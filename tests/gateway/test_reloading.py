"""A configuration file that is read again while the gateway runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from gateway.commands.run import gateway
from gateway.config import ConfigError, GatewayConfig
from gateway.live import LIVE, LiveConfig, flag_of
from tests.stacks import eventually

ROOT = Path(__file__).parents[2]


def test_a_live_setting_is_taken_and_told_to_followers(config: GatewayConfig) -> None:
    live, heard = LiveConfig(config), list[int]()
    live.follow(lambda new: heard.append(new.queue))
    new = replace(config, queue=7)
    assert [(one.option, one.was, one.now) for one in live.check(new)] == [("--queue", 1000, 7)]
    assert live.now.queue == 1000, "checking changes nothing"
    live.take(new)
    assert (live.now.queue, heard) == (7, [7])


def test_what_cannot_change_is_named_and_nothing_is_taken(config: GatewayConfig) -> None:
    live = LiveConfig(config)
    with pytest.raises(ConfigError, match=r"--local-cluster, --port cannot change .* nothing was changed"):
        live.check(replace(config, queue=7, port=1, local_cluster="other"))
    with pytest.raises(ConfigError, match="--tls-cert cannot change"):
        live.check(replace(config, tls_cert=Path("c"), tls_key=Path("k")))


def test_what_can_change_is_set_by_options_that_there_are() -> None:
    options = {opt for parameter in gateway.params for opt in parameter.opts}
    named = {word.strip(" ,") for name in LIVE for word in flag_of(name).replace(" or ", " ").split()}
    assert named - options == set()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("treshold = 5", "there is no option --treshold; did you mean threshold?"),
        ("queue = 'many'", "queue: 'many' is not a valid integer"),
        ("queue = [1]", "queue must be a single value"),
        ("kv-events = 'x'", "kv-events must be a list"),
        ("queue = ", "Invalid value"),
        ("queue-timeout = 0", "queue-timeout: 0"),
    ],
)
def test_a_broken_file_is_refused_by_its_name_and_key(
    model_dir: Path, tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    done = CliRunner().invoke(gateway, ["--model", str(model_dir), "--config", str(file)])
    assert done.exit_code == 2
    assert complaint in done.output.replace("\n", " ")
    assert "gateway.toml" in done.output


class Running:
    """One gateway process with a file."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self.file = folder / "gateway.toml"
        self.log = folder / "log"
        self.write("queue = 10\nthreshold = 500")
        template = folder / "template"
        os.mkfifo(template)
        files = ("--model", str(model_dir), "--chat-template", str(template))
        command = [sys.executable, "-m", "gateway.cli", "gateway", *files, "--port", "0"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--config", str(self.file), "--queue-timeout", "9"], cwd=ROOT, stdout=out, stderr=out
            )
        with template.open("w") as starting:  # opened once the gateway, on its way to serve, begins to read it
            self.hang_up()
            starting.write("{{ messages[0].content }}")
        assert eventually(lambda: "listening on" in self.log.read_text(), 30), self.log.read_text()
        self.url = self.log.read_text().split("listening on ")[1].split()[0]

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def hang_up(self) -> None:
        os.kill(self.process.pid, signal.SIGHUP)

    def queue(self) -> dict[str, float]:
        found: dict[str, float] = httpx.get(f"{self.url}/v1/status").json()["queue"]
        return found

    def says(self, text: str) -> bool:
        return eventually(lambda: text in self.log.read_text(), 5)


@pytest.fixture(scope="module")
def running(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    one = Running(model_dir, tmp_path_factory.mktemp("reload"))
    yield one
    one.process.terminate()
    assert one.process.wait(20) == 0, one.log.read_text()


def test_a_hangup_during_the_start_is_heeded_after_it(running: Running) -> None:
    assert running.says("reloaded changed=[]")


def test_the_file_counts_from_the_start_and_the_command_line_outweighs_it(running: Running) -> None:
    running.write("queue = 10\nthreshold = 500\nqueue-timeout = 5")
    running.hang_up()
    assert running.says("reloaded changed=[]")
    assert running.queue() | {"queue": 10, "timeout_s": 9} == running.queue()


def test_a_hangup_takes_what_is_new(running: Running) -> None:
    running.write("queue = 11\nthreshold = 600")
    running.hang_up()
    assert running.says("'--queue'")
    assert running.queue()["queue"] == 11
    assert httpx.get(f"{running.url}/v1/status").json()["threshold_tokens"] == 600


def test_a_file_that_breaks_or_wants_too_much_changes_nothing_and_says_why(running: Running) -> None:
    before = running.queue()["queue"]
    running.write("queue = 12\nlocal-cluster = 'elsewhere'")
    refused = httpx.post(f"{running.url}/v1/reload")
    assert refused.status_code == 409
    assert "--local-cluster cannot change" in refused.json()["error"]["message"]
    running.write("queue = twelve")
    assert httpx.post(f"{running.url}/v1/reload").status_code == 409
    assert running.says("not reloaded: --config")
    assert running.queue()["queue"] == before
    assert running.process.poll() is None


def test_the_command_says_what_changed(running: Running) -> None:
    running.write("queue = 13")
    command = [sys.executable, "-m", "gateway.cli", "reload", "--gateway", running.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--queue" in done.stdout
    assert "13" in done.stdout
