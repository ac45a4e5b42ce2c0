"""A proxy between a node and its SuperLink that counts bytes and can be disconnected."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

CHUNK = 1 << 16


class Passed(NamedTuple):
    """Bytes that passed at some time, to or from the node."""

    when: float
    down: bool
    count: int


class Proxy:
    """Forwards everything from its own port."""

    def __init__(self, target: int) -> None:
        self._target, self.port = target, 0
        self.passed: list[Passed] = []
        self._connected: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.mend()

    def bytes_between(self, start: float, end: float) -> tuple[int, int]:
        """Bytes to and from the node between two times."""
        inside = [one for one in list(self.passed) if start <= one.when < end]
        return sum(one.count for one in inside if one.down), sum(one.count for one in inside if not one.down)

    def cut(self) -> None:
        """Close every connection and stop listening."""
        with self._lock:
            for end in (self._listening, *self._connected):
                _end(end)

    def mend(self) -> None:
        """Listen again, on the same port."""
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        with suppress(OSError), near, socket.create_connection(("127.0.0.1", self._target)) as far:
            with self._lock:
                self._connected |= {near, far}
            back = threading.Thread(target=self._pump, args=(far, near, True), daemon=True)
            back.start()
            self._pump(near, far, False)
            back.join()
            with self._lock:
                self._connected -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                sink.sendall(data)
                self.passed.append(Passed(time.time(), down, len(data)))
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    """Shut a connection down at both ends, which wakes up its readers."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
