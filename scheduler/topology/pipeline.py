"""Layer-by-layer transfer as a model: a layer leaves when it is computed, and after the layers before it have left.

What is modelled: layers are computed one after another, one way carries them one after another at a steady rate, and
nothing else competes for either. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Seconds of one transfer beside its computation. ``exposed_s`` is what is left when the last layer is computed."""

    compute_s: float
    transfer_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """The share of the transfer that the computation hides, from 0 to 1; 1 where there is nothing to send."""
        return 1.0 - self.exposed_s / self.transfer_s if self.transfer_s > 0 else 1.0


def pipelined(compute_s: Sequence[float], transfer_s: Sequence[float], setup_s: float = 0.0) -> Pipelined:
    """The end of each layer's transfer is max(the layer's computed, the one before has left) + its own time.

    ``compute_s`` and ``transfer_s`` have one time a layer; ``setup_s`` passes before the first leaves.

    Raises ValueError where they differ in length, or a time is negative.
    """
    if len(compute_s) != len(transfer_s):
        raise ValueError(f"one time a layer is needed for both, got {len(compute_s)} and {len(transfer_s)}")
    if setup_s < 0 or min((*compute_s, *transfer_s), default=0.0) < 0:
        raise ValueError("times must not be negative")
    computed, left = 0.0, setup_s
    for compute, transfer in zip(compute_s, transfer_s, strict=True):
        computed += compute
        left = max(computed, left) + transfer
    return Pipelined(computed, sum(transfer_s), max(0.0, left - computed))


def even(layers: int, compute_s: float, transfer_s: float) -> float:
    """The share hidden of ``layers`` equal layers, in closed form: all but the last, as far as computing lasts.

    A layer's transfer that is no longer than its computation leaves only the last one exposed, 1 - 1 / L; a longer one
    leaves all that does not fit beside L - 1 computations, (L - 1) c / (L x).
    """
    if layers < 1 or compute_s < 0 or transfer_s <= 0:
        raise ValueError("layers and transfer_s must be positive, compute_s not negative")
    return (layers - 1) / layers * min(1.0, compute_s / transfer_s)
