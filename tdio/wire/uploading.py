"""Operations that create and delete a whole store.

Entries become visible last: the data goes first, then one MULTI/EXEC registers it together with
the commit mark. A store whose writer died is refused as incomplete, never read as zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tdio.errors import EntryTooLarge, StoreExists, StoreNotFound
from tdio.layout.levels import encode_level
from tdio.wire.changes import STREAM_BYTES, PutTensor, PutValue, token_writes
from tdio.wire.names import GLOBAL_SUFFIXES, Names
from tdio.wire.reading import FORMAT_VERSION, StoreInfo, Tokens
from tdio.wire.requests import Arg, Commands, Operation

_DEFAULT_LIMIT_BYTES = 512 * 1024 * 1024
_DRAGONFLY_LIMIT_BYTES = 256 * 1024 * 1024

Put = PutTensor | PutValue


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


def check_sizes(puts: Iterable[Put], limit: tuple[int, str], where: str) -> None:
    """Refuse entries above the string limit before the first byte is sent.

    Raises:
        EntryTooLarge: naming the entry and the limit.
    """
    for put in puts:
        if put.nbytes > limit[0]:
            raise EntryTooLarge(
                f"{where}: the entry {put.path!r} has {put.nbytes} bytes, more than one string "
                f"may have on this server ({limit[1]}); raise the limit or split the entry"
            )


def announce(names: Names, puts: Sequence[Put]) -> Operation[None]:
    """Note which entries an upload will write, so that a half-written one can be deleted."""
    if puts:
        yield Commands([("SADD", names.planned, *(put.path for put in puts))])


def put_data(names: Names, put: Put) -> Operation[None]:
    """Send the bytes of one entry, in one SET where the server takes it."""
    key = names.data(put.path)
    yield Commands([("SET", key, put.body(0, min(put.nbytes, STREAM_BYTES)))])
    for start in range(STREAM_BYTES, put.nbytes, STREAM_BYTES):
        stop = min(put.nbytes, start + STREAM_BYTES)
        yield Commands([("SETRANGE", key, start, put.body(start, stop))])


def publish(names: Names, puts: Sequence[Put], info: StoreInfo, tokens: Tokens) -> Operation[None]:
    """Make a store and its entries visible, in one transaction."""
    items: list[tuple[Arg, ...]] = []
    for put in puts:
        items += put.meta(names, info)
    items += [("SET", names.key(k), v) for k, v in _global_keys(info).items()]
    if info.levels:
        fields = [part for item in info.levels.items() for part in (item[0], encode_level(item[1]))]
        items.append(("HSET", names.levels, *fields))
    items += token_writes(names, tokens)
    items.append(("HSET", names.commit, "state", "complete"))
    items.append(("DEL", names.planned))
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


def delete_store(names: Names, where: str, *, missing_ok: bool) -> Operation[None]:
    """Delete a store, complete or not, and everything tdio keeps with it.

    Raises:
        StoreNotFound: nothing is there, and ``missing_ok`` is not set.
    """
    registered, values, planned, exists = yield Commands(
        [
            ("SMEMBERS", names.registry),
            ("SMEMBERS", names.values),
            ("SMEMBERS", names.planned),
            ("EXISTS", *(names.key(suffix) for suffix in GLOBAL_SUFFIXES)),
        ]
    )
    if not exists and not missing_ok:
        raise StoreNotFound(f"{where} holds no store to delete")
    paths = {path.decode() for path in (*registered, *values, *planned)}
    keys = [key for path in paths for key in names.entry(path)]
    # The marks go last: a deletion that is cut off can be repeated.
    if keys:
        yield Commands([("UNLINK", *keys)])
    yield Commands([("UNLINK", *(names.key(suffix) for suffix in GLOBAL_SUFFIXES))])
