"""Which version of a store there is now."""

from __future__ import annotations

from tdio.store.handle import Handle
from tdio.wire.reading import token_items
from tdio.wire.requests import Commands, Operation


def current_version(handle: Handle) -> bytes:
    """Return the token that every write of tdio replaces. One round trip.

    Empty for a store that tdio has never written to.
    """

    def look() -> Operation[bytes]:
        version, _ = yield Commands(token_items(handle.names))
        return bytes(version)

    return handle.client.read(look)
