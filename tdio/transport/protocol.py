"""What goes out and comes in for one round trip, without doing it: for a sync and an async link.

``Protocol.exchange`` is a generator of steps: a buffer to send, or views to receive into one after
the other, to which it is sent the number of bytes that came.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import hiredis
import numpy as np

from tdio.errors import CorruptEntry, EntryNotFound, ServerError
from tdio.wire.asking import few, pieces
from tdio.wire.ranges import as_asked
from tdio.wire.receiving import SCRATCH_BYTES, RangeReceiver, UnexpectedFrameError, groups_of
from tdio.wire.requests import Body, Commands, Fetch, RangeRead, Reads, encode_command, error_of

_SEND_BYTES = 64 * 1024
#: What a new connection asks first; its reply, or error, is for ``greeted``.
GREETING = Commands([("HELLO",)], tolerant=True)
#: The first line of a bulk reply is shorter.
_HEADER_BYTES = 32

#: ``(True, buffer)``: send all of it. ``(False, views)``: receive at least a byte into them.
Steps = Generator[tuple[bool, Any], int, Any]


class Protocol:
    """The state of one connection: a reply parser and a buffer to receive into.

    Args:
        where: the server, for errors.
        window_bytes: how many bytes of replies may be under way.

    Attributes:
        in_step: whether every reply that was asked for has been read.
    """

    def __init__(self, where: Any, window_bytes: int):
        self._where = where
        self._window_bytes = window_bytes
        self._at_once = False
        self._reader = hiredis.Reader()
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self.in_step = True

    def greeted(self, replies: list[Any]) -> None:
        """Learn from the answer to ``GREETING`` how long strings are best asked for.

        Valkey sends a string itself from version 9.0 on. Others hold a copy of it until it is sent
        (and take twice the time of pieces for 8 MB), so they are asked for a piece at a time.
        """
        (hello,) = replies
        if isinstance(hello, dict):
            hello = list(itertools.chain.from_iterable(hello.items()))
        if isinstance(hello, list):
            pairs = list(itertools.pairwise(hello))[::2]
            version = next((value for name, value in pairs if name == b"version"), b"")
            valkey = (b"server", b"valkey") in pairs
            self._at_once = valkey and isinstance(version, bytes) and _major(version) >= 9

    def exchange(self, request: Commands | Fetch) -> Steps:
        """Do one round trip; returns the replies.

        Raises:
            ServerError: the server answered a command with an error.
            CorruptEntry: a range is shorter than was asked for.
            EntryNotFound: the key of a range is gone.
        """
        self.in_step = False
        if isinstance(request, Fetch):
            replies = yield from self._fetch(request)
        else:
            replies = yield from self._run(request)
        self.in_step = True
        return replies

    # ---- ordinary commands

    def _run(self, request: Commands) -> Steps:
        items = request.items
        if request.atomic:
            items = [("MULTI",), *items, ("EXEC",)]
        yield from self._send(items)
        replies: Any = []
        for _ in items:
            replies.append((yield from self._reply()))
        if request.atomic:
            replies = _unwrap(replies)
        if replies is not None and not request.tolerant:
            for command, reply in zip(request.items, replies, strict=True):
                if isinstance(reply, hiredis.ReplyError):
                    # Every reply has been read.
                    self.in_step = True
                    raise error_of(str(reply), self._what(command))
        return replies

    def _send(self, items: Iterable[tuple[Any, ...]]) -> Steps:
        pending = b""
        for piece in itertools.chain.from_iterable(map(encode_command, items)):
            if isinstance(piece, bytes) and len(pending) + len(piece) < _SEND_BYTES:
                pending += piece
                continue
            yield True, pending
            pending = b""
            if isinstance(piece, Body):
                yield from _send_body(piece)
            else:
                yield True, piece
        yield True, pending

    def _reply(self) -> Steps:
        reply = self._parsed()
        while reply is False:
            n = yield False, [self._scratch.data]
            self._reader.feed(self._scratch[:n].tobytes())
            reply = self._parsed()
        return reply

    def _parsed(self) -> Any:
        try:
            return self._reader.gets()
        except (hiredis.ProtocolError, MemoryError, RecursionError, TypeError) as error:
            raise ServerError(
                f"{self._where} does not answer as a server of the Redis protocol does: {error}"
            ) from error

    def _what(self, command: tuple[Any, ...]) -> str:
        key = f" {command[1]}" if len(command) > 1 and isinstance(command[1], str) else ""
        return f"{command[0]}{key} on {self._where}"

    # ---- range reads

    def _fetch(self, request: Fetch) -> Steps:
        prefix = head = b""
        asked_for = (as_asked(read, self._at_once) for read in request.reads)
        stamp = () if request.stamp is None else (request.stamp,)
        reads = Reads(itertools.chain(stamp, asked_for))
        tail = b"".join(map(_encoded, request.after))
        if request.atomic:
            count = len(request.after) + sum(len(read.ranges) for read in reads)
            prefix = b"+OK\r\n" + b"+QUEUED\r\n" * count + b"*%d\r\n" % count
            tail += b"*1\r\n$4\r\nEXEC\r\n"
            head = b"*1\r\n$5\r\nMULTI\r\n"
        found = None if prefix else few(reads)
        if found is not None:
            head, groups = found
            reads = Reads()
        else:
            groups = groups_of(reads)
        receiver = RangeReceiver(groups, self._scratch, prefix=prefix)
        # In a transaction nothing is sent back before the end.
        window = float("inf") if request.atomic or request.together else self._window_bytes
        try:
            for piece in pieces(request, reads, receiver, window, head, tail):
                if piece is None:
                    receiver.got((yield False, receiver.want()))
                else:
                    yield True, piece
            while not receiver.done:
                receiver.got((yield False, receiver.want()))
        except UnexpectedFrameError as frame:
            yield from self._explain(frame, request)
        self._reader.feed(receiver.rest())
        replies = []
        for command in request.after:
            reply = self._parsed()
            if reply is False:
                reply = yield from self._reply()
            if isinstance(reply, hiredis.ReplyError):
                raise error_of(str(reply), self._what(command))
            replies.append(reply)
        return replies

    def _explain(self, frame: UnexpectedFrameError, request: Fetch) -> Steps:
        """Parse the unexpected frame the ordinary way and raise what it means."""
        what = f"{frame.read if frame.read else 'a read'} on {self._where}"
        rest = frame.rest
        while b"\r\n" not in rest[:_HEADER_BYTES] and len(rest) < _HEADER_BYTES:
            n = yield False, [self._scratch.data]
            rest += self._scratch[:n].tobytes()
        header = rest[:_HEADER_BYTES].partition(b"\r\n")[0]
        if frame.read and header[:1] == b"$" and header[1:].isdigit():
            size = int(header[1:])
            if size > frame.size:
                # Not read, as it may be of any size: the connection stays out of step.
                raise self._mismatch(what, frame.read, frame.size, size)
        self._reader.feed(rest)
        reply = yield from self._reply()
        if isinstance(reply, hiredis.ReplyError):
            raise error_of(str(reply), what)
        if frame.read is None:
            raise ServerError(f"{what}: the server answered a transaction with {reply!r:.80}")
        if not reply:
            raise EntryNotFound(
                f"{what}: the server holds no bytes where {frame.size} were asked for (key "
                f"{frame.read.key}): the entry was deleted or evicted, or the server restarted "
                "empty"
            )
        size = len(reply) if isinstance(reply, bytes) else -1
        raise self._mismatch(what, frame.read, frame.size, size)

    @staticmethod
    def _mismatch(what: str, read: RangeRead, size: int, came: int) -> CorruptEntry:
        than = "longer" if came > size else "shorter"
        return CorruptEntry(
            f"{what}: {size} bytes were asked for and {came} came: its data (key {read.key}) is "
            f"{than} than its metadata says, or was replaced meanwhile"
        )


@functools.lru_cache(4096)
def _encoded(command: tuple[Any, ...]) -> bytes:
    """Return the encoding of a command whose arguments are all small."""
    # A body that is streamed has no place here, and is refused by join.
    return b"".join(encode_command(command))  # type: ignore[arg-type]


def _unwrap(replies: list[Any]) -> Any:
    """Return the replies inside EXEC, or None where a watched key changed."""
    final = replies[-1]
    if not isinstance(final, hiredis.ReplyError):
        return final
    # EXECABORT: the reason stands at the command that was refused when it was queued.
    return [reply if isinstance(reply, hiredis.ReplyError) else final for reply in replies[1:-1]]


def _major(version: bytes) -> int:
    major = version.partition(b".")[0]
    return int(major) if major.isdigit() and len(major) < 4 else 0


def _send_body(body: Body) -> Steps:
    sent = 0
    for chunk in body.chunks():
        view = memoryview(chunk).cast("B")
        sent += len(view)
        if sent > body.nbytes:
            break
        yield True, view
    if sent != body.nbytes:
        raise RuntimeError(f"a body of {body.nbytes} bytes produced {sent}")


def drive(steps: Steps, send: Callable[[Any], Any], receive: Callable[[Any], int]) -> Any:
    """Run the steps over blocking functions; returns the replies."""
    try:
        sending, buffer = next(steps)
        while True:
            if sending:
                send(buffer)
                sending, buffer = next(steps)
            else:
                sending, buffer = steps.send(receive(buffer))
    except StopIteration as stop:
        return stop.value
