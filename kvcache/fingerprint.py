"""What two nodes must share for their KV bytes to be interchangeable, and what differs where they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config, read_config

_MAX_HEADER_BYTES = 100 << 20
_SAMPLE_BYTES = 4096
_CONFIG_KEYS_WITHOUT_EFFECT = frozenset(
    {
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The parts, each a short text; a part's name is what a refusal names."""

    weights: str
    tokenizer: str
    layout: str
    dtype: str

    @classmethod
    def from_parts(cls, parts: Mapping[str, str]) -> Fingerprint:
        """The inverse of ``parts``; unknown names are ignored. Raises ValueError naming a missing one."""
        missing = [field.name for field in fields(cls) if field.name not in parts]
        if missing:
            raise ValueError(f"fingerprint: {missing[0]} is missing")
        return cls(**{field.name: parts[field.name] for field in fields(cls)})

    def parts(self) -> dict[str, str]:
        """Names and values, for messages that must be able to name what differs."""
        return asdict(self)

    def digest(self) -> str:
        """All parts as one hex text of 32 characters: equal exactly where every part is."""
        return _digest_of(self)

    def difference(self, other: Fingerprint) -> str | None:
        """The first part in which the two differ, or None."""
        mine, theirs = self.parts(), other.parts()
        return next((name for name in mine if mine[name] != theirs[name]), None)


@lru_cache(maxsize=256)
def _digest_of(fingerprint: Fingerprint) -> str:
    """Kept: every request asks for that of the one model that is served."""
    return _digest(json.dumps(fingerprint.parts(), sort_keys=True).encode())


def fingerprint_of(model_dir: Path, dtype: DType, revision: str = "") -> Fingerprint:
    """The fingerprint of a model directory with config.json, tokenizer.json and safetensors files.

    ``weights`` joins the operator's ``revision``, the config's settings, and every tensor's name, type, shape and first
    4 KiB, however they are spread over files: two fine-tunes of one model differ, and no node reads gigabytes to know.
    Raises FileNotFoundError naming what is missing, ValueError for damaged files, UnsupportedArchitecture.
    """
    config, tokenizer_file = read_config(model_dir), model_dir / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise FileNotFoundError(f"model directory {model_dir} has no tokenizer.json")
    return Fingerprint(
        weights=f"{revision}@{_weights_digest(model_dir, config)}",
        tokenizer=_digest(tokenizer_file.read_bytes()),
        layout=layout_digest(layout_from_config(config, dtype)),
        dtype=str(dtype),
    )


def layout_digest(layout: KVLayout) -> str:
    """A hex text that is equal exactly for equal layouts."""
    return _digest(json.dumps(asdict(layout), sort_keys=True).encode())


def _weights_digest(model_dir: Path, config: Mapping[str, Any]) -> str:
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"model directory {model_dir} has no *.safetensors file")
    tensors = sorted(tensor for file in files for tensor in _tensors(file))
    settings = {k: v for k, v in config.items() if k not in _CONFIG_KEYS_WITHOUT_EFFECT and v is not None}
    return _digest(json.dumps([settings, tensors], sort_keys=True).encode())


def _tensors(file: Path) -> list[tuple[str, str, list[int], str]]:
    """Name, type, shape and digest of the first bytes of every tensor in a safetensors file."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: a safetensors header of {size} bytes; the file is damaged")
        try:
            header = json.loads(stream.read(size))
            found = []
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                stream.seek(8 + size + begin)
                wanted = min(end - begin, _SAMPLE_BYTES)
                sample = stream.read(wanted)
                if len(sample) != wanted:
                    raise ValueError(f"tensor {name} is cut off")
                found.append((name, entry["dtype"], entry["shape"], _digest(sample)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, OSError) as error:
            raise ValueError(f"{file}: not a safetensors file ({error}); fetch it again") from error
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
