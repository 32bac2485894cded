"""A TCP proxy between KV peers: slow enough to be in mid-transfer, and able to go silent without closing anything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

READ = 8192
BUFFER = 65536


class SlowProxy:
    """Forwards connections to a loopback port. Bytes that come back from there are paced to ``bytes_per_s``."""

    def __init__(self, target_port: int, bytes_per_s: float) -> None:
        self._target = ("127.0.0.1", target_port)
        self._pace_s = 1.0 / bytes_per_s
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        self.forwarded = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def pace(self, bytes_per_s: float) -> None:
        """Another rate, from the next read on."""
        self._pace_s = 1.0 / bytes_per_s

    def cut(self) -> None:
        """Stop forwarding, both ways, and keep every connection open."""
        self._flowing.clear()

    def heal(self) -> None:
        """Close what was cut and forward again, for new connections."""
        for each in self._sockets[1:]:
            _shut(each)
        del self._sockets[1:]
        self._flowing.set()

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.heal()
        _shut(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
                try:
                    far.connect(self._target)
                except OSError:
                    near.close()
                    continue
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                self._sockets += [near, far]
                for source, sink, paced in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(source, sink, paced), name="proxy", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, paced: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ):
                self._flowing.wait()
                sink.sendall(data)
                if paced:
                    self.forwarded += len(data)
                    time.sleep(len(data) * self._pace_s)
        _shut(source)
        _shut(sink)


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
