"""Two tensor-parallel workers of one real vLLM: shards of one manifest, out of one server's blocks and into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.protocol import GenerateCommand, Loaded, PrefillCommand, PrefillFinished, Token
from engines.vllm.engine import VllmEngine
from engines.vllm.spec import VllmSpec
from kvcache.control import Sampling
from kvcache.layout import DType
from tests.engines.harness import Room, layout_of
from tests.models import tiny_model
from tests.stacks import some_ids

CHUNK = 256
VLLM_BLOCK = 128
ARGUMENTS = (
    *("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
)
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("kv_heads", [2, 1])
async def test_two_ranks_export_and_load_what_one_computes(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
    """With one KV head both ranks hold it, and the first one exports it."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 32}
    model = tiny_model("llama", tmp_path / "llama", **sizes)
    room = Room.create(layout_of(model, DType.BFLOAT16), pages=600)
    spec = VllmSpec(model, room.geometry.layout, DType.BFLOAT16, vllm_python, ARGUMENTS, chunk_tokens=CHUNK)
    engine = await VllmEngine.start(spec, room.pool)
    try:
        ids, stop = tuple(some_ids(700)), 699
        first, again = room.table("first", stop), room.table("again", stop)
        done = [e async for e in engine.submit(PrefillCommand("p", ids, 0, stop, first.pages, salt="computed"))]
        assert isinstance(done[-1], PrefillFinished)
        loaded = [e async for e in engine.submit(GenerateCommand("g", ids, stop, first.pages, GREEDY, salt="loaded"))]
        assert loaded[0] == Loaded("g")
        done = [e async for e in engine.submit(PrefillCommand("q", ids, 0, stop, again.pages, salt="loaded"))]
        assert isinstance(done[-1], PrefillFinished)
        plan = room.plan(stop, chunk_tokens=CHUNK)
        whole = (stop - 1) // VLLM_BLOCK * VLLM_BLOCK
        for piece, one, other in zip(plan.pieces, room.pieces(first, plan), room.pieces(again, plan), strict=True):
            upto = max(0, min(piece.stop, whole) - piece.start) * len(one) // (piece.stop - piece.start)
            assert one[:upto] == other[:upto], piece
            assert upto == 0 or any(one[:upto])
        alone = [e async for e in engine.submit(GenerateCommand("a", ids, 0, (), GREEDY, salt="alone"))]
        assert [e for e in alone if isinstance(e, Token)] == [
            Token("a", e.token_id) for e in loaded if isinstance(e, Token)
        ]
    finally:
        await engine.close()
