"""What the stored classes share: TensorDictBase's hooks over reads and writes by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import torch

from tdio._td import (
    _LOCK_ERROR,
    NO_DEFAULT,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    _NoShapeOps,
    _NoVmap,
    _unravel_key_to_tuple,
    build,
    imported_tensorclass,
    is_non_tensor,
    is_tensor_collection,
    value_of,
)
from tdio.errors import EntryNotFound, UnsupportedValue
from tdio.layout.levels import Level
from tdio.layout.paths import below, check_key, parents, path_of
from tdio.layout.spec import LeafSpec
from tdio.layout.values import ValueSpec
from tdio.store.handle import Edit, Handle, Location, create, device_of
from tdio.store.shape import Frame, names_of
from tdio.store.writer import Flat, check_leaves, flatten
from tdio.transport.aio import AsyncClient
from tdio.transport.fake import MemoryServer
from tdio.wire.changes import Drop
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Operation

_TENSOR = torch.zeros(())
_READ_AHEAD_BYTES = 32 * 1024 * 1024
_VALUE = NonTensorData(None)
Making = Callable[[], Operation[Edit]]
#: The writes that are gathered into one transaction, with the handle that will do them.
_UPDATED: ContextVar[frozenset[int]] = ContextVar("updated", default=frozenset())
_GATHERED: ContextVar[list[tuple[Handle, Making]] | None] = ContextVar("gathered", default=None)


class Stored(_NoShapeOps, _NoVmap, TensorDictBase):
    """A tensordict whose leaves are on a server; subclasses say how a path is read and written.

    Reads return fresh copies (``_reads_return_copies``), so in-place methods of the base class
    read, change and write back instead of changing a copy that nobody keeps.
    """

    _reads_return_copies = True
    _update_stores_copy_of_self = True
    _leaves_built_on_read = True
    _masking_on_dense_copy = True
    _masked_select_on_dense_copy = True
    _masked_select_inplace_unsupported = True
    _contiguous_via_to_tensordict = True
    _pin_memory_unsupported = True
    _storage_holds_no_gradients = True
    _copy_shares_storage = True
    _is_shared = False
    _is_memmap = False

    _handle: Handle
    _entered: list[bool]
    _prefix: str = ""
    _backend: str = "redis"

    def _setup(self, handle: Handle, batch: tuple[int, ...], device: torch.device | None) -> None:
        self._handle = handle
        self._batch_size = torch.Size(batch)
        self._device = device
        self._is_locked = False

    def _create(self, location: Location, info: StoreInfo, backend: str, **options: Any) -> None:
        """Make the empty store of a constructor."""
        handle = create(location, info, **options)
        self._setup(handle, info.batch, device_of(info, None, location))
        self._backend = backend

    @classmethod
    def _wrap(cls, handle: Handle, device: Any, backend: str) -> Any:
        """Return the tensordict of a store that is on the server."""
        out = cls.__new__(cls)
        out._setup(handle, handle.info.batch, device_of(handle.info, device, handle.location))
        out._backend = backend
        return out

    # ---- what a subclass says

    def _reading(self, paths: list[str], index: Any, prefix: str) -> Operation[Any]:
        """Read entries by full path at ``index`` of the level ``prefix``, as that level."""
        raise NotImplementedError

    def _putting(self, flat: Flat, inplace: bool) -> Operation[Edit]:
        """Write whole entries by full path."""
        raise NotImplementedError

    def _writing_at(self, flat: Flat, index: Any) -> Operation[Edit]:
        """Write tensors, numbers and values by full path at ``index``; all are checked first."""
        raise NotImplementedError

    def _frame(self, prefix: str) -> Frame:
        """Return the batch size of a level."""
        return Frame.of(self._handle.info, prefix)

    # ---- transactions

    def _apply(self, making: Making) -> None:
        gathered = _GATHERED.get()
        if gathered is None:
            self._handle.write(making)
        else:
            gathered.append((self._handle, making))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Gather the writes of the block into one transaction; an error in it writes nothing."""
        if _GATHERED.get() is not None:
            yield
            return
        gathered: list[tuple[Handle, Making]] = []
        token = _GATHERED.set(gathered)
        try:
            yield
        finally:
            _GATHERED.reset(token)
        for handle in dict.fromkeys(handle for handle, _ in gathered):
            handle.write(_all_of([making for of, making in gathered if of is handle]))

    def _update_entries(self, *args: Any, **kwargs: Any) -> Any:
        # tensordict looks at each entry that it is about to write: a stand-in of its class will
        # do, so that nothing is read.
        token = _UPDATED.set(_UPDATED.get() | {id(self)})
        try:
            with self._together():
                super()._update_entries(*args, **kwargs)
        finally:
            _UPDATED.reset(token)
        return self

    def _update_(
        self, input_dict_or_td: Any, *, clone: bool, non_blocking: bool, keys_to_update: Any
    ) -> Any:
        # The base class reads what it overwrites.
        source = input_dict_or_td
        if not is_tensor_collection(source):
            source = TensorDict.from_dict(source, batch_dims=self.batch_dims)
        if keys_to_update is not None:
            source = source.select(*keys_to_update)
        flat = flatten(source.to_tensordict()).under(self._prefix)
        known = flat.paths & self._handle.known()
        if (flat.paths and not known) or (keys_to_update is not None and known != flat.paths):
            raise self._missing(min(flat.paths - known))
        mine = Flat(
            {path: value for path, value in flat.tensors.items() if path in known},
            {path: value for path, value in flat.values.items() if path in known},
        )
        self._apply(lambda: self._putting(mine, True))
        return self

    def _update_at_(self, *args: Any, **kwargs: Any) -> Any:
        with self._together():
            super()._update_at_(*args, **kwargs)
        return self

    def _write_back(self, *args: Any, **kwargs: Any) -> None:
        with self._together():
            super()._write_back(*args, **kwargs)

    # ---- keys

    @property
    def td_id(self) -> str:
        """The id of the store on the server: what ``from_store`` and ``StoreDataset`` take."""
        return self._handle.names.td_id

    def _full(self, key: NestedKey) -> str:
        path = path_of(key)  # type: ignore[arg-type]
        return f"{self._prefix}.{path}" if self._prefix else path

    def _leaf_paths(self) -> list[str]:
        """Paths of all leaves below this level, relative to it, sorted."""
        return below(self._handle.known(), self._prefix)

    def _levels(self) -> list[str]:
        """Paths of all nested levels below this one, relative to it, sorted."""
        leaves = self._leaf_paths()
        levels = below(self._handle.info.levels, self._prefix)
        found = {parent for path in (*leaves, *levels) for parent in parents(path)}
        return sorted(found | {path for path in levels if path})

    def _skeleton(self, nested: bool) -> TensorDict:
        """Return a tensordict with the same keys, and leaves of the same kind."""
        paths = self._leaf_paths()
        leaves: dict[str, Any] = dict.fromkeys(paths, _TENSOR)
        if nested:
            specs = self._handle.specs([self._full(path) for path in paths])
            for path in paths:
                if isinstance(specs[self._full(path)], ValueSpec):
                    leaves[path] = _VALUE
        levels = {path: Level(()) for path in self._levels()}
        return build(leaves, (), None, levels)

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return the keys, from the registry: no data is read."""
        skeleton = self._skeleton(include_nested or leaves_only or is_leaf is not None)
        return skeleton.keys(include_nested, leaves_only, is_leaf, sort=sort)

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return keys and values; several entries are read in one round trip.

        At most 32 MiB, or one entry, are read ahead. Nested tensordicts come as views.
        """
        return self._pairs(list(self.keys(include_nested, leaves_only, is_leaf, sort=sort)))

    def values(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values, as ``items``."""
        return (value for _, value in self.items(*args, **kwargs))

    def _pairs(self, keys: list[NestedKey]) -> Iterator[tuple[NestedKey, Any]]:
        paths = {key: self._full(key) for key in keys}
        specs = self._handle.specs([path for path in paths.values() if path in self._handle.paths])
        group: list[NestedKey] = []
        size = 0
        for key in keys:
            spec = specs.get(paths[key])
            size += spec.nbytes if isinstance(spec, LeafSpec) else 1024
            if group and size > _READ_AHEAD_BYTES:
                yield from self._read_group(group, paths, specs)
                group, size = [], 0
            group.append(key)
        yield from self._read_group(group, paths, specs)

    def _read_group(
        self, keys: list[NestedKey], paths: dict[NestedKey, str], specs: dict[str, Any]
    ) -> Iterator[tuple[NestedKey, Any]]:
        leaves = [paths[key] for key in keys if paths[key] in specs]
        read = self._read(leaves, (), self._prefix) if leaves else None
        for key in keys:
            name = _unravel_key_to_tuple(key)
            source = read if paths[key] in specs else self
            value = source._get_tuple(name, NO_DEFAULT)
            yield key, value

    def _copy_of_leaves(self) -> TensorDict:
        """Return the tensor leaves, for an in-place method to change and write back."""
        out = build({}, self.batch_size, self.device)
        for key, value in self.items(True, True):
            if isinstance(value, torch.Tensor):
                out._set_tuple(_unravel_key_to_tuple(key), value, inplace=False, validated=True)
        return out

    def entry_class(self, key: NestedKey) -> type:
        """Return the class of an entry, from its metadata."""
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.known():
            (spec,) = self._handle.specs([path]).values()
            return NonTensorData if isinstance(spec, ValueSpec) else torch.Tensor
        if self._has_level(path):
            level = self._handle.info.levels.get(path)
            return imported_tensorclass(level.kind) if level and level.kind else type(self)
        raise self._missing(key)

    def _has_level(self, path: str) -> bool:
        """Whether a nested tensordict is at a full path."""
        return path in self._handle.info.levels or bool(below(self._handle.paths, path))

    def _contains_str(self, key: str) -> bool:
        path = self._full(key)
        return path in self._handle.known() or self._has_level(path)

    def _missing(self, key: NestedKey) -> EntryNotFound:
        return EntryNotFound(
            f"no entry {key!r} in the store {self._handle.location}; it has {self._leaf_paths()}"
        )

    # ---- names

    @property
    def _td_dim_names(self) -> list[str | None] | None:
        return names_of(self._handle.info, self._frame(self._prefix))

    @_td_dim_names.setter
    def _td_dim_names(self, names: list[str | None] | None) -> None:
        self._set_level_names({self._prefix: names})

    def _rename_subtds(self, value: Any) -> None:
        given = list(value) if value is not None else [None] * self.batch_dims
        renamed: dict[str, list[str | None] | None] = {}
        for path in self._levels():
            full = self._full(path)
            frame = self._frame(full)
            own = (names_of(self._handle.info, frame) or [None] * len(frame.batch))[len(given) :]
            renamed[full] = [*given, *own]
        self._set_level_names(renamed)

    def _set_level_names(self, names: dict[str, list[str | None] | None]) -> None:
        levels: dict[str, Level | None] = {}
        for path, own in names.items():
            known = self._handle.info.levels.get(path)
            given = tuple(own) if own is not None and any(own) else ()
            if known is None and not given:
                continue
            level = Level(self._frame(path).batch, given, known.kind if known else "")
            level = self._stored_level(level) if path else level
            levels[path] = replace(level, batch=known.batch) if known else level
        if levels:
            self._apply(_making(Edit((), levels)))

    def _stored_level(self, level: Level) -> Level:
        """Return a nested level as it is stored: in a lazy stack, that of one element."""
        return level

    def _batch_size_setter(self, new_batch_size: Any) -> None:
        if tuple(new_batch_size) != tuple(self.batch_size):
            raise RuntimeError(
                f"the batch size of a {type(self).__name__} is fixed on the server; call "
                "to_tensordict() first"
            )

    # ---- reads

    def _read(self, paths: list[str], index: Any, prefix: str) -> Any:
        return self._handle.client.read(lambda: self._reading(paths, index, prefix))

    def _get_str(self, key: str, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_tuple((key,), default, **kwargs)

    def _get_tuple(self, key: NestedKey, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        key = _unravel_key_to_tuple(key)
        path = self._full(key)
        if path in self._handle.known():
            if default is None and id(self) in _UPDATED.get():
                return _TENSOR if self.entry_class(key) is torch.Tensor else _VALUE
            return self._read_entry(path, (), **kwargs)
        if self._has_level(path):
            return self._nested(path)
        if default is NO_DEFAULT:
            raise self._missing(key if len(key) > 1 else key[0])
        return default

    def _read_entry(self, path: str, index: Any, **kwargs: Any) -> Any:
        """Read one leaf at an index of the level that holds it."""
        prefix, _, name = path.rpartition(".")
        out = self._read([path], index, prefix)
        return out.get(name, **kwargs) if kwargs else out._get_str(name, NO_DEFAULT)

    def _nested(self, path: str) -> Any:
        """Return a view of a nested level: it reads and writes on the server."""
        out = self._shallow()
        out._prefix = path
        out._batch_size = torch.Size(self._frame(path).batch)
        level = self._handle.info.levels.get(path)
        if level is not None and level.kind:
            return imported_tensorclass(level.kind)._from_tensordict(out)
        return out

    def _get_at_str(self, key: str, idx: Any, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_at_tuple((key,), idx, default, **kwargs)

    def _get_at_tuple(
        self, key: NestedKey, idx: Any, default: Any = NO_DEFAULT, **kwargs: Any
    ) -> Any:
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.known():
            return self._read_entry(path, idx, **kwargs)
        value = self._get_tuple(key, default, **kwargs)
        return value if value is default else value[idx]

    def _index_tensordict(self, index: Any, new_batch_size: Any = None, names: Any = None) -> Any:
        paths = [self._full(path) for path in self._leaf_paths()]
        return self._read(paths, index, self._prefix)

    def __getitem__(self, index: Any) -> Any:
        key = _unravel_key_to_tuple(index) if isinstance(index, (str, tuple)) else ()
        if key:
            return self._get_tuple_maybe_non_tensor(key, NO_DEFAULT)
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        return self._index_tensordict(index)

    def __getitems__(self, index: Any) -> Any:
        """Read a batch, as a ``DataLoader`` asks for it: ``store[index]``. One round trip."""
        return self._index_tensordict(list(index))

    def __iter__(self) -> Iterator[Any]:
        if not self.batch_dims:
            raise TypeError("iteration over a store without batch dims")
        return (self[i] for i in range(self.batch_size[0]))

    def _to_tensordict(self, *, retain_none: bool | None) -> TensorDictBase:
        out: TensorDictBase = self._index_tensordict(())
        return out

    def _clone(self, recurse: bool = True) -> TensorDictBase:
        if recurse:
            return self._to_tensordict(retain_none=None)
        return self._shallow()

    def _shallow(self) -> Any:
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__)
        out._is_locked = False
        return out

    # ---- reads of a coroutine

    def _async_client(self) -> AsyncClient:
        client = self.__dict__.get("_aio")
        if client is None or not client.usable:
            address = self._handle.location.address
            if isinstance(address, MemoryServer):
                raise UnsupportedValue("a MemoryServer has no async face; read it from plain code")
            client = self._aio = AsyncClient(address)
        return client

    async def aread(self, index: Any = ()) -> Any:
        """Read ``store[index]`` from a coroutine: as a plain tensordict, without blocking the loop.

        Args:
            index: as in ``store[index]``; ``()`` reads all of it.

        Returns:
            What ``store[index]`` reads: fresh tensors in one storage, or a lazy stack where
            entries are ragged; an element of a lazy stack comes whole, not as a view.

        Raises:
            IndexOutOfRange: an index outside the batch size.
            ServerUnavailable: the server is not there.
            ServerTimeout: the server does not answer.
        """
        paths = [self._full(path) for path in below(self._handle.paths, self._prefix)]
        return await self._async_client().read(lambda: self._reading(paths, index, self._prefix))

    async def aget(self, key: NestedKey) -> Any:
        """Read one entry from a coroutine; a nested tensordict is read whole.

        Args:
            key: a key or a tuple of keys.

        Returns:
            A tensor, a non-tensor value, or a plain tensordict.

        Raises:
            EntryNotFound: no such entry.
            ServerUnavailable: the server is not there.
        """
        path = self._full(_unravel_key_to_tuple(key))
        client = self._async_client()
        if path in self._handle.paths:
            prefix, _, name = path.rpartition(".")
            out = await client.read(lambda: self._reading([path], (), prefix))
            return out[name]
        if not self._has_level(path):
            raise self._missing(key)
        paths = [f"{path}.{rest}" for rest in below(self._handle.paths, path)]
        return await client.read(lambda: self._reading(paths, (), path))

    # ---- writes

    def _set_str(self, key: str, value: Any, **kwargs: Any) -> TensorDictBase:
        return self._set_tuple((key,), value, **kwargs)

    def _set_tuple(
        self,
        key: NestedKey,
        value: Any,
        *,
        inplace: Any,
        validated: bool,
        non_blocking: bool = False,
        ignore_lock: bool = False,
    ) -> TensorDictBase:
        key = _unravel_key_to_tuple(key)
        path = self._full(check_key(key))
        if not validated:
            value = self._validate_value(value, check_shape=True, key=key)
        known = path in self._handle.paths or self._has_level(path)
        if self.is_locked and not ignore_lock and (inplace is False or not known):
            raise RuntimeError(_LOCK_ERROR)
        if inplace is True and not known:
            raise self._missing(key if len(key) > 1 else key[0])
        flat = self._flat(value, path)
        in_place = bool(inplace) and known
        if in_place and not flat.levels and not below(self._handle.paths, path):
            self._apply(lambda: self._putting(flat, True))
        else:
            self._apply(lambda: self._replacing(path, flat))
        return self

    def _set_non_tensor(self, key: NestedKey, value: Any) -> TensorDictBase:
        entry = NonTensorData(data=value, batch_size=self.batch_size, device=self.device)
        return self._set_tuple(key, entry, inplace=False, validated=True)

    def _flat(self, value: Any, path: str) -> Flat:
        """Return a value by full path."""
        if isinstance(value, torch.Tensor):
            return Flat({path: value})
        if is_tensor_collection(value) and not is_non_tensor(value):
            flat = flatten(value, self._frame("").batch).under(path)
            flat.levels = {at: self._stored_level(level) for at, level in flat.levels.items()}
            return flat
        return Flat(values={path: _value(value)})

    def _replacing(self, path: str, flat: Flat) -> Operation[Edit]:
        """Write what is at ``path`` anew: what was there and is not in ``flat`` goes."""
        edit = yield from self._putting(flat, False)
        gone = {f"{path}.{rest}" for rest in below(self._handle.paths, path)} - flat.paths
        levels: dict[str, Level | None] = {
            level: None
            for level in self._handle.info.levels
            if level == path or level.startswith(path + ".")
        }
        drops = [Drop(old) for old in sorted(gone)]
        return Edit([*edit.changes, *drops], {**levels, **edit.levels})

    def _set_at_str(self, key: str, value: Any, idx: Any, **kwargs: Any) -> TensorDictBase:
        return self._set_at_tuple((key,), value, idx, **kwargs)

    def _set_at_tuple(
        self, key: NestedKey, value: Any, idx: Any, *, validated: bool, non_blocking: bool
    ) -> TensorDictBase:
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.known():
            (spec,) = self._handle.specs([path]).values()
            if isinstance(spec, ValueSpec):
                flat = Flat(values={path: _value(value)})
            else:
                if not isinstance(value, (torch.Tensor, Number)):
                    value = torch.as_tensor(value)
                flat = Flat({path: value})
        elif self._has_level(path) and is_tensor_collection(value):
            flat = flatten(value).under(path)
            unknown = flat.paths - self._handle.paths
            if unknown:
                raise self._missing(min(unknown))
        else:
            raise self._missing(key)
        prefix = path if self._has_level(path) else path.rpartition(".")[0]
        self._apply(lambda: self._writing_at(flat, _Index(idx, self._frame(prefix))))
        return self

    def _setitem_index(self, index: Any, value: Any) -> None:
        if isinstance(value, Number):
            specs = self._handle.specs([self._full(path) for path in self._leaf_paths()])
            flat = Flat({p: value for p, s in specs.items() if not isinstance(s, ValueSpec)})  # type: ignore[misc]
        else:
            if not is_tensor_collection(value):
                if not isinstance(value, dict):
                    raise UnsupportedValue(
                        f"a {type(value).__name__} cannot be written to an element: pass a "
                        "tensordict, a dict or a number"
                    )
                value = TensorDict.from_dict(value, batch_size=[])
            flat = flatten(value).under(self._prefix)
            self._check_same_leaves(flat, index)
        self._apply(lambda: self._writing_at(flat, _Index(index, self._frame(self._prefix))))

    def _check_same_leaves(self, flat: Flat, index: Any) -> None:
        expected = {self._full(path) for path in self._leaf_paths()}
        check_leaves(expected, flat.paths, f"{self._handle.location}[{index!r}]")

    def _del(self, key: tuple[str, ...]) -> None:
        path = self._full(key)
        known = self._handle.known()
        found = [path] if path in known else []
        found += [f"{path}.{rest}" for rest in below(known, path)]
        levels: dict[str, Level | None] = {
            level: None
            for level in self._handle.info.levels
            if level == path or level.startswith(path + ".")
        }
        if not found and not levels:
            raise self._missing(key if len(key) > 1 else key[0])
        self._apply(_making(Edit([Drop(old) for old in found], levels)))

    # ---- the rest

    def _lock_sub_tensordicts(self) -> list[TensorDictBase]:
        return []

    def _memmap_(self, *, inplace: bool, **kwargs: Any) -> Any:
        if inplace:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be memory-mapped in place; use memmap()"
            )
        return self.to_tensordict()._memmap_(inplace=False, **kwargs)

    def _repr_parts(self) -> list[str]:
        shapes = {}
        specs = self._handle.specs([self._full(path) for path in self._leaf_paths()])
        for path, spec in zip(self._leaf_paths(), specs.values(), strict=True):
            if isinstance(spec, ValueSpec):
                shapes[path] = spec.encoding
                continue
            size = "ragged" if spec.ragged else list(spec.shape)
            shapes[path] = f"{str(spec.dtype).removeprefix('torch.')}{size}"
        entries = ", ".join(f"{path}: {text}" for path, text in shapes.items())
        return [
            f"    entries={{{entries}}}",
            f"    batch_size={self.batch_size}",
            f"    device={self.device}",
            f"    backend={self._backend!r}",
            f"    td_id={self.td_id!r}",
            f"    server={str(self._handle.location.address)!r}",
        ]

    def close(self) -> None:
        """Close the connections of this handle. The data stays on the server."""
        self._handle.close()

    def clear_redis(self) -> None:
        """Delete the store, all its entries and marks, from the server."""
        self._handle.clear()

    def refresh(self) -> None:
        """Forget what is known of keys and shapes, and read it again from the server."""
        self._handle.refresh()

    # ``with store.unlock_():`` is tensordict's; ``with store:`` closes the connections at its end.

    def __enter__(self) -> Any:
        resource = getattr(self, "_last_op", None) is None
        self.__dict__.setdefault("_entered", []).append(resource)
        return self if resource else super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        if self._entered.pop():
            self.close()
            return None
        return super().__exit__(kind, value, trace)


@dataclass(frozen=True)
class _Index:
    """An index, and the batch size that it indexes."""

    index: Any
    frame: Frame


def _making(edit: Edit) -> Making:
    """Return the operation of an edit that depends on nothing."""

    def make() -> Operation[Edit]:
        return edit
        yield  # makes this a generator

    return make


def _all_of(makings: list[Making]) -> Making:
    """Return one edit that does several, in their order."""

    def make() -> Operation[Edit]:
        changes: list[Any] = []
        levels: dict[str, Level | None] = {}
        for making in makings:
            edit = yield from making()
            changes += edit.changes
            levels |= edit.levels
        return Edit(changes, levels)

    return make


def _value(value: Any) -> tuple[Any, int]:
    """Return a raw or wrapped value, and how many batch dims it spells out."""
    return value_of(value) if is_non_tensor(value) else (value, 0)
