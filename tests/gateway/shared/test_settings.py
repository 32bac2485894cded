"""Where Redis is: said once, checked, and never with its password in a text."""

import pytest

from gateway.config import ConfigError
from gateway.shared.redis_url import parse_redis

SECRET = "s3cr3t/:@"
QUOTED = "s3cr3t%2F%3A%40"


def test_a_url_says_all_and_its_password_is_in_no_text():
    found = parse_redis(f"rediss://ops:{QUOTED}@redis.example:7000/3")
    assert (found.host, found.port, found.database, found.username, found.password, found.tls) == (
        "redis.example",
        7000,
        3,
        "ops",
        SECRET,
        True,
    )
    assert found.where == "rediss://redis.example:7000/3"
    assert "s3cr3t" not in repr(found) + str(found) + found.where


def test_a_file_outweighs_the_environment_and_that_the_url(tmp_path):
    file = tmp_path / "password"
    file.write_text("of the file\n")
    url = f"redis://:{QUOTED}@127.0.0.1"
    assert parse_redis(url, password_file=file, environment_password="env").password == "of the file"
    assert parse_redis(url, environment_password="env").password == "env"
    assert parse_redis(url).password == SECRET
    assert parse_redis("redis://localhost").password is None


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://127.0.0.1", "is not redis"),
        ("redis://", "is not redis"),
        ("redis://127.0.0.1:port", "no URL"),
        ("redis://127.0.0.1/x", "no number"),
        ("redis://127.0.0.1?db=1", "is not redis"),
        (f"redis://:{QUOTED}@10.0.0.1", "--redis-insecure-network"),
    ],
)
def test_what_cannot_be_used_is_refused_without_telling_secrets(url, word):
    with pytest.raises(ConfigError, match=word) as refused:
        parse_redis(url)
    assert "s3cr3t" not in str(refused.value)


def test_a_network_in_the_clear_must_be_asked_for():
    assert not parse_redis("redis://10.0.0.1", insecure_network=True).tls
    assert parse_redis("rediss://10.0.0.1").tls


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ConfigError, match="--redis-password-file"):
        parse_redis("redis://localhost", password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="--redis-ca"):
        parse_redis("rediss://localhost", ca=tmp_path / "none")
