"""A store as seen by this process: its address, what its entries are, reads and writes.

The tensordict classes on top of it know nothing of the wire; a dataset reads batches from it
without the cost of a tensordict subclass. Its methods that return an ``Operation`` do no I/O
themselves: a sync or an async client runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from tdio.errors import AccessDenied, CorruptEntry, EntryMismatch, EntryNotFound, ServerTimeout
from tdio.layout.levels import Level
from tdio.layout.paths import below, parents
from tdio.layout.plan import one_range
from tdio.layout.spec import LeafSpec
from tdio.transport.address import Address
from tdio.transport.client import Client
from tdio.transport.fake import MemoryServer
from tdio.wire import reading, script, uploading
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
from tdio.wire.names import Names
from tdio.wire.reading import Spec, StoreInfo, Tokens, token_items
from tdio.wire.requests import Arg, Commands, Fetch, Operation, RangeRead

T = TypeVar("T")
#: Attempts of a read or write that others come between.
ATTEMPTS = 100
#: Without MULTI, a read that is torn so often is done in smaller parts.
_TORN = 4
#: Every server takes this much; the limit is asked for only above it.
_ANY_SERVER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Location:
    """Which store: server, prefix and id. Pickles as an address."""

    address: Address | MemoryServer
    names: Names

    def __str__(self) -> str:
        return f"td_id={self.names.td_id!r} at {self.address} (prefix={self.names.prefix!r})"


class Contended(ServerTimeout):
    """Writers came between again and again; a read of fewer rows may succeed."""


@dataclass(frozen=True)
class Plan:
    """What one read needs of the server.

    Attributes:
        reads: byte ranges, with the buffers that they land in.
        values: paths of non-tensor entries, whose bytes are given to ``finish``.
        finish: turns them and the filled buffers into the result.
    """

    reads: list[RangeRead]
    values: Sequence[str]
    finish: Callable[[list[bytes | None]], Any]


@dataclass(frozen=True)
class Edit:
    """What one write does, all of it or nothing.

    Attributes:
        changes: at most one for each entry.
        levels: levels to set; None takes one away.
    """

    changes: Sequence[Change]
    levels: Mapping[str, Level | None] = field(default_factory=dict)


class _Known:
    """What a handle knows of a store, all of it read under one schema token.

    A handle that learns that it is stale drops the whole of it for a new one, so that another
    thread's plan never mixes two.
    """

    def __init__(self, info: StoreInfo):
        self.info = info
        self.tokens = info.tokens
        self.paths = set(info.paths)
        self.specs: dict[str, Spec] = {}


class Handle:
    """One store. Metadata is read once; the schema token of each read tells when it is stale.

    Attributes:
        location: server, prefix and id.
        client: runs the operations.
        cache: whether metadata is kept.
        allow_pickle: whether pickled values are read and written.
    """

    def __init__(
        self,
        location: Location,
        info: StoreInfo,
        *,
        cache: bool = True,
        allow_pickle: bool = False,
        client: Client | None = None,
    ):
        self.location = location
        self.client = client or Client(location.address)
        self.cache = cache
        self.allow_pickle = allow_pickle
        self._may_transact = True
        self._may_script = True
        self._tokens = token_items(location.names)
        self._state = _Known(info)

    @property
    def info(self) -> StoreInfo:
        """Batch size, kind, device and levels."""
        return self._state.info

    @property
    def paths(self) -> set[str]:
        """The paths of all leaf entries, as last seen."""
        return self._state.paths

    @classmethod
    def open(cls, location: Location, *, cache: bool = True, allow_pickle: bool = False) -> Handle:
        """Open a store for reading or writing. Writes nothing. One round trip.

        Raises:
            StoreNotFound: there is none under this id; the message says where it was looked for.
            IncompleteStore: its writer has not finished.
        """
        client = Client(location.address)
        info = client.read(lambda: reading.find(location.names, str(location)))
        return cls(location, info, cache=cache, allow_pickle=allow_pickle, client=client)

    @property
    def names(self) -> Names:
        """The names of the store's keys."""
        return self.location.names

    @property
    def lazy(self) -> bool:
        """Whether this is a lazy stack."""
        return self.info.stack is not None

    # ---- metadata

    def reload(self) -> Operation[None]:
        """Read the global keys and the registry again; forget the entries' metadata."""
        self._state = _Known((yield from reading.find(self.names, str(self.location))))

    def refresh(self) -> None:
        """Run ``reload``. One round trip."""
        self.client.read(self.reload)

    def known(self) -> set[str]:
        """Return the paths of all leaf entries. One round trip where metadata is not kept."""
        if not self.cache:
            self.refresh()
        return self.paths

    def load(self, paths: Iterable[str]) -> Operation[dict[str, Spec]]:
        """Return the specs of entries; what is not kept is read, in one or two round trips.

        Raises:
            EntryNotFound: an entry that is not registered.
        """
        wanted = list(paths)
        if not self.cache:
            yield from self.reload()
        state = self._state
        missing = [path for path in wanted if path not in state.specs]
        if missing:
            unknown = set(missing) - state.paths
            if unknown:
                raise EntryNotFound(
                    f"the store {self.location} has no entry {sorted(unknown)[0]!r}; it has "
                    f"{sorted(state.paths)[:20]}"
                )
            found = yield from reading.load_specs(
                self.names, state.info, missing, str(self.location)
            )
            state.specs.update(found)
        return {path: state.specs[path] for path in wanted}

    def specs(self, paths: Iterable[str]) -> dict[str, Spec]:
        """Run ``load``."""
        wanted = list(paths)
        return self.client.read(lambda: self.load(wanted))

    # ---- reads

    def fetch(self, make: Callable[[], Operation[Plan]]) -> Operation[Any]:
        """Read what ``make`` plans, from one version of the store. One round trip.

        The version token is read before and after the ranges: where it changed between, the read
        is done again, in a transaction if the user may. The schema token tells whether the plan
        was made from metadata that another handle has changed meanwhile.

        Raises:
            Contended: writers came between too often, and the user may not use MULTI.
            CorruptEntry: an entry is shorter than its metadata says.
            EntryNotFound: the server lost an entry.
        """
        doubted, torn = False, 0
        for _ in range(ATTEMPTS):
            state, known = self._state, self._state.tokens
            plan = yield from make()
            if self.cache and self._state is not state:
                continue  # another thread reloaded while this one planned
            if not self.cache:
                state, known = self._state, self._state.tokens
            atomic = torn > 0 and self._may_transact
            if not plan.reads and not plan.values:
                return plan.finish([])
            stamp = np.empty(len(known.version), np.uint8)
            several = len(plan.values) + sum(len(read.ranges.starts) for read in plan.reads) > 1
            stamped = bool(len(stamp)) and several and not atomic
            reads = plan.reads
            if stamped:
                whole = one_range(0, len(stamp))
                first = RangeRead(self.names.version, whole, stamp, ("", self.location))
                reads = [first, *reads]
            after: list[tuple[Arg, ...]] = [("GET", self.names.data(p)) for p in plan.values]
            try:
                replies = yield Fetch(reads, [*after, *self._tokens], atomic)
            except AccessDenied:
                if not atomic:
                    raise
                self._may_transact = False
                continue
            except (CorruptEntry, EntryNotFound) as error:
                # The metadata may be what is wrong: look once more before it is said aloud.
                if doubted:
                    yield from self._look_for(plan, error)
                    raise
                yield from self.reload()
                doubted = self._state.tokens.schema == known.schema
                continue
            version, schema = replies[-2:]
            if schema != known.schema or (version != known.version and not known.version):
                yield from self.reload()
            elif stamped and stamp.tobytes() != version:
                torn += 1
                if torn >= _TORN and not self._may_transact:
                    break
            else:
                return plan.finish(replies[:-2])
        raise Contended(
            f"{self.location}: other writers came between every attempt of this read; let the user "
            "use MULTI and EXEC, or read fewer rows at once"
        )

    def _look_for(self, plan: Plan, error: Exception) -> Operation[None]:
        """A range without bytes: say that the entry is cut short where its key is there."""
        keys = list(dict.fromkeys(read.key for read in plan.reads))
        (found,) = yield Commands([("EXISTS", *keys)])
        if isinstance(error, EntryNotFound) and found == len(keys):
            raise CorruptEntry(f"{error}; its data is shorter than its metadata says") from error

    # ---- writes

    def commit(self, make: Callable[[], Operation[Edit]]) -> Operation[None]:
        """Do what ``make`` says, in one transaction; again where another writer came between.

        One round trip; one more where something must be looked at first.

        Raises:
            EntryTooLarge: above the server's string limit; nothing was sent.
            EntryNotFound: an entry to be changed is gone.
            ServerTimeout: other writers came between too often.
        """
        where = str(self.location)
        for _ in range(ATTEMPTS):
            state = self._state
            edit = yield from make()
            if self._state is not state:
                if self.cache:
                    continue
                state = self._state
            changes = [*edit.changes, *self._displaced(edit.changes)]
            if not changes and not edit.levels:
                return
            if self._may_script and not edit.levels:
                done = yield from self._at_once(state, changes)
                if done is not None:
                    if done:
                        return
                    continue
            yield from self._check_sizes(changes)
            request, counts = look_at(self.names, changes)
            replies: list[Any] = [] * len(changes)
            looked = any(counts)
            if looked:
                _, schema, *replies = yield request
                if schema != state.tokens.schema:
                    yield Commands([("UNWATCH",)])
                    yield from self.reload()
                    continue
            if (yield from self._execute(state, edit, changes, counts, replies, looked)):
                return
        raise ServerTimeout(f"{where}: other writers came between {ATTEMPTS} times")

    def _at_once(self, state: _Known, changes: Sequence[Change]) -> Operation[bool | None]:
        """Do a small write in one round trip; return whether it went through, None if it may not.

        Raises:
            EntryNotFound: an entry is shorter than its metadata says.
        """
        tokens = new_tokens(state.tokens, schema=False)
        arguments = script.arguments(self.names, state.tokens, tokens.version, changes)
        if arguments is None:
            return None
        (reply,) = yield Commands([("EVALSHA", script.SHA, *arguments)], tolerant=True)
        if isinstance(reply, Exception) and str(reply).startswith("NOSCRIPT"):
            (reply,) = yield Commands([("EVAL", script.SOURCE, *arguments)], tolerant=True)
        if isinstance(reply, Exception):
            # No right to, or no scripts here: the transaction says what is wrong, if anything is.
            self._may_script = False
            return None
        if isinstance(reply, list):
            number, held = reply
            changes[number - 1].write(self.names, state.info, [held], str(self.location))
        if reply != 0:
            yield from self.reload()
            return False
        self._learn(state, {}, {}, tokens)
        return True

    def _execute(
        self,
        state: _Known,
        edit: Edit,
        changes: Sequence[Change],
        counts: Sequence[int],
        replies: list[Any],
        looked: bool,
    ) -> Operation[bool]:
        """Send the transaction; return whether it went through."""
        where = str(self.location)
        items: list[tuple[Arg, ...]] = [
            ("GETRANGE", self.names.schema, 0, 2 * reading.TOKEN_BYTES - 1)
        ]
        specs: dict[str, Spec | None] = {}
        at = 0
        for change, count in zip(changes, counts, strict=True):
            written, spec = change.write(self.names, state.info, replies[at : at + count], where)
            at += count
            items += written
            specs[change.path] = spec
        items += level_writes(self.names, edit.levels)
        moved = bool(edit.levels) or any(
            not _same(spec, state.specs.get(path)) for path, spec in specs.items()
        )
        known, tokens = state.tokens, new_tokens(state.tokens, schema=moved)
        items.append(("SET", self.names.version, tokens.version))
        if tokens.schema != known.schema:
            items.append(("SET", self.names.schema, tokens.schema))
        for change in changes:
            if isinstance(change, PutTensor) and change.nbytes > STREAM_BYTES:
                yield from uploading.put_data(self.names, change)
        done = yield Commands(items, atomic=True)
        if done is None:
            return False
        self._learn(state, specs, edit.levels, tokens)
        if not looked and done[0] != known.schema:
            # Another handle changed keys or shapes before this write: see what is there now.
            yield from self._reconcile(changes)
        return True

    def _reconcile(self, changes: Sequence[Change]) -> Operation[None]:
        """Take away what the write displaced, as far as this handle did not know of it."""
        yield from self.reload()
        items: list[tuple[Arg, ...]] = []
        for change in self._displaced(changes):
            items += change.write(self.names, self.info, (), "")[0]
        tokens = new_tokens(Tokens(), schema=True)
        items += [("SET", self.names.version, tokens.version)]
        items += [("SET", self.names.schema, tokens.schema)]
        yield Commands(items, atomic=True)
        yield from self.reload()

    def _displaced(self, changes: Sequence[Change]) -> list[Drop]:
        """Return the removal of entries that cannot be there beside the written ones."""
        gone: set[str] = set()
        for change in changes:
            if isinstance(change, Drop):
                continue
            gone |= self.paths.intersection(parents(change.path))
            if change.path not in self.paths:
                gone.update(f"{change.path}.{rest}" for rest in below(self.paths, change.path))
        return [Drop(path) for path in sorted(gone - {change.path for change in changes})]

    def _check_sizes(self, changes: Sequence[Change]) -> Operation[None]:
        puts = [c for c in changes if isinstance(c, (PutTensor, PutValue))]
        if max((put.nbytes for put in puts), default=0) > _ANY_SERVER_BYTES:
            limit = yield from uploading.string_limit()
            uploading.check_sizes(puts, limit, str(self.location))

    def _learn(
        self,
        state: _Known,
        specs: Mapping[str, Spec | None],
        levels: Mapping[str, Level | None],
        tokens: Tokens,
    ) -> None:
        fresh = _Known(state.info)
        fresh.tokens = tokens
        fresh.paths = {*state.paths, *(path for path, spec in specs.items() if spec is not None)}
        fresh.paths -= {path for path, spec in specs.items() if spec is None}
        fresh.specs = {**state.specs, **{p: s for p, s in specs.items() if s is not None}}
        if levels:
            kept = {**state.info.levels, **levels}
            fresh.info = replace(
                state.info, levels={k: level for k, level in kept.items() if level is not None}
            )
        if self._state is state:
            # Where another thread has read it anew meanwhile, its next read finds it stale.
            self._state = fresh

    def write(self, make: Callable[[], Operation[Edit]]) -> None:
        """Run ``commit``."""
        self.client.write(self.commit(make))

    def put(self, edit: Edit) -> None:
        """Run ``commit`` for an edit that depends on nothing."""
        self.write(lambda: _just(edit))

    def clear(self) -> None:
        """Delete the whole store."""
        where = str(self.location)
        self.client.write(uploading.delete_store(self.names, where, missing_ok=True))
        self._state = _Known(replace(self.info, paths=frozenset()))

    def close(self) -> None:
        """Close the connections; the data stays on the server."""
        self.client.close()

    # ---- pickling: an address and what is known, no connection

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "client"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.client = Client(self.location.address)


def _just(edit: Edit) -> Operation[Edit]:
    """An operation without a round trip."""
    return edit
    yield  # makes this a generator


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


def create(
    location: Location, info: StoreInfo, puts: Sequence[uploading.Put] = (), **options: Any
) -> Handle:
    """Create a store with its entries; they become visible last.

    Raises:
        StoreExists: the id is taken.
        EntryTooLarge: an entry is above the server's string limit; nothing was sent.
        EntryMismatch: a batch size with a negative number.
    """
    where, names = str(location), location.names
    if any(type(n) is not int or n < 0 for n in info.batch):
        raise EntryMismatch(f"{list(info.batch)} is not a batch size: sizes are whole numbers >= 0")
    handle = Handle(location, info, **options)
    run = handle.client.write
    run(handle._check_sizes(puts))
    run(uploading.claim(names, where))
    tokens = new_tokens(Tokens(), schema=True)
    try:
        run(uploading.announce(names, puts))
        for put in puts:
            run(uploading.put_data(names, put))
        run(uploading.publish(names, puts, info, tokens))
    except BaseException:
        _undo(location)
        raise
    handle._learn(handle._state, {put.path: put.spec for put in puts}, {}, tokens)
    return handle


def _undo(location: Location) -> None:
    """Remove what a failed upload left, as far as the server can still be reached."""
    client = Client(location.address)
    try:
        client.write(uploading.delete_store(location.names, str(location), missing_ok=True))
    except ConnectionError:
        pass  # The store stays marked as incomplete, and is refused as such.
    finally:
        client.close()


def delete_store(location: Location) -> None:
    """Delete a store, complete or not."""
    client = Client(location.address)
    try:
        client.write(uploading.delete_store(location.names, str(location), missing_ok=False))
    finally:
        client.close()


def device_of(info: StoreInfo, override: Any, where: object = "the store") -> torch.device | None:
    """Return the device that reads return: the caller's, else the one that was stored."""
    if override is not None:
        return torch.device(override)
    try:
        return torch.device(info.device) if info.device else None
    except RuntimeError as error:
        raise CorruptEntry(
            f"{where}: {info.device[:80]!r} is stored as the device of its tensors, which torch "
            "does not know; pass device="
        ) from error
