"""Operations that read: what a store is, what its entries are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tdio.errors import (
    CorruptEntry,
    EntryNotFound,
    IncompleteStore,
    StoreNotFound,
    UnsupportedValue,
)
from tdio.layout.spec import LeafSpec, decode
from tdio.wire.names import Names
from tdio.wire.requests import Arg, Commands, Operation

#: The highest version of tdio's additions that this code understands.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoreInfo:
    """What the global keys of a store say.

    Attributes:
        batch: the batch size, the stack dim included.
        stack: position of the stack dim in ``batch`` for a lazy stack, None for a plain store.
        device: ``str(device)`` or "".
        tensorclass: the path of the tensorclass that was stored, or "".
        paths: the paths of all leaf entries.
    """

    batch: tuple[int, ...]
    stack: int | None = None
    device: str = ""
    tensorclass: str = ""
    paths: frozenset[str] = field(default_factory=frozenset, repr=False)

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


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode("utf-8", "replace")


def find(names: Names, where: str) -> Operation[StoreInfo]:
    """Find out what lies under ``names``, in one round trip.

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
    )
    suffixes += ("__stack_dim__", "__inner_batch_size__")
    items: list[tuple[Arg, ...]] = [("GET", names.key(suffix)) for suffix in suffixes]
    items += [("HGETALL", names.commit), ("SMEMBERS", names.registry)]
    *raw, commit, registry = yield Commands(items)
    batch, device, tensorclass, kind, count, stack_dim, inner = map(_text, raw)
    # A RESP2 server sends a hash as a flat list, a RESP3 one as a dict.
    _check_commit(_pairs(commit), where, names)
    paths = frozenset(path.decode() for path in registry)
    try:
        if kind == "lazy_stack":
            sizes = list(_sizes(inner))
            stack = int(stack_dim or 0)
            stack += len(sizes) + 1 if stack < 0 else 0
            if int(count) < 0 or not 0 <= stack <= len(sizes):
                raise ValueError(f"count {count}, stack_dim {stack_dim}")
            sizes.insert(stack, int(count))
            return StoreInfo(tuple(sizes), stack, device, "", paths)
        if raw[0] is None:
            raise StoreNotFound(
                f"{where} holds no store; check td_id=, prefix=, host=, port= and db=, and that "
                "the server was not restarted or emptied"
            )
        return StoreInfo(_sizes(batch), None, device, tensorclass, paths)
    except (ValueError, TypeError) as error:
        raise CorruptEntry(f"{where}: its global keys are damaged: {error}") from error


def _sizes(text: str) -> tuple[int, ...]:
    sizes = json.loads(text)
    if not isinstance(sizes, list) or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"{text[:80]!r} is not a list of sizes")
    return tuple(sizes)


def _check_commit(commit: dict[str, str], where: str, names: Names) -> None:
    if not commit:
        return
    version = commit.get("version", "1")
    if not version.isdigit() or int(version) > FORMAT_VERSION:
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
    else:
        assert isinstance(reply, list)
        items = list(zip(reply[::2], reply[1::2], strict=True))
    return {_text(k): _text(v) for k, v in items}


def load_specs(
    names: Names, info: StoreInfo, paths: Sequence[str], where: str
) -> Operation[dict[str, LeafSpec]]:
    """Read the metadata of entries: one round trip, a second one where some are ragged.

    Raises:
        EntryNotFound: an entry has no metadata.
        UnsupportedValue: a non-tensor entry.
        CorruptEntry: metadata that makes no sense.
    """
    replies = yield Commands([("HGETALL", names.meta(path)) for path in paths])
    fields = {path: _pairs(reply) for path, reply in zip(paths, replies, strict=True)}
    for path in paths:
        if not fields[path]:
            raise EntryNotFound(f"{where}: the entry {path!r} is gone from the server")
        if fields[path].get("is_non_tensor") == "1":
            raise UnsupportedValue(
                f"{where}: the entry {path!r} is not a tensor; this version reads tensors only, "
                "select others with keys="
            )
    ragged = [
        path
        for path in paths
        if info.stack is not None and fields[path].get("homogeneous", "1") != "1"
    ]
    tables: dict[str, bytes] = {}
    if ragged:
        tables = dict(
            zip(
                ragged,
                (yield Commands([("GET", names.offsets(path)) for path in ragged])),
                strict=True,
            )
        )
    return {
        path: decode(
            path,
            fields[path],
            where=f"{where}, entry {path!r}",
            batch=info.batch,
            stack=info.stack,
            offsets=tables.get(path),
        )
        for path in paths
    }
