"""Rows to byte ranges: which ranges of a server string land where in the buffer.

Two ways to read the rows of an entry, chosen by counting bytes (numbers in ``docs/stores.md``):

- *direct*: one range for each run of rows that follow each other in the order of the request,
  received straight into its place;
- *gathered*: distinct rows in ascending order, near neighbours merged into longer ranges,
  received into a scratch buffer and picked out of it. A gap is merged where reading through it
  moves fewer bytes than another command would, or where the whole read moves at most twice the
  bytes that it returns: 8,192 of 10,000 rows are then a few long ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tdio.layout.spec import Int64Array

#: Request and reply framing of one GETRANGE, about: a gap below this is cheaper to read than skip.
COMMAND_BYTES = 128
#: Merging more than this many bytes of gap saves no time even at full density.
MAX_GAP_BYTES = 16 * 1024
#: A range longer than this is asked for in pieces, so that the server's reply buffer is bounded.
PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Ranges:
    """Byte ranges of one server string.

    Attributes:
        starts: first byte of each range, int64 ``[r]``.
        sizes: length of each range in bytes, all above 0, int64 ``[r]``.
        rows: for a gathered read, the row of the scratch buffer for each row of the result,
            int64 ``[n]``; None for a direct one, whose ranges fill the result in order.
        row_bytes: the size of one row.
    """

    starts: Int64Array
    sizes: Int64Array
    rows: Int64Array | None
    row_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that the ranges bring, payload only."""
        return int(self.sizes.sum())


_NONE = np.zeros(0, np.int64)


def plan_rows(positions: Int64Array, row_bytes: int, *, gather: bool = True) -> Ranges:
    """Return the ranges that bring rows ``positions`` (int64 ``[n]``) of ``row_bytes`` each.

    ``gather=False`` allows the direct way only: the ranges of a write.
    """
    if not len(positions) or not row_bytes:
        return Ranges(_NONE, _NONE, None, row_bytes)
    firsts, counts = _runs(positions)
    direct = Ranges(firsts * row_bytes, counts * row_bytes, None, row_bytes)
    if len(firsts) == 1 or not gather:
        return direct
    gathered = _gather(positions, row_bytes)
    return gathered if len(gathered.starts) < len(firsts) else direct


def plan_elements(positions: Int64Array, offsets: Int64Array) -> Ranges:
    """Return the ranges that bring ragged elements, one for each non-empty run, in order."""
    starts, ends = offsets[positions], offsets[positions + 1]
    filled = ends > starts
    starts, ends = starts[filled], ends[filled]
    if not len(starts):
        return Ranges(_NONE, _NONE, None, 1)
    breaks = np.concatenate([[True], starts[1:] != ends[:-1]])
    firsts = np.flatnonzero(breaks)
    lasts = np.append(firsts[1:], len(starts)) - 1
    return Ranges(starts[firsts], ends[lasts] - starts[firsts], None, 1)


def in_pieces(ranges: Ranges) -> Ranges:
    """Cut ranges longer than ``PIECE_BYTES`` into pieces, in order."""
    if not len(ranges.sizes) or int(ranges.sizes.max()) <= PIECE_BYTES:
        return ranges
    counts = -(-ranges.sizes // PIECE_BYTES)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(ranges.starts, counts) + nth * PIECE_BYTES
    ends = np.repeat(ranges.starts + ranges.sizes, counts)
    return Ranges(starts, np.minimum(ends - starts, PIECE_BYTES), ranges.rows, ranges.row_bytes)


def _runs(positions: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the first row and the length of each run of consecutive positions."""
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    return positions[starts], np.diff(np.append(starts, len(positions)))


def _gather(positions: Int64Array, row_bytes: int) -> Ranges:
    distinct, inverse = np.unique(positions, return_inverse=True)
    gaps = (np.diff(distinct) - 1) * row_bytes
    payload = len(distinct) * row_bytes
    limit = COMMAND_BYTES
    wide = gaps <= MAX_GAP_BYTES
    if int(gaps[wide].sum()) <= payload:
        limit = MAX_GAP_BYTES
    cuts = np.flatnonzero(gaps > limit)
    firsts = distinct[np.concatenate([[0], cuts + 1])]
    lasts = distinct[np.append(cuts, len(distinct) - 1)]
    counts = lasts - firsts + 1
    # Row p of the entry lies at scratch row base(run of p) + p - first(run of p).
    bases = np.cumsum(counts) - counts
    run = np.searchsorted(firsts, distinct, side="right") - 1
    rows = (bases[run] + distinct - firsts[run])[inverse.reshape(-1)]
    return Ranges(firsts * row_bytes, counts * row_bytes, rows, row_bytes)
