"""From addresses and keys to endpoints; the transport is imported when it is first needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tdio.transport.endpoint import Endpoint

#: How long ``connect`` tries, and ``listen`` waits, in seconds.
CONNECT_TIMEOUT_S = 30.0
LISTEN_TIMEOUT_S = 300.0


def ucx() -> Any:
    """Return the module that moves messages over UCX.

    Raises:
        TransportUnavailable: ucxx is not installed.
    """
    from tdio.transport import ucx

    return ucx


def endpoint_of(endpoint: Any) -> Endpoint:
    """Return an endpoint of tdio; an ``ucxx.Endpoint`` is adopted."""
    if isinstance(endpoint, Endpoint):
        return endpoint
    from tdio.transport.ucx_adopted import adopt

    return adopt(endpoint)


def read_key(auth_key: bytes | str | Path | None) -> bytes | None:
    """Return the key; of a file the content without white space around it.

    Raises:
        ValueError: it is empty.
    """
    if auth_key is None:
        return None
    key = auth_key if isinstance(auth_key, bytes) else Path(auth_key).read_bytes().strip()
    if not key:
        raise ValueError("auth_key is empty")
    return key
