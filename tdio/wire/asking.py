"""Which commands of a round trip of range reads are sent together, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tdio.wire.ranges import encode_reads, encode_single
from tdio.wire.receiving import DIRECT_BYTES, RangeReceiver
from tdio.wire.requests import Fetch, Reads
from tdio.wire.scatter import Group

#: So many bytes of commands are sent at once: the server begins while the rest is encoded.
_EARLY_BYTES = 8 * 1024
#: And the first ones once so many bytes are asked for.
_EARLY_ASKED = 32 * 1024
#: What is planned beyond this waits until some of it has arrived.
_AHEAD_BYTES = 4 * 1024 * 1024
#: At most so many single ranges are asked for in one piece.
_FEW = 64
#: From so many on, replies go straight to their places though they are small.
_SCATTERED = 3


def pieces(
    request: Fetch,
    reads: Reads,
    receiver: RangeReceiver,
    window_bytes: float,
    head: bytes,
    tail: bytes,
) -> Iterator[bytes | None]:
    """Yield what is to be sent, one piece after the other, and None where to receive first.

    Args:
        request: says whether all of it is one piece, and what to do when the server has work.
        reads: what is asked for, planned as it is come to.
        receiver: knows how much has arrived.
        window_bytes: how many bytes of replies may be under way.
        head: what stands before the first command of ``reads``.
        tail: what follows the last; it brings next to nothing, and waits for no room.
    """
    batches = encode_reads(reads)
    pending, asked, begun, over, ready = head, 0, False, False, None
    while True:
        while over or asked - receiver.received_bytes < window_bytes:
            batch = ready or next(batches, None)
            ready = None
            if batch is not None:
                pending += batch[0]
                asked += batch[1]
                full = asked - receiver.received_bytes >= window_bytes
                many = len(pending) >= _EARLY_BYTES
                early = many or (not begun and asked >= _EARLY_ASKED)
                if not full and (request.together or not early):
                    continue
                yield pending
                pending, begun = b"", True
                continue
            # The server has enough to do, and takes the last commands only when it is through: to
            # send them may wait for that (256 rows: 0.5 ms).
            if begun and request.meanwhile:
                request.meanwhile()
            yield pending + tail
            if not begun and request.meanwhile:
                request.meanwhile()
            return
        # There is nothing to do but to wait: prepare what is asked for next. One leaf at a time, so
        # that the server does not run out of work, and not all of them, as each takes memory.
        if reads.planned_bytes - receiver.received_bytes < _AHEAD_BYTES:
            reads.take_one()
        ready = ready or next(batches, None)
        over = ready is None
        if not over:
            yield None


def few(reads: Reads) -> tuple[bytes, Iterable[Group]] | None:
    """Return the commands of a few single ranges, and the groups of their replies.

    None where it is more, for which it pays that the server begins before all is planned. Twenty
    ranges of 800 bytes take a tenth more time in the general way.
    """
    commands: list[bytes] = []
    groups: list[Group] = []
    asked = 0
    for count, read in enumerate(reads, 1):
        single = read.ranges.single
        if single is None or count > _FEW:
            return None
        size = single[1]
        asked += size
        if asked >= _EARLY_ASKED and len(reads.first(count + 1)) > count:
            return None
        commands.append(encode_single(read, single))
        groups.append(Group(read, size, 1, read.into.data, b"$%d\r\n" % size, True))
    if len(groups) < _SCATTERED and asked < DIRECT_BYTES:
        for group in groups:
            group.direct = False
    return b"".join(commands), groups
