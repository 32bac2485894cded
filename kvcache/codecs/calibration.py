"""A calibration as a file: numpy arrays without pickle, named by what they hold."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.transform import FACTOR_BITS, Basis, Transform
from kvcache.quality import TRANSFORM_PREFIX

_STEM = "kv-transform-"
_ARRAYS = ("means", "forward", "inverse", "scales")


class CalibrationError(ValueError):
    """A file that is no calibration, or not the one that its name says."""


def save(bases: Mapping[tuple[int, str], Basis], directory: Path) -> Path:
    """Write ``kv-transform-<id>.npz`` into ``directory``; the id follows from the content."""
    arrays: dict[str, NDArray[Any]] = {}
    for (layer, tensor), basis in bases.items():
        place = f"{layer}.{tensor}"
        arrays[f"{place}.means"] = basis.means
        arrays[f"{place}.forward"] = basis.forward.astype("<i4")
        arrays[f"{place}.inverse"] = basis.inverse.astype("<i4")
        arrays[f"{place}.scales"] = np.array([basis.fineness, basis.to_steps, basis.from_steps])
    path = directory / f"{_STEM}{_id(arrays)}.npz"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    partial.replace(path)
    return path


def load(path: Path) -> Transform:
    """Read what ``save`` wrote. Raises CalibrationError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise CalibrationError(f"{path}: {error}") from error
    found = _id(arrays)
    if path.name != f"{_STEM}{found}.npz":
        raise CalibrationError(f"{path}: holds calibration {found}; calibrate again")
    bases = {}
    for place in {name.rpartition(".")[0] for name in arrays}:
        layer, _, tensor = place.partition(".")
        try:
            means, forward, inverse, scales = (arrays[f"{place}.{part}"] for part in _ARRAYS)
            bases[int(layer), tensor] = _basis(means, forward, inverse, scales)
        except (KeyError, ValueError) as error:
            raise CalibrationError(f"{path}: {place}: {error}") from error
    return Transform(TRANSFORM_PREFIX + found, bases)


def load_all(directory: Path) -> list[Transform]:
    """Every calibration beside a model, by file name. Raises CalibrationError."""
    return [load(path) for path in sorted(directory.glob(f"{_STEM}*.npz"))]


def _basis(means: NDArray[Any], forward: NDArray[Any], inverse: NDArray[Any], scales: NDArray[Any]) -> Basis:
    heads, dim = means.shape
    if forward.shape != (heads, dim, dim) or inverse.shape != (heads, dim, dim) or scales.shape != (3,):
        raise ValueError(f"shapes {means.shape}, {forward.shape}, {inverse.shape}, {scales.shape}")
    if np.abs(forward).max() >= 1 << FACTOR_BITS or not np.isfinite(scales).all() or not np.isfinite(means).all():
        raise ValueError("a factor is too large or a number not finite")
    fineness, to_steps, from_steps = (float(scale) for scale in scales)
    return Basis(
        means.astype(np.float32),
        forward.astype(np.float64),
        inverse.astype(np.float64),
        fineness,
        to_steps,
        from_steps,
    )


def _id(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
