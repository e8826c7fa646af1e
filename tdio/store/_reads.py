"""Reads of a stored tensordict: by key, by index, from a coroutine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tdio._td import (
    NO_DEFAULT,
    NestedKey,
    TensorDict,
    TensorDictBase,
    _unravel_key_to_tuple,
    build,
    imported_tensorclass,
    is_non_tensor,
    value_of,
)
from tdio.errors import EntryNotFound
from tdio.layout.spec import LeafSpec
from tdio.store._keys import (
    _TENSOR,
    _UPDATED,
    _VALUE,
    StoredKeys,
)
from tdio.wire.requests import Operation

_READ_AHEAD_BYTES = 32 * 1024 * 1024


class StoredReads(StoredKeys):
    """TensorDictBase's hooks that read; each brings only what was asked for."""

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
        read: Any = self._read(leaves, (), self._prefix) if leaves else None
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

    # ---- reads

    def _read(self, paths: list[str] | None, index: Any, prefix: str) -> Any:
        return self._handle.client.read(lambda: self._reading(paths, index, prefix))

    def _get_str(self, key: str, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_tuple((key,), default, **kwargs)

    def _get_tuple(self, key: NestedKey, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        key = _unravel_key_to_tuple(key)
        path = self._full(key)
        if path in self._handle.known():
            try:
                if default is None and id(self) in _UPDATED.get():
                    return _TENSOR if self.entry_class(key) is torch.Tensor else _VALUE
                return self._read_entry(path, (), **kwargs)
            except EntryNotFound:
                if path in self._handle.paths:
                    raise
                # Another handle has deleted it meanwhile.
        if path != self._prefix and self._has_level(path):
            return self._nested(path)
        if default is NO_DEFAULT:
            raise self._missing(key if len(key) > 1 else key[0])
        return default

    def _read_entry(self, path: str, index: Any, **kwargs: Any) -> Any:
        """Read one leaf at an index of the level that holds it."""
        if not kwargs:
            return self._handle.client.read(lambda: self._reading_leaf(path, index))
        prefix, _, name = path.rpartition(".")
        return self._read([path], (), prefix).get(name, **kwargs)[index]

    def _reading_leaf(self, path: str, index: Any) -> Operation[Any]:
        """The operation of ``_read_entry``."""
        raise NotImplementedError

    def _nested(self, path: str) -> Any:
        """Return a view of a nested level: it reads and writes on the server."""
        out = self._shallow()
        out._owner = self
        out._prefix = path
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
            try:
                return self._read_entry(path, idx, **kwargs)
            except EntryNotFound:
                if path in self._handle.paths:
                    raise
        value = self._get_tuple(key, default, **kwargs)
        return value if value is default else value[idx]

    def _index_tensordict(self, index: Any, new_batch_size: Any = None, names: Any = None) -> Any:
        return self._read(None, index, self._prefix)

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

    def _copy_entries(self, keys: list[str] | None) -> Any:
        """Return a copy of some top-level entries: what select and exclude start from."""
        paths = self._leaf_paths()
        some = [p for p in paths if keys is None or p.partition(".")[0] in keys]
        return self._read([self._full(path) for path in some], (), self._prefix)

    def _clone(self, recurse: bool = True) -> TensorDictBase:
        if recurse:
            return self._to_tensordict(retain_none=None)
        return self._shallow()

    def _shallow(self) -> Any:
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__)
        for name in ("_last_op", "_last_op_queue", "_entered"):
            out.__dict__.pop(name, None)
        out._is_locked = False
        out._owner = None
        return out

    # ---- reads of a coroutine

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
        client = self._handle.async_client()
        return await client.read(lambda: self._reading(None, index, self._prefix))

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
        client = self._handle.async_client()
        return await client.read(lambda: self._getting(key))

    def _getting(self, key: NestedKey) -> Operation[Any]:
        handle, path = self._handle, self._full(_unravel_key_to_tuple(key))
        if not handle.cache:
            yield from handle.reload()
        if path in handle.paths:
            leaf = yield from self._reading_leaf(path, ())
            return value_of(leaf)[0] if is_non_tensor(leaf) else leaf
        if not self._has_level(path):
            raise self._missing(key)
        return (yield from self._reading(None, (), path))
