r"""Range reads on the wire: encode many ``GETRANGE``, strip the framing of many replies.

The sizes of all replies are known before they arrive, so the reply stream is
``$<size>\r\n<payload>\r\n`` with computable headers. Equal sizes are checked and stripped as
one strided copy; a large payload is received straight into its place. Any other frame (an error,
a short reply) is left for the ordinary parser.
"""

from __future__ import annotations

import functools
import itertools
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
BATCH_COMMANDS = 256
BATCH_BYTES = 1024 * 1024
#: Up to so many commands plain formatting is faster than numpy.
_FEW = 12


def encode_reads(reads: Sequence[RangeRead]) -> Iterator[tuple[bytes, int]]:
    """Yield batches of encoded ``GETRANGE`` commands, each with the bytes it will bring."""
    for read in reads:
        starts, sizes = read.ranges.starts, read.ranges.sizes
        if not len(starts):
            continue
        head = _head(read.key)
        if read.ranges.single is not None:
            start, size = read.ranges.single
            yield head + _numbers(start, start + size - 1), size
            continue
        if len(starts) <= _FEW:
            ends = (starts + sizes - 1).tolist()
            yield head + head.join(map(_numbers, starts.tolist(), ends)), int(sizes.sum())
            continue
        per_batch = max(1, min(BATCH_COMMANDS, BATCH_BYTES // int(sizes.max())))
        for at in range(0, len(starts), per_batch):
            part = slice(at, at + per_batch)
            first, last = starts[part], starts[part] + sizes[part] - 1
            yield _encode(head, first, last), int(sizes[part].sum())


@functools.lru_cache(4096)
def _head(key: str) -> bytes:
    """Return what stands before the numbers of a GETRANGE."""
    raw = key.encode()
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(raw), raw)


def _numbers(first: int, last: int) -> bytes:
    return b"$%d\r\n%d\r\n$%d\r\n%d\r\n" % (len(str(first)), first, len(str(last)), last)


_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)
_QUADS = np.frombuffer(b"".join(b"%04d" % n for n in range(10_000)), "S4")


def _digits(numbers: npt.NDArray[np.int64]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Return decimal digits, zero-filled to equal width, and how many of them count."""
    columns = -(-len(str(int(numbers.max()))) // 4)
    quads = np.empty((len(numbers), columns), "S4")
    rest = numbers
    for column in range(columns - 1, 0, -1):
        high = rest // 10_000
        quads[:, column] = _QUADS[rest - high * 10_000]
        rest = high
    quads[:, 0] = _QUADS[rest]
    widths = np.searchsorted(_POWERS, numbers, side="right") + 1
    return quads.view(np.uint8).reshape(len(numbers), 4 * columns), widths


def _encode(head: bytes, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bytes:
    """Encode commands that differ in their numbers only: a block for each run of equal widths.

    Blocks pay from about eight commands on; ascending offsets have a handful of runs.
    """
    digits, widths = _digits(np.concatenate([first, last]))
    size, total = len(first), digits.shape[1]
    a, b, wide_a, wide_b = digits[:size], digits[size:], widths[:size], widths[size:]
    both = wide_a * 32 + wide_b
    cuts = np.flatnonzero(both[1:] != both[:-1]) + 1
    if len(cuts) * 8 > len(first):
        return head + head.join(map(_numbers, first.tolist(), last.tolist()))
    blocks = []
    bounds = [0, *cuts.tolist(), len(first)]
    for lo, hi in itertools.pairwise(bounds):
        m, n = int(wide_a[lo]), int(wide_b[lo])
        before, between = head + b"$%d\r\n" % m, b"\r\n$%d\r\n" % n
        template = before + bytes(m) + between + bytes(n) + b"\r\n"
        block = np.empty((hi - lo, len(template)), np.uint8)
        block[:] = np.frombuffer(template, np.uint8)
        at = len(before)
        block[:, at : at + m] = a[lo:hi, total - m :]
        at += m + len(between)
        block[:, at : at + n] = b[lo:hi, total - n :]
        blocks.append(block.tobytes())
    return b"".join(blocks)


class UnexpectedFrameError(Exception):
    """A reply that is not the bulk of the expected size; never leaves ``wire``/``transport``.

    Attributes:
        read: the read that was being answered, or None before the first.
        size: the size that was expected.
        rest: the bytes from the start of that frame on, as far as they have arrived.
    """

    def __init__(self, read: RangeRead | None, size: int, rest: bytes):
        super().__init__(str(read))
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
        size = int(sizes[0])
        if read.ranges.uniform or len(sizes) == 1:
            yield _Group(read, size, len(sizes), read.into, b"$%d\r\n" % size)
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

    def __init__(
        self, reads: Sequence[RangeRead], scratch: Bytes | None = None, *, prefix: bytes = b""
    ):
        self.received_bytes = 0
        self._prefix = prefix
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
        return self._group is None and not self._prefix

    def rest(self) -> bytes:
        """Return what has arrived behind the last reply."""
        return bytes(self._view[self._pos : self._fill])

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
        if self._prefix and not self._skip_prefix():
            return
        while self._group is not None and self._take(self._group):
            pass

    def _skip_prefix(self) -> bool:
        """Consume the replies that stand before the first frame; return whether all are there."""
        seen = bytes(self._view[self._pos : min(self._fill, self._pos + len(self._prefix))])
        if seen != self._prefix[: len(seen)]:
            # Frames differ in their first byte, so the first odd byte begins one.
            same = next(i for i, byte in enumerate(seen) if byte != self._prefix[i])
            raise UnexpectedFrameError(
                self._group.read if self._group else None,
                0,
                bytes(self._view[self._pos + same : self._fill]),
            )
        self._pos += len(seen)
        self._prefix = self._prefix[len(seen) :]
        return not self._prefix

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
        if count == 1:
            at = self._pos
            sound = bytes(self._view[at : at + head]) == group.header
            if not (sound and bytes(self._view[at + frame - 2 : at + frame]) == b"\r\n"):
                self._fail(group, at)
            group.into[: group.size] = self._scratch[at + head : at + frame - 2]
            return
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
