"""Operations that read: what a store is, what its entries are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tdio.errors import (
    CorruptEntry,
    EntryNotFound,
    IncompleteStore,
    ServerTimeout,
    StoreNotFound,
    TdioError,
)
from tdio.layout.levels import Level, decode_levels
from tdio.layout.paths import parents
from tdio.layout.spec import LeafSpec, decode
from tdio.layout.values import ValueSpec, decode_fields
from tdio.wire.names import Names
from tdio.wire.requests import Arg, Commands, Operation

#: The highest version of tdio's additions that this code understands.
FORMAT_VERSION = 1


#: What an entry is: a tensor, or a non-tensor value.
Spec = LeafSpec | ValueSpec
TOKEN_BYTES = 8
_ATTEMPTS = 100


@dataclass(frozen=True)
class Tokens:
    """What the version keys held; equal tokens mean that no write of tdio came between.

    Attributes:
        version: replaced by every write; empty for a store that tdio has never written to. Its
            second half is the schema: a read that looks at the version has looked at both.
        schema: replaced by a write that changes keys, shapes, dtypes, kinds or levels. In a key of
            its own, which writers watch. Where the two disagree, as after an eviction, readers go
            by the half and writers by the key; the next write makes them agree.
    """

    version: bytes = b""
    schema: bytes = b""

    def describes(self, version: object) -> bool:
        """Whether the schema has not changed up to a version that was read later."""
        if not isinstance(version, bytes) or len(version) <= TOKEN_BYTES:
            # None, or one that does not tell.
            return version == self.version
        return version[TOKEN_BYTES:] == self.version[TOKEN_BYTES:]


def token_items(names: Names) -> list[tuple[Arg, ...]]:
    """Return the commands whose replies ``Tokens`` takes. Bounded: the keys may be hostile."""
    return [("GETRANGE", key, 0, 2 * TOKEN_BYTES - 1) for key in (names.version, names.schema)]


def _tokens(version: object, schema: object) -> Tokens:
    if not isinstance(version, bytes) or not isinstance(schema, bytes):
        raise TypeError(f"a version was expected, the server answered {version!r:.80}")
    return Tokens(version, schema)


@dataclass(frozen=True)
class StoreInfo:
    """What the global keys of a store say.

    Attributes:
        batch: the batch size, the stack dim included.
        stack: position of the stack dim in ``batch`` for a lazy stack, None for a plain store.
        device: ``str(device)`` or "".
        tensorclass: the path of the tensorclass that was stored, or "".
        paths: the paths of all leaf entries.
        levels: the levels that are not the default, by path.
        tokens: the version keys, read before everything else.
    """

    batch: tuple[int, ...]
    stack: int | None = None
    device: str = ""
    tensorclass: str = ""
    paths: frozenset[str] = field(default_factory=frozenset, repr=False)
    levels: Mapping[str, Level] = field(default_factory=dict, repr=False)
    tokens: Tokens = field(default_factory=Tokens, repr=False)

    @property
    def count(self) -> int:
        """Number of elements of a lazy stack."""
        assert self.stack is not None
        return self.batch[self.stack]

    @property
    def inner(self) -> tuple[int, ...]:
        """Batch size of one element of a lazy stack."""
        assert self.stack is not None
        return self.batch[: self.stack] + self.batch[self.stack + 1 :]

    @property
    def nested(self) -> tuple[int, ...]:
        """What the batch sizes of nested levels start with: of the store, or of one element."""
        return self.batch if self.stack is None else self.inner


def _text(raw: object) -> str:
    if raw is None:
        return ""
    if not isinstance(raw, bytes):
        raise TypeError(f"a text was expected, the server answered {raw!r:.80}")
    return raw.decode("utf-8", "replace")


def find(
    names: Names, where: str, paths: Sequence[str] = ()
) -> Operation[tuple[StoreInfo, dict[str, Spec]]]:
    """Find out what lies under ``names``, in one round trip.

    Returns also the specs of those of ``paths`` that are still there; none of them where the
    schema changed meanwhile.

    Raises:
        StoreNotFound: nothing.
        IncompleteStore: an upload that has not finished.
        CorruptEntry: global keys that contradict each other.
    """
    suffixes: tuple[str, ...] = (
        "__batch_size__",
        "__device__",
        "__tensorclass__",
        "__type__",
        "__count__",
        "__stack_dim__",
        "__inner_batch_size__",
    )
    items = token_items(names)
    items += [("GET", names.key(suffix)) for suffix in suffixes]
    items += [("HGETALL", names.commit), ("HGETALL", names.levels)]
    items += [("SMEMBERS", names.registry), ("SMEMBERS", names.values)]
    count = len(items)
    metas = _meta_items(names, paths) if paths else []
    replies = yield Commands([*items, *metas])
    try:
        info = _info_of(names, where, replies[:count])
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, TdioError):
            raise
        raise CorruptEntry(f"{where}: its global keys are damaged: {error}") from error
    if not metas or replies[-1] != info.tokens.schema:
        return info, {}
    return info, {
        path: spec
        for path, spec in _specs_of(info, paths, replies[count:], where).items()
        if spec is not None and path in info.paths
    }


def _info_of(names: Names, where: str, replies: list[Any]) -> StoreInfo:
    version, schema, *raw, commit, levels, registry, values = replies
    batch, device, tensorclass, kind, count, stack_dim, inner = map(_text, raw)
    # A RESP2 server sends a hash as a flat list, a RESP3 one as a dict.
    _check_commit(_pairs(commit), where, names)
    if raw[0] is None and kind != "lazy_stack":
        raise StoreNotFound(
            f"{where} holds no store; check td_id=, prefix=, host=, port= and db=, and that "
            "the server was not restarted or emptied"
        )
    stack = None
    if kind == "lazy_stack":
        sizes = list(_sizes(inner))
        stack = int(stack_dim or 0)
        stack += len(sizes) + 1 if stack < 0 else 0
        if int(count) < 0 or not 0 <= stack <= len(sizes):
            raise ValueError(f"count {count}, stack_dim {stack_dim}")
        sizes.insert(stack, int(count))
    else:
        sizes = list(_sizes(batch))
    paths = {path.decode() for path in (*_members(registry), *_members(values))}
    # As for the reference, "x" is the nested level where "x" and "x.y" are both there.
    paths -= {parent for path in paths for parent in parents(path)}
    info = StoreInfo(
        tuple(sizes), stack, device, tensorclass, frozenset(paths), {}, _tokens(version, schema)
    )
    if not levels:
        return info
    return replace(info, levels=decode_levels(_pairs(levels), info.batch, info.nested, where))


def _members(reply: object) -> list[bytes]:
    """Return a set reply: a list from a RESP2 server, a set from a RESP3 one."""
    if not isinstance(reply, (list, set)) or not all(isinstance(m, bytes) for m in reply):
        raise TypeError(f"a set was expected, the server answered {reply!r:.80}")
    return list(reply)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = json.loads(text)
    if not isinstance(sizes, list) or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"{text[:80]!r} is not a list of sizes")
    return tuple(sizes)


def _check_commit(commit: dict[str, str], where: str, names: Names) -> None:
    if not commit:
        return
    version = commit.get("version", "1")
    sound = version.isascii() and version.isdecimal() and len(version) < 10
    if not sound or int(version) > FORMAT_VERSION:
        raise CorruptEntry(f"{where} was written with format {version[:20]}; upgrade tdio")
    if commit.get("state") != "complete":
        raise IncompleteStore(
            f"{where} is incomplete: its writer has not finished, or died. Wait for it, or delete "
            f"the rest with tdio.delete_store(td_id={names.td_id!r}, ...) and write it again"
        )


def _pairs(reply: object) -> dict[str, str]:
    """Return a hash reply as text; bytes that are not UTF-8 become replacement characters."""
    if isinstance(reply, dict):
        items = list(reply.items())
    elif isinstance(reply, list) and len(reply) % 2 == 0:
        items = list(zip(reply[::2], reply[1::2], strict=True))
    else:
        raise TypeError(f"a hash was expected, the server answered {reply!r:.80}")
    return {_text(k): _text(v) for k, v in items}


def load_specs(
    names: Names, info: StoreInfo, paths: Sequence[str], where: str
) -> Operation[dict[str, Spec]]:
    """Read the metadata of entries, in one round trip.

    The shapes and the offsets of a ragged entry are two keys: they are read again where the
    schema changed between.

    Raises:
        EntryNotFound: an entry has no metadata.
        CorruptEntry: metadata that makes no sense.
        ServerTimeout: other writers came between too often.
    """
    items = _meta_items(names, paths)
    for _ in range(_ATTEMPTS):
        before, *replies = yield Commands([items[-1], *items])
        if before == replies[-1]:
            break
    else:
        raise ServerTimeout(f"{where}: its shapes changed at each of {_ATTEMPTS} attempts to read")
    specs: dict[str, Spec] = {}
    for path, spec in _specs_of(info, paths, replies, where).items():
        if spec is None:
            raise EntryNotFound(f"{where}: the entry {path!r} is gone from the server")
        specs[path] = spec
    return specs


def _meta_items(names: Names, paths: Sequence[str]) -> list[tuple[Arg, ...]]:
    """Return the commands that read metadata and offset tables, and at last the schema token."""
    items: list[tuple[Arg, ...]] = [("HGETALL", names.meta(path)) for path in paths]
    items += [("GET", names.offsets(path)) for path in paths]
    return [*items, token_items(names)[1]]


def _specs_of(
    info: StoreInfo, paths: Sequence[str], replies: Sequence[Any], where: str
) -> dict[str, Spec | None]:
    metas, tables = replies[: len(paths)], replies[len(paths) : 2 * len(paths)]
    return {
        path: load_entry(info, path, meta, table, where)
        for path, meta, table in zip(paths, metas, tables, strict=True)
    }


def spec_of(
    info: StoreInfo, path: str, fields: Mapping[str, str], table: bytes | None, where: str
) -> Spec:
    """Return what an entry is; of a kind that was written over another, the reference's choice.

    Raises:
        CorruptEntry: metadata that makes no sense.
    """
    where = f"{where}, entry {path!r}"
    if fields.get("is_non_tensor") == "1":
        return decode_fields(path, fields, where)
    return decode(path, fields, where=where, batch=info.batch, stack=info.stack, offsets=table)


def load_entry(
    info: StoreInfo, path: str, meta: object, table: bytes | None, where: str
) -> Spec | None:
    """Return what an entry is from raw replies, or None where it is gone.

    Raises:
        CorruptEntry: metadata that makes no sense.
    """
    try:
        fields = _pairs(meta)
    except TypeError as error:
        raise CorruptEntry(f"{where}, entry {path!r}: {error}") from error
    if table is not None and not isinstance(table, bytes):
        raise CorruptEntry(f"{where}, entry {path!r}: its offset table is {table!r:.80}")
    return spec_of(info, path, fields, table, where) if fields else None
