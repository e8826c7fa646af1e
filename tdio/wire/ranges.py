"""Range reads on the wire: encode many ``GETRANGE`` in bulk, and ``GET`` for a whole string."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from tdio.layout.plan import PIECE_BYTES, in_pieces
from tdio.wire.requests import RangeRead

Bytes = npt.NDArray[np.uint8]

#: Commands are sent in batches, so that the server works while the next ones are encoded. It runs
#: all that it has read before it answers, so large rows are asked for a few at a time (with 1 MiB
#: the receiver waited 200 us at every batch).
BATCH_COMMANDS = 256
BATCH_BYTES = 128 * 1024
#: Up to so many commands plain Python is as fast as numpy.
_PLAIN_COMMANDS = 16


def as_asked(read: RangeRead, at_once: bool) -> RangeRead:
    """Make a read one that commands ask for: long ranges in pieces, or the whole string at once.

    A whole string that is no longer than a piece, or of any length where ``at_once`` says so, is
    asked for with ``GET``, which Valkey answers without a copy: 20 entries of 80 kB take a third of
    the time, one of 8 MB two thirds.
    """
    if read.whole and (at_once or len(read.into) <= PIECE_BYTES):
        return read
    read.ranges, read.whole = in_pieces(read.ranges), False
    return read


def encode_reads(reads: Iterable[RangeRead]) -> Iterator[tuple[bytes, int]]:
    """Yield batches of encoded commands, each with the bytes it will bring."""
    for read in reads:
        if not len(read.ranges):
            continue
        if (single := read.ranges.single) is not None:
            yield encode_single(read, single), single[1]
            continue
        head = _head(read.key)
        starts = read.ranges.starts
        sizes = None if read.ranges.uniform else read.ranges.sizes
        largest = read.ranges.row_bytes if sizes is None else int(sizes.max())
        per_batch = max(1, min(BATCH_COMMANDS, BATCH_BYTES // largest))
        few = min(per_batch, len(starts)) <= _PLAIN_COMMANDS
        for at in range(0, len(starts), per_batch):
            first = starts[at : at + per_batch]
            if sizes is None:
                last, total = first + (largest - 1), largest * len(first)
            else:
                size = sizes[at : at + per_batch]
                last, total = first + size - 1, int(size.sum())
            if few:
                numbers = map(_numbers, first.tolist(), last.tolist())
                yield head + head.join(numbers), total
            else:
                yield _encode(head, first, last), total


def encode_single(read: RangeRead, single: tuple[int, int]) -> bytes:
    """Return the command of a read of one range, whose start and size are given."""
    if read.whole:
        return _get(read.key)
    start, size = single
    return _head(read.key) + _numbers(start, start + size - 1)


@functools.lru_cache(4096)
def _head(key: str) -> bytes:
    """Return what stands before the numbers of a GETRANGE."""
    raw = key.encode()
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(raw), raw)


@functools.lru_cache(4096)
def _get(key: str) -> bytes:
    raw = key.encode()
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(raw), raw)


def _numbers(first: int, last: int) -> bytes:
    return b"$%d\r\n%d\r\n$%d\r\n%d\r\n" % (len(str(first)), first, len(str(last)), last)


_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)
_QUADS = np.frombuffer(b"".join(b"%04d" % n for n in range(10_000)), "S4")


def _widths(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many decimal digits each number has."""
    return np.searchsorted(_POWERS, numbers, side="right") + 1


def _digits(numbers: npt.NDArray[np.int64]) -> Bytes:
    """Return decimal digits, zero-filled to equal width, uint8 ``[n, digits]``."""
    columns = -(-len(str(int(numbers.max()))) // 4)
    quads = np.empty((len(numbers), columns), "S4")
    rest = numbers
    for column in range(columns - 1, 0, -1):
        high = rest // 10_000
        quads[:, column] = _QUADS[rest - high * 10_000]
        rest = high
    quads[:, 0] = _QUADS[rest]
    return quads.view(np.uint8).reshape(len(numbers), 4 * columns)


def _encode(head: bytes, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bytes:
    """Encode commands that differ in their numbers only: a block for each run of equal widths.

    Blocks pay from about eight commands on; ascending offsets have a handful of runs.
    """
    numbers = np.concatenate([first, last])
    widths = _widths(numbers)
    size = len(first)
    both = widths[:size] * 32 + widths[size:]
    cuts = np.flatnonzero(both[1:] != both[:-1]) + 1
    if len(cuts) * 8 > size:
        return head + head.join(map(_numbers, first.tolist(), last.tolist()))
    digits = _digits(numbers)
    total = digits.shape[1]
    blocks = []
    bounds = [0, *cuts.tolist(), size]
    for lo, hi in itertools.pairwise(bounds):
        m, n = int(widths[lo]), int(widths[size + lo])
        before, between = head + b"$%d\r\n" % m, b"\r\n$%d\r\n" % n
        template = before + bytes(m) + between + bytes(n) + b"\r\n"
        block = np.empty((hi - lo, len(template)), np.uint8)
        block[:] = np.frombuffer(template, np.uint8)
        at = len(before)
        block[:, at : at + m] = digits[lo:hi, total - m :]
        at += m + len(between)
        block[:, at : at + n] = digits[size + lo : size + hi, total - n :]
        blocks.append(block.tobytes())
    return b"".join(blocks)
