"""What the stored classes share: TensorDictBase's hooks over reads and writes by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any

import torch

from tdio._td import (
    _LOCK_ERROR,
    NO_DEFAULT,
    NestedKey,
    TensorDict,
    TensorDictBase,
    _NoShapeOps,
    _NoVmap,
    _unravel_key_to_tuple,
    build,
    is_non_tensor,
    is_tensor_collection,
)
from tdio.errors import EntryNotFound, UnsupportedValue
from tdio.layout.paths import below, check_key, path_of
from tdio.store.handle import Handle, Location, create, device_of
from tdio.store.writer import leaves_of
from tdio.wire.reading import StoreInfo

_SKELETON_LEAF = torch.zeros(())


class Stored(_NoShapeOps, _NoVmap, TensorDictBase):
    """A tensordict whose leaves are on a server; subclasses say how a path is read and written.

    Reads return fresh copies (``_reads_return_copies``), so in-place methods of the base class
    read, change and write back instead of changing a copy that nobody keeps.
    """

    _td_dim_names = None
    _reads_return_copies = True
    _nested_reads_return_copies = True
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

    def _create(self, location: Location, info: StoreInfo, cache: bool, backend: str) -> None:
        """Make the empty store of a constructor."""
        handle = create(location, info)
        handle.cache = cache
        self._setup(handle, info.batch, device_of(info, None))
        self._backend = backend

    @classmethod
    def _wrap(cls, handle: Handle, device: Any, backend: str) -> Any:
        """Return the tensordict of a store that is on the server."""
        out = cls.__new__(cls)
        out._setup(handle, handle.info.batch, device_of(handle.info, device))
        out._backend = backend
        return out

    # ---- what a subclass says

    def _read_paths(self, paths: list[str], index: Any) -> TensorDictBase:
        """Read entries by full path at ``index`` (``()`` for all of it), nested as stored."""
        raise NotImplementedError

    def _write_path(self, path: str, value: torch.Tensor) -> None:
        """Write one whole entry."""
        raise NotImplementedError

    def _write_at(self, values: dict[str, Any], index: Any) -> None:
        """Write tensors or numbers by full path at ``index``; all of them are checked first."""
        raise NotImplementedError

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
        return below(self._handle.paths(), self._prefix)

    def _skeleton(self) -> TensorDict:
        return build(dict.fromkeys(self._leaf_paths(), _SKELETON_LEAF), ())

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return the keys, from the registry: no data is read."""
        return self._skeleton().keys(include_nested, leaves_only, is_leaf, sort=sort)

    def entry_class(self, key: NestedKey) -> type:
        """Return the class of an entry, from the registry."""
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.paths():
            return torch.Tensor
        if below(self._handle.paths(), path):
            return self._nested_class()
        raise self._missing(key)

    def _nested_class(self) -> type:
        return TensorDict

    def _contains_str(self, key: str) -> bool:
        path = self._full(key)
        return path in self._handle.paths() or bool(below(self._handle.paths(), path))

    def _missing(self, key: NestedKey) -> EntryNotFound:
        return EntryNotFound(
            f"no entry {key!r} in the store {self._handle.location}; it has {self._leaf_paths()}"
        )

    # ---- reads

    def _get_str(self, key: str, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_tuple((key,), default, **kwargs)

    def _get_tuple(self, key: NestedKey, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        key = _unravel_key_to_tuple(key)
        path = self._full(key)
        if path in self._handle.paths():
            return self._read_paths([path], ()).get(tuple(path.split(".")), **kwargs)
        if below(self._handle.paths(), path):
            return self._nested(path)
        if default is NO_DEFAULT:
            raise self._missing(key if len(key) > 1 else key[0])
        return default

    def _nested(self, path: str) -> TensorDictBase:
        paths = [f"{path}.{rest}" for rest in below(self._handle.paths(), path)]
        nested = self._read_paths(paths, ()).get(tuple(path.split(".")))
        assert isinstance(nested, TensorDictBase)
        return nested

    def _get_at_str(self, key: str, idx: Any, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_at_tuple((key,), idx, default, **kwargs)

    def _get_at_tuple(
        self, key: NestedKey, idx: Any, default: Any = NO_DEFAULT, **kwargs: Any
    ) -> Any:
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.paths():
            return self._read_paths([path], idx).get(tuple(path.split(".")), **kwargs)
        value = self._get_tuple(key, default, **kwargs)
        return value if value is default else value[idx]

    def _index_tensordict(self, index: Any, new_batch_size: Any = None, names: Any = None) -> Any:
        paths = [self._full(path) for path in self._leaf_paths()]
        out = self._read_paths(paths, index)
        return out.get(tuple(self._prefix.split("."))) if self._prefix else out

    def __getitem__(self, index: Any) -> Any:
        key = _unravel_key_to_tuple(index) if isinstance(index, (str, tuple)) else ()
        if key:
            return self._get_tuple(key, NO_DEFAULT)
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        return self._index_tensordict(index)

    def __iter__(self) -> Iterator[Any]:
        if not self.batch_dims:
            raise TypeError("iteration over a store without batch dims")
        return (self[i] for i in range(self.batch_size[0]))

    def _to_tensordict(self, *, retain_none: bool | None) -> TensorDictBase:
        return self._index_tensordict(())

    def _clone(self, recurse: bool = True) -> TensorDictBase:
        if recurse:
            return self._to_tensordict(retain_none=None)
        return self._shallow()

    def _shallow(self) -> TensorDictBase:
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__)
        out._is_locked = False
        return out

    # ---- writes

    def _set_str(
        self,
        key: str,
        value: Any,
        *,
        inplace: Any,
        validated: bool,
        ignore_lock: bool = False,
        non_blocking: bool = False,
    ) -> TensorDictBase:
        return self._set_tuple(
            (key,),
            value,
            inplace=inplace,
            validated=validated,
            non_blocking=non_blocking,
            ignore_lock=ignore_lock,
        )

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
        if isinstance(value, (str, bytes, set)) or is_non_tensor(value):
            raise UnsupportedValue(f"the value of {key!r} is not a tensor: {type(value).__name__}")
        if not validated:
            value = self._validate_value(value, check_shape=True, key=key)
        if self.is_locked and not ignore_lock and inplace is not True:
            known = path in self._handle.paths() or below(self._handle.paths(), path)
            if inplace is False or not known:
                raise RuntimeError(_LOCK_ERROR)
        if is_tensor_collection(value):
            values = {f"{path}.{rest}": leaf for rest, leaf in leaves_of(value).items()}
        else:
            values = {path: value}
        for full, leaf in values.items():
            self._write_path(full, leaf)
        return self

    def _set_at_str(
        self, key: str, value: Any, idx: Any, *, validated: bool, non_blocking: bool
    ) -> TensorDictBase:
        return self._set_at_tuple(
            (key,), value, idx, validated=validated, non_blocking=non_blocking
        )

    def _set_at_tuple(
        self, key: NestedKey, value: Any, idx: Any, *, validated: bool, non_blocking: bool
    ) -> TensorDictBase:
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.paths():
            value = value if isinstance(value, (torch.Tensor, Number)) else torch.as_tensor(value)
            self._write_at({path: value}, idx)
        elif below(self._handle.paths(), path) and is_tensor_collection(value):
            values = {f"{path}.{rest}": leaf for rest, leaf in leaves_of(value).items()}
            self._write_at(values, idx)
        else:
            raise self._missing(key)
        return self

    def _setitem_index(self, index: Any, value: Any) -> None:
        if isinstance(value, Number):
            values: dict[str, Any] = {self._full(path): value for path in self._leaf_paths()}
        else:
            if not is_tensor_collection(value):
                if not isinstance(value, dict):
                    raise UnsupportedValue(
                        f"a {type(value).__name__} cannot be written to an element: pass a "
                        "tensordict, a dict or a number"
                    )
                value = TensorDict.from_dict(value, batch_size=[])
            values = {self._full(path): leaf for path, leaf in leaves_of(value).items()}
        self._write_index(values, index)

    def _write_index(self, values: dict[str, Any], index: Any) -> None:
        self._write_at(values, index)

    def _del(self, key: tuple[str, ...]) -> None:
        path = self._full(key)
        found = [path] if path in self._handle.paths() else []
        found += [f"{path}.{rest}" for rest in below(self._handle.paths(), path)]
        if not found:
            raise self._missing(key if len(key) > 1 else key[0])
        self._handle.delete(found)

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
        for path in self._leaf_paths():
            spec = self._handle.specs([self._full(path)])[self._full(path)]
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
