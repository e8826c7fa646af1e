r"""The replies of many range reads: check and strip their framing in bulk.

The sizes of all replies are known before they arrive, so the reply stream is
``$<size>\r\n<payload>\r\n`` with computable headers. Equal small sizes are checked and stripped
as one strided copy; other payloads are received straight into their places. Any other frame (an
error, a short reply) is left for the ordinary parser.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from tdio.wire.ranges import Bytes
from tdio.wire.requests import RangeRead
from tdio.wire.scatter import Group, Scatter, spread

#: A payload from this size on is received into its place, not through the scratch buffer. So are
#: smaller ones that are few, or stand before such a one.
DIRECT_BYTES = 8 * 1024
#: So many large frames, or so many bytes of them, are prepared for at a time: one lot ahead of the
#: one that is arriving.
_LOT, _LOT_BYTES = 16, 256 * 1024
SCRATCH_BYTES = 256 * 1024
#: Of up to so many ranges each has a group of its own: that is cheaper than to look for equal ones.
_SINGLE_RANGES = 16


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


class _Following:
    """Reads one after the other, with a look at the next, which is not planned before."""

    def __init__(self, reads: Iterable[RangeRead]):
        self._reads = iter(reads)
        self._next: RangeRead | None = None

    def __iter__(self) -> Iterator[RangeRead]:
        while (read := self.peek()) is not None:
            self._next = None
            yield read

    def peek(self) -> RangeRead | None:
        self._next = self._next or next(self._reads, None)
        return self._next


def groups_of(reads: Iterable[RangeRead]) -> Iterator[Group]:
    """Yield the frames of the replies to ``reads``, in groups of one size."""
    following = _Following(reads)
    for read in following:
        into, ranges = read.into.data, read.ranges
        direct = False
        if len(ranges) <= _SINGLE_RANGES:
            if ranges.single is not None:
                runs: Iterable[tuple[int, int]] = ((ranges.single[1], 1),)
            else:
                runs = [(size, 1) for size in ranges.sizes.tolist()]
            # A small one too where much follows, most of which would come into the scratch buffer
            # with it.
            direct = len(into) >= DIRECT_BYTES
            if not direct and (later := following.peek()) is not None:
                direct = len(later.into) >= DIRECT_BYTES
        elif ranges.uniform:
            runs = [(ranges.row_bytes, len(ranges))]
        else:
            sizes = ranges.sizes
            cuts = np.flatnonzero(np.diff(sizes)) + 1
            firsts = np.concatenate([[0], cuts])
            counts = np.diff(np.append(firsts, len(sizes)))
            runs = zip(sizes[firsts].tolist(), counts.tolist(), strict=True)
        at = 0
        for size, count in runs:
            end = at + size * count
            header = b"$%d\r\n" % size
            straight = direct or size >= DIRECT_BYTES
            yield Group(read, size, count, into[at:end], header, straight, end == len(into))
            at = end


class RangeReceiver:
    """Takes a reply stream, the frames of ``groups``, as it arrives and fills their buffers.

    Ask ``want()`` for where the next bytes go, receive into it, say ``got(n)``; until ``done``.

    Attributes:
        received_bytes: payload that has arrived.
    """

    def __init__(
        self, groups: Iterable[Group], scratch: Bytes | None = None, *, prefix: bytes = b""
    ):
        self.received_bytes = 0
        self._prefix = prefix
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8) if scratch is None else scratch
        self._view = self._scratch.data
        self._fill = 0
        self._pos = 0
        #: Each with the groups that end in it.
        self._scatters: deque[tuple[Scatter, list[Group]]] = deque()
        self._groups = iter(groups)
        self._group = next(self._groups, None)
        #: Nothing has been prepared for yet: that is done while the server works.
        self._new = not prefix

    @property
    def done(self) -> bool:
        """Whether every reply has arrived."""
        return self._group is None and not self._scatters and not self._prefix

    def rest(self) -> bytes:
        """Return what has arrived behind the last reply."""
        return bytes(self._view[self._pos : self._fill])

    def want(self) -> list[memoryview]:
        """Return the memory for the next bytes of the stream, a view or several in order."""
        if self._new:
            self._new = False
            self._advance()
        if self._scatters:
            if len(self._scatters) < 2:
                self._prepare()
            views = [view for scatter, _ in self._scatters for view in scatter.want()]
            if self._group is None or not self._group.direct:
                views.append(self._view)
            return views
        if self._pos:
            rest = self._fill - self._pos
            self._scratch[:rest] = self._scratch[self._pos : self._fill].copy()
            self._pos, self._fill = 0, rest
        return [self._view[self._fill :]]

    def got(self, n: int) -> None:
        """Take note of ``n`` bytes received into ``want()``.

        Raises:
            UnexpectedFrameError: a frame that is not the one that was asked for.
        """
        if self._scatters:
            self._scattered(n)
            return
        self._fill += n
        if self._prefix and not self._skip_prefix():
            return
        self._advance()

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

    def _advance(self) -> None:
        """Consume what is complete, then see that a large frame goes straight to its place."""
        while self._group is not None and not self._scatters:
            group = self._group
            head = len(group.header)
            frame = head + group.size + 2
            rest = self._fill - self._pos
            count = min(group.count, rest // frame)
            if count:
                self._strip(group, count, head, frame)
                self._pos += count * frame
                self.received_bytes += count * group.size
                self._took(group, count)
                if group is not self._group:
                    group.arrived()
            elif group.direct:
                self._begin_scatter()
            else:
                seen = bytes(self._view[self._pos : self._pos + min(head, rest)])
                if not group.header.startswith(seen):
                    self._fail(group, self._pos)
                return

    def _begin_scatter(self) -> None:
        self._prepare()
        arrived = self.rest()
        self._pos = self._fill = 0
        if arrived:
            # Less than the first of these frames, or it would not be here.
            spread(self._scatters[0][0].want(), arrived)
            self._scattered(len(arrived))

    def _prepare(self) -> None:
        """Make ready for the next frames that go straight to their places, if there are any."""
        frames: list[tuple[Group, memoryview]] = []
        ending: list[Group] = []
        room = _LOT_BYTES
        while (group := self._group) is not None and group.direct:
            size, into = group.size, group.into
            if room <= 0 or len(frames) == _LOT:
                break
            if group.count == 1:
                count = 1
                frames.append((group, into))
            else:
                count = min(group.count, _LOT - len(frames), -(-room // size))
                frames += [(group, into[i * size : (i + 1) * size]) for i in range(count)]
            room -= count * size
            self._took(group, count)
            if group is not self._group:
                ending.append(group)
        if frames:
            self._scatters.append((Scatter(frames), ending))

    def _scattered(self, n: int) -> None:
        while n and self._scatters:
            scatter, ending = self._scatters[0]
            before = scatter.received_bytes
            unexpected = scatter.got(n)
            self.received_bytes += scatter.received_bytes - before
            n = scatter.beyond
            if not scatter.done and unexpected is None:
                return
            self._scatters.popleft()
            if unexpected is not None:
                behind = [view for later, _ in self._scatters for view in later.want()]
                group, rest = unexpected
                rest += b"".join([*behind, self._view])[:n]
                raise UnexpectedFrameError(group.read, group.size, rest)
            for group in ending:
                group.arrived()
        if not self._scatters:
            self._fill = n
            self._advance()

    def _strip(self, group: Group, count: int, head: int, frame: int) -> None:
        if count == 1:
            at = self._pos
            sound = bytes(self._view[at : at + head]) == group.header
            if not (sound and bytes(self._view[at + frame - 2 : at + frame]) == b"\r\n"):
                self._fail(group, at)
            group.into[: group.size] = self._view[at + head : at + frame - 2]
            return
        frames = self._scratch[self._pos : self._pos + count * frame].reshape(count, frame)
        good = frames[:, :head] == np.frombuffer(group.header, np.uint8)
        ends = frames[:, -2:] == _CRLF
        if not (good.all() and ends.all()):
            bad = int(np.argmin(good.all(axis=1) & ends.all(axis=1)))
            self._fail(group, self._pos + bad * frame)
        payload = frames[:, head:-2]
        into = np.frombuffer(group.into[: count * group.size], np.uint8)
        into.reshape(count, group.size)[:] = payload

    def _took(self, group: Group, count: int) -> None:
        if count == group.count:
            self._group = next(self._groups, None)
            return
        group.count -= count
        group.into = group.into[count * group.size :]

    def _fail(self, group: Group, at: int) -> None:
        rest = bytes(self._view[at : self._fill])
        raise UnexpectedFrameError(group.read, group.size, rest)


_CRLF = np.frombuffer(b"\r\n", np.uint8)
