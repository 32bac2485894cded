"""The inexact codecs on a CUDA device, next to the same arithmetic on this machine's processor. Under four minutes.

    python -m tests.bench.gpu_codec [--mib 64] [--json]

Per codec and device: the arithmetic alone (where the tensor lives), the whole codec (with the copy to the host and the
entropy stage, which runs there), and whether the payload's bytes equal those that numpy makes. Without a device it says
so and ends well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from kvcache import codecs
from kvcache.codecs import TensorCodec
from kvcache.codecs.quantised import Quantised
from kvcache.codecs.transform import Basis, TransformCodec
from kvcache.layout import DType

PASSES = 5
SECONDS_PER_FIGURE = 5.0
TOKENS, HEADS, DIM = 256, 8, 128


def best_s(call: Callable[[], object], device: str) -> float:
    """The fastest of a few passes, within a bound; the device's queue is empty before and after each."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    began, best = time.perf_counter(), float("inf")
    for _ in range(PASSES):
        wait()
        start = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - began > SECONDS_PER_FIGURE:
            break
    return best


def measure(codec: TensorCodec, device: str, pieces: int) -> dict[str, object]:
    """One line: ``pieces`` chunks of K with channel scales, as one tensor on the device, chunk by chunk."""
    dtype = DType.BFLOAT16 if DType.BFLOAT16 in codec.dtypes else DType.FLOAT32
    shape = (TOKENS, HEADS, DIM)
    rng = np.random.default_rng(0)
    scales = np.exp2(rng.normal(0, 1, shape[1:])).astype(np.float32)
    one = torch.from_numpy((rng.standard_normal(shape, np.float32) + rng.standard_normal(shape[1:])) * scales)
    kind, word = (torch.float32, torch.int32) if dtype is DType.FLOAT32 else (torch.bfloat16, torch.int16)
    words = one.to(kind).view(word)
    host = b"".join(codec.encode([memoryview(words.numpy().tobytes())], dtype, shape))
    chunks = [words.to(device)] * pieces
    raw = pieces * words.numel() * words.element_size()

    def rate(call: Callable[[], object]) -> float:
        call()  # to warm up
        return round(raw / best_s(call, device) / 1e9, 3)

    payloads = [b"".join(codec.encode_tensor(chunk, dtype, shape)) for chunk in chunks[:1]] * pieces
    row: dict[str, object] = {
        "codec": codec.name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": str(dtype),
        "mib": raw >> 20,
        "ratio": round(raw / pieces / len(host), 3),
        "same_bytes": payloads[0] == host,
        "encode_gbytes_s": rate(lambda: [codec.encode_tensor(chunk, dtype, shape) for chunk in chunks]),
        "decode_gbytes_s": rate(
            lambda: [codec.decode_tensor(memoryview(payload), dtype, shape, chunks[0]) for payload in payloads]
        ),
    }
    if isinstance(codec, Quantised):
        found, symbols = codec.quantise(chunks[0], dtype, shape)
        row["quantise_gbytes_s"] = rate(lambda: [codec.quantise(chunk, dtype, shape) for chunk in chunks])
        row["dequantise_gbytes_s"] = rate(lambda: [codec.dequantise(found, symbols, dtype) for _ in chunks])
    return row


def some_transform() -> TransformCodec:
    """A transform of the right shape: any rotation costs what a calibrated one does."""
    turns = np.stack(
        [np.linalg.qr(np.random.default_rng(head).standard_normal((DIM, DIM)))[0] for head in range(HEADS)]
    )
    return TransformCodec("transform", Basis.of(np.zeros((HEADS, DIM)), turns, turns.swapaxes(1, 2), 32.0, 1.0))


def main() -> None:
    """Print one line per codec and device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="raw bytes per codec on the device; the processor has 1/8")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    torch.set_num_threads(1)
    for codec in (*codecs.TENSOR_CODECS, some_transform()):
        for device, mib in (("cuda", options.mib), ("cpu", max(1, options.mib // 8))):
            row = measure(codec, device, max(1, (mib << 20) // (TOKENS * HEADS * DIM * 2)))
            print(json.dumps(row) if options.json else "  ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
