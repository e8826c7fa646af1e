"""``LazyStackedTensorDictStore``: a stack of tensordicts that may differ in shape, on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Number
from typing import Any

import numpy as np
import torch

from tdio._td import (
    LazyStackedTensorDict,
    TensorDictBase,
    _register_tensor_class,
)
from tdio.errors import EntryMismatch, IndexOutOfRange, UnsupportedValue, WrongStoreKind
from tdio.layout.dtypes import as_bytes
from tdio.layout.index import normalise, select
from tdio.layout.paths import check_key, key_of
from tdio.layout.plan import Ranges
from tdio.layout.spec import LeafSpec, decode, ragged_offsets, shapes_array
from tdio.store._stored import Stored
from tdio.store.connecting import locate
from tdio.store.element import ElementView, element_shape
from tdio.store.handle import Handle, create
from tdio.store.reader import read, read_elements
from tdio.store.writer import (
    check_fit,
    check_leaves,
    leaves_of,
    number_as,
    progress_bar,
    rows_writes,
    scalar_values,
    upload_elements,
    upload_tensor,
    upload_zeros,
)
from tdio.wire.reading import StoreInfo
from tdio.wire.writing import RangeWrite, patch_ragged


class LazyStackedTensorDictStore(Stored):
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
        self._create(location, info, cache_metadata, backend)

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
        progress: bool = False,
        **connection: Any,
    ) -> LazyStackedTensorDictStore:
        """Copy a lazy stack to the server; entries whose shapes differ get an offset table.

        Args:
            lazy_td: the stack, N elements with the same keys and dtypes.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: device of the tensors that reads return; None takes that of ``lazy_td``.
            td_id: id of the new store; None makes a random one.
            cache_metadata: as in the constructor.
            progress: show a bar of the bytes sent.
            **connection: ``host``, ``port``, ``db``, ``unix_socket_path``, ``client`` and
                arguments of ``redis.Redis``.

        Raises:
            EntryMismatch: elements differ in their keys or in the dtype of a leaf.
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
        info = _info(len(elements), lazy_td.stack_dim, tuple(elements[0].batch_size), device)
        columns = _columns(elements)
        total = sum(t.nbytes for column in columns.values() for t in column)
        report, done = progress_bar(total, progress)
        uploads = [upload_elements(path, column, report) for path, column in columns.items()]
        location = locate(prefix=prefix, td_id=td_id, **connection)
        handle = create(location, info, uploads)
        done()
        handle.cache = cache_metadata
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
        **connection: Any,
    ) -> LazyStackedTensorDictStore:
        """Open a lazy stack that is on the server. Writes nothing there. One round trip.

        Args:
            td_id: id of the store.
            backend: as in the constructor.
            prefix: as in the constructor.
            device: device of the tensors that reads return; None takes the stored one.
            cache_metadata: as in the constructor.
            **connection: as in ``from_lazy_stack``.

        Raises:
            StoreNotFound: no such store; the message says where it was looked for.
            WrongStoreKind: the id is that of a plain store.
            IncompleteStore: its writer has not finished, or died.
        """
        location = locate(prefix=prefix, td_id=td_id, **connection)
        handle = Handle.open(location, cache=cache_metadata)
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

    # ---- properties of the stack

    @property
    def stack_dim(self) -> int:
        """Where the number of elements stands in the batch size."""
        assert self._handle.info.stack is not None
        return self._handle.info.stack

    def _position(self, index: int) -> int:
        count = self._handle.info.count
        if not -count <= index < count:
            raise IndexOutOfRange(
                f"element {index} of a stack of {count} ({self._handle.location})"
            )
        return index % count

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and self.stack_dim == 0:
            return ElementView(self, self._position(index))
        return super().__getitem__(index)

    # ---- hooks

    def _read_paths(self, paths: list[str], index: Any) -> TensorDictBase:
        return read(self._handle, paths, index, self._device)

    def _write_path(self, path: str, value: torch.Tensor) -> None:
        batch = self._handle.info.batch
        if tuple(value.shape[: len(batch)]) != batch:
            raise EntryMismatch(
                f"{self._handle.location}: the entry {path!r} must start with the batch size "
                f"{list(batch)}, the value has shape {list(value.shape)}"
            )
        upload = upload_tensor(path, value)
        # With the stack dim in front both layouts are the same.
        self._handle.set_entry(
            replace(upload, spec=replace(upload.spec, stack_first=self.stack_dim == 0))
        )

    def _write_index(self, values: dict[str, Any], index: Any) -> None:
        known = self._handle.paths()
        # The first element that is written to an empty stack says what the entries are.
        if known or type(index) is not int:
            check_leaves(known, set(values), f"{self._handle.location}[{index!r}]")
        self._write_at(values, index)

    def _write_at(self, values: dict[str, Any], index: Any) -> None:
        if type(index) is int and self.stack_dim == 0:
            self._write_element(self._position(index), values)
            return
        handle, info, where = self._handle, self._handle.info, str(self._handle.location)
        items = normalise(index, len(info.batch))
        specs = handle.specs(values)
        if any(spec.ragged for spec in specs.values()):
            raise UnsupportedValue(
                f"{where}: entries of different shapes are written an element at a time: "
                "store[i] = td"
            )
        rows = select(info.batch, items)
        filled = {
            path: scalar_values(value, specs[path], rows, info.batch)
            if isinstance(value, Number)
            else value
            for path, value in values.items()
        }
        handle.write_ranges(rows_writes(specs, filled, rows, info.batch, info.stack, where))

    def _write_element(self, position: int, values: dict[str, Any]) -> None:
        """Write leaves of one element: in place where the shape stays, else the entry anew."""
        handle, info = self._handle, self._handle.info
        where = f"{handle.location}[{position}]"
        for path in values.keys() - handle.paths():
            self._add_entry(path, values[path], where)
        specs = handle.specs(values)
        inner = len(info.inner)
        tensors: dict[str, torch.Tensor] = {}
        for path, value in values.items():
            shape = element_shape(specs[path], info, position)
            if isinstance(value, Number):
                value = number_as(value, specs[path].dtype, shape)
            check_fit(path, value, specs[path].dtype, (*info.inner, *value.shape[inner:]), where)
            tensors[path] = value
        in_place, resized = [], []
        for path, value in tensors.items():
            spec = specs[path]
            if tuple(value.shape) != element_shape(spec, info, position):
                resized.append((spec, value))
            elif spec.offsets is not None:
                lo, hi = int(spec.offsets[position]), int(spec.offsets[position + 1])
                sizes = [hi - lo] if hi > lo else []
                ranges = Ranges(np.array([lo][: len(sizes)]), np.array(sizes, np.int64), None, 1)
                in_place.append(RangeWrite(spec, ranges, as_bytes(value)))
            else:
                index = (slice(None),) * self.stack_dim + (position,)
                rows = select(info.batch, normalise(index, len(info.batch)))
                in_place += rows_writes(
                    {path: spec}, {path: value}, rows, info.batch, info.stack, where
                )
        handle.write_ranges(in_place)
        for spec, value in resized:
            handle.learn(self._resize(spec, position, value, where))

    def _add_entry(self, path: str, value: Any, where: str) -> None:
        """Make an entry of zeros with the shape of one element's value."""
        info = self._handle.info
        if not isinstance(value, torch.Tensor) or value.shape[: len(info.inner)] != info.inner:
            raise EntryMismatch(
                f"{where}: a new entry {path!r} must be a tensor that starts with the batch size "
                f"of an element, {list(info.inner)}"
            )
        upload = upload_zeros(check_key(key_of(path)), (info.count, *value.shape), value.dtype)
        self._handle.set_entry(upload)

    def _resize(self, spec: LeafSpec, position: int, value: torch.Tensor, where: str) -> LeafSpec:
        info = self._handle.info
        data = as_bytes(value).numpy().tobytes()

        def load(fields: dict[str, Any], table: bytes | None) -> LeafSpec:
            text = {k: v.decode() for k, v in fields.items()}
            return decode(
                spec.path, text, where=where, batch=info.batch, stack=info.stack, offsets=table
            )

        def patch(now: LeafSpec, blob: bytes) -> tuple[LeafSpec, bytes]:
            if now.shapes is None:
                blob = _stack_first(now, blob, info)
                shapes = np.array([element_shape(now, info, 0)] * info.count, np.int64)
                shapes = shapes.reshape(info.count, -1)
            else:
                shapes = now.shapes
            offsets = ragged_offsets(shapes, now.dtype.itemsize)
            rows = [tuple(n for n in row if n >= 0) for row in shapes.tolist()]
            rows[position] = tuple(value.shape)
            table = shapes_array(rows)
            lo, hi = int(offsets[position]), int(offsets[position + 1])
            new = LeafSpec(
                spec.path,
                now.dtype,
                (info.count, *rows[0]),
                True,
                table,
                ragged_offsets(table, now.dtype.itemsize),
            )
            return new, blob[:lo] + data + blob[hi : int(offsets[-1])]

        operation = patch_ragged(self._handle.names, spec, position, load, patch, where)
        return self._handle.client.write(operation)

    def _read_element(self, position: int, paths: list[str]) -> TensorDictBase:
        (element,) = read_elements(
            self._handle, paths, np.array([position], np.int64), self._device
        )
        return element


def _stack_first(spec: LeafSpec, blob: bytes, info: StoreInfo) -> bytes:
    """Return the bytes of a homogeneous entry with its elements one after the other."""
    assert info.stack is not None
    if spec.stack_first or info.stack == 0 or not blob:
        return blob
    rows = np.frombuffer(blob, np.uint8).reshape(*info.batch, -1)
    return np.ascontiguousarray(np.moveaxis(rows, info.stack, 0)).tobytes()


def _info(count: int, stack_dim: int, inner: tuple[int, ...], device: Any) -> StoreInfo:
    stack = stack_dim + len(inner) + 1 if stack_dim < 0 else stack_dim
    if not 0 <= stack <= len(inner) or count < 0:
        raise IndexOutOfRange(
            f"stack_dim={stack_dim}, count={count} with an inner batch size of {list(inner)}"
        )
    batch = (*inner[:stack], count, *inner[stack:])
    return StoreInfo(batch, stack, "" if device is None else str(torch.device(device)))


def _columns(elements: Sequence[TensorDictBase]) -> dict[str, list[torch.Tensor]]:
    """Return the leaves of all elements by path.

    Raises:
        EntryMismatch: an element has other keys than the first.
    """
    columns: dict[str, list[torch.Tensor]] = {path: [] for path in leaves_of(elements[0])}
    simple = set(columns)
    for position, element in enumerate(elements):
        leaves = leaves_of(element)
        check_leaves(simple, set(leaves), f"element {position} of the stack")
        for path, column in columns.items():
            column.append(leaves[path])
    return columns


_register_tensor_class(LazyStackedTensorDictStore)
