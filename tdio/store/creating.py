"""Making and deleting a whole store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdio.errors import CorruptEntry, EntryMismatch
from tdio.store.committing import check_sizes, learn
from tdio.store.handle import Handle, Location
from tdio.transport.client import Client
from tdio.wire import uploading
from tdio.wire.changes import new_tokens
from tdio.wire.reading import StoreInfo, Tokens


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
    run(check_sizes(handle, puts))
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
    learn(handle, handle.state, {put.path: put.spec for put in puts}, {}, tokens)
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


def delete_at(location: Location) -> None:
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
