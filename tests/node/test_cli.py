"""``prfaas node`` says what is wrong with its flags before it loads anything."""

import pytest
from click.testing import CliRunner

from node.cli import node
from tests.models import write_tokenizer

GOOD = {"--role": "prefill", "--cluster": "east", "--gateway": "http://127.0.0.1:1"}


def run(tmp_path, **flags):
    arguments = (
        GOOD | {"--model": str(tmp_path)} | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    )
    return CliRunner().invoke(node, [part for flag, value in arguments.items() for part in (flag, value)])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"cluster": "a b"}, "--cluster"),
        ({"node_id": "a/b"}, "--node-id"),
        ({"gateway": "http://10.0.0.1:8000"}, "--gateway"),
        ({"kv_host": "0.0.0.0"}, "--kv-advertise"),
        ({"kv_host": "10.0.0.1"}, "--kv-tls-cert"),
        ({"dial": "out", "kv_port": "7"}, "--dial"),
        ({"join_token_file": "/nothing"}, "--join-token-file"),
        ({"gateway_ca": "/nothing"}, "--gateway-ca"),
        ({"pool_mib": "0"}, "--pool-mib"),
        ({}, "--model"),
    ],
)
def test_a_flag_that_cannot_work_is_named(tmp_path, flags, named):
    result = run(tmp_path, **flags)
    assert result.exit_code == 2
    assert named in result.output
    assert "Traceback" not in result.output


def test_a_model_without_weights_is_named(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    result = run(tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.output
