"""Runs operations over pooled links: one driver, reads retried, writes not."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tdio.errors import ServerUnavailable, TdioError
from tdio.transport.link import Link
from tdio.wire.requests import Operation, Pause

T = TypeVar("T")
#: Waits between the attempts of a read whose connection broke, in seconds.
BACKOFF_S = (0.0, 0.05, 0.2)
_MAX_IDLE = 4


class Client:
    """A server, seen from one process. Links open on first use and do not cross a fork.

    Args:
        address: where the server is. Pickling keeps the address alone.
    """

    def __init__(self, address: Any):
        self.address = address
        self.round_trips = 0
        self._idle: deque[Link] = deque()
        self._pid = os.getpid()
        self._closed = False

    def read(self, operation: Callable[[], Operation[T]]) -> T:
        """Run a read-only operation; a broken connection is opened again and the read repeated.

        Raises:
            ServerUnavailable: the server is not there, also after the retries.
            ServerTimeout: the server does not answer.
        """
        for wait_s in BACKOFF_S:
            # Not looked at first, as that costs as much as a small read: it can be repeated.
            link = self._take(checked=False)
            try:
                return self._drive(operation(), link)
            except ServerUnavailable:
                # What the server did to one idle connection it did to the others.
                self._forget_links()
                time.sleep(wait_s)
        return self._drive(operation(), self._take())

    def write(self, operation: Operation[T]) -> T:
        """Run an operation that writes. It is not repeated when the connection breaks half way.

        Raises:
            ServerUnavailable: the server is not there, or the connection broke; what was under
                way may or may not have been done.
            ServerTimeout: the server does not answer.
        """
        return self._drive(operation, self._take())

    def _drive(self, operation: Operation[T], link: Link) -> T:
        """Run an operation: do each round trip, and let it see what our errors mean."""
        try:
            request = next(operation)
            while True:
                self.round_trips += not isinstance(request, Pause)
                try:
                    replies = link.exchange(request)
                except TdioError as error:
                    request = operation.throw(error)
                    # It goes on: on another connection where this one is out of step.
                    if link.broken:
                        link.close()
                        link = self._take()
                else:
                    # Its buffers are free before the operation takes others.
                    del request
                    request = operation.send(replies)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            # A write that stopped half way may have left the connection watching keys.
            link.broken = True
            raise
        finally:
            operation.close()
            self._give_back(link)

    def _take(self, *, checked: bool = True) -> Link:
        if self._closed:
            raise ServerUnavailable(f"this handle on {self.address} is closed; open a new one")
        if self._pid != os.getpid():
            # A forked child: the parent's connections are not ours to use.
            self._forget_links()
        while self._idle:
            link = self._idle.popleft()
            if not checked or not link.stale():
                return link
            link.close()
        fresh: Link = self.address.open_link()
        return fresh

    def _give_back(self, link: Link) -> None:
        if link.broken or self._closed or len(self._idle) >= _MAX_IDLE:
            link.close()
        else:
            self._idle.appendleft(link)

    def _forget_links(self) -> None:
        for link in self._idle:
            link.close()
        self._idle.clear()
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connections. The handle cannot be used afterwards; the data stays."""
        self._closed = True
        self._forget_links()

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["address"])  # type: ignore[misc]
