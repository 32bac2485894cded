"""The file of engines: what is in it, and what is refused by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gateway.config import ConfigError
from gateway.fleet.config import DialectName, EngineConfig, EngineRole, parse, read

PAIR = """
[[engine]]
url = "http://10.0.0.7:8000/"
model = "m"
role = "prefill"
dialect = "sglang"
cluster = "east"
[[engine]]
url = "https://[::1]:8001"
model = "m"
dialect = "sglang"
name = "d0"
ranks = 2
"""


def engines(text: str) -> tuple[EngineConfig, ...]:
    return parse(tomllib.loads(text), "home")


def test_what_is_left_out_has_its_default() -> None:
    prefill, decode = engines(PAIR)
    assert (prefill.url, prefill.host, prefill.name) == ("http://10.0.0.7:8000", "10.0.0.7", "10.0.0.7-8000")
    assert (prefill.role, prefill.cluster, prefill.bootstrap) == (EngineRole.PREFILL, "east", "10.0.0.7:8998")
    assert (decode.host, decode.bootstrap, decode.cluster) == ("::1", "[::1]:8998", "home")
    assert (decode.role, decode.ranks, decode.max_running, decode.key) == (EngineRole.BOTH, 2, 256, None)
    (plain,) = engines('[[engine]]\nurl = "http://h"\nmodel = "m"')
    assert (plain.dialect, plain.name) == (DialectName.OPENAI, "h-80")
    (v6,) = engines('[[engine]]\nurl = "http://[::1]:9"\nmodel = "m"')
    assert v6.name == "v6---1-9"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "engine: needs at least one"),
        ("[engines]", "engines: unknown"),
        ('[[engine]]\nurl = "http://h"', r"engine\[0\].model: missing"),
        ('[[engine]]\nurl = "h:80"\nmodel = "m"', r"engine\[0\].url: 'h:80' must be http"),
        ('[[engine]]\nurl = "http://h/v1"\nmodel = "m"', "without a path"),
        ('[[engine]]\nurl = "http://u:p@h"\nmodel = "m"', "without a path"),
        ('[[engine]]\nurl = "http://h:99999"\nmodel = "m"', "out of range"),
        ('[[engine]]\nurl = "http://a..b:80"\nmodel = "m"', r"engine\[0\].url: url: 'a..b' cannot be a host's name"),
        ('[[engine]]\nurl = "http://h\u00e9:80"\nmodel = "m"', r"engine\[0\].url: url: .* without user"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\ndialect = "sglang"\nbootstrap = "a..b:1"', "cannot be a host's"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\nrolle = "both"', r"engine\[0\].rolle: unknown"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\nrole = "prefill"', "does both"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\ndialect = "nixl"', "must be one of openai, vllm-nixl-pull"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\nmax_running = 0', "from 1 to"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\nbootstrap = "h:1"', "openai has none"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\ndialect = "sglang"\nlease_s = 3', "sglang has none"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\ndialect = "sglang"\nbootstrap = "h"', "not HOST:PORT"),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\ndialect = "vllm-nixl-pull"\nlease_s = 0', "above 0"),
        (
            '[[engine]]\nurl = "http://h"\nmodel = "m"\ndialect = "sglang"\nrole = "decode"\ncluster = "east"',
            "a decode engine is where the gateway is",
        ),
        ('[[engine]]\nurl = "http://h"\nmodel = "m"\n[[engine]]\nurl = "http://h"\nmodel = "m"', "there twice"),
        (PAIR + '[[engine]]\nurl = "http://h"\nmodel = "m"', r"other engines of 'm' speak sglang"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engines(text)


def test_a_key_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    file = tmp_path / "engines.toml"
    file.write_text(f'[[engine]]\nurl = "http://h"\nmodel = "m"\nkey_file = "{tmp_path}/key"')
    (one,) = read(file, "home")
    assert one.key == "s3cret"
    assert "s3cret" not in repr(one)
    (tmp_path / "key").write_text("two\nlines")
    with pytest.raises(ConfigError, match=r"engine\[0\].key_file"):
        read(file, "home")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read(tmp_path / "nowhere", "home")
