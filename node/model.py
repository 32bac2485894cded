"""What a node must know of its model before an engine has loaded it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvcache.codecs import Transform, calibration
from kvcache.fingerprint import Fingerprint, fingerprint_of
from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config, read_config
from node.config import ConfigError


@dataclass(frozen=True, slots=True)
class NodeModel:
    """A model directory, read."""

    fingerprint: Fingerprint
    layout: KVLayout
    tokenizer: Tokenizer
    transforms: tuple[Transform, ...] = ()

    @classmethod
    def read(cls, directory: Path, dtype: DType) -> NodeModel:
        """Read config.json, tokenizer.json, the safetensors headers, and calibrations.

        Raises ConfigError naming the cure.
        """
        try:
            layout = layout_from_config(read_config(directory), dtype)
            fingerprint = fingerprint_of(directory, dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {directory}: {error}; give a model directory in Hugging Face format") from error
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"--model {directory}: tokenizer.json: {error}; fetch the model again") from error
        try:
            return cls(fingerprint, layout, tokenizer, tuple(calibration.load_all(directory)))
        except calibration.CalibrationError as error:
            raise ConfigError(f"--model {error}; delete it or run prfaas calibrate") from error
