"""What a model's layers cache and ask for while it reads: the sums that a calibration is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from engines.embedded import attention
from kvcache.codecs.transform import Basis
from kvcache.layout import GroupKind
from node.bench.quality import Reader
from node.calibration.bases import Moments, basis

# Steps in parts of the root mean square coordinate. Errors of keys do less harm for their bits than those of values.
KEY_PART = 0.5
VALUE_PART = 0.6


class Observer:
    """Collects from one ``reader``; ``read`` any number of texts, then ask for ``bases``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._seen: dict[tuple[int, str], Moments] = {}
        self._queries: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def read(self, ids: Sequence[int]) -> None:
        """Prefill one text and count in what it caches and asks for."""
        with self._observed():
            captured = self._reader.capture(ids, len(ids))
        try:
            for piece in captured.pieces((GroupKind.FULL, GroupKind.SLIDING)):
                shape, spec = captured.plan.shape(piece), captured.plan.tensor(piece)
                layer = captured.plan.layout.groups[piece.group].layers[piece.layer].index
                if (layer, spec.name) not in self._seen:
                    self._seen[layer, spec.name] = Moments.none(*spec.shape)
                self._seen[layer, spec.name].add(captured.values(piece).reshape(shape))
        finally:
            captured.close()

    def bases(self) -> dict[tuple[int, str], Basis]:
        """The coordinates of every tensor that grows with tokens. Raises ValueError where one never varied."""
        found = {}
        for (layer, name), seen in self._seen.items():
            sums, part = {"k": (self._queries, KEY_PART), "v": (self._outputs, VALUE_PART)}.get(name, ({}, KEY_PART))
            harm = sums.get(layer)
            try:
                found[layer, name] = basis(seen, None if harm is None else _numpy(harm), part)
            except ValueError as error:
                raise ValueError(f"layer {layer}, {name}: {error}; give a longer text") from error
        return found

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Inside, the model's attention also counts in its queries."""
        AttentionInterface.register(attention.NAME, self._watching(attention.attend))
        try:
            yield
        finally:
            attention.register()

    def _watching(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            layer, heads = int(module.layer_idx), key.shape[1]
            asked = query[0].double().reshape(heads, -1, query.shape[-1])
            moment = asked.transpose(1, 2) @ asked
            self._queries[layer] = self._queries[layer] + moment if layer in self._queries else moment
            projection = getattr(module, "o_proj", None)
            if layer not in self._outputs and projection is not None:
                weight = projection.weight.double()
                columns = weight.T.reshape(heads, query.shape[1] // heads, value.shape[-1], -1)
                self._outputs[layer] = (columns @ columns.transpose(2, 3)).sum(1)
            return attend(module, query, key, value, *args, **kwargs)

        return watch


def _numpy(tensor: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = tensor.detach().to(torch.float64).numpy()
    return array
