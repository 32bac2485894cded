"""When a remote way counts as failed because its first token does not come."""

from __future__ import annotations

from gateway.moving import patience_s
from scheduler.decision import Decision, Option


def late_after_s(decision: Decision) -> float | None:
    """Seconds after which a remote attempt is late; None where nothing was predicted: then the deadline alone.

    Twice what was predicted, or two seconds more; a prefix that is moved may first be waited for in vain.
    """
    chosen = decision.chosen
    if not decision.remote or chosen is None or chosen.predicted_ttft_s is None:
        return None
    predicted = chosen.predicted_ttft_s
    if chosen.move is not None:
        unmoved = _without_move(decision, chosen)
        if unmoved is None:
            return None
        predicted = max(predicted, patience_s(chosen.move) + unmoved)
    return beyond_s(predicted)


def beyond_s(predicted_s: float) -> float:
    """Seconds after which what was predicted to take so long is late."""
    return max(2 * predicted_s, predicted_s + 2.0)


def _without_move(decision: Decision, chosen: Option) -> float | None:
    """The predicted TTFT of the same way where its prefix does not come."""
    return next(
        (o.predicted_ttft_s for o in decision.options if o.prefill_node == chosen.prefill_node and o.move is None), None
    )
