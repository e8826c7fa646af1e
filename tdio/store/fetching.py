"""Reads of what a plan asks for, all of it from one version of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdio.errors import AccessDenied, CorruptEntry, EntryNotFound
from tdio.layout.plan import PIECE_BYTES, one_range
from tdio.store.handle import ATTEMPTS, Contended, Handle, Known
from tdio.wire.reading import Tokens
from tdio.wire.requests import Arg, Commands, Fetch, Operation, RangeRead, Reads

#: Without MULTI, a read that is torn so often is done in smaller parts.
_TORN = 4
#: So many times a read whose bytes are not there is done again while others write.
_DOUBTS = 4
#: So many reads that nobody wrote between have to follow one that somebody did, before the version
#: is no longer asked for at both ends.
_WARY = 16


@dataclass(frozen=True)
class Plan:
    """What one read needs of the server.

    Attributes:
        reads: byte ranges, with the buffers that they land in.
        values: paths of non-tensor entries, whose bytes are given to ``finish``.
        finish: turns them and the filled buffers into the result.
        meanwhile: what can be made of the result before any byte of it is there.
    """

    reads: Reads
    values: Sequence[str]
    finish: Callable[[list[bytes | None]], Any]
    meanwhile: Callable[[], None] | None = None

    @property
    def several(self) -> bool:
        """Whether it takes more than one command."""
        first = self.reads.first(1)
        # A long one is asked for in pieces, unless it is a whole string of a Valkey.
        if first and (len(first[0].ranges) > 1 or len(first[0].into) > PIECE_BYTES):
            return True
        return len(first) + len(self.values) > 1 or len(self.reads.first(2)) > 1


def fetch(handle: Handle, make: Callable[[], Operation[Plan]]) -> Operation[Any]:
    """Read what ``make`` plans, from one version of the store. One round trip if nobody writes.

    The version is read after the ranges. Where it is the one that was seen last, nobody has written
    since. Where it is another, the read is done again, and from then on, until nobody has written
    for a while, the version is read before the ranges too: where it changed between the two, the
    read is done again, in a transaction if the user may. The schema token in it tells whether the
    plan was made from metadata that another handle has changed.

    Raises:
        Contended: writers came between too often.
        CorruptEntry: an entry is shorter than its metadata says.
        EntryNotFound: the server lost an entry.
    """
    doubts, torn = _DOUBTS, 0
    for _ in range(ATTEMPTS):
        if not handle.cache:
            yield from handle.reload()
        state, known = handle.state, handle.state.tokens
        plan = yield from make()
        if handle.state is not state:
            continue  # another thread read it anew while this one planned
        together = torn > 0
        atomic = together and handle.may_transact
        stamp = None
        if handle.wary > 0 and not atomic and plan.several:
            stamp = _stamp(handle, len(known.version))
        after: list[tuple[Arg, ...]] = [("GET", handle.names.data(p)) for p in plan.values]
        after.append(handle.ask_version)
        try:
            replies = yield Fetch(plan.reads, after, atomic, together, stamp, plan.meanwhile)
        except AccessDenied:
            if not atomic:
                raise
            handle.may_transact = False
            del plan  # before the next one takes as much memory
            continue
        except (CorruptEntry, EntryNotFound) as error:
            # The metadata may be what is wrong: look once more before it is said aloud.
            if not doubts:
                yield from _look_for(handle, plan, error)
                raise
            del plan
            yield from handle.reload()
            doubts = doubts - 1 if handle.state.tokens != known else 0
            continue
        # Against what was known when this read was planned: another thread may know more by now.
        verdict = _SOUND
        if replies[-1] != known.version:
            alone = atomic or not plan.several
            verdict = _verdict(handle, state, known, replies[-1], stamp, alone=alone)
        elif stamp is not None:
            handle.wary -= 1
        if verdict is _SOUND:
            return plan.finish(replies[:-1])
        del plan
        if verdict is _STALE:
            yield from handle.reload()
        elif stamp is not None:
            torn += 1
            if torn >= _TORN and not handle.may_transact:
                break
    advice = "" if handle.may_transact else "let the user use MULTI and EXEC, or "
    raise Contended(
        f"{handle.location}: other writers came between every attempt of this read; {advice}read "
        "fewer rows at once"
    )


_SOUND, _STALE, _WRITTEN = "sound", "stale", "written"


def _verdict(
    handle: Handle,
    state: Known,
    known: Tokens,
    version: object,
    stamp: RangeRead | None,
    *,
    alone: bool,
) -> str:
    """Say what another version behind the ranges than the known one means, and remember it.

    ``alone`` is what was read by one command, or in a transaction: nobody can come between.
    """
    if not isinstance(version, bytes) or not known.describes(version):
        return _STALE
    state.tokens = Tokens(version, known.schema)
    if alone:
        return _SOUND
    handle.wary = _WARY
    return _SOUND if stamp is not None and stamp.into.tobytes() == version else _WRITTEN


def _stamp(handle: Handle, size: int) -> RangeRead:
    """Read the version, before what is planned."""
    before = np.empty(size, np.uint8)
    what = ("__tdio_version__", handle.location)
    return RangeRead(handle.names.version, one_range(0, size), before, what)


def _look_for(handle: Handle, plan: Plan, error: Exception) -> Operation[None]:
    """A range without bytes: say that the entry is cut short where its key is there."""
    keys = list(dict.fromkeys(read.key for read in plan.reads))
    (found,) = yield Commands([("EXISTS", *keys)])
    if isinstance(error, EntryNotFound) and found == len(keys):
        raise CorruptEntry(f"{error}; its data is shorter than its metadata says") from error
