"""One connection: sends requests, receives replies, range reads straight into their buffers."""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hiredis
import numpy as np

from tdio.errors import CorruptEntry, EntryNotFound, ServerTimeout, ServerUnavailable
from tdio.transport.address import Address
from tdio.wire.ranges import SCRATCH_BYTES, RangeReceiver, UnexpectedFrameError, encode_reads
from tdio.wire.requests import Body, Commands, Fetch, Request, encode_command, error_of

#: Replies under way at once: above this the server copies what it cannot send (256 rows of 21 KB:
#: 9.5 ms a batch with 16 MiB, 7.5 ms with 512 KiB).
WINDOW_BYTES = 512 * 1024
_SEND_BYTES = 64 * 1024


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
        self._reader = hiredis.Reader()
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self.broken = False

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
        with self._exclusive():
            if isinstance(request, Fetch):
                return self._fetch(request)
            return self._run(request)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        began = time.monotonic()
        self.broken = True
        try:
            yield
        except TimeoutError as error:
            if isinstance(error, ServerTimeout):
                raise
            raise ServerTimeout(
                f"{self.address} sent nothing for {self.address.timeout_s:g} s "
                f"({time.monotonic() - began:.1f} s after the request); raise socket_timeout= if "
                "it is only slow"
            ) from error
        except OSError as error:
            if isinstance(error, ServerUnavailable):
                raise
            raise ServerUnavailable(f"the connection to {self.address} broke: {error}") from error
        self.broken = False

    # ---- ordinary commands

    def _run(self, request: Commands) -> Any:
        items = request.items
        if request.atomic:
            items = [("MULTI",), *items, ("EXEC",)]
        pending = b""
        for piece in itertools.chain.from_iterable(map(encode_command, items)):
            if isinstance(piece, bytes) and len(pending) + len(piece) < _SEND_BYTES:
                pending += piece
                continue
            self._socket.sendall(pending)
            pending = b""
            if isinstance(piece, Body):
                self._send_body(piece)
            else:
                self._socket.sendall(piece)
        self._socket.sendall(pending)
        replies = [self._reply() for _ in items]
        if request.atomic:
            replies = self._unwrap(replies)
        if replies is not None and not request.tolerant:
            for command, reply in zip(request.items, replies, strict=True):
                if isinstance(reply, hiredis.ReplyError):
                    # Every reply has been read: the link stays in step.
                    self.broken = False
                    raise error_of(str(reply), self._what(command))
        return replies

    def _unwrap(self, replies: list[Any]) -> Any:
        final = replies[-1]
        if not isinstance(final, hiredis.ReplyError):
            return final
        # EXECABORT: the reason stands at the command that was refused when it was queued.
        return [
            reply if isinstance(reply, hiredis.ReplyError) else final for reply in replies[1:-1]
        ]

    def _send_body(self, body: Body) -> None:
        sent = 0
        for chunk in body.chunks():
            view = memoryview(chunk).cast("B")
            sent += len(view)
            if sent > body.nbytes:
                break
            self._socket.sendall(view)
        if sent != body.nbytes:
            raise RuntimeError(f"a body of {body.nbytes} bytes produced {sent}")

    def _reply(self) -> Any:
        reply = self._reader.gets()
        while reply is False:
            n = self._socket.recv_into(self._scratch.data)
            if not n:
                raise ServerUnavailable(f"{self.address} closed the connection")
            self._reader.feed(self._scratch[:n].tobytes())
            reply = self._reader.gets()
        return reply

    def _what(self, command: tuple[Any, ...]) -> str:
        key = f" {command[1]}" if len(command) > 1 and isinstance(command[1], str) else ""
        return f"{command[0]}{key} on {self.address}"

    # ---- range reads

    def _fetch(self, request: Fetch) -> None:
        receiver = RangeReceiver(request.reads, self._scratch)
        batches = encode_reads(request.reads)
        asked = 0
        try:
            while not receiver.done:
                while asked - receiver.received_bytes < WINDOW_BYTES:
                    batch = next(batches, None)
                    if batch is None:
                        break
                    self._socket.sendall(batch[0])
                    asked += batch[1]
                n = self._socket.recv_into(receiver.want())
                if not n:
                    raise ServerUnavailable(f"{self.address} closed the connection")
                receiver.got(n)
        except UnexpectedFrameError as frame:
            self._explain(frame)

    def _explain(self, frame: UnexpectedFrameError) -> None:
        """Parse the unexpected frame the ordinary way and raise what it means."""
        self._reader.feed(frame.rest)
        reply = self._reply()
        what = f"{frame.read.what} on {self.address}"
        if isinstance(reply, hiredis.ReplyError):
            raise error_of(str(reply), what)
        size = len(reply) if isinstance(reply, bytes) else -1
        if not size and not self._exists(frame.read.key):
            raise EntryNotFound(
                f"{what}: the server no longer holds its bytes (key {frame.read.key}): it was "
                "deleted, evicted, or the server restarted empty"
            )
        raise CorruptEntry(
            f"{what}: {frame.size} bytes were asked for and {size} came: its data (key "
            f"{frame.read.key}) is shorter than its metadata says, or was replaced meanwhile"
        )

    def _exists(self, key: str) -> bool:
        """Ask on a connection of its own: this one still has replies under way."""
        link = Link(self.address)
        try:
            return bool(link.exchange(Commands([("EXISTS", key)]))[0])
        finally:
            link.close()
