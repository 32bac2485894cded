"""Convert a quantised GGUF file to a plain model directory: bf16 safetensors, config, a tokeniser that adds BOS.

A process of its own (``python -m deploy.convert GGUF DIRECTORY``), so that its memory goes away with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLE = "The quick brown fox jumps over the lazy dog, and the sun rises in the east every morning."
READABLE_NATS = 5.0


def convert(gguf: Path, directory: Path) -> None:
    """Write ``directory`` from ``gguf``. Raises RuntimeError where the result does not read English."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers refuses to save a model that came from GGUF, although its weights are plain by now: move them over
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(directory)
    _save_tokenizer(gguf, directory)
    _check(directory)


def _save_tokenizer(gguf: Path, directory: Path) -> None:
    """The file's tokeniser adds no BOS, without which Gemma's output is noise: put it into the post-processor."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)
    backend: Tokenizer = tokenizer.backend_tokenizer
    bos, bos_id = str(tokenizer.bos_token), int(tokenizer.bos_token_id)
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
    backend.save(str(directory / "tokenizer.json"))


def _check(directory: Path) -> None:
    """Load what was written and read a plain sentence: mangled weights or a missing BOS show as a high loss."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer.encode(SAMPLE).ids])
    if int(ids[0, 0]) != model.config.get_text_config().bos_token_id:
        raise RuntimeError(f"the tokeniser begins with id {int(ids[0, 0])}, not with BOS")
    with torch.inference_mode():
        loss = float(model(input_ids=ids, labels=ids).loss)
    if not loss < READABLE_NATS:
        raise RuntimeError(f"the converted model reads plain English at {loss:.1f} nats a token; it is damaged")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
