"""Two real workers over one real Redis behind one port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.redis_server import needs_redis, running_redis
from tests.stacks import children

pytestmark = [needs_redis, pytest.mark.timeout(120)]
PRFAAS = (sys.executable, "-c", "from gateway.cli import main; main()", "gateway")


def until(found: Callable[[], object], patience_s: float = 60.0) -> None:
    give_up = time.monotonic() + patience_s
    while not found():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_two_workers_are_one_gateway_and_tell_of_both(model_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_redis() as redis, log.open("wb") as out:
        files = ("--model", str(model_dir), "--state", str(tmp_path / "s.db"))
        process = subprocess.Popen(
            [*PRFAAS, *files, "--workers", "2", "--port", "0", "--redis", redis.url], stdout=out, stderr=out
        )
        try:
            until(lambda: b"listening on" in log.read_bytes())
            url = re.findall(r"listening on (\S+)", log.read_text())[0]
            with pytest.raises(httpx.ReadTimeout):  # nodes of a worker that follows another are on their way: it waits
                httpx.post(f"{url}/v1/completions", json={"model": model_dir.name, "prompt": "a"}, timeout=0.5)

            def gateways() -> list[str]:
                """By the addresses at which nodes reach them."""
                status = httpx.get(f"{url}/v1/status", timeout=10).json()
                return [one["url"] for one in status["shared"]["gateways"]]

            until(lambda: len(gateways()) == 2)
            own = gateways()
            assert url not in own
            assert len(set(own)) == 2
            asked = Counter(httpx.get(f"{url}/v1/status", timeout=10).json()["shared"]["gateway"] for _ in range(40))
            assert len(asked) == 2
            metrics = httpx.get(f"{url}/metrics", timeout=10).text
            assert "prfaas_workers 2" in metrics
            assert {'prfaas_num_requests_running{worker="0"}', 'prfaas_num_requests_running{worker="1"}'} <= {
                line.rpartition(" ")[0] for line in metrics.splitlines()
            }
            before = set(own)
            os.kill(children(process.pid)[0], signal.SIGTERM)
            until(lambda: len(gateways()) == 2 and set(gateways()) != before)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "s.db.1").exists()
