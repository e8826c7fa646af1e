"""What a writer does to one entry, and the transaction that does several of them at once.

A *change* says what must be looked at first (``look``), and turns the replies into commands
(``write``). ``commit`` makes any number of changes one MULTI/EXEC, together with new version
tokens, so that a reader sees all of them or none. Changes that look are optimistic: the keys and
the schema token are watched, and the whole is done again where another writer came between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tdio.errors import CorruptEntry, EntryNotFound
from tdio.layout.levels import Level, encode_level
from tdio.layout.plan import Ranges
from tdio.layout.spec import LeafSpec, encode
from tdio.layout.values import ValueSpec, value_fields
from tdio.wire.names import Names
from tdio.wire.reading import TOKEN_BYTES, Spec, StoreInfo, Tokens, load_entry
from tdio.wire.requests import Arg, Body, Commands

Items = list[tuple[Arg, ...]]
#: A string above this goes up in several SETRANGE: servers close a client whose query buffer
#: passes 1 GiB (client-query-buffer-limit).
STREAM_BYTES = 512 * 1024 * 1024


def new_tokens(now: Tokens, *, schema: bool) -> Tokens:
    """Return fresh tokens: random, so that no counter has to be read first."""
    fresh = secrets.token_bytes(TOKEN_BYTES)
    # A store that the reference wrote has none: its schema gets one with the first write.
    kept = fresh if schema or not now.schema else now.schema
    return Tokens(fresh + kept, kept)


def token_writes(names: Names, tokens: Tokens) -> Items:
    """Return the commands that set both tokens."""
    return [("SET", names.version, tokens.version), ("SET", names.schema, tokens.schema)]


def level_writes(names: Names, levels: Mapping[str, Level | None]) -> Items:
    """Return the commands that set levels; None takes one away."""
    items: Items = []
    for path, level in levels.items():
        if level is None:
            items.append(("HDEL", names.levels, path))
        else:
            items.append(("HSET", names.levels, path, encode_level(level)))
    return items


class Change:
    """A change of one entry.

    Attributes:
        path: the entry.
        watches: whether ``look`` reads what ``write`` will overwrite.
    """

    path: str
    watches: bool = False

    def look(self, names: Names) -> Items:
        """Return the commands whose replies ``write`` needs."""
        return []

    def write(
        self, names: Names, info: StoreInfo, replies: Sequence[Any], where: str
    ) -> tuple[Items, Spec | None]:
        """Return the commands, and what the entry is then (None where it is gone)."""
        raise NotImplementedError


def _registry(names: Names, info: StoreInfo, spec: Spec) -> tuple[str, str]:
    """Return the set that lists an entry of this kind, and the other one."""
    both = (names.registry, names.values)
    return both[::-1] if info.stack is not None and isinstance(spec, ValueSpec) else both


def _meta(names: Names, info: StoreInfo, spec: Spec, fields: dict[str, str]) -> Items:
    """Replace the metadata. DEL first: no field of a former entry of another kind may stay."""
    path = spec.path
    listed, other = _registry(names, info, spec)
    flat = [part for pair in fields.items() for part in pair]
    return [
        ("DEL", names.meta(path), names.offsets(path)),
        ("HSET", names.meta(path), *flat),
        ("SADD", listed, path),
        ("SREM", other, path),
    ]


def tensor_meta(names: Names, info: StoreInfo, spec: LeafSpec) -> Items:
    """Return the commands that write the metadata and the offset table of a tensor entry."""
    items = _meta(names, info, spec, encode(spec, lazy=info.stack is not None))
    if spec.offsets is not None:
        table = spec.offsets.astype("<i8").tobytes()
        items.append(("SET", names.offsets(spec.path), memoryview(table)))
    return items


@dataclass(frozen=True)
class PutTensor(Change):
    """Write or replace one whole tensor entry.

    ``body(start, stop)`` yields the bytes ``[start, stop)`` of its data while they are sent.
    """

    spec: LeafSpec
    body: Callable[[int, int], Body]

    @property
    def path(self) -> str:  # type: ignore[override]
        """The entry."""
        return self.spec.path

    @property
    def nbytes(self) -> int:
        """Bytes of the data string."""
        return self.spec.nbytes

    def meta(self, names: Names, info: StoreInfo) -> Items:
        """Return the commands that write everything but the data."""
        return tensor_meta(names, info, self.spec)

    def write(
        self, names: Names, info: StoreInfo, replies: Sequence[Any], where: str
    ) -> tuple[Items, Spec | None]:
        """Return the commands, and the new spec."""
        items = self.meta(names, info)
        if self.nbytes <= STREAM_BYTES:
            items.append(("SET", names.data(self.path), self.body(0, self.nbytes)))
        return items, self.spec


@dataclass(frozen=True)
class PutValue(Change):
    """Write or replace one whole non-tensor entry."""

    spec: ValueSpec
    blob: bytes

    @property
    def path(self) -> str:  # type: ignore[override]
        """The entry."""
        return self.spec.path

    @property
    def nbytes(self) -> int:
        """Bytes of the data string."""
        return len(self.blob)

    def body(self, start: int, stop: int) -> Body:
        """Return the bytes ``[start, stop)`` of the data."""
        return Body(stop - start, lambda: [self.blob[start:stop]])

    def meta(self, names: Names, info: StoreInfo) -> Items:
        """Return the commands that write everything but the data."""
        return _meta(names, info, self.spec, value_fields(self.spec))

    def write(
        self, names: Names, info: StoreInfo, replies: Sequence[Any], where: str
    ) -> tuple[Items, Spec | None]:
        """Return the commands, and the new spec."""
        return [*self.meta(names, info), ("SET", names.data(self.path), self.blob)], self.spec


@dataclass(frozen=True)
class Drop(Change):
    """Delete one entry."""

    path: str

    def write(
        self, names: Names, info: StoreInfo, replies: Sequence[Any], where: str
    ) -> tuple[Items, Spec | None]:
        """Return the commands."""
        return [
            ("DEL", *names.entry(self.path)),
            ("SREM", names.registry, self.path),
            ("SREM", names.values, self.path),
        ], None


@dataclass(frozen=True)
class PutRows(Change):
    """Write byte ranges of a tensor entry: ``payload`` (uint8 ``[n]``) cut at ``ranges``."""

    spec: LeafSpec
    ranges: Ranges
    payload: torch.Tensor

    @property
    def path(self) -> str:  # type: ignore[override]
        """The entry."""
        return self.spec.path

    def look(self, names: Names) -> Items:
        """Ask for the length: an entry that was lost is not brought back as zeros."""
        return [("STRLEN", names.data(self.path))] if len(self.payload) else []

    def write(
        self, names: Names, info: StoreInfo, replies: Sequence[Any], where: str
    ) -> tuple[Items, Spec | None]:
        """Return one SETRANGE for each range.

        Raises:
            EntryNotFound: the server no longer holds the entry whole.
        """
        if not replies:
            return [], self.spec
        key, size = names.data(self.path), self.spec.nbytes
        if replies[0] < size:
            raise EntryNotFound(
                f"{where}: {key} holds {replies[0]} bytes where its metadata says {size}; it was "
                "deleted, evicted or replaced: open the store again"
            )
        return [("SETRANGE", key, start, part) for start, part in self.parts()], self.spec

    def parts(self) -> list[tuple[int, memoryview]]:
        """Return the offset and the bytes of each range."""
        view = self.payload.numpy().data
        if self.ranges.single is not None:
            return [(self.ranges.single[0], view)]
        ends = np.cumsum(self.ranges.sizes)
        begins = (ends - self.ranges.sizes).tolist()
        rows = zip(self.ranges.starts.tolist(), begins, ends.tolist(), strict=True)
        return [(start, view[begin:end]) for start, begin, end in rows]


@dataclass(frozen=True)
class Patch(Change):
    """Replace an entry by what ``patch(spec, bytes)`` makes of it; no other writer is lost."""

    path: str
    patch: Callable[[Spec, bytes], PutTensor | PutValue]
    watches: bool = True

    def look(self, names: Names) -> Items:
        """Read the whole entry."""
        data, table, meta = names.entry(self.path)
        return [("HGETALL", meta), ("GET", table), ("GET", data)]

    def write(
        self, names: Names, info: StoreInfo, replies: Sequence[Any], where: str
    ) -> tuple[Items, Spec | None]:
        """Return the commands that write the patched entry.

        Raises:
            EntryNotFound: the entry is gone.
            CorruptEntry: its data is shorter than its metadata says.
        """
        meta, table, blob = replies
        now = load_entry(info, self.path, meta, table, where)
        if now is None:
            raise EntryNotFound(f"{where}: the entry {self.path!r} is gone from the server")
        blob = blob or b""
        if isinstance(now, LeafSpec) and len(blob) < now.nbytes:
            raise CorruptEntry(
                f"{where}: the entry {self.path!r} holds {len(blob)} bytes, its metadata says "
                f"{now.nbytes}"
            )
        return self.patch(now, blob).write(names, info, (), where)


def look_at(names: Names, changes: Sequence[Change]) -> tuple[Commands, list[int]]:
    """Return the round trip that watches and looks, and how many replies each change gets.

    Its first reply is that of WATCH, then come the schema token, whose turn it is, and whether
    the store is there.
    """
    keys = [names.schema]
    items: Items = [
        ("GETRANGE", names.schema, 0, 2 * TOKEN_BYTES - 1),
        ("GET", names.turn),
        ("EXISTS", names.key("__batch_size__"), names.key("__type__")),
    ]
    counts = []
    for change in changes:
        if change.watches:
            keys += names.entry(change.path)
        looks = change.look(names)
        counts.append(len(looks))
        items += looks
    return Commands([("WATCH", *keys), *items]), counts
