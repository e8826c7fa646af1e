"""``LazyStackedTensorDictStore``: a stack of tensordicts that may differ in shape, on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from tdio._td import (
    LazyStackedTensorDict,
    _register_tensor_class,
)
from tdio.errors import EntryMismatch, IndexOutOfRange, UnsupportedValue, WrongStoreKind
from tdio.layout.dtypes import check_plain
from tdio.layout.index import as_int
from tdio.store._local import no_server
from tdio.store._stack import StoredStack
from tdio.store.connecting import locate
from tdio.store.creating import create
from tdio.store.element import ElementView
from tdio.store.handle import Handle
from tdio.store.stacking import columns_of
from tdio.store.uploading import progress_bar, put_value, upload_elements
from tdio.wire.reading import StoreInfo


@no_server(
    "stack local ones: LazyStackedTensorDictStore.from_lazy_stack(lazy_stack([...]), host=...)"
)
class LazyStackedTensorDictStore(StoredStack):
    """A lazy stack of tensordicts on a server; elements may differ in the shapes of their leaves.

    ``store[i]`` is a view of element ``i`` that reads and writes on the server; a list, slice,
    mask or tensor reads a batch: a consolidated TensorDict where all entries are homogeneous,
    else a lazy stack of elements with their own shapes.

    Args:
        backend: a label for the kind of server, shown by ``repr``.
        host: host name of the server.
        port: port of the server.
        db: database number.
        unix_socket_path: path of a Unix socket; ``host`` and ``port`` are then ignored.
        prefix: namespace of the store's keys.
        count: number of elements, N.
        stack_dim: where N stands in the batch size; may be negative.
        inner_batch_size: batch size of one element.
        device: device of the tensors that reads return; None: CPU tensors, no device.
        client: a ``redis.Redis`` or ``redis.asyncio.Redis`` whose server and settings to use.
        td_id: id of the new store; None makes a random one. An existing id is refused.
        cache_metadata: keep keys, shapes and offset tables in this process.
        allow_pickle: as in ``TensorDictStore``.
        **redis_kwargs: as in ``TensorDictStore``.

    Raises:
        StoreExists: ``td_id`` is taken.
        ServerUnavailable: no server at the address.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> from tdio import TensorDictStore
        >>> from tdio.server import embedded_server
        >>> episodes = lazy_stack([TensorDict(x=torch.zeros(3)), TensorDict(x=torch.ones(5))])
        >>> with embedded_server() as server:
        ...     store = TensorDictStore.from_tensordict(episodes, **server.connection_kwargs)
        ...     store[1]["x"].shape
        torch.Size([5])
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
        count: int,
        stack_dim: int = 0,
        inner_batch_size: Sequence[int],
        device: Any = None,
        client: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        allow_pickle: bool = False,
        **redis_kwargs: Any,
    ) -> None:
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
        info = _info(count, stack_dim, tuple(inner_batch_size), device)
        self._create(location, info, backend, cache=cache_metadata, allow_pickle=allow_pickle)

    # ---- construction

    @classmethod
    def from_lazy_stack(
        cls,
        lazy_td: LazyStackedTensorDict,
        *,
        backend: str = "redis",
        prefix: str = "tensordict",
        device: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        allow_pickle: bool = False,
        progress: bool = False,
        **connection: Any,
    ) -> LazyStackedTensorDictStore:
        """Copy a lazy stack to the server; entries whose shapes differ get an offset table.

        Dims in which the elements differ are no batch dims of the store: elements of batch size
        ``[T, 3]``, each with a T of its own, come back with batch size ``[]`` and their leaves.

        Args:
            lazy_td: the stack, N elements with the same keys and dtypes.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: device of the tensors that reads return; None takes that of ``lazy_td``.
            td_id: id of the new store; None makes a random one.
            cache_metadata: as in the constructor.
            allow_pickle: as in the constructor.
            progress: show a bar of the bytes sent.
            **connection: ``host``, ``port``, ``db``, ``unix_socket_path``, ``client`` and
                arguments of ``redis.Redis``.

        Raises:
            EntryMismatch: elements differ in their keys, in the dtype of a leaf, or in a batch dim
                before ``stack_dim``.
            StoreExists: ``td_id`` is taken.
            EntryTooLarge: an entry is above the server's string limit; nothing was sent.
        """
        if not isinstance(lazy_td, LazyStackedTensorDict):
            raise UnsupportedValue(
                f"from_lazy_stack takes a LazyStackedTensorDict, not a {type(lazy_td).__name__}; "
                "use TensorDictStore.from_tensordict"
            )
        elements = lazy_td.tensordicts
        device = lazy_td.device if device is None else device
        inner = _common_batch(lazy_td)
        info = _info(len(elements), lazy_td.stack_dim, inner, device)
        columns = columns_of(elements, inner)
        info = replace(info, levels=columns.levels(info, lazy_td.names[: len(info.batch)]))
        for path, column in columns.tensors.items():
            for tensor in column:
                check_plain(tensor, f"the entry {path!r}")
        total = sum(t.nbytes for column in columns.tensors.values() for t in column)
        location = locate(prefix=prefix, td_id=td_id, **connection)
        options: Any = {"allow_pickle": allow_pickle, "where": str(location)}
        with progress_bar(total, progress) as report:
            puts: list[Any] = [
                *(
                    upload_elements(path, column, report)
                    for path, column in columns.tensors.items()
                ),
                *(put_value(path, (list(v), 1), **options) for path, v in columns.values.items()),
            ]
            handle = create(location, info, puts, cache=cache_metadata, allow_pickle=allow_pickle)
        return cls._wrap(handle, None, backend)

    @classmethod
    def from_store(
        cls,
        *,
        td_id: str,
        backend: str = "redis",
        prefix: str = "tensordict",
        device: Any = None,
        cache_metadata: bool = True,
        allow_pickle: bool = False,
        **connection: Any,
    ) -> LazyStackedTensorDictStore:
        """Open a lazy stack that is on the server. Writes nothing there. One round trip.

        Args:
            td_id: id of the store.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: device of the tensors that reads return; None takes the stored one.
            cache_metadata: as in the constructor.
            allow_pickle: as in the constructor.
            **connection: as in ``from_lazy_stack``.

        Raises:
            StoreNotFound: no such store; the message says where it was looked for.
            WrongStoreKind: the id is that of a plain store.
            IncompleteStore: its writer has not finished, or died.
        """
        location = locate(prefix=prefix, td_id=td_id, **connection)
        handle = Handle.open(location, cache=cache_metadata, allow_pickle=allow_pickle)
        if not handle.lazy:
            handle.close()
            raise WrongStoreKind(
                f"{location} is a plain store; open it with TensorDictStore.from_store"
            )
        return cls._wrap(handle, device, backend)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a dict is not a stack; use ``from_lazy_stack``."""
        raise NotImplementedError(
            "a lazy stack is not made from a dict: stack TensorDicts with tensordict.lazy_stack "
            "and pass them to LazyStackedTensorDictStore.from_lazy_stack"
        )

    def __getitem__(self, index: Any) -> Any:
        index = as_int(index)
        if type(index) is int and self.stack_dim == 0:
            return ElementView(self, self._position(index))
        return super().__getitem__(index)


def _common_batch(stack: Any) -> tuple[int, ...]:
    """Return the batch dims that all elements begin with.

    Raises:
        EntryMismatch: they differ in one before the stack dim.
    """
    sizes = [tuple(td.batch_size) for td in stack.tensordicts]
    same = takewhile(lambda dims: len(set(dims)) == 1, zip(*sizes, strict=False))
    inner = tuple(dims[0] for dims in same)
    if stack.stack_dim > len(inner):
        odd = next(size for size in sizes if size != sizes[0])
        raise EntryMismatch(
            f"the elements have batch sizes {list(sizes[0])} and {list(odd)}, which differ before "
            f"stack_dim={stack.stack_dim}: stack them along dim {len(inner)}, or give them "
            "batch_size=[]"
        )
    return inner


def _info(count: int, stack_dim: int, inner: tuple[int, ...], device: Any) -> StoreInfo:
    stack = stack_dim + len(inner) + 1 if stack_dim < 0 else stack_dim
    if not 0 <= stack <= len(inner) or count < 0:
        raise IndexOutOfRange(
            f"stack_dim={stack_dim}, count={count} with an inner batch size of {list(inner)}"
        )
    batch = (*inner[:stack], count, *inner[stack:])
    return StoreInfo(batch, stack, "" if device is None else str(torch.device(device)))


_register_tensor_class(LazyStackedTensorDictStore)
