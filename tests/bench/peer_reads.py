"""Reads of another library's transfer engine, for comparison: run by the Python of an environment that has it.

    python tests/bench/peer_reads.py {mooncake|nixl} {offer|read} ADDRESS DIRECTORY BYTES READS

``offer`` and ``read`` meet in DIRECTORY. ``read`` leaves a file ``done`` there, a JSON list of pairs: seconds, and
processor seconds of its own, of every read after a first one to warm up. Every read is checked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PATIENCE_S = 60.0
MARK = 7


def await_file(path: Path) -> bytes:
    """The bytes of a file that the other side will put there."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path.name} was not written")
        time.sleep(0.02)
    return path.read_bytes()


def publish(path: Path, data: bytes) -> None:
    """Let the other side see a whole file or none."""
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def mooncake(offering: bool, address: str, room: Path, memory: np.ndarray) -> tuple[object, Callable[[], None]]:
    """The engine, and one read of everything, in 64 parts at once, over Mooncake's TCP transport."""
    from mooncake.engine import TransferEngine

    engine, parts = TransferEngine(), 64
    if engine.initialize(address, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the transfer engine does not start")
    engine.register_memory(memory.ctypes.data, memory.nbytes)
    if offering:
        publish(room / "offer", json.dumps([f"{address}:{engine.get_rpc_port()}", memory.ctypes.data]).encode())
        return engine, lambda: None
    segment, base = json.loads(await_file(room / "offer"))
    size = memory.nbytes // parts
    offsets = range(0, parts * size, size)

    def read() -> None:
        mine, theirs = [memory.ctypes.data + at for at in offsets], [base + at for at in offsets]
        if engine.batch_transfer_sync_read(segment, mine, theirs, [size] * parts):
            raise RuntimeError("the read failed")

    return engine, read


def nixl(offering: bool, address: str, room: Path, memory: np.ndarray) -> tuple[object, Callable[[], None]]:
    """The engine, and one read of everything over NIXL's UCX backend; UCX_TLS in the environment says tcp."""
    import torch
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("offer" if offering else "read", nixl_agent_config(backends=["UCX"]))
    tensor = torch.from_numpy(memory)
    agent.register_memory(tensor)
    own = agent.get_xfer_descs([tensor])
    if offering:
        publish(room / "descriptors", agent.get_serialized_descs(own))
        publish(room / "offer", agent.get_agent_metadata())
        return (agent, own), lambda: None
    other = agent.add_remote_agent(await_file(room / "offer"))
    theirs = agent.deserialize_descs((room / "descriptors").read_bytes())

    def read() -> None:
        handle = agent.initialize_xfer("READ", own, theirs, other, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the read ended as {state}")

    return agent, read


def main() -> None:
    """Offer until the reader is done, or read."""
    library, role, address, directory, nbytes, reads = sys.argv[1:7]
    room, offering = Path(directory), role == "offer"
    memory = np.full(int(nbytes), MARK if offering else 0, dtype=np.uint8)
    # The engine serves for as long as somebody refers to it.
    engine, read = {"mooncake": mooncake, "nixl": nixl}[library](offering, address, room, memory)
    if offering:
        await_file(room / "done")
        del engine
        os._exit(0)
    found = []
    for _ in range(int(reads) + 1):
        memory[:] = 0
        began, cpu_began = time.perf_counter(), time.process_time()
        read()
        found.append((time.perf_counter() - began, time.process_time() - cpu_began))
        if int(memory[: len(memory) // 64 * 64].min()) != MARK:
            raise RuntimeError("the read brought other bytes")
    publish(room / "done", json.dumps(found[1:]).encode())
    os._exit(0)  # both libraries may crash on their way out


if __name__ == "__main__":
    main()
