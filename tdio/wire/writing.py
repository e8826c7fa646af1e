"""Operations that write: claim, upload, commit, write rows, delete.

Entries become visible last: the data goes first, then one MULTI/EXEC registers it together with
the commit mark. A store whose writer died is refused as incomplete, never read as zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tdio.errors import (
    CorruptEntry,
    EntryNotFound,
    EntryTooLarge,
    ServerTimeout,
    StoreExists,
    StoreNotFound,
)
from tdio.layout.plan import Ranges
from tdio.layout.spec import LeafSpec, encode
from tdio.wire.names import GLOBAL_SUFFIXES, Names
from tdio.wire.reading import FORMAT_VERSION, StoreInfo
from tdio.wire.requests import Arg, Body, Commands, Operation

#: A string above this goes up in several SETRANGE: servers close a client whose query buffer
#: passes 1 GiB (client-query-buffer-limit).
STREAM_BYTES = 512 * 1024 * 1024
_DEFAULT_LIMIT_BYTES = 512 * 1024 * 1024
_DRAGONFLY_LIMIT_BYTES = 256 * 1024 * 1024
#: Attempts of a write that must read first, while others write to the same entry.
_ATTEMPTS = 100


@dataclass(frozen=True)
class Upload:
    """One entry to upload: its spec and its bytes, produced while they are sent.

    ``body(start, stop)`` yields the bytes ``[start, stop)`` of the data string.
    """

    spec: LeafSpec
    body: Callable[[int, int], Body]


def claim(names: Names, where: str) -> Operation[None]:
    """Reserve a new ``td_id``.

    Raises:
        StoreExists: something is there already.
    """
    markers = ("__batch_size__", "__type__", "__keys__", "__tdio_commit__")
    (found,) = yield Commands([("EXISTS", *(names.key(marker) for marker in markers))])
    claimed = 0
    if not found:
        claimed, _ = yield Commands(
            [
                ("HSETNX", names.commit, "state", "writing"),
                ("HSETNX", names.commit, "version", FORMAT_VERSION),
            ],
            atomic=True,
        )
    if not claimed:
        raise StoreExists(
            f"{where} already holds a store, and is left as it is; open it with from_store(td_id="
            f"{names.td_id!r}), or delete it with tdio.delete_store first"
        )


def string_limit() -> Operation[tuple[int, str]]:
    """Return the server's limit for one string in bytes, and the name of the limit."""
    config, server = yield Commands(
        [("CONFIG", "GET", "proto-max-bulk-len"), ("INFO", "server")], tolerant=True
    )
    if isinstance(server, bytes) and b"dragonfly_version" in server:
        return _DRAGONFLY_LIMIT_BYTES, "Dragonfly's limit for one string, 256 MiB"
    if isinstance(config, dict):
        config = [part for item in config.items() for part in item]
    if isinstance(config, list) and len(config) == 2 and bytes(config[1]).isdigit():
        return int(config[1]), f"proto-max-bulk-len, {int(config[1])} bytes"
    return _DEFAULT_LIMIT_BYTES, "proto-max-bulk-len, taken as its default of 512 MiB"


def check_sizes(specs: Sequence[LeafSpec], limit: tuple[int, str], where: str) -> None:
    """Refuse entries above the string limit before the first byte is sent.

    Raises:
        EntryTooLarge: naming the entry and the limit.
    """
    for spec in specs:
        if spec.nbytes > limit[0]:
            raise EntryTooLarge(
                f"{where}: the entry {spec.path!r} has {spec.nbytes} bytes, more than one string "
                f"may have on this server ({limit[1]}); raise the limit or split the entry"
            )


def announce(names: Names, specs: Sequence[LeafSpec]) -> Operation[None]:
    """Note which entries an upload will write, so that a half-written one can be deleted."""
    if specs:
        yield Commands([("SADD", names.planned, *(spec.path for spec in specs))])


def put_data(names: Names, upload: Upload) -> Operation[None]:
    """Send the bytes of one entry, in one SET where the server takes it."""
    key, nbytes = names.data(upload.spec.path), upload.spec.nbytes
    yield Commands([("SET", key, upload.body(0, min(nbytes, STREAM_BYTES)))])
    for start in range(STREAM_BYTES, nbytes, STREAM_BYTES):
        stop = min(nbytes, start + STREAM_BYTES)
        yield Commands([("SETRANGE", key, start, upload.body(start, stop))])


def register(
    names: Names, specs: Sequence[LeafSpec], *, lazy: bool, globals_of: StoreInfo | None = None
) -> Operation[None]:
    """Make entries visible, in one transaction; with ``globals_of`` also the store itself."""
    items: list[tuple[Arg, ...]] = []
    for spec in specs:
        items += _meta_items(names, spec, lazy=lazy)
    if specs:
        items.append(("SADD", names.registry, *(spec.path for spec in specs)))
    if globals_of is not None:
        items += [("SET", names.key(k), v) for k, v in _global_keys(globals_of).items()]
        items.append(("HSET", names.commit, "state", "complete"))
        items.append(("DEL", names.planned))
    if items:
        yield Commands(items, atomic=True)


def _global_keys(info: StoreInfo) -> dict[str, str]:
    keys = {"__device__": info.device}
    if info.stack is None:
        keys["__batch_size__"] = json.dumps(list(info.batch))
        if info.tensorclass:
            keys["__tensorclass__"] = info.tensorclass
        return keys
    return keys | {
        "__type__": "lazy_stack",
        "__count__": str(info.count),
        "__stack_dim__": str(info.stack),
        "__inner_batch_size__": json.dumps(list(info.inner)),
    }


def _meta_items(names: Names, spec: LeafSpec, *, lazy: bool) -> list[tuple[Arg, ...]]:
    """Replace the metadata and the offset table of an entry.

    DEL first: no field of a former entry of another kind may stay.
    """
    items: list[tuple[Arg, ...]] = [("DEL", names.meta(spec.path), names.offsets(spec.path))]
    if spec.offsets is not None:
        table = spec.offsets.astype("<i8").tobytes()
        items.append(("SET", names.offsets(spec.path), memoryview(table)))
    fields: list[Arg] = [part for pair in encode(spec, lazy=lazy).items() for part in pair]
    return [*items, ("HSET", names.meta(spec.path), *fields)]


def set_entry(names: Names, upload: Upload, *, lazy: bool) -> Operation[None]:
    """Write or replace one whole entry: data, metadata and registration in one transaction."""
    spec = upload.spec
    data: list[tuple[Arg, ...]] = []
    if spec.nbytes > STREAM_BYTES:
        yield from put_data(names, upload)
    else:
        data.append(("SET", names.data(spec.path), upload.body(0, spec.nbytes)))
    meta = _meta_items(names, spec, lazy=lazy)
    yield Commands([*data, *meta, ("SADD", names.registry, spec.path)], atomic=True)


@dataclass(frozen=True)
class RangeWrite:
    """Bytes to put into an entry: ``payload`` (uint8 ``[n]``) cut at ``ranges``, in order."""

    spec: LeafSpec
    ranges: Ranges
    payload: torch.Tensor


def write_ranges(names: Names, writes: Sequence[RangeWrite], where: str) -> Operation[None]:
    """Write byte ranges of existing entries, all of them in one transaction.

    The lengths are looked at first, so that an entry that was deleted or lost is not brought back
    as zeros around the written rows.

    Raises:
        EntryNotFound: the server no longer holds an entry whole.
    """
    keys = [names.data(write.spec.path) for write in writes if len(write.payload)]
    if not keys:
        return
    items: list[tuple[Arg, ...]] = []
    for write in writes:
        view = write.payload.numpy().data
        ends = np.cumsum(write.ranges.sizes)
        begins = (ends - write.ranges.sizes).tolist()
        rows = zip(write.ranges.starts.tolist(), begins, ends.tolist(), strict=True)
        key = names.data(write.spec.path)
        items += [("SETRANGE", key, start, view[begin:end]) for start, begin, end in rows]
    lengths: list[tuple[Arg, ...]] = [("STRLEN", key) for key in keys]
    found = yield Commands(lengths)
    expected = [write.spec.nbytes for write in writes if len(write.payload)]
    for key, length, size in zip(keys, found, expected, strict=True):
        if length < size:
            raise EntryNotFound(
                f"{where}: {key} holds {length} bytes where its metadata says {size}; it was "
                "deleted, evicted or replaced: open the store again"
            )
    yield Commands(items, atomic=True)


def patch_ragged(
    names: Names,
    spec: LeafSpec,
    position: int,
    load: Callable[[dict[str, bytes], bytes | None], LeafSpec],
    patch: Callable[[LeafSpec, bytes], tuple[LeafSpec, bytes]],
    where: str,
) -> Operation[LeafSpec]:
    """Replace an entry by what ``patch`` makes of its present spec and bytes.

    Optimistic: the keys are watched, and the whole is done again where another writer came
    between, so no writer's element is lost.

    Raises:
        EntryNotFound: the entry is gone.
        ServerTimeout: other writers came between too often.
    """
    data, table, meta = names.entry(spec.path)
    for _ in range(_ATTEMPTS):
        replies = yield Commands(
            [("WATCH", data, table, meta), ("HGETALL", meta), ("GET", table), ("GET", data)]
        )
        _, raw, offsets, blob = replies
        fields = raw if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))
        if not fields:
            raise EntryNotFound(f"{where}: the entry {spec.path!r} is gone from the server")
        now = load({k.decode(): v for k, v in fields.items()}, offsets)
        blob = blob or b""
        if len(blob) < now.nbytes:
            raise CorruptEntry(
                f"{where}: the entry {spec.path!r} holds {len(blob)} bytes, its metadata says "
                f"{now.nbytes}"
            )
        new, payload = patch(now, blob)
        changed = _meta_items(names, new, lazy=True)
        done = yield Commands([("SET", data, memoryview(payload)), *changed], atomic=True)
        if done is not None:
            return new
    raise ServerTimeout(f"{where}: other writers came between {_ATTEMPTS} times")


def delete_entries(names: Names, paths: Sequence[str]) -> Operation[None]:
    """Delete entries and their registration, in one transaction."""
    if paths:
        keys = [key for path in paths for key in names.entry(path)]
        yield Commands([("DEL", *keys), ("SREM", names.registry, *paths)], atomic=True)


def delete_store(names: Names, where: str, *, missing_ok: bool) -> Operation[None]:
    """Delete a store, complete or not, and everything tdio keeps with it.

    Raises:
        StoreNotFound: nothing is there, and ``missing_ok`` is not set.
    """
    registered, planned, exists = yield Commands(
        [
            ("SMEMBERS", names.registry),
            ("SMEMBERS", names.planned),
            ("EXISTS", *(names.key(suffix) for suffix in GLOBAL_SUFFIXES)),
        ]
    )
    if not exists and not missing_ok:
        raise StoreNotFound(f"{where} holds no store to delete")
    paths = {path.decode() for path in (*registered, *planned)}
    keys = [key for path in paths for key in names.entry(path)]
    # The marks go last: a deletion that is cut off can be repeated.
    if keys:
        yield Commands([("UNLINK", *keys)])
    yield Commands([("UNLINK", *(names.key(suffix) for suffix in GLOBAL_SUFFIXES))])
