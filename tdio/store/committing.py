"""Writes: what is to be changed, in one transaction, again where another writer came between."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tdio.errors import ServerTimeout
from tdio.layout.levels import Level
from tdio.layout.paths import below, parents
from tdio.layout.spec import LeafSpec
from tdio.store.handle import ATTEMPTS, CLEARED, Edit, Handle, Known
from tdio.wire import script, uploading
from tdio.wire.changes import (
    STREAM_BYTES,
    Change,
    Drop,
    PutTensor,
    PutValue,
    level_writes,
    look_at,
    new_tokens,
)
from tdio.wire.reading import Spec, Tokens
from tdio.wire.requests import Arg, Commands, Operation, Pause

#: Every server takes this much, as no limit can be set lower; it is asked for only above.
_ANY_SERVER_BYTES = 1024 * 1024
#: After so many lost attempts a writer asks for a turn, which ends by itself after so long.
_PATIENCE = 4
_TURN_MS = 1000
_WAIT_S = 0.002
_MAX_WAITS = 5000
_DONE, _LOST, _WAIT = "done", "lost", "wait"


def commit(handle: Handle, make: Callable[[], Operation[Edit]]) -> Operation[None]:
    """Do what ``make`` says, in one transaction; again where another writer came between.

    Two round trips; one for a small write to rows that exist.

    Raises:
        EntryTooLarge: above the server's string limit; nothing was sent.
        EntryNotFound: an entry to be changed is gone.
        ServerTimeout: other writers came between too often.
    """
    mine = b""
    lost = waits = 0
    while lost < ATTEMPTS and waits < _MAX_WAITS:
        if lost == _PATIENCE and not mine:
            mine = yield from _ask_for_turn(handle)
        if not handle.cache:
            yield from handle.reload()
        state = handle.state
        edit = yield from handle.doubting(make)
        if handle.state is not state:
            continue  # it was read anew while this was planned
        changes = [*edit.changes, *_displaced(handle, edit.changes)]
        if not changes and not edit.levels:
            if state.tokens == CLEARED:
                yield from handle.reload()
            return
        outcome = None
        if handle.may_script and not edit.levels and not mine:
            outcome = yield from _at_once(handle, state, changes)
        if outcome is None:
            outcome = yield from _in_two(handle, state, edit, changes, mine)
        if outcome is _DONE:
            return
        if outcome is _WAIT:
            waits += 1
            yield Pause(_WAIT_S)
        else:
            lost += 1
            yield from handle.reload()
    raise ServerTimeout(
        f"{handle.location}: other writers came between {lost} times, and had their turn for "
        f"{waits * _WAIT_S:.1f} s"
    )


def _ask_for_turn(handle: Handle) -> Operation[bytes]:
    """Ask the other writers to wait: one that loses again and again would never be done.

    A writer that has just lost must look anew, and one that has won is faster by a round trip.
    """
    mine = secrets.token_hex(8).encode()
    (taken,) = yield Commands([("SET", handle.names.turn, mine, "NX", "PX", _TURN_MS)])
    return mine if taken else b""


def _in_two(
    handle: Handle, state: Known, edit: Edit, changes: Sequence[Change], mine: bytes
) -> Operation[str]:
    """Look under a watch, then write: a handle may not know what others have done meanwhile."""
    yield from check_sizes(handle, changes)
    request, counts = look_at(handle.names, changes)
    _, schema, turn, exists, *replies = yield request
    if turn is not None and turn != mine:
        yield Commands([("UNWATCH",)])
        return _WAIT
    if schema != state.tokens.schema or not exists:
        # Keys or shapes changed, or the store is gone: what is known is read again first.
        yield Commands([("UNWATCH",)])
        return _LOST
    return (yield from _execute(handle, state, edit, changes, counts, replies, mine))


def _at_once(handle: Handle, state: Known, changes: Sequence[Change]) -> Operation[str | None]:
    """Do a small write in one round trip; return what came of it, None where it may not.

    Raises:
        EntryNotFound: an entry is shorter than its metadata says.
    """
    tokens = new_tokens(state.tokens, schema=False)
    arguments = script.arguments(handle.names, state.tokens, tokens.version, changes)
    if arguments is None:
        return None
    (reply,) = yield Commands([("EVALSHA", script.SHA, *arguments)], tolerant=True)
    if isinstance(reply, Exception) and str(reply).startswith("NOSCRIPT"):
        (reply,) = yield Commands([("EVAL", script.SOURCE, *arguments)], tolerant=True)
    if isinstance(reply, Exception):
        # No right to, or no scripts here: the transaction says what is wrong, if anything is.
        handle.may_script = False
        return None
    told = isinstance(reply, list) and list(map(type, reply)) == [int, int]
    if told and 0 < reply[0] <= len(changes):
        number, held = reply
        changes[number - 1].write(handle.names, state.info, [held], str(handle.location))
    if reply != 0:
        return _WAIT if reply == script.WAIT else _LOST
    learn(handle, state, {}, {}, tokens)
    return _DONE


def _execute(
    handle: Handle,
    state: Known,
    edit: Edit,
    changes: Sequence[Change],
    counts: Sequence[int],
    replies: list[Any],
    mine: bytes,
) -> Operation[str]:
    """Send the transaction; return what came of it."""
    where = str(handle.location)
    items: list[tuple[Arg, ...]] = []
    specs: dict[str, Spec | None] = {}
    at = 0
    for change, count in zip(changes, counts, strict=True):
        written, spec = change.write(handle.names, state.info, replies[at : at + count], where)
        at += count
        items += written
        specs[change.path] = spec
    items += level_writes(handle.names, edit.levels)
    moved = bool(edit.levels) or any(
        not _same(spec, state.specs.get(path)) for path, spec in specs.items()
    )
    known, tokens = state.tokens, new_tokens(state.tokens, schema=moved)
    items.append(("SET", handle.names.version, tokens.version))
    if tokens.schema != known.schema:
        items.append(("SET", handle.names.schema, tokens.schema))
    if mine:
        items.append(("DEL", handle.names.turn))
    for change in changes:
        if isinstance(change, PutTensor) and change.nbytes > STREAM_BYTES:
            yield from uploading.put_data(handle.names, change)
    done = yield Commands(items, atomic=True)
    if done is None:
        return _LOST
    learn(handle, state, specs, edit.levels, tokens)
    return _DONE


def _displaced(handle: Handle, changes: Sequence[Change]) -> list[Drop]:
    """Return the removal of entries that cannot be there beside the written ones."""
    gone: set[str] = set()
    for change in changes:
        if isinstance(change, Drop):
            continue
        gone |= handle.paths.intersection(parents(change.path))
        if change.path not in handle.paths:
            gone.update(f"{change.path}.{rest}" for rest in below(handle.paths, change.path))
    return [Drop(path) for path in sorted(gone - {change.path for change in changes})]


def check_sizes(handle: Handle, changes: Sequence[Change]) -> Operation[None]:
    """Refuse entries that the server would refuse half way.

    Raises:
        EntryTooLarge: an entry is above the server's string limit.
    """
    puts = [c for c in changes if isinstance(c, (PutTensor, PutValue))]
    if max((put.nbytes for put in puts), default=0) > _ANY_SERVER_BYTES:
        limit = yield from uploading.string_limit()
        uploading.check_sizes(puts, limit, str(handle.location))


def learn(
    handle: Handle,
    state: Known,
    specs: Mapping[str, Spec | None],
    levels: Mapping[str, Level | None],
    tokens: Tokens,
) -> None:
    """Take note of what a write has changed, of the metadata that it was made from."""
    fresh = Known(state.info)
    fresh.tokens = tokens
    fresh.paths = {*state.paths, *(path for path, spec in specs.items() if spec is not None)}
    fresh.paths -= {path for path, spec in specs.items() if spec is None}
    fresh.specs = {**state.specs, **{p: s for p, s in specs.items() if s is not None}}
    if levels:
        kept = {**state.info.levels, **levels}
        fresh.info = replace(
            state.info, levels={k: level for k, level in kept.items() if level is not None}
        )
    if handle.state is state:
        # Where another thread has read it anew meanwhile, its next read finds it stale.
        handle.state = fresh


def _same(a: Spec | None, b: Spec | None) -> bool:
    """Return whether two specs state the same metadata."""
    if a is b:
        return True
    if not isinstance(a, LeafSpec) or not isinstance(b, LeafSpec) or a.ragged or b.ragged:
        if isinstance(a, LeafSpec) and isinstance(b, LeafSpec) and a.ragged and b.ragged:
            assert a.shapes is not None
            return a.dtype == b.dtype and np.array_equal(a.shapes, b.shapes)  # type: ignore[arg-type]
        return type(a) is type(b) and not isinstance(a, LeafSpec) and a == b
    return a == b
