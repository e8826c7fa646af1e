"""``LazyStackedTensorDictStore``: a stack of tensordicts that may differ in shape, on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tdio._td import (
    _LOCK_ERROR,
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    _register_tensor_class,
    is_tensor_collection,
)
from tdio.errors import EntryMismatch, IndexOutOfRange, UnsupportedValue, WrongStoreKind
from tdio.layout.index import normalise, select
from tdio.layout.levels import Level
from tdio.layout.spec import LeafSpec
from tdio.store._local import for_stacks, no_server, plain_all
from tdio.store._stored import Stored
from tdio.store.connecting import locate
from tdio.store.creating import create
from tdio.store.element import ElementView, element_spec, writing_element
from tdio.store.handle import Edit, Handle
from tdio.store.ragged import elements_of, flats_of, positions_of, writing_elements
from tdio.store.reader import reading, reading_leaf
from tdio.store.shape import Frame
from tdio.store.stacking import Column, columns_of, only
from tdio.store.writer import (
    Flat,
    check_batch,
    first_dim_rows,
    into_entry,
    progress_bar,
    put_value,
    rows_changes,
    upload_elements,
    upload_tensor,
    value_patch,
)
from tdio.wire.changes import PutTensor
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Operation


@no_server(
    "stack local ones: LazyStackedTensorDictStore.from_lazy_stack(lazy_stack([...]), host=...)"
)
@for_stacks
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
        columns = columns_of(elements)
        names = lazy_td.names if lazy_td._has_names() else None
        info = replace(info, levels=columns.levels(info, names))
        total = sum(t.nbytes for column in columns.tensors.values() for t in column)
        report, done = progress_bar(total, progress)
        location = locate(prefix=prefix, td_id=td_id, **connection)
        options: Any = {"allow_pickle": allow_pickle, "where": str(location)}
        puts: list[Any] = [
            *(upload_elements(path, column, report) for path, column in columns.tensors.items()),
            *(put_value(path, (list(v), 1), **options) for path, v in columns.values.items()),
        ]
        handle = create(location, info, puts, cache=cache_metadata, allow_pickle=allow_pickle)
        done()
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

    def _ragged(self) -> bool:
        specs = self._handle.specs([self._full(path) for path in self._leaf_paths()])
        return any(isinstance(spec, LeafSpec) and spec.ragged for spec in specs.values())

    def _local(self) -> Any:
        return self._as_stack(super()._local())

    def _as_stack(self, td: Any) -> Any:
        """Return what was read of all elements as a lazy stack."""
        if isinstance(td, LazyStackedTensorDict):
            return td
        dim = self.stack_dim
        name = td.names[dim] if td._has_names() else None
        return LazyStackedTensorDict(*td.unbind(dim), stack_dim=dim, stack_dim_name=name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = plain_all(tuple(args))
        if any(issubclass(type(one), cls) for one in _flat_arguments(args)):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    @classmethod
    def stack(cls, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``TensorDict.stack`` of stores and tensordicts, read whole."""
        return TensorDict.stack(plain_all(list(input)), *args, **kwargs)

    @classmethod
    def cat(cls, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``TensorDict.cat`` of stores and tensordicts, read whole."""
        return TensorDict.cat(plain_all(list(input)), *args, **kwargs)

    @classmethod
    def maybe_dense_stack(cls, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``TensorDict.maybe_dense_stack`` of stores and tensordicts, read whole."""
        return TensorDict.maybe_dense_stack(plain_all(list(input)), *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and self.stack_dim == 0:
            return ElementView(self, self._position(index))
        return super().__getitem__(index)

    # ---- hooks

    _value_class = NonTensorStack

    def _read_entry(self, path: str, index: Any, **kwargs: Any) -> Any:
        if not kwargs or index != ():
            return super()._read_entry(path, index, **kwargs)
        prefix, _, name = path.rpartition(".")
        return self._as_stack(self._read([path], (), prefix)).get(name, **kwargs)

    def _flat(self, value: Any, path: str) -> Flat:
        """Take a lazy stack apart by elements: an entry may have no tensor of its own."""
        dim = self.stack_dim
        if type(value) is not LazyStackedTensorDict or value.stack_dim != dim:
            return super()._flat(value, path)
        columns = columns_of(value.tensordicts, self._handle.info.inner)
        flat = Flat(
            dict(columns.tensors),  # type: ignore[arg-type]
            {name: (column, 1) for name, column in columns.values.items()},
            columns.nested,
        )
        if not flat.paths and not flat.levels:
            flat.levels[""] = Level(tuple(value.tensordicts[0].batch_size))
        return flat.under(path)

    def _update_entries(self, source: Any, *, inplace: bool, keys_to_update: Any, **kw: Any) -> Any:
        if type(source) is not LazyStackedTensorDict or source.stack_dim != self.stack_dim:
            return super()._update_entries(
                source, inplace=inplace, keys_to_update=keys_to_update, **kw
            )
        if keys_to_update is not None:
            source = source.select(*keys_to_update, strict=False)
        flat = self._flat(source, self._prefix)
        new = flat.paths - self._handle.known()
        if self.is_locked and (new or not inplace):
            raise RuntimeError(_LOCK_ERROR)
        fresh = only(flat, new) if inplace else flat
        known = only(flat, flat.paths - new) if inplace else Flat()
        with self._together():
            self._apply(lambda: self._putting(fresh, False))
            self._apply(lambda: self._putting(known, True))
        return self

    def _update_at_(self, source: Any, idx: Any, *, keys_to_update: Any, **kwargs: Any) -> Any:
        if not is_tensor_collection(source) or not self._ragged():
            return super()._update_at_(source, idx, keys_to_update=keys_to_update, **kwargs)
        if keys_to_update is not None:
            source = source.select(*keys_to_update, strict=False)
        self._write_elements(idx, source)
        return self

    def _setitem_index(self, index: Any, value: Any) -> None:
        if self._ragged() and not (type(index) is int and self.stack_dim == 0):
            self._write_elements(index, value, self._check_same_leaves)
        else:
            super()._setitem_index(index, value)

    def _write_elements(self, index: Any, value: Any, check: Any = None) -> None:
        """Write several elements of different shapes in one transaction."""
        where = f"{self._handle.location}[{index!r}]"
        frame = self._frame(self._prefix)
        positions, rest = positions_of(index, frame, where)
        elements = elements_of(value, len(positions), type(index) is int, where)
        tensors = [self._full(path) for path in self._leaf_paths()]
        flats = flats_of(elements, self._prefix, tensors)
        for flat in flats if check is not None else ():
            check(flat, index)
        self._apply(lambda: writing_elements(self._handle, positions, flats, rest, frame))

    def _reading(self, paths: list[str], index: Any, prefix: str) -> Operation[Any]:
        return reading(self._handle, paths, index, self._device, prefix)

    def _reading_leaf(self, path: str, index: Any) -> Operation[Any]:
        return reading_leaf(self._handle, path, index, self._device)

    def _stored_level(self, level: Level) -> Level:
        """Take the stack dim out: nested levels are stored as those of one element."""
        at = self.stack_dim
        names = level.names[:at] + level.names[at + 1 :]
        return replace(
            level,
            batch=level.batch[:at] + level.batch[at + 1 :],
            names=names if any(names) else (),
        )

    def _putting(self, flat: Flat, inplace: bool) -> Operation[Edit]:
        handle = self._handle
        options: Any = {"allow_pickle": handle.allow_pickle, "where": str(handle.location)}
        specs: dict[str, Any] = (yield from handle.load(flat.tensors)) if inplace else {}
        puts: list[Any] = []
        for path, value in flat.tensors.items():
            if isinstance(value, Column):
                puts.append(self._put_column(path, value, specs.get(path)))
                continue
            if inplace:
                value = into_entry(value, specs[path])
            check_batch(path, value, self._frame(path.rpartition(".")[0]).batch, handle.location)
            put = upload_tensor(path, value)
            # With the stack dim in front both layouts are the same.
            puts.append(replace(put, spec=replace(put.spec, stack_first=self.stack_dim == 0)))
        for path, (content, dims) in flat.values.items():
            if isinstance(content, Column):
                rows = list(content)
            else:
                # One for each element, as a lazy stack of tensordicts has it.
                rows = [content] * handle.info.count
                rows = _moved_first(content, self.stack_dim) if dims else rows
            puts.append(put_value(path, (rows, 1), **options))
        return Edit(puts, flat.levels)

    def _put_column(self, path: str, column: Column, spec: Any) -> PutTensor:
        """Return the upload of an entry by its elements; ``spec`` is what it is in place."""
        info, where = self._handle.info, self._handle.location
        if len(column) != info.count:
            raise EntryMismatch(
                f"{where}: {info.count} elements take no stack of {len(column)}; nothing was "
                "written"
            )
        batch = Frame.of_element(info, path.rpartition(".")[0]).batch
        elements = [
            value if spec is None else into_entry(value, element_spec(spec, info, position))
            for position, value in enumerate(column)
        ]
        for value in elements:
            check_batch(path, value, batch, where)
        return upload_elements(path, elements)

    def _check_same_leaves(self, flat: Flat, index: Any) -> None:
        # The first element that is written to an empty stack says what the entries are.
        if self._handle.known() or type(index) is not int:
            super()._check_same_leaves(flat, index)

    def _writing_at(self, flat: Flat, index: Any) -> Operation[Edit]:
        handle, frame, where = self._handle, index.frame, str(self._handle.location)
        if type(index.index) is int and self.stack_dim == 0:
            position = self._position(index.index)
            return (yield from writing_element(handle, position, flat))
        items = normalise(index.index, len(frame.batch))
        specs = yield from handle.load(flat.paths)
        if any(isinstance(spec, LeafSpec) and spec.ragged for spec in specs.values()):
            raise UnsupportedValue(
                f"{where}: entries of different shapes are written by their elements: "
                "store[index] = a lazy stack"
            )
        rows = select(frame.batch, items)
        changes = rows_changes(specs, flat.tensors, rows, frame.batch, frame.stack, where)
        for path, value in flat.values.items():
            at = first_dim_rows(path, rows, frame, where)
            changes.append(value_patch(path, value, at, frame.batch[0], handle.allow_pickle, where))
        return Edit(changes)


def _flat_arguments(args: Any) -> list[Any]:
    return [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else (arg,))]


def _moved_first(value: Any, dim: int) -> list[Any]:
    """Return nested lists with dim ``dim`` in front."""
    for _ in range(dim):
        value = [list(row) for row in zip(*value, strict=True)]
    return list(value)


def _info(count: int, stack_dim: int, inner: tuple[int, ...], device: Any) -> StoreInfo:
    stack = stack_dim + len(inner) + 1 if stack_dim < 0 else stack_dim
    if not 0 <= stack <= len(inner) or count < 0:
        raise IndexOutOfRange(
            f"stack_dim={stack_dim}, count={count} with an inner batch size of {list(inner)}"
        )
    batch = (*inner[:stack], count, *inner[stack:])
    return StoreInfo(batch, stack, "" if device is None else str(torch.device(device)))


_register_tensor_class(LazyStackedTensorDictStore)
