"""``prfaas bench kv`` in processes of its own, on the loopback or at the ends of a wide-area link."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
BENCH = (sys.executable, "-c", "from node.bench.cli import bench; bench()", "kv")


class Place(Protocol):
    """Where processes run: an ``End`` of a link, or this machine."""

    @property
    def address(self) -> str:
        """Where others reach it."""

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process there."""


@dataclass(frozen=True)
class Here:
    """This machine's loopback."""

    address: str = "127.0.0.1"

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process."""
        return subprocess.Popen(command, **options)


@dataclass(frozen=True)
class KvServing:
    """A server that runs; ``fetch`` as often as wanted."""

    place: Place
    port: str
    credentials: Path
    flags: tuple[str, ...]
    pid: int

    def start_fetch(self, place: Place, codec: str, *more: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a fetching process at ``place``."""
        where = ("--host", self.place.address, "--port", self.port, "--credentials", str(self.credentials))
        command = (*BENCH, "fetch", *where, "--codec", codec, "--json", *self.flags, *more)
        return place.start(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)

    def fetch(self, place: Place, codec: str, *more: str) -> dict[str, Any]:
        """What a fetch at ``place`` prints."""
        return figures(self.start_fetch(place, codec, *more, stderr=subprocess.DEVNULL))


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(fetching: subprocess.Popen[Any]) -> dict[str, Any]:
    """What a fetching process prints in the end."""
    out, _ = fetching.communicate(timeout=600)
    if fetching.returncode:
        raise RuntimeError(f"the fetch ended with {fetching.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found


@contextlib.contextmanager
def kv_serving(place: Place, nbytes: int, model: Path | None = None, tls: bool = False) -> Iterator[KvServing]:
    """A server at ``place`` for as long as the block lasts."""
    flags = ("--tls",) if tls else () if isinstance(place, Here) else ("--insecure-lab-network",)
    source = ("--model", str(model)) if model is not None else ()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "credentials.json"
        where = ("--host", place.address, "--port", "0", "--credentials", str(path), "--bytes", str(nbytes))
        command = (*BENCH, "serve", *where, *flags, *source)
        server = place.start(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            line = server.stderr.readline()
            while " KV at " not in line:
                if not line:
                    raise RuntimeError("the server did not start")
                line = server.stderr.readline()
            yield KvServing(place, line.rsplit(":", 1)[1].strip(), path, flags, server.pid)
        finally:
            server.terminate()
            server.wait(30)
            server.stderr.close()
