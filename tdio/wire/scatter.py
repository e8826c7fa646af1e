"""Payloads of a reply stream that are received straight into their places."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tdio.wire.requests import RangeRead


@dataclass(slots=True)
class Group:
    """Consecutive frames of one size.

    ``direct`` ones are received straight into their places. ``last``: they end their read.
    """

    read: RangeRead
    size: int
    count: int
    into: memoryview
    header: bytes
    direct: bool
    last: bool = True

    def arrived(self) -> None:
        """Tell who reads, if these frames are the last."""
        if self.last and self.read.arrived is not None:
            self.read.arrived(self.read)


class Scatter:
    """Consecutive frames, each payload received straight into its place.

    The bytes around the payloads go into a small buffer of their own and are compared as they
    arrive. Views of framing and of payload alternate; where the stream is in them is looked up,
    not walked to.

    Attributes:
        received_bytes: payload that has arrived.
        beyond: how many bytes have come behind the last frame, in the views that followed.
    """

    def __init__(self, frames: Sequence[tuple[Group, memoryview]]):
        self.received_bytes = self.beyond = 0
        self._frames = frames
        framing = [b"\r\n" + group.header for group, _ in frames]
        framing[0] = framing[0][2:]
        framing.append(b"\r\n")
        self._expected = b"".join(framing)
        self._arrived = bytearray(len(self._expected))
        #: Where each part of the framing starts in ``_arrived``.
        self._starts = list(itertools.accumulate(map(len, framing), initial=0))
        room = memoryview(self._arrived)
        parts: list[Any] = [None] * (2 * len(frames) + 1)
        parts[::2] = [room[lo:hi] for lo, hi in itertools.pairwise(self._starts)]
        parts[1::2] = [payload for _, payload in frames]
        self._views: list[memoryview] = parts
        #: Where in the stream each view ends.
        self._ends = list(itertools.accumulate(map(len, parts)))
        self._total = self._framed = self._at = self._offset = 0

    @property
    def done(self) -> bool:
        """Whether every frame has arrived."""
        return self._at == len(self._views)

    def want(self) -> list[memoryview]:
        """Return where the next bytes go."""
        views = self._views[self._at :]
        if self._offset:
            views[0] = views[0][self._offset :]
        return views

    def got(self, n: int) -> tuple[Group, bytes] | None:
        """Take note of ``n`` bytes; return a frame that was not expected, as far as it is there."""
        total = min(self._total + n, self._ends[-1])
        self.beyond = self._total + n - total
        self._at = at = bisect.bisect_right(self._ends, total)
        self._offset = total - (self._ends[at - 1] if at else 0)
        framed = self._starts[(at + 1) // 2] + (0 if at % 2 else self._offset)
        before, self._framed, self._total = self._framed, framed, total
        self.received_bytes = total - framed
        if self._arrived[before:framed] != self._expected[before:framed]:
            return self._unexpected(before)
        return None

    def _unexpected(self, before: int) -> tuple[Group, bytes]:
        """Find the first odd frame; framing up to ``before`` was sound."""
        odd = next(i for i in range(before, self._framed) if self._arrived[i] != self._expected[i])
        part = bisect.bisect_right(self._starts, odd) - 1
        begin = self._ends[2 * part - 1] if part else 0
        rest = b"".join(self._views[2 * part :])[: self._total - begin]
        if not part:
            return self._frames[0][0], rest
        if odd - self._starts[part] < 2:
            # The end of the payload before: that one is longer than was asked for.
            return self._frames[part - 1][0], rest
        return self._frames[part][0], rest[2:]


def spread(views: Sequence[memoryview], data: bytes) -> None:
    """Copy ``data`` into the views, one after the other."""
    at = 0
    for view in views:
        part = data[at : at + len(view)]
        view[: len(part)] = part
        at += len(part)
