r"""Range reads on the wire: encode many ``GETRANGE``, strip the framing of many replies.

The sizes of all replies are known before they arrive, so the reply stream is
``$<size>\r\n<payload>\r\n`` with computable headers. Equal sizes are checked and stripped as
one strided copy; a large payload is received straight into its place. Any other frame (an error,
a short reply) is left for the ordinary parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tdio.wire.requests import RangeRead

Bytes = npt.NDArray[np.uint8]

#: A payload above this is received into its place, not through the scratch buffer.
DIRECT_BYTES = 32 * 1024
SCRATCH_BYTES = 256 * 1024
#: Commands are sent in batches, so that the server works while the next ones are encoded.
BATCH_COMMANDS = 128
BATCH_BYTES = 4 * 1024 * 1024


def encode_reads(reads: Sequence[RangeRead]) -> Iterator[tuple[bytes, int]]:
    """Yield batches of encoded ``GETRANGE`` commands, each with the bytes it will bring."""
    for read in reads:
        raw = read.key.encode()
        head = f"*4\r\n$8\r\nGETRANGE\r\n${len(raw)}\r\n{read.key}\r\n$"
        sizes = read.ranges.sizes
        per_batch = BATCH_COMMANDS
        if len(sizes):
            per_batch = max(1, min(per_batch, BATCH_BYTES // max(1, int(sizes.max()))))
        starts = read.ranges.starts.tolist()
        ends = (read.ranges.starts + sizes - 1).tolist()
        for at in range(0, len(starts), per_batch):
            text = "".join(
                [
                    f"{head}{len(first)}\r\n{first}\r\n${len(last)}\r\n{last}\r\n"
                    for first, last in zip(
                        map(str, starts[at : at + per_batch]),
                        map(str, ends[at : at + per_batch]),
                        strict=True,
                    )
                ]
            )
            yield text.encode(), int(sizes[at : at + per_batch].sum())


class UnexpectedFrameError(Exception):
    """A reply that is not the bulk of the expected size; never leaves ``wire``/``transport``.

    Attributes:
        read: the read that was being answered.
        size: the size that was expected.
        rest: the bytes from the start of that frame on, as far as they have arrived.
    """

    def __init__(self, read: RangeRead, size: int, rest: bytes):
        super().__init__(read.what)
        self.read = read
        self.size = size
        self.rest = rest


@dataclass
class _Group:
    """Consecutive frames of one size."""

    read: RangeRead
    size: int
    count: int
    into: Bytes
    header: bytes


def _groups(reads: Sequence[RangeRead]) -> Iterator[_Group]:
    for read in reads:
        sizes = read.ranges.sizes
        if not len(sizes):
            continue
        cuts = np.flatnonzero(np.diff(sizes)) + 1
        firsts = np.concatenate([[0], cuts])
        counts = np.diff(np.append(firsts, len(sizes)))
        at = 0
        for size, count in zip(sizes[firsts].tolist(), counts.tolist(), strict=True):
            end = at + size * count
            yield _Group(read, size, count, read.into[at:end], b"$%d\r\n" % size)
            at = end


class RangeReceiver:
    """Takes the reply stream of ``reads`` as it arrives and fills their buffers.

    Ask ``want()`` for where the next bytes go, receive into it, say ``got(n)``; until ``done``.
    """

    def __init__(self, reads: Sequence[RangeRead], scratch: Bytes | None = None):
        self.received_bytes = 0
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8) if scratch is None else scratch
        self._view = self._scratch.data
        self._fill = 0
        self._pos = 0
        self._direct: memoryview | None = None
        self._tail = False
        self._groups = _groups(reads)
        self._group = next(self._groups, None)

    @property
    def done(self) -> bool:
        """Whether every reply has arrived."""
        return self._group is None

    def want(self) -> memoryview:
        """Return the memory for the next bytes of the stream."""
        if self._direct is not None:
            return self._direct
        if self._pos:
            rest = self._fill - self._pos
            self._scratch[:rest] = self._scratch[self._pos : self._fill].copy()
            self._pos, self._fill = 0, rest
        return self._view[self._fill :]

    def got(self, n: int) -> None:
        """Take note of ``n`` bytes received into ``want()``.

        Raises:
            UnexpectedFrameError: a frame that is not the one that was asked for.
        """
        if self._direct is not None:
            self.received_bytes += n
            self._direct = self._direct[n:] if n < len(self._direct) else None
            # Its two closing bytes come through the scratch buffer.
            self._tail = self._direct is None
            return
        self._fill += n
        while self._group is not None and self._take(self._group):
            pass

    def _take(self, group: _Group) -> bool:
        """Consume what is complete of the current group; return whether to go on."""
        rest = self._fill - self._pos
        if self._tail:
            if rest < 2:
                return False
            if bytes(self._view[self._pos : self._pos + 2]) != b"\r\n":
                self._fail(group, self._pos)
            self._pos += 2
            self._tail = False
            self._advance(group, 1)
            return True
        head = len(group.header)
        frame = head + group.size + 2
        count = min(group.count, rest // frame)
        if count:
            self._strip(group, count, head, frame)
            self._pos += count * frame
            self.received_bytes += count * group.size
            self._advance(group, count)
            return True
        seen = bytes(self._view[self._pos : self._pos + min(head, rest)])
        if not group.header.startswith(seen):
            self._fail(group, self._pos)
        # Into its place goes what is large, and what the scratch buffer could not hold whole.
        if rest >= head and (group.size > DIRECT_BYTES or frame > len(self._scratch)):
            arrived = min(rest - head, group.size)
            target = group.into[: group.size].data
            target[:arrived] = self._view[self._pos + head : self._pos + head + arrived]
            self._pos += head + arrived
            self.received_bytes += arrived
            if arrived < group.size:
                self._direct = target[arrived:]
                return False
            self._tail = True
            return True
        return False

    def _strip(self, group: _Group, count: int, head: int, frame: int) -> None:
        frames = self._scratch[self._pos : self._pos + count * frame].reshape(count, frame)
        good = frames[:, :head] == np.frombuffer(group.header, np.uint8)
        ends = frames[:, -2:] == _CRLF
        if not (good.all() and ends.all()):
            bad = int(np.argmin(good.all(axis=1) & ends.all(axis=1)))
            self._fail(group, self._pos + bad * frame)
        payload = frames[:, head:-2]
        group.into[: count * group.size].reshape(count, group.size)[:] = payload

    def _advance(self, group: _Group, count: int) -> None:
        group.count -= count
        group.into = group.into[count * group.size :]
        if not group.count:
            self._group = next(self._groups, None)

    def _fail(self, group: _Group, at: int) -> None:
        rest = bytes(self._view[at : self._fill])
        raise UnexpectedFrameError(group.read, group.size, rest)


_CRLF = np.frombuffer(b"\r\n", np.uint8)
