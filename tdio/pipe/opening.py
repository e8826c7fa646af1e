"""From addresses and keys to endpoints; the transport is imported when it is first needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def check_on_error(on_error: Any) -> None:
    """Raise ValueError where ``on_error=`` is not one of its values."""
    if on_error not in ("raise", "stop"):
        raise ValueError(f"on_error is {on_error!r}; it must be 'raise' or 'stop'")


def checked(kind: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a pipe, before anybody is waited for: its key is read.

    ``wait_timeout`` is its ``timeout``, under the name that it has where there is another one.

    Raises:
        TypeError: it has no such argument.
        ValueError: ``on_error`` is neither of its values, or the key is empty.
    """
    named = {"timeout" if name == "wait_timeout" else name: v for name, v in options.items()}
    inspect.signature(kind).bind(None, **named)
    check_on_error(named.get("on_error", "raise"))
    return {**named, "auth_key": read_key(named.get("auth_key"))}
