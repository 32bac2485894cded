"""Ratio and speed of the codecs on a real model's cache, one thread, from pool pages to pool pages.

    python -m tests.bench.codecs MODEL_DIR [--text FILE] [--tokens 2048] [--json]

The model prefills the text's first tokens on the chunk grid; its cache is laid into a host pool and cut as a transfer
cuts it. Speeds count raw bytes, best of seven passes over the whole cache: machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from kvcache import codecs
from kvcache.blocks import PageGeometry, PageTable
from kvcache.hostpool import HostPool
from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from kvcache.plan import TransferPlan, plan_transfer

CHUNK_TOKENS = 256
PASSES = 7


@contextmanager
def cache_in_pool(model_dir: Path, text: str, tokens: int) -> Iterator[tuple[HostPool, PageTable, TransferPlan]]:
    """Prefill ``tokens`` tokens of ``text`` in bf16 and lay the cache (full attention and windows) into a pool."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ids = [model.config.bos_token_id, *Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids][:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"--text: {len(ids)} tokens, --tokens asks for {tokens}")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for start in range(0, tokens, CHUNK_TOKENS):
            model.model(torch.tensor([ids[start : start + CHUNK_TOKENS]]), past_key_values=cache)
    layout = layout_from_config(json.loads((model_dir / "config.json").read_text()), DType.BFLOAT16)
    plan = plan_transfer(layout, 0, tokens, CHUNK_TOKENS)
    geometry = PageGeometry.of(layout)
    count = geometry.pages_for(0, tokens)
    table = geometry.table(0, tokens, range(count))
    pool = HostPool.create(geometry.page_bytes, count)
    try:
        for piece in plan.pieces:
            group = layout.groups[piece.group]
            layer = cache.layers[group.layers[piece.layer].index]
            tensor = (layer.keys, layer.values)[piece.tensor][0].transpose(0, 1)
            first = group.first_token(tokens)
            raw = tensor[piece.start - first : piece.stop - first].contiguous().view(torch.uint8).numpy().tobytes()
            done = 0
            for view in pool.views(table.extents(piece)):
                view[:] = raw[done : done + view.nbytes]
                done += view.nbytes
            assert done == len(raw)
        yield pool, table, plan
    finally:
        pool.close()


def measure(name: str, pool: HostPool, table: PageTable, plan: TransferPlan, passes: int = PASSES) -> dict[str, object]:
    """Encode and decode every piece, check every byte, and time the best pass of each direction."""
    codec = codecs.by_name(name)
    landing = HostPool.create(pool.page_bytes, pool.pages)
    work = [(plan.tensor(p).dtype, plan.shape(p), table.extents(p)) for p in plan.pieces]
    encode_s = decode_s = float("inf")
    try:
        for _ in range(passes):
            began = time.perf_counter()
            encoded = [codec.encode(pool.views(extents), dtype, shape) for dtype, shape, extents in work]
            encode_s = min(encode_s, time.perf_counter() - began)
            wire = [memoryview(b"".join(parts)) for parts in encoded]
            began = time.perf_counter()
            for payload, (dtype, shape, extents) in zip(wire, work, strict=True):
                codec.decode(payload, landing.views(extents), dtype, shape)
            decode_s = min(decode_s, time.perf_counter() - began)
        assert landing.buffer == pool.buffer, f"{name} is not exact"
    finally:
        landing.close()
    return {
        "codec": name,
        "raw_bytes": plan.nbytes,
        "wire_bytes": sum(payload.nbytes for payload in wire),
        "ratio": round(plan.nbytes / sum(payload.nbytes for payload in wire), 4),
        "encode_gb_per_s": round(plan.nbytes / encode_s / 1e9, 2),
        "decode_gb_per_s": round(plan.nbytes / decode_s / 1e9, 2),
    }


def main() -> None:
    """Print one line per codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "LICENSE")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with cache_in_pool(options.model_dir, options.text.read_text(), options.tokens) as (pool, table, plan):
        for name in codecs.EXACT:
            row = measure(name, pool, table, plan)
            print(json.dumps(row) if options.json else "  ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
