"""Schemathesis on the OpenAPI document of a live gateway: ``python -m tests.bench.schemathesis``.

The gateway is real, on a real socket, its nodes are fakes that answer at once. What is checked: that every status is a
stated one (a 500 is not, nor is any other 5xx that the document does not name for that operation), that bodies, headers
and media types are as described, that methods which are not there are refused with Allow, that no operation can be
called without a key. Exit status 1 where any of that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.front import Front
from gateway.joining.stream_protocol import StreamProtocol
from gateway.keys import Role as KeyRole
from gateway.model import load_model
from gateway.state import State
from kvcache.control import ModelInfo
from kvcache.layout import DType
from kvcache.wire import Role
from tests.gateway.fakes import FakeNode
from tests.gateway.model_files import write_model
from tests.models import CONTEXT, VOCAB

CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


async def run(tool: str, examples: int, seed: int, seconds: int) -> int:
    """Serve, let the tool loose on it, and return its exit status."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory)
        write_model(model_dir)
        config = GatewayConfig(model_dir, "tiny", DType.FLOAT32, port=0, threshold_tokens=32, request_timeout_s=10.0)
        model = load_model(model_dir, "tiny", DType.FLOAT32)
        gateway = Gateway(replace(config, canary_s=0), model, State(None))
        _, key = gateway.keys.create("root", KeyRole.ADMIN)
        server = uvicorn.Server(
            uvicorn.Config(gateway, port=0, http=Front, ws=StreamProtocol, log_config=None, access_log=False)
        )
        serving = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        info = ModelInfo("tiny", model.fingerprint.parts(), CONTEXT, 256, VOCAB)
        keeping = asyncio.create_task(_keep_nodes(gateway, url, info))
        try:
            return await _tool(tool, url, key, model_dir, examples, seed, seconds)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            server.should_exit = True
            await serving
            gateway.close()


async def _keep_nodes(gateway: Gateway, url: str, info: ModelInfo) -> None:
    """A prefill and a decode node, and new ones for those that some request has sent away."""
    nodes: dict[str, FakeNode] = {}
    try:
        for number in count():
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                if gateway.registry.node(name) is None:
                    if name in nodes:
                        await nodes.pop(name).stop()
                    nodes[name] = await FakeNode(url, name, role, info, incarnation=f"{name}{number}").start()
            await asyncio.sleep(0.2)
    finally:
        for node in nodes.values():
            await node.stop()


def _with_names(document: dict[str, Any]) -> dict[str, Any]:
    """The document with names that exist, so that not all that is generated is refused for its name alone."""
    for name in ("CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody"):
        document["components"]["schemas"][name]["properties"]["model"] = {"enum": ["tiny"]}
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    message = {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}}
    chat["messages"]["items"] = {"type": "object", "required": ["role", "content"], "properties": message}
    token = {"type": "integer", "minimum": 0, "maximum": VOCAB - 1}
    texts = [{"type": "string", "minLength": 1}, {"type": "array", "items": token, "minItems": 1}]
    document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"] = {"anyOf": texts}
    known = {"/v1/clusters/{name}": ["local", "east"], "/v1/models/{name}": ["tiny"], "/v1/nodes/{node_id}": ["p", "d"]}
    for path, operations in document["paths"].items():
        names = next((names for start, names in known.items() if path.startswith(start)), None)
        for operation in operations.values() if names else ():
            for parameter in operation["parameters"]:
                if parameter["in"] == "path":
                    parameter["schema"] = {"anyOf": [{"enum": names}, parameter["schema"]]}
    return document


async def _tool(tool: str, url: str, key: str, directory: Path, examples: int, seed: int, seconds: int) -> int:
    options = ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--no-color"]
    options += ["--max-examples", str(examples), "--seed", str(seed), "--max-time", str(seconds), "--workers", "1"]
    options += ["--request-timeout", "15", "--suppress-health-check", "all", "--continue-on-failure"]
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
        document = (await client.get("/openapi.json")).json()
        await client.post("/v1/clusters", json={"name": "east"})
    file = directory / "openapi.json"
    file.write_text(json.dumps(_with_names(document)))
    command = [tool, "run", str(file), "--url", url, "--header", f"Authorization: Bearer {key}", *options]
    process = await asyncio.create_subprocess_exec(*command, cwd=directory)
    try:
        async with asyncio.timeout(seconds + 120):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    """Find the tool beside this Python or on the path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tool", default=shutil.which("st", path=str(Path(sys.executable).parent)) or shutil.which("st")
    )
    parser.add_argument("--examples", type=int, default=30, help="generated cases of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=300)
    given = parser.parse_args()
    if given.tool is None:
        sys.exit("schemathesis is not installed: pip install 'prfaas[api]', or say --tool PATH of its `st`")
    sys.exit(asyncio.run(run(given.tool, given.examples, given.seed, given.seconds)))


if __name__ == "__main__":
    main()
