"""Messages of a worker on their way to its node, sent by a thread of its own: whoever puts one in never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from engines.protocol import Exported, Pulse

PULSE_S = 0.5


class Outbox:
    """Sends in order, only the newest Exported of a job, and a Pulse at least every half second.

    Bounded by the jobs that a node has enlisted: each has a handful of messages but for its Exported, of which one
    waits at most.
    """

    def __init__(self, send: Callable[[msgspec.Struct], None], lost: Callable[[], None]) -> None:
        """``lost`` is called where ``send`` raises OSError: nobody listens any more."""
        self._send = send
        self._lost = lost
        self._ready = threading.Condition()
        self._messages: list[msgspec.Struct] = []
        threading.Thread(target=self._run, daemon=True, name="prfaas-outbox").start()

    def put(self, message: msgspec.Struct) -> None:
        """Send a message soon."""
        with self._ready:
            last = self._messages[-1] if self._messages else None
            if isinstance(message, Exported) and isinstance(last, Exported) and last.job == message.job:
                self._messages[-1] = message
            else:
                self._messages.append(message)
            self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                if not self._messages:
                    self._ready.wait(PULSE_S)
                messages, self._messages = self._messages or [Pulse(0, 0)], []
            try:
                for message in messages:
                    self._send(message)
            except OSError:
                self._lost()
                return
