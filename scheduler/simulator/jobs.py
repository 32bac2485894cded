"""One request on its way through the simulated fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.decision import Option
    from scheduler.simulator.flows import Flow


class Job:
    """What is known of a request, and how far it has come. ``stop`` tokens are prefilled, all but the prompt's last.

    ``cached`` of them are not computed where it prefills, ``held`` not sent to where it decodes. ``begun`` is set once
    prefill has; ``key`` is its place in its node's queue, ``service_s`` its prefill there in all, ``done_s`` how much
    of that is done. ``attempt`` counts the ways tried: what belongs to an earlier one is void.
    """

    __slots__ = (
        "arrived",
        "attempt",
        "begun",
        "blocks",
        "cached",
        "decode_node",
        "done_s",
        "fell_back",
        "flow",
        "held",
        "index",
        "key",
        "option",
        "output",
        "prefill_node",
        "remote",
        "service_s",
        "stop",
        "wire_bytes",
    )

    def __init__(self, index: int, arrived: float, stop: int, output: int, blocks: tuple[int, ...]) -> None:
        self.index = index
        self.arrived = arrived
        self.stop = stop
        self.output = output
        self.blocks = blocks
        self.attempt = 0
        self.cached = 0
        self.held = 0
        self.option: Option | None = None
        self.prefill_node = ""
        self.decode_node = ""
        self.remote = False
        self.fell_back = False
        self.begun = False
        self.key = 0.0
        self.service_s = 0.0
        self.done_s = 0.0
        self.wire_bytes = 0.0
        self.flow: Flow | None = None
