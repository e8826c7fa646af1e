"""A pair of endpoints in memory, for tests of what is built on pipes, with the faults of a network.

A message is copied when it is sent. The two ends may be used from two threads, two coroutines, or
one after the other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tdio.errors import PeerLost, PipeClosed, PipeTimeout, ProtocolError
from tdio.transport.endpoint import Endpoint, Transfer

__all__ = ["MemoryEndpoint", "memory_pair"]


def memory_pair(*, tdio_peer: bool = True) -> tuple[MemoryEndpoint, MemoryEndpoint]:
    """Return the two ends of a connection in memory: one that connected, one that was accepted.

    Args:
        tdio_peer: whether the ends know each other as tdio; without it they use the messages of
            tensordict's own pipe.

    Example:
        >>> from tdio.transport.memory import memory_pair
        >>> a, b = memory_pair()
        >>> _ = a.send(b"hello")
        >>> b.probe()
        5
    """
    wire = _Wire()
    ends = [MemoryEndpoint(wire, side, tdio_peer) for side in (0, 1)]
    return ends[0], ends[1]


class _Wire:
    """What the two ends share."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.inboxes = [(deque[bytes](), deque[bytes]()) for _ in range(2)]
        self.stalled = [False, False]
        self.waiting: list[Callable[[], None]] = []
        self.lost: str | None = None

    def wake(self) -> None:
        """Let everybody look again; the lock is held."""
        self.changed.notify_all()
        for wake in self.waiting:
            wake()


class _Sent(Transfer):
    def __init__(self, nbytes: int):
        self.nbytes = nbytes

    @property
    def done(self) -> bool:
        return True

    def result(self) -> int:
        return self.nbytes


class _Receiving(Transfer):
    def __init__(self, end: MemoryEndpoint, buffer: Any, channel: int):
        self._end, self._buffer, self._channel = end, buffer, channel
        self._error: Exception | None = None
        self._finished = False
        self.nbytes = 0

    @property
    def done(self) -> bool:
        with self._end._wire.changed:
            if not self._finished:
                self._finished = self._try()
            return self._finished

    def _try(self) -> bool:
        end = self._end
        inbox = end._inbox[self._channel]
        if end._closed:
            self._error = PipeClosed(f"{end.name}: this end was closed during the transfer")
        elif inbox and not end._wire.stalled[end._side]:
            message = inbox.popleft()
            room = _view(self._buffer)
            if len(message) > len(room):
                self._error = ProtocolError(f"{end.name}: a message is longer than its buffer")
            else:
                room[: len(message)] = np.frombuffer(message, np.uint8)
                self.nbytes = len(message)
        elif end._wire.lost:
            self._error = PeerLost(f"{end.name}: {end._wire.lost}")
        else:
            return False
        return True

    def result(self) -> int:
        if not self.done:
            raise RuntimeError(f"{self._end.name}: the transfer is still under way")
        if self._error is not None:
            raise self._error
        return self.nbytes


def _view(buffer: Any) -> Any:
    if isinstance(buffer, torch.Tensor):
        return buffer.detach().view(torch.uint8).numpy()
    return np.frombuffer(buffer, np.uint8)


class MemoryEndpoint(Endpoint):
    """One end in memory. ``memory_pair`` makes two.

    The faults: ``cut`` loses the connection, ``stall`` announces messages whose bytes do not come,
    ``inject`` makes the other end receive what nobody sent.
    """

    def __init__(self, wire: _Wire, side: int, tdio_peer: bool):
        self._wire = wire
        self._side = side
        self._inbox = wire.inboxes[side]
        self._outbox = wire.inboxes[1 - side]
        self._closed = False
        self.sent: list[int] = []
        self.tdio_peer = tdio_peer
        self.accepted = bool(side)
        self.name = f"memory:{side} -> memory:{1 - side}"

    # ---- faults

    def cut(self, why: str = "the connection was reset") -> None:
        """Lose the connection. What has arrived can still be received."""
        with self._wire.changed:
            self._wire.lost = why
            self._wire.wake()

    def stall(self, on: bool = True) -> None:
        """Let this end see that messages begin to arrive, and no bytes of them."""
        with self._wire.changed:
            self._wire.stalled[self._side] = on
            self._wire.wake()

    def inject(self, message: bytes, channel: int = 0) -> None:
        """Let the other end receive ``message``."""
        with self._wire.changed:
            self._outbox[channel].append(message)
            self._wire.wake()

    # ---- the interface

    def _check(self) -> None:
        if self._closed:
            raise PipeClosed(f"{self.name}: this end is closed")

    def send(self, buffer: Any, channel: int = 0) -> Transfer:
        """Copy ``buffer`` to the other end. Raises PeerLost or PipeClosed."""
        message = _view(buffer).tobytes()
        with self._wire.changed:
            self._check()
            if self._wire.lost:
                raise PeerLost(f"{self.name}: {self._wire.lost}")
            self._outbox[channel].append(message)
            self._wire.wake()
        # Sizes only, of the data: for tests that count messages.
        if channel == 0:
            self.sent.append(len(message))
        return _Sent(len(message))

    def probe(self, channel: int = 0) -> int | None:
        """Return the size of the next message, or None. Raises PeerLost or PipeClosed."""
        with self._wire.changed:
            self._check()
            inbox = self._inbox[channel]
            if inbox:
                return len(inbox[0])
            if self._wire.lost:
                raise PeerLost(f"{self.name}: {self._wire.lost}")
            return None

    def recv(self, buffer: Any, channel: int = 0) -> Transfer:
        """Start to receive the next message. Raises PipeClosed."""
        self._check()
        return _Receiving(self, buffer, channel)

    def flush(self) -> Transfer:
        """Return a transfer that is done: a message is at the other end once it is sent."""
        return _Sent(0)

    def wait(self, ready: Any, timeout_s: float | None) -> None:
        """Block until ``ready()`` is true. Raises PeerLost, PipeTimeout or PipeClosed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._wire.changed:
            while not ready():
                self._check()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise PipeTimeout(f"{self.name}: nothing within {timeout_s:g} s")
                self._wire.changed.wait(left)

    async def wait_async(self, ready: Any, timeout_s: float | None) -> None:
        """The same for a coroutine; may be cancelled."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        with self._wire.changed:
            self._wire.waiting.append(wake)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not ready():
                self._check()
                left = None if deadline is None else deadline - time.monotonic()
                try:
                    await asyncio.wait_for(event.wait(), left)
                except asyncio.TimeoutError:
                    raise PipeTimeout(f"{self.name}: nothing within {timeout_s:g} s") from None
                event.clear()
        finally:
            with self._wire.changed:
                self._wire.waiting.remove(wake)

    def close(self) -> None:
        """Close this end; the other one loses its peer once it has received what was sent."""
        with self._wire.changed:
            if not self._closed:
                self._closed = True
                self._wire.lost = self._wire.lost or "the other end closed the connection"
                self._wire.wake()
