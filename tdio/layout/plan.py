"""Rows to byte ranges: which ranges of a server string land where in the buffer.

Three ways to read the rows of an entry, chosen by counting (numbers in ``docs/stores.md``):

- *direct*: one range for each run of rows that follow each other in the order of the request,
  received straight into its place;
- *spanned*: rows that lie close together, as one range from the first to the last, of which they
  are picked out without being sorted; at most 64 bytes for each row lie between them, or what the
  batch has left;
- *gathered*: distinct rows in ascending order, received into a scratch buffer and picked out of
  it. Near neighbours are merged where that halves the number of ranges (of many small rows: leaves
  a sixth). A gap is read through where it moves fewer bytes than another command would, or costs
  less time than one, and the whole read moves at most twice the bytes that it returns (4 MiB more
  are nothing). Small rows are gathered also without merging: ascending offsets have long runs of
  one width, whose commands are encoded in bulk. Rows above 16 KiB never are: to copy one takes
  longer than another command.
"""

from __future__ import annotations

import numpy as np

from tdio.layout.spec import Int64Array

#: Request and reply framing of one GETRANGE, about: a gap below this is cheaper to read than skip.
COMMAND_BYTES = 128
#: Gaps below that may take so much memory beyond what is returned, whatever that is.
SLACK_BYTES = 4 * 1024 * 1024
#: So many rows are looked at at a time.
BLOCK_ROWS = 1 << 16
#: So much memory a range takes while it is planned: a gap below this takes less.
_SAVED_BYTES = 64
#: Merging more than this many bytes of gap saves no time even at full density; nor does merging
#: rows above that, whose copy takes longer than another command.
MAX_GAP_BYTES = 16 * 1024
#: So many bytes take as long as another GETRANGE and its reply (about 2.7 us).
QUICK_BYTES = 4 * 1024
#: A range longer than this is asked for in pieces, so that the server's reply buffer is bounded.
PIECE_BYTES = 1024 * 1024
#: Rows up to this size are read in ascending order and put in their places by one more copy.
SORTED_ROW_BYTES = 1024
#: From so many runs on: fewer are asked for and received as fast one by one.
_SORTED_RUNS = 32
#: A range of a size of its own costs as much as so many of one size, which are handled in bulk.
_BULK = 6


class Ranges:
    """Byte ranges of one server string.

    Args:
        starts: first byte of each range, int64 ``[r]``.
        sizes: length of each range in bytes, all above 0, int64 ``[r]``; None where each is
            ``row_bytes``.
        rows: for a gathered or spanned read, where each row of the result is in the scratch buffer,
            int64 ``[n]``; None for a direct one, whose ranges fill the result in order.
        row_bytes: the size of one row.

    Attributes:
        first: what is to be taken from ``rows``: a spanned read begins at this row of the entry.
        single: start and size, where there is one range.
        uniform: whether all sizes are known to be ``row_bytes``.
    """

    __slots__ = ("_sizes", "_starts", "first", "row_bytes", "rows", "single", "uniform")

    def __init__(
        self,
        starts: Int64Array,
        sizes: Int64Array | None,
        rows: Int64Array | None,
        row_bytes: int,
    ):
        self._starts: Int64Array | None = starts
        self._sizes = sizes
        self.rows = rows
        self.row_bytes = row_bytes
        self.first = 0
        self.uniform = sizes is None
        self.single: tuple[int, int] | None = None
        if len(starts) == 1:
            self.single = int(starts[0]), row_bytes if sizes is None else int(sizes[0])

    @classmethod
    def one(cls, start: int, size: int, rows: Int64Array | None, row_bytes: int) -> Ranges:
        """Return a single range, without the arrays: they cost as much as the rest of its plan."""
        self = cls.__new__(cls)
        self._starts = self._sizes = None
        self.rows = rows
        self.row_bytes = row_bytes
        self.first = 0
        self.uniform = row_bytes == size
        self.single = start, size
        return self

    @property
    def starts(self) -> Int64Array:
        """First byte of each range, int64 ``[r]``."""
        if self._starts is None:
            assert self.single is not None
            self._starts = np.array([self.single[0]])
        return self._starts

    @property
    def sizes(self) -> Int64Array:
        """Length of each range in bytes, int64 ``[r]``."""
        if self._sizes is None:
            size = self.row_bytes if self.single is None else self.single[1]
            self._sizes = np.full(len(self), size)
        return self._sizes

    def __len__(self) -> int:
        return 1 if self._starts is None else len(self._starts)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the ranges bring, payload only."""
        if self.single is not None:
            return self.single[1]
        return len(self) * self.row_bytes if self.uniform else int(self.sizes.sum())


_NONE = np.zeros(0, np.int64)
_FIRST = np.zeros(1, np.int64)


def one_range(start: int, size: int) -> Ranges:
    """Return a single range, or none for a size of 0."""
    if not size:
        return Ranges(_NONE, _NONE, None, 1)
    return Ranges.one(start, size, None, size)


class Selection:
    """Row numbers, int64 ``[n]``, with what several leaves of one batch need to know of them.

    Remembered by hand: before Python 3.12 ``cached_property`` holds one lock for all objects, which
    a child that is forked while a thread plans would inherit taken.
    """

    def __init__(self, positions: Int64Array):
        self.positions = positions
        self._count: int | None = None
        self._runs: tuple[Int64Array, Int64Array] | None = None
        self._distinct: tuple[Int64Array, Int64Array, Int64Array] | None = None
        self._ascending: Int64Array | None = None
        self._span: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """How many runs of consecutive positions there are."""
        if len(self.positions) <= BLOCK_ROWS:
            return len(self.runs()[0])
        if self._count is None:
            rows, self._count = self.positions, 1
            # A block at a time: the whole would take as much memory as the index.
            for at in range(0, len(rows) - 1, BLOCK_ROWS):
                some = rows[at : at + BLOCK_ROWS + 1]
                self._count += int(np.count_nonzero(some[1:] - some[:-1] != 1))
        return self._count

    def runs(self) -> tuple[Int64Array, Int64Array]:
        """Return the first row and the length of each run, in order."""
        if self._runs is None:
            rows = self.positions
            breaks = (rows[1:] - rows[:-1] != 1).nonzero()[0] + 1
            starts = np.concatenate([_FIRST, breaks])
            self._runs = rows[starts], np.append(breaks, len(rows)) - starts
        return self._runs

    @property
    def distinct(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Distinct rows in ascending order, for each position its place among them, the gaps.

        A gap is the number of rows between two neighbours.
        """
        if self._distinct is None:
            order = self.positions.argsort()
            rows = self.positions[order]
            gaps = rows[1:] - rows[:-1] - 1
            if len(gaps) and gaps.min() < 0:
                rows, places = np.unique(self.positions, return_inverse=True)
                places, gaps = places.reshape(-1), rows[1:] - rows[:-1] - 1
            else:
                places = np.empty_like(order)
                places[order] = np.arange(len(order))
            self._distinct = rows, places, gaps
        return self._distinct

    @property
    def span(self) -> tuple[int, int]:
        """The first row, and how many there are from it to the last."""
        if self._span is None:
            first = int(self.positions.min())
            self._span = first, int(self.positions.max()) - first + 1
        return self._span

    def gap_above(self, wider: int) -> int:
        """Return the widest gap, in rows, where ``wider`` others are not narrower."""
        if self._ascending is None:
            self._ascending = np.sort(self.distinct[2])
        last = len(self._ascending) - 1 - wider
        return int(self._ascending[last]) if last >= 0 else 0


def plan_rows(
    selection: Selection | Int64Array,
    row_bytes: int,
    *,
    gather: bool = True,
    spare: int | None = None,
) -> Ranges:
    """Return the ranges that bring the selected rows of ``row_bytes`` each.

    Args:
        selection: the rows.
        row_bytes: size of a row.
        gather: False allows the direct way only: the ranges of a write.
        spare: bytes that a batch of several leaves has left for gaps; None: as many as it returns.
    """
    if not isinstance(selection, Selection):
        selection = Selection(selection)
    positions = selection.positions
    if not len(positions) or not row_bytes:
        return Ranges(_NONE, _NONE, None, row_bytes)
    if len(positions) == 1:
        return one_range(int(positions[0]) * row_bytes, row_bytes)
    runs = selection.count
    own = len(positions) * row_bytes
    spare = own if spare is None else spare
    if runs > 1 and gather and row_bytes <= MAX_GAP_BYTES:
        spanned = _spanned(selection, row_bytes, spare)
        if spanned is not None:
            return spanned
        small = row_bytes <= SORTED_ROW_BYTES and runs >= _SORTED_RUNS
        limit = _gap_limit(selection, row_bytes, runs // (_BULK if small else 2) - 1, spare)
        if limit is not None:
            return _gathered(selection, limit, row_bytes)
        if small:
            distinct, places, _ = selection.distinct
            return Ranges(distinct * row_bytes, None, places, row_bytes)
    if runs == len(positions) or (gather and runs * 8 > len(positions) * 7):
        # Hardly a run is longer than a row: replies of one size are handled in bulk.
        return Ranges(positions * row_bytes, None, None, row_bytes)
    firsts, counts = selection.runs()
    return Ranges(firsts * row_bytes, counts * row_bytes, None, row_bytes)


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
    if ranges.single is not None:
        largest = ranges.single[1]
    else:
        largest = ranges.row_bytes if ranges.uniform else int(ranges.sizes.max(initial=0))
    if largest <= PIECE_BYTES:
        return ranges
    counts = -(-ranges.sizes // PIECE_BYTES)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(ranges.starts, counts) + nth * PIECE_BYTES
    ends = np.repeat(ranges.starts + ranges.sizes, counts)
    return Ranges(starts, np.minimum(ends - starts, PIECE_BYTES), ranges.rows, ranges.row_bytes)


def _spanned(selection: Selection, row_bytes: int, spare: int) -> Ranges | None:
    """Return one range from the first row to the last, or None where too much lies between."""
    rows = selection.positions
    first, count = selection.span
    beyond = (count - len(rows)) * row_bytes
    room = min(len(rows) * COMMAND_BYTES, max(spare, SLACK_BYTES))
    if beyond > max(room, len(rows) * _SAVED_BYTES):
        return None
    plan = Ranges.one(first * row_bytes, count * row_bytes, rows, row_bytes)
    plan.first = first
    return plan


def _gap_limit(selection: Selection, row_bytes: int, most: int, spare: int) -> int | None:
    """Return the widest gap, in rows, to read through so that at most ``most`` wider ones are left.

    None where it is not worth it.
    """
    if most < 0:
        return None
    needed, gaps = selection.gap_above(most), selection.distinct[2]
    own = len(selection.positions) * row_bytes
    for most_bytes, room in (
        (MAX_GAP_BYTES, min(own, spare)),
        (QUICK_BYTES, spare),
        (COMMAND_BYTES, max(spare, SLACK_BYTES)),
    ):
        limit = most_bytes // row_bytes
        if needed > limit:
            return None
        if int(gaps[gaps <= limit].sum()) * row_bytes <= room:
            return limit
    return None


def _gathered(selection: Selection, limit: int, row_bytes: int) -> Ranges:
    """Return one range for each stretch without a gap above ``limit`` rows, gaps included."""
    distinct, places, gaps = selection.distinct
    cuts = np.flatnonzero(gaps > limit)
    firsts = distinct[np.concatenate([_FIRST, cuts + 1])]
    counts = distinct[np.append(cuts, len(distinct) - 1)] - firsts + 1
    # Row p of the entry lies at scratch row base(range of p) + p - first(range of p).
    shift = np.cumsum(counts) - counts - firsts
    run = np.searchsorted(firsts, distinct, side="right") - 1
    rows = (shift[run] + distinct)[places]
    return Ranges(firsts * row_bytes, counts * row_bytes, rows, row_bytes)
