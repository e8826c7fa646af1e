"""A server in this process, for tests of code that uses stores: ``client=MemoryServer()``.

It speaks the protocol byte by byte, so framing, transactions and errors are those of a real
server; what it does not know, it refuses as one would. It also counts and can fail.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import hiredis

from tdio.errors import ServerUnavailable
from tdio.transport.address import WINDOW_BYTES
from tdio.transport.protocol import Protocol, drive
from tdio.wire.requests import Pause, Request
from tdio.wire.scatter import spread

_SERVERS: weakref.WeakValueDictionary[int, MemoryServer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_WRONG_TYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"


class MemoryServer:
    """Keys and values in the memory of this process, behind the protocol of a real server.

    Attributes:
        data: the values by key: bytes, dicts and sets.
        commands: how often each command was called.
        fail_next: a number of round trips whose connection breaks before an answer.

    Example:
        >>> import torch
        >>> from tdio import TensorDictStore
        >>> from tdio.transport.fake import MemoryServer
        >>> store = TensorDictStore(batch_size=[2], client=MemoryServer())
        >>> store["x"] = torch.arange(2)
        >>> store["x"]
        tensor([0, 1])
    """

    def __init__(self) -> None:
        self.data: dict[bytes, Any] = {}
        self.commands: dict[str, int] = {}
        self.fail_next = 0
        self.timeout_s = 10.0
        self._versions: dict[bytes, int] = {}
        self._lock = threading.RLock()
        self._generation = 0
        self._number = next(_NUMBERS)
        _SERVERS[self._number] = self

    def __str__(self) -> str:
        return f"memory server {self._number}"

    def __reduce__(self) -> Any:
        # A handle on it pickles, and opens again in this process or in a forked child.
        return _found, (self._number,)

    def open_link(self) -> _MemoryLink:
        """Open a connection."""
        return _MemoryLink(self)

    # ---- to look at it around what is tested

    def get(self, key: str | bytes) -> bytes | None:
        """Return a string, or None."""
        value: bytes | None = self.data.get(_name(key))
        return value

    def set(self, key: str | bytes, value: bytes) -> None:
        """Set a string."""
        self.data[_name(key)] = bytes(value)

    def hgetall(self, key: str | bytes) -> dict[bytes, bytes]:
        """Return a hash."""
        return dict(self.data.get(_name(key), {}))

    def keys(self, pattern: str = "*") -> list[bytes]:
        """Return the keys that begin as ``pattern`` does before its ``*``."""
        start = pattern.partition("*")[0].encode()
        return [key for key in self.data if key.startswith(start)]

    def delete(self, *keys: str | bytes) -> None:
        """Delete keys."""
        for key in keys:
            self.data.pop(_name(key), None)

    def client_kill_filter(self, **_filters: Any) -> None:
        """Close all connections."""
        self._generation += 1

    # ---- the commands

    def run(self, session: _Session, args: list[bytes]) -> bytes:
        """Run one command of a connection; returns the encoded reply."""
        name = args[0].upper()
        self.commands[name.decode()] = self.commands.get(name.decode(), 0) + 1
        if session.queue is not None and name not in (b"EXEC", b"DISCARD"):
            session.queue.append(args)
            return b"+QUEUED\r\n"
        if name == b"MULTI":
            session.queue = []
            return b"+OK\r\n"
        if name == b"EXEC":
            return self._exec(session)
        if name == b"WATCH":
            session.watched |= {key: self._versions.get(key, 0) for key in args[1:]}
            return b"+OK\r\n"
        if name == b"UNWATCH":
            session.watched.clear()
            return b"+OK\r\n"
        return self._run(name, args[1:])

    def _exec(self, session: _Session) -> bytes:
        queue, session.queue = session.queue or [], None
        moved = any(self._versions.get(key, 0) != n for key, n in session.watched.items())
        session.watched.clear()
        if moved:
            return b"*-1\r\n"
        replies = [self._run(args[0].upper(), args[1:]) for args in queue]
        return b"*%d\r\n%b" % (len(replies), b"".join(replies))

    def _run(self, name: bytes, args: list[bytes]) -> bytes:
        command = _COMMANDS.get(name)
        if command is None:
            return b"-ERR unknown command '%b'\r\n" % name
        try:
            return command(self, *args)
        except (AttributeError, TypeError):
            return _WRONG_TYPE

    def touch(self, key: bytes) -> None:
        """Note a change, for those who watch the key."""
        self._versions[key] = self._versions.get(key, 0) + 1


def _name(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode()


def _found(number: int) -> MemoryServer:
    server = _SERVERS.get(number)
    if server is None:
        raise ServerUnavailable(f"memory server {number} belongs to a process, or is gone")
    return server


class _Session:
    def __init__(self) -> None:
        self.queue: list[list[bytes]] | None = None
        self.watched: dict[bytes, int] = {}


class _MemoryLink:
    """One connection to a server in memory."""

    def __init__(self, server: MemoryServer):
        self._server = server
        self._generation = server._generation
        self._protocol = Protocol(server, WINDOW_BYTES)
        self._session = _Session()
        self._parser = hiredis.Reader()
        self._answers = bytearray()
        self.broken = False

    def close(self) -> None:
        self.broken = True

    def stale(self) -> bool:
        return self._generation != self._server._generation

    def exchange(self, request: Request) -> Any:
        if isinstance(request, Pause):
            return None
        if self._server.fail_next:
            self._server.fail_next -= 1
            self.broken = True
            raise ServerUnavailable(f"{self._server} broke the connection")
        self.broken = True
        try:
            with self._server._lock:
                return drive(self._protocol.exchange(request), self._send, self._receive)
        finally:
            self.broken = not self._protocol.in_step

    def _send(self, buffer: Any) -> None:
        self._parser.feed(bytes(buffer))

    def _receive(self, views: list[memoryview]) -> int:
        while not self._answers:
            args = self._parser.gets()
            if args is False:
                raise ServerUnavailable(f"{self._server} was asked for a reply too many")
            self._answers += self._server.run(self._session, args)
        n = min(sum(map(len, views)), len(self._answers))
        spread(views, bytes(self._answers[:n]))
        del self._answers[:n]
        return n


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def _array(values: list[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(values), b"".join(map(_bulk, values)))


def _integer(n: int) -> bytes:
    return b":%d\r\n" % n


def _string(server: MemoryServer, key: bytes) -> bytes:
    value = server.data.get(key, b"")
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _get(server: MemoryServer, key: bytes) -> bytes:
    return _bulk(_string(server, key) if key in server.data else None)


def _set(server: MemoryServer, key: bytes, value: bytes, *options: bytes) -> bytes:
    # PX is taken and does nothing: no key of this server ends by itself.
    if b"NX" in options and key in server.data:
        return b"$-1\r\n"
    server.data[key] = value
    server.touch(key)
    return b"+OK\r\n"


def _getrange(server: MemoryServer, key: bytes, start: bytes, end: bytes) -> bytes:
    value = _string(server, key)
    first, last = (n if n >= 0 else max(0, n + len(value)) for n in (int(start), int(end)))
    return _bulk(value[first : last + 1])


def _setrange(server: MemoryServer, key: bytes, start: bytes, part: bytes) -> bytes:
    value, at = _string(server, key), int(start)
    if part:
        value = value[:at].ljust(at, b"\0") + part + value[at + len(part) :]
        server.data[key] = value
        server.touch(key)
    return _integer(len(value))


def _delete(server: MemoryServer, *keys: bytes) -> bytes:
    found = [key for key in keys if server.data.pop(key, None) is not None]
    for key in found:
        server.touch(key)
    return _integer(len(found))


def _hset(server: MemoryServer, key: bytes, *pairs: bytes) -> bytes:
    fields = server.data.setdefault(key, {})
    before = len(fields)
    fields.update(zip(pairs[::2], pairs[1::2], strict=True))
    server.touch(key)
    return _integer(len(fields) - before)


def _hsetnx(server: MemoryServer, key: bytes, field: bytes, value: bytes) -> bytes:
    known = field in server.data.get(key, {})
    return _integer(0) if known else _hset(server, key, field, value)


def _hdel(server: MemoryServer, key: bytes, *fields: bytes) -> bytes:
    held = server.data.get(key, {})
    gone = [field for field in fields if held.pop(field, None) is not None]
    if not held:
        server.data.pop(key, None)
    server.touch(key)
    return _integer(len(gone))


def _hgetall(server: MemoryServer, key: bytes) -> bytes:
    items = server.data.get(key, {}).items()
    return _array([part for item in items for part in item])


def _sadd(server: MemoryServer, key: bytes, *members: bytes) -> bytes:
    held = server.data.setdefault(key, set())
    new = set(members).difference(held)
    held.update(new)
    server.touch(key)
    return _integer(len(new))


def _srem(server: MemoryServer, key: bytes, *members: bytes) -> bytes:
    held = server.data.get(key, set())
    gone = held.intersection(members)
    held.difference_update(gone)
    if not held:
        server.data.pop(key, None)
    server.touch(key)
    return _integer(len(gone))


_COMMANDS: dict[bytes, Callable[..., bytes]] = {
    b"GET": _get,
    b"SET": _set,
    b"GETRANGE": _getrange,
    b"SETRANGE": _setrange,
    b"STRLEN": lambda server, key: _integer(len(_string(server, key))),
    b"EXISTS": lambda server, *keys: _integer(sum(key in server.data for key in keys)),
    b"DEL": _delete,
    b"UNLINK": _delete,
    b"HSET": _hset,
    b"HSETNX": _hsetnx,
    b"HDEL": _hdel,
    b"HGETALL": _hgetall,
    b"SADD": _sadd,
    b"SREM": _srem,
    b"SMEMBERS": lambda server, key: _array(sorted(server.data.get(key, set()).difference())),
    b"CONFIG": lambda server, *args: _array([b"proto-max-bulk-len", b"536870912"]),
    b"INFO": lambda server, *args: _bulk(b"redis_version:fake"),
}
