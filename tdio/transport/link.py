"""One connection of plain code: sends requests, receives replies into their buffers."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

from tdio.errors import ServerTimeout, ServerUnavailable, TdioError
from tdio.transport.address import Address
from tdio.transport.protocol import GREETING, Protocol, drive
from tdio.wire.requests import Pause, Request
from tdio.wire.scatter import spread


class Link:
    """A connection that belongs to one process and is used by one operation at a time.

    A link that was interrupted between request and reply is ``broken``: it is closed, never
    used again, so that a reply cannot reach the wrong caller.
    """

    def __init__(self, address: Address):
        self.address = address
        self._connection = address.connect()
        # redis-py connects, authenticates and does TLS; from here on the socket is ours.
        self._socket: socket.socket = self._connection._sock
        self._socket.settimeout(address.timeout_s)
        self._protocol = Protocol(address, address.window_bytes)
        self.broken = False
        try:
            self._protocol.greeted(self.exchange(GREETING))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. In a forked child this leaves the parent's connection alone."""
        self.broken = True
        self._connection.disconnect()

    def stale(self) -> bool:
        """Whether an idle link was closed, or sent anything, by the server meanwhile."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(self.address.timeout_s)
        return True

    def exchange(self, request: Request) -> Any:
        """Do one round trip: send ``request``, return its replies.

        Raises:
            ServerTimeout: no byte for ``address.timeout_s`` seconds.
            ServerUnavailable: the connection broke.
            ServerError: the server answered a command with an error.
        """
        if isinstance(request, Pause):
            time.sleep(request.seconds)
            return None
        self.broken = True
        began = time.monotonic()
        try:
            return drive(self._protocol.exchange(request), self._socket.sendall, self._receive)
        except OSError as error:
            raise named(error, self.address, began) from error
        finally:
            self.broken = not self._protocol.in_step

    def _receive(self, views: list[memoryview]) -> int:
        if len(views) == 1:
            n = self._socket.recv_into(views[0])
        elif isinstance(self._socket, ssl.SSLSocket):
            data = self._socket.recv(sum(map(len, views)))
            spread(views, data)
            n = len(data)
        else:
            n = self._socket.recvmsg_into(views)[0]
        if not n:
            raise ServerUnavailable(f"{self.address} closed the connection")
        return n


def named(error: OSError, address: Address, began: float) -> OSError:
    """Return our error for one of a socket; one of ours passes through."""
    if isinstance(error, TdioError):
        return error
    if isinstance(error, TimeoutError):
        return ServerTimeout(
            f"{address} sent nothing for {address.timeout_s:g} s "
            f"({time.monotonic() - began:.1f} s after the request); raise socket_timeout= if "
            "it is only slow"
        )
    return ServerUnavailable(f"the connection to {address} broke: {error}")
