"""What is stored, by path: address, transactions, keys and dim names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from tdio._td import (
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
    value_of,
)
from tdio.errors import EntryNotFound
from tdio.layout.index import as_int
from tdio.layout.levels import Level
from tdio.layout.paths import below, parents, path_of
from tdio.layout.spec import LeafSpec
from tdio.layout.values import ValueSpec
from tdio.store.committing import commit
from tdio.store.creating import create, device_of
from tdio.store.flat import Flat
from tdio.store.handle import Edit, Handle, Location
from tdio.store.shape import Frame, names_of
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Operation

_TENSOR = torch.zeros(())
_VALUE = NonTensorData(None)
Making = Callable[[], Operation[Edit]]
#: The writes that are gathered into one transaction, with the handle that will do them.
_UPDATED: ContextVar[frozenset[int]] = ContextVar("updated", default=frozenset())
_GATHERED: ContextVar[list[tuple[Handle, Making]] | None] = ContextVar("gathered", default=None)


class StoredKeys(_NoShapeOps, _NoVmap, TensorDictBase):
    """Address, transactions, keys and dim names; subclasses say how a path is read and written."""

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
    #: The store that a nested or element view was taken from: its lock holds for the view too.
    _owner: Any = None
    _value_class: type = NonTensorData
    _entered: list[tuple[bool, bool]]
    _prefix: str = ""
    _backend: str = "redis"

    def _setup(self, handle: Handle, device: torch.device | None) -> None:
        self._handle = handle
        self._device = device
        self._is_locked = False

    def _create(self, location: Location, info: StoreInfo, backend: str, **options: Any) -> None:
        """Make the empty store of a constructor."""
        handle = create(location, info, **options)
        self._setup(handle, device_of(info, None, location))
        self._backend = backend

    @classmethod
    def _wrap(cls, handle: Handle, device: Any, backend: str) -> Any:
        """Return the tensordict of a store that is on the server."""
        out = cls.__new__(cls)
        out._setup(handle, device_of(handle.info, device, handle.location))
        out._backend = backend
        return out

    @property
    def _batch_size(self) -> torch.Size:
        # Of a nested level another handle may change it.
        return torch.Size(self._frame(self._prefix).batch)

    # ---- what a subclass says

    def _reading(self, paths: list[str] | None, index: Any, prefix: str) -> Operation[Any]:
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
            self._handle.client.write(commit(self._handle, making))
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
            making = _all_of([making for of, making in gathered if of is handle])
            handle.client.write(commit(handle, making))

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
        leaves: dict[str, Any] = dict.fromkeys(self._leaf_paths(), _TENSOR)
        if nested:
            cut = len(self._prefix) + 1 if self._prefix else 0
            specs = self._handle.specs_under(self._prefix).items()
            leaves = {p[cut:]: _VALUE if isinstance(s, ValueSpec) else _TENSOR for p, s in specs}
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

    def entry_class(self, key: NestedKey) -> type:
        """Return the class of an entry, from its metadata."""
        path = self._full(_unravel_key_to_tuple(key))
        if path in self._handle.known():
            (spec,) = self._handle.specs([path]).values()
            return self._value_class if isinstance(spec, ValueSpec) else torch.Tensor
        if self._has_level(path):
            level = self._handle.info.levels.get(path)
            return imported_tensorclass(level.kind) if level and level.kind else type(self)
        raise self._missing(key)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all tensors, or None where they differ; from the metadata."""
        specs = self._handle.specs_under(self._prefix)
        dtypes = {spec.dtype for spec in specs.values() if isinstance(spec, LeafSpec)}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _ragged(self) -> bool:
        """Whether an entry has elements of different shapes."""
        return False

    def _local(self) -> Any:
        """Return a local copy that behaves as this class does: in a stack, a lazy stack."""
        return self.to_tensordict().unlock_()

    # ---- locks: of this handle on the store, not of the store

    @property
    def is_locked(self) -> bool:
        """Whether keys and entries may not be set through this object."""
        return bool(self._is_locked or (self._owner is not None and self._owner.is_locked))

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    def _check_unlock(self, first_attempt: bool = True) -> None:
        if self._owner is not None and self._owner.is_locked:
            raise RuntimeError("this is a view of a locked store: unlock the store")

    def _lock_sub_tensordicts(self) -> list[TensorDictBase]:
        return []

    def _has_level(self, path: str) -> bool:
        """Whether a nested tensordict is at a full path."""
        return self._handle.has_level(path)

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
        def naming() -> Operation[Edit]:
            return Edit((), self._named(names))
            yield  # makes this a generator

        self._apply(naming)

    def _named(self, names: dict[str, list[str | None] | None]) -> dict[str, Level | None]:
        levels: dict[str, Level | None] = {}
        for path, own in names.items():
            known = self._handle.info.levels.get(path)
            given = tuple(own) if own is not None and any(own) else ()
            if known is None and not given:
                continue
            level = Level(self._frame(path).batch, given, known.kind if known else "")
            level = self._stored_level(level) if path else level
            levels[path] = replace(level, batch=known.batch) if known else level
        return levels

    def _stored_level(self, level: Level) -> Level:
        """Return a nested level as it is stored: in a lazy stack, that of one element."""
        return level

    def _batch_size_setter(self, new_batch_size: Any) -> None:
        if tuple(new_batch_size) != tuple(self.batch_size):
            raise RuntimeError(
                f"the batch size of a {type(self).__name__} is fixed on the server; call "
                "to_tensordict() first"
            )


@dataclass(frozen=True)
class _Index:
    """An index, and what it indexes: a level, or one leaf, below whose batch dims it may reach."""

    index: Any
    frame: Frame
    leaf: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", as_int(self.index))


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
