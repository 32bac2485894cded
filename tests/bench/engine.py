"""Speed of the embedded engine on a real model: ``python -m tests.bench.engine MODEL_DIR [bfloat16|float32]``.

Everything goes through the engine process, as on a node. Figures per CPU second are steadier than those per second.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import torch

from engines.process import EngineProcess, EngineSpec
from engines.protocol import GenerateCommand, Loading, PrefillCommand, PrefillFinished, Token
from kvcache.control import Sampling
from kvcache.layout import DType
from tests.engines.harness import Room, layout_of

PROMPTS = (512, 2048, 8192)
BATCHES = (1, 4, 8)
STEPS = 16


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main(model_dir: Path, dtype: DType) -> None:
    """Print start-up, prefill and decode figures."""
    room = Room.create(layout_of(model_dir, dtype), pages=4000)
    began = time.monotonic()
    stages: list[tuple[float, str]] = []

    def note(loading: Loading) -> None:
        stages.append((time.monotonic() - began, loading.stage))

    engine = await EngineProcess.start(EngineSpec(model_dir, dtype), room.pool, note)
    ready = time.monotonic() - began
    check = ready - stages[-1][0]
    print(f"ready {ready:.1f} s, of it self-check {check:.1f} s, {cpu_s(engine.pid):.1f} cpu-s in all; {engine.info}")
    ids = tuple(torch.randint(10, engine.info.vocab_size, (max(PROMPTS) + 1,)).tolist())
    for count in PROMPTS:
        table = room.table("prefill", count)
        used, began = cpu_s(engine.pid), time.monotonic()
        command = PrefillCommand("prefill", ids, 0, count, table.pages)
        done = [event async for event in engine.submit(command)][-1]
        assert isinstance(done, PrefillFinished), done
        used, took = cpu_s(engine.pid) - used, time.monotonic() - began
        print(f"prefill {count}: {count / took:.0f} tok/s, {count / used:.0f} tok/cpu-s")
        room.owners.release("prefill")
    for batch in BATCHES:
        await decode(engine, ids, batch)
    await engine.close()
    room.pool.close()


async def decode(engine: EngineProcess, ids: tuple[int, ...], batch: int) -> None:
    """Speak ``batch`` streams of different contexts (64 to 1100); figures of ``STEPS`` steps with all of them in."""
    sampling = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)
    lengths = [64 + 1036 * n // (batch - 1) for n in range(batch)] if batch > 1 else [1100]
    streams = [engine.submit(GenerateCommand(f"d{n}", ids[:m], 0, (), sampling)) for n, m in enumerate(lengths)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    used, began = cpu_s(engine.pid), time.monotonic()
    last = streams[-1]
    for _ in range(STEPS):
        assert isinstance(await anext(last), Token)
    used, took = cpu_s(engine.pid) - used, time.monotonic() - began
    print(f"decode batch {batch}: {STEPS * batch / took:.1f} tok/s, {STEPS * batch / used:.1f} tok/cpu-s")
    await asyncio.gather(*(stream.aclose() for stream in streams))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), DType(sys.argv[2] if len(sys.argv) > 2 else "bfloat16")))
