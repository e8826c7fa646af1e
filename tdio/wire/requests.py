"""What an operation may yield: one round trip of commands, or one of range reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tdio.errors import AccessDenied, AuthenticationFailed, ServerError, TdioError
from tdio.layout.plan import Ranges

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Body:
    """An argument of known size whose bytes are produced while they are sent.

    An upload is one ``SET`` with a streamed body: the server allocates once, the client holds
    one chunk, and a writer that dies half way has written nothing.
    """

    nbytes: int
    chunks: Callable[[], Iterable[Buffer]]


Arg = str | bytes | int | memoryview | Body


@dataclass(slots=True)
class Commands:
    """One round trip of ordinary commands.

    Attributes:
        items: the commands, each a tuple of arguments.
        atomic: wrap them in MULTI/EXEC; the replies are then those inside EXEC, or None where a
            watched key changed.
        tolerant: give error replies back as values instead of raising the first.
    """

    items: list[tuple[Arg, ...]]
    atomic: bool = False
    tolerant: bool = False


@dataclass(slots=True)
class RangeRead:
    """Byte ranges of one server string, received one after the other into ``into``.

    Attributes:
        key: the server key.
        ranges: what to read; their total size is that of ``into``.
        into: uint8 ``[n]`` destination.
        what: entry and store, for errors.
        whole: whether it is all of the string, in one range.
        arrived: called with the read as soon as its last byte is there.
    """

    key: str
    ranges: Ranges
    into: npt.NDArray[np.uint8]
    what: tuple[str, object]
    whole: bool = False
    arrived: Callable[[RangeRead], None] | None = None

    def __str__(self) -> str:
        return f"entry {self.what[0]!r} of {self.what[1]}"


class Reads:
    """Range reads, each taken from an iterator when it is come to for the first time.

    So the server is at the first while the others are planned. May be gone over again: the
    commands are made of them, their replies are taken by them, and an error looks for its entry.
    """

    def __init__(self, reads: Iterable[RangeRead] = ()):
        self._taken: list[RangeRead] = []
        self._more = iter(reads)
        #: How much those that are planned bring.
        self.planned_bytes = 0

    def _take(self) -> RangeRead | None:
        following = next(self._more, None)
        if following is not None:
            self._taken.append(following)
            self.planned_bytes += len(following.into)
        return following

    def __iter__(self) -> Iterator[RangeRead]:
        taken, at = self._taken, 0
        while at < len(taken) or self._take() is not None:
            yield taken[at]
            at += 1

    def first(self, count: int) -> list[RangeRead]:
        """Return so many of them, or all that there are."""
        while len(self._taken) < count and self._take() is not None:
            pass
        return self._taken[:count]

    def take_one(self) -> None:
        """Have one more planned."""
        self._take()


@dataclass(slots=True)
class Fetch:
    """One round trip of range reads, whose data is in the buffers when it ends.

    Attributes:
        reads: what to read.
        after: ordinary commands that follow them; their replies are those of the round trip.
        atomic: wrap all of it in MULTI/EXEC.
        together: send all commands at once, as the server then most likely runs them without those
            of others between. For a read that writers came between.
        stamp: the version, read before the others.
        meanwhile: work that needs no reply, done when the server has enough to do.
    """

    reads: Reads = field(default_factory=Reads)
    after: list[tuple[Arg, ...]] = field(default_factory=list)
    atomic: bool = False
    together: bool = False
    stamp: RangeRead | None = None
    meanwhile: Callable[[], None] | None = None


#: An argument up to this size is copied, so that it goes out with what is around it.
_SMALL_BYTES = 8 * 1024


@dataclass(slots=True)
class Pause:
    """Wait before the next round trip. Its reply is None."""

    seconds: float


Request = Commands | Fetch | Pause
T = TypeVar("T")
#: Yields the requests of one round trip each, is sent the replies, returns its result.
Operation = Generator[Request, Any, T]


def encode_command(args: tuple[Arg, ...]) -> Iterator[Buffer | Body]:
    """Yield the RESP encoding of a command; large arguments pass through untouched."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        if isinstance(arg, bytes):
            raw = arg
        elif isinstance(arg, memoryview) and arg.nbytes <= _SMALL_BYTES:
            raw = bytes(arg)
        elif isinstance(arg, (Body, memoryview)):
            parts.append(b"$%d\r\n" % arg.nbytes)
            yield b"".join(parts)
            yield arg
            parts = [b"\r\n"]
            continue
        else:
            raw = str(arg).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    yield b"".join(parts)


def error_of(message: str, what: str) -> TdioError:
    """Return our error for the text of an error reply; ``what`` says what was asked, where."""
    code = message.split(" ", 1)[0]
    if code in ("WRONGPASS", "NOAUTH"):
        return AuthenticationFailed(f"{what}: the server refused the user or password: {message}")
    if code == "NOPERM" or (code == "EXECABORT" and "NOPERM" in message):
        return AccessDenied(f"{what}: this user may not do that: {message}")
    return ServerError(f"{what}: the server answered: {message}")
