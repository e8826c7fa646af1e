"""The arguments that every constructor shares, turned into a location on a server."""

from __future__ import annotations

import uuid
from typing import Any

from tdio.errors import UnsupportedValue
from tdio.store.handle import Location
from tdio.transport.address import Address
from tdio.transport.fake import MemoryServer
from tdio.wire.names import Names


def locate(
    *,
    host: str = "localhost",
    port: int = 6379,
    db: int = 0,
    unix_socket_path: str | None = None,
    prefix: str = "tensordict",
    client: Any = None,
    td_id: str | None = None,
    **redis_kwargs: Any,
) -> Location:
    """Return where a store lies.

    Args:
        host: host name of the server.
        port: port of the server.
        db: database number.
        unix_socket_path: path of a Unix socket; ``host`` and ``port`` are then ignored.
        prefix: namespace of the keys.
        client: a ``redis.Redis`` or ``redis.asyncio.Redis`` whose server to use; connections of
            our own are opened to it with its settings. Or a ``MemoryServer``.
        td_id: id of the store; None makes a new random one.
        **redis_kwargs: further arguments of ``redis.Redis``: ``username``, ``password``, ``ssl``,
            ``socket_timeout`` (seconds without a byte, 10 by default),
            ``socket_connect_timeout`` (seconds, 0.8 by default), ...

    Raises:
        TypeError: ``client`` is neither of the two; a URL.
    """
    if "url" in redis_kwargs or "://" in str(host):
        raise TypeError(
            "a URL is no argument here: pass host=, port=, db=, password=, or "
            "client=redis.Redis.from_url(...)"
        )
    address: Address | MemoryServer
    if isinstance(client, MemoryServer):
        address = client
    elif client is None:
        address = Address(host, port, db, unix_socket_path, redis_kwargs)
    else:
        address = Address.of_client(client)
        address.options.update(redis_kwargs)
    if td_id is None:
        td_id = str(uuid.uuid4())
    if not isinstance(td_id, str) or not td_id:
        raise UnsupportedValue(f"td_id= takes the id of a store, a string, not {td_id!r}")
    return Location(address, Names(prefix, td_id))
