"""A real browser, headless, over its DevTools protocol: pages are loaded, looked at and measured.

Tests are skipped, with the reason, where none is installed (on Debian: ``chromium``).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0"),
)
START_S = 30.0
CALL_S = 20.0


class Page:
    """One tab. ``errors`` are what the console and the page complained of, ``requested`` every address it asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._calls = 0
        self._loaded = 0
        self.errors: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Make the window that large; ``dark`` is what its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Load an address and wait until it is loaded."""
        before = self._loaded
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + CALL_S
        while self._loaded == before:
            self._take(deadline)

    def ask(self, expression: str) -> Any:
        """What a JavaScript expression comes to."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, file: Path, clip: tuple[float, float, float, float] | None = None) -> None:
        """Keep a PNG of the page, or of (x, y, width, height) of it."""
        area = {} if clip is None else {"clip": dict(zip(("x", "y", "width", "height"), clip, strict=True), scale=1)}
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True, **area)
        file.write_bytes(b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        deadline = time.monotonic() + CALL_S
        while True:
            message = self._take(deadline)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                found: dict[str, Any] = message["result"]
                return found

    def _take(self, deadline: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=max(0.01, deadline - time.monotonic())))
        what, params = message.get("method"), message.get("params", {})
        if what == "Page.loadEventFired":
            self._loaded += 1
        elif what == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif what == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("text")))
        elif what == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str([one.get("value") for one in params["args"]]))
        elif what == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        return message


@contextmanager
def browser_page() -> Iterator[Page]:
    """A browser with one tab, ended with the block."""
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on PATH")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_address(Path(profile), process), max_size=64 << 20, proxy=None) as socket:
                yield Page(socket)
        except ConnectionClosed as error:
            raise AssertionError(f"the browser went away: exit status {process.poll()}") from error
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the only tab is to be spoken to."""
    port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if len(lines) == 2:
            tabs = httpx.get(f"http://127.0.0.1:{lines[0]}/json/list", trust_env=False).json()
            pages = [tab for tab in tabs if tab["type"] == "page"]
            if pages:
                address: str = pages[0]["webSocketDebuggerUrl"]
                return address
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start within {START_S:g} s: exit status {process.poll()}")
