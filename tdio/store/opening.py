"""Stores of either kind by their id: opened, and deleted."""

from __future__ import annotations

from typing import Any

from tdio.store.connecting import locate
from tdio.store.creating import delete_at
from tdio.store.handle import Handle
from tdio.store.lazy import LazyStackedTensorDictStore
from tdio.store.plain import TensorDictStore


def open_store(
    *,
    td_id: str,
    prefix: str = "tensordict",
    device: Any = None,
    backend: str = "redis",
    cache_metadata: bool = True,
    allow_pickle: bool = False,
    **connection: Any,
) -> Any:
    """Open a store of either kind. One round trip; writes nothing.

    Args:
        td_id: id of the store.
        prefix: namespace of its keys.
        device: device of the tensors that reads return; None takes the stored one.
        backend: a name of the server's kind, as in the constructor.
        cache_metadata: keep keys, shapes and offset tables, as in the constructor.
        allow_pickle: read and write pickled values, as in the constructor.
        **connection: ``host``, ``port``, ``db``, ``unix_socket_path``, ``client`` and arguments
            of ``redis.Redis``.

    Returns:
        A ``TensorDictStore`` or a ``LazyStackedTensorDictStore``.

    Raises:
        StoreNotFound: no such store.
        IncompleteStore: its writer has not finished, or died.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tdio import TensorDictStore, delete_store, open_store
        >>> from tdio.server import embedded_server
        >>> with embedded_server() as server:
        ...     connection = server.connection_kwargs
        ...     data = TensorDict(x=torch.arange(3), batch_size=[3])
        ...     td_id = TensorDictStore.from_tensordict(data, **connection).td_id
        ...     value = open_store(td_id=td_id, **connection)[1]["x"].item()
        ...     delete_store(td_id=td_id, **connection)
        >>> value
        1
    """
    location = locate(prefix=prefix, td_id=td_id, **connection)
    handle = Handle.open(location, cache=cache_metadata, allow_pickle=allow_pickle)
    kind = LazyStackedTensorDictStore if handle.lazy else TensorDictStore
    return kind._wrap(handle, device, backend)


def delete_store(
    *, td_id: str, prefix: str = "tensordict", backend: str = "redis", **connection: Any
) -> None:
    """Delete a store from the server, also one whose upload was never finished.

    Args:
        td_id: id of the store.
        prefix: namespace of its keys.
        backend: as in the constructor.
        **connection: as in ``TensorDictStore.from_store``.

    Raises:
        StoreNotFound: no such store.
    """
    delete_at(locate(prefix=prefix, td_id=td_id, **connection))
