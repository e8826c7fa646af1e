"""``TensorDictStore``: a tensordict on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tdio._td import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    _is_tensorclass,
    _register_tensor_class,
    _unravel_key_to_tuple,
    imported_tensorclass,
    is_tensor_collection,
)
from tdio.errors import UnsupportedValue, WrongStoreKind
from tdio.layout.dtypes import check_plain
from tdio.layout.paths import check_key
from tdio.store._local import no_server
from tdio.store._stored import Stored
from tdio.store.connecting import locate
from tdio.store.creating import create
from tdio.store.flat import Flat, flatten
from tdio.store.handle import Edit, Handle
from tdio.store.uploading import progress_bar, puts_of, upload_zeros
from tdio.store.writer import (
    check_batch,
    into_entry,
)
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Operation


@no_server(
    "copy a local one: TensorDictStore.from_tensordict(TensorDict.{name}(...), host=..., port=...)"
)
class TensorDictStore(Stored):
    """A tensordict whose entries live on a server that speaks the Redis protocol.

    Each leaf is one string of raw bytes on the server, readable by ``tensordict.store`` 0.15. A
    read brings only the rows that were asked for, in one round trip for all leaves, into one
    storage. The data stays on the server after ``close``; delete it with ``clear_redis``.

    Args:
        backend: a label for the kind of server, shown by ``repr``.
        host: host name of the server.
        port: port of the server.
        db: database number.
        unix_socket_path: path of a Unix socket; ``host`` and ``port`` are then ignored.
        prefix: namespace of the store's keys.
        batch_size: leading dims that all entries share, ``[*B]``; None is ``[]``.
        device: device of the tensors that reads return; None: CPU tensors, no device.
        client: a ``redis.Redis`` or ``redis.asyncio.Redis`` whose server and settings to use.
        td_id: id of the new store; None makes a random one. An existing id is refused.
        cache_metadata: keep keys, shapes and dtypes in this process. Every read checks that they
            still hold; ``keys()`` and ``repr`` show another handle's new keys after ``refresh()``.
        allow_pickle: write values that JSON cannot hold as pickles, and read those of others.
            A pickle can run any code when it is read.
        **redis_kwargs: further arguments of ``redis.Redis``. Defaults differ from redis-py's in
            ``socket_connect_timeout=0.8`` and ``socket_timeout=10`` (seconds), and nothing is
            retried on a closed port.

    Raises:
        StoreExists: ``td_id`` is taken; the store there is left as it is.
        ServerUnavailable: no server at the address.
        AuthenticationFailed: wrong user or password.

    Example:
        >>> import torch
        >>> from tdio import TensorDictStore
        >>> from tdio.server import embedded_server
        >>> with embedded_server() as server:
        ...     store = TensorDictStore(batch_size=[100], **server.connection_kwargs)
        ...     store["obs"] = torch.zeros(100, 84)
        ...     store[3:5]["obs"].shape
        torch.Size([2, 84])
    """

    def __init__(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        batch_size: Sequence[int] | torch.Size | None = None,
        device: Any = None,
        client: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        allow_pickle: bool = False,
        **redis_kwargs: Any,
    ) -> None:
        batch = tuple(batch_size) if batch_size is not None else ()
        location = locate(
            host=host,
            port=port,
            db=db,
            unix_socket_path=unix_socket_path,
            prefix=prefix,
            client=client,
            td_id=td_id,
            **redis_kwargs,
        )
        info = StoreInfo(batch, None, "" if device is None else str(torch.device(device)))
        self._create(location, info, backend, cache=cache_metadata, allow_pickle=allow_pickle)

    # ---- construction

    @classmethod
    def from_tensordict(
        cls,
        td: TensorDictBase,
        *,
        backend: str = "redis",
        prefix: str = "tensordict",
        device: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        allow_pickle: bool = False,
        progress: bool = False,
        **connection: Any,
    ) -> Any:
        """Copy a tensordict, tensorclass or lazy stack to the server.

        The store becomes visible when all of it has arrived; a writer that dies half way leaves
        one that is refused as incomplete. Memory beside ``td`` is at most 32 MiB.

        Args:
            td: what to copy, batch size ``[*B]``. Tensors are stored detached, from any device.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: device of the tensors that reads return; None takes that of ``td``.
            td_id: id of the new store; None makes a random one.
            cache_metadata: as in the constructor.
            allow_pickle: as in the constructor.
            progress: show a bar of the bytes sent.
            **connection: ``host``, ``port``, ``db``, ``unix_socket_path``, ``client`` and
                arguments of ``redis.Redis``.

        Returns:
            A ``TensorDictStore``; for a lazy stack a ``LazyStackedTensorDictStore``; for a
            tensorclass an instance of that class over a store.

        Raises:
            StoreExists: ``td_id`` is taken.
            EntryTooLarge: a leaf is above the server's string limit; nothing was sent.
            UnsupportedValue: not a tensordict, a tensor that is not dense, a value that JSON cannot
                hold, or a key with a "."; nothing was sent.
        """
        if isinstance(td, LazyStackedTensorDict):
            from tdio.store.lazy import LazyStackedTensorDictStore

            return LazyStackedTensorDictStore.from_lazy_stack(
                td,
                backend=backend,
                prefix=prefix,
                device=device,
                td_id=td_id,
                cache_metadata=cache_metadata,
                allow_pickle=allow_pickle,
                progress=progress,
                **connection,
            )
        if not is_tensor_collection(td):
            raise UnsupportedValue(
                f"from_tensordict takes a tensordict, not a {type(td).__name__}; use from_dict, or "
                "TensorDict(..., batch_size=[...])"
            )
        kind = type(td) if _is_tensorclass(type(td)) else None
        device = td.device if device is None else torch.device(device)
        info = StoreInfo(
            tuple(td.batch_size),
            None,
            "" if device is None else str(device),
            "" if kind is None else f"{kind.__module__}.{kind.__qualname__}",
        )
        location = locate(prefix=prefix, td_id=td_id, **connection)
        flat = flatten(td)
        for path, tensor in flat.tensors.items():
            check_plain(tensor, f"the entry {path!r}")
        info = replace(info, levels=flat.levels)
        with progress_bar(sum(t.nbytes for t in flat.tensors.values()), progress) as report:
            puts = puts_of(flat, report, allow_pickle=allow_pickle, where=str(location))
            handle = create(location, info, puts, cache=cache_metadata, allow_pickle=allow_pickle)
        store = cls._wrap(handle, None, backend)
        return store if kind is None else kind._from_tensordict(store)

    @classmethod
    def from_dict(
        cls,
        input_dict: Any,
        *,
        auto_batch_size: bool = False,
        batch_size: Sequence[int] | torch.Size | None = None,
        batch_dims: int | None = None,
        names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Copy a dict of tensors (nested dicts allowed) to the server.

        Args:
            input_dict: the entries, each ``[*B, *]``.
            auto_batch_size: take the largest leading shape that all entries share.
            batch_size: the batch size ``[*B]``.
            batch_dims: at most so many dims for ``auto_batch_size``.
            names: names of the batch dims.
            **kwargs: as in ``from_tensordict``.
        """
        if is_tensor_collection(input_dict):
            td = input_dict
        else:
            td = TensorDict.from_dict(
                input_dict,
                auto_batch_size=auto_batch_size or batch_dims is not None,
                batch_size=batch_size,
                batch_dims=batch_dims,
            )
        if names is not None:
            td.names = names
        return cls.from_tensordict(td, **kwargs)

    @classmethod
    def from_schema(
        cls,
        schema: dict[Any, tuple[Sequence[int], torch.dtype]],
        *,
        batch_size: Sequence[int] | torch.Size | None = None,
        backend: str = "redis",
        prefix: str = "tensordict",
        device: Any = None,
        td_id: str | None = None,
        **connection: Any,
    ) -> TensorDictStore:
        """Make a store of zeros, to be filled by index.

        Args:
            schema: ``{key: (shape below the batch dims, dtype)}``.
            batch_size: the batch size ``[*B]``.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: as in the constructor.
            td_id: id of the new store; None makes a random one.
            **connection: as in ``from_tensordict``.

        Raises:
            EntryTooLarge: an entry is above the server's string limit; nothing was sent.

        Example:
            >>> import torch
            >>> from tdio import TensorDictStore
            >>> from tdio.server import embedded_server
            >>> with embedded_server() as server:
            ...     schema = {"obs": ((84,), torch.float32)}
            ...     connection = server.connection_kwargs
            ...     store = TensorDictStore.from_schema(schema, batch_size=[100], **connection)
            ...     store[3:5] = store[3:5].apply(lambda obs: obs + 1)
            ...     store["obs"].sum(-1)[2:5].tolist()
            [0.0, 84.0, 84.0]
        """
        batch = tuple(batch_size) if batch_size is not None else ()
        info = StoreInfo(batch, None, "" if device is None else str(torch.device(device)))
        uploads = [
            upload_zeros(check_key(_unravel_key_to_tuple(key)), (*batch, *shape), dtype)
            for key, (shape, dtype) in schema.items()
        ]
        location = locate(prefix=prefix, td_id=td_id, **connection)
        return cls._wrap(create(location, info, uploads), None, backend)

    @classmethod
    def from_store(
        cls,
        *,
        td_id: str,
        backend: str = "redis",
        prefix: str = "tensordict",
        device: Any = None,
        tensorclass_cls: type | str | None = None,
        cache_metadata: bool = True,
        allow_pickle: bool = False,
        **connection: Any,
    ) -> Any:
        """Open a store that is on the server. Writes nothing there. One round trip.

        Args:
            td_id: id of the store.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: device of the tensors that reads return; None takes the stored one.
            tensorclass_cls: a tensorclass to wrap the store in; None takes the stored one if its
                class has been imported. The server's word alone never imports a module.
            cache_metadata: as in the constructor.
            allow_pickle: as in the constructor.
            **connection: as in ``from_tensordict``.

        Raises:
            StoreNotFound: no such store; the message says where it was looked for.
            WrongStoreKind: the id is that of a lazy stack.
            IncompleteStore: its writer has not finished, or died.
        """
        location = locate(prefix=prefix, td_id=td_id, **connection)
        handle = Handle.open(location, cache=cache_metadata, allow_pickle=allow_pickle)
        if handle.lazy:
            handle.close()
            raise WrongStoreKind(
                f"{location} is a lazy stack; open it with LazyStackedTensorDictStore.from_store"
            )
        store = cls._wrap(handle, device, backend)
        kind = _tensorclass(tensorclass_cls, handle.info.tensorclass)
        return store if kind is None else kind._from_tensordict(store)

    # ---- hooks

    def _putting(self, flat: Flat, inplace: bool) -> Operation[Edit]:
        handle = self._handle
        tensors = flat.tensors
        if inplace:
            specs = yield from handle.load(tensors)
            tensors = {path: into_entry(value, specs[path]) for path, value in tensors.items()}
        for path, value in tensors.items():
            check_batch(path, value, self._batch_above(flat, path), handle.location)
        whole = Flat(tensors, flat.values, flat.levels)
        options: Any = {"allow_pickle": handle.allow_pickle, "where": str(handle.location)}
        return Edit(puts_of(whole, **options), flat.levels)


def _tensorclass(asked: type | str | None, stored: str) -> Any:
    """Return the tensorclass to wrap a store in: imported classes only."""
    if isinstance(asked, type):
        return asked
    name = asked or stored
    return imported_tensorclass(name) if name else None


_register_tensor_class(TensorDictStore)
