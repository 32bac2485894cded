"""What an operator may set of the routing policy. A decision record keeps them, so that it can be decided again."""

from __future__ import annotations

import msgspec

from kvcache.quality import Quality


class PolicyValues(msgspec.Struct, frozen=True):
    """Values of the short-term policy. Raises ValueError for a codec that is not exact, and for what is negative.

    ``local_codec`` and ``remote_codec`` are those of transfers at home and from afar while nothing better was measured.
    ``observe``: decide, but prefill at home unless a client's hint says otherwise.
    ``slack_s``: how much slower than the local way a remote one may be predicted; 0 unless somebody wants to see it.
    ``threshold_s`` lets the threshold bend with the queues (``scheduler.cost.threshold_s``); 0 makes it a rule.
    ``waiting_weight_per_s`` weighs the waiting of others; ``seconds_per_unit`` is how many seconds of TTFT one unit of
    currency is worth.
    ``session_s``: a node that served the session before counts as that much quicker.
    ``decode_slack``: a decode node that holds more of the prompt may run so many more generations than the emptiest.
    ``in_place_tokens``: with a prefix cached there and no more than that to compute, a decode node may prefill itself.
    ``abundant_below``: a link of which a smaller share is used has bandwidth to move prefixes.
    """

    local_codec: str = "raw"
    remote_codec: str = "lossless"
    observe: bool = False
    slack_s: float = 0.0
    threshold_s: float = 30.0
    waiting_weight_per_s: float = 0.3
    seconds_per_unit: float = 0.0
    session_s: float = 0.02
    decode_slack: int = 2
    in_place_tokens: int = 256
    abundant_below: float = 0.5

    def __post_init__(self) -> None:
        for field in ("local_codec", "remote_codec"):
            if getattr(self, field) not in Quality.EXACT.codecs:
                exact = " or ".join(Quality.EXACT.codecs)
                raise ValueError(f"{field}: {getattr(self, field)!r} is no exact codec, it must be {exact}")
        for field in self.__struct_fields__[3:]:
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}: {getattr(self, field)} must not be negative")
