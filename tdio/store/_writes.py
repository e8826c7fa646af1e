"""Writes of a stored tensordict: each is one transaction."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch

from tdio._td import (
    _LOCK_ERROR,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    _unravel_key_to_tuple,
    is_non_tensor,
    is_tensor_collection,
)
from tdio.errors import UnsupportedValue
from tdio.layout.levels import Level
from tdio.layout.paths import below, check_key, parents
from tdio.layout.values import ValueSpec
from tdio.store._keys import (
    _UPDATED,
    _Index,
    _value,
)
from tdio.store._reads import StoredReads
from tdio.store.flat import Flat, flatten
from tdio.store.handle import Edit
from tdio.store.stacking import is_same
from tdio.store.writer import check_leaves
from tdio.wire.changes import Drop
from tdio.wire.requests import Operation


class StoredWrites(StoredReads):
    """TensorDictBase's hooks that write."""

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
        source = source._local() if isinstance(source, StoredReads) else source
        flat = self._flat(source, self._prefix)
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
        in_place = inplace is not False and known
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
            flat = flatten(value, self._frame("").batch, root_kind=True)
            if not flat.paths and not flat.levels:
                flat.levels[""] = Level(tuple(value.batch_size))
            flat = flat.under(path)
            flat.levels = {at: self._stored_level(level) for at, level in flat.levels.items()}
            return flat
        return Flat(values={path: _value(value)})

    def _replacing(self, path: str, flat: Flat) -> Operation[Edit]:
        """Write what is at ``path`` anew: what was there and is not in ``flat`` goes."""
        flat.replaces = path
        edit = yield from self._putting(flat, False)
        drops = self._drops(self._under(path) - flat.paths)
        return Edit([*edit.changes, *drops], {**self._no_levels(path), **edit.levels})

    def _batch_above(self, flat: Flat, path: str) -> tuple[int, ...]:
        """Return the batch size of the level that will hold an entry of ``flat``."""
        parent, top = path.rpartition(".")[0], flat.replaces
        if top is None or not (parent == top or parent.startswith(top + ".")):
            return self._frame(parent).batch
        base = self._frame(top.rpartition(".")[0]).batch
        extra: tuple[int, ...] = ()
        for above in (*parents(parent), parent):
            if above in flat.levels:
                base = self._frame("").batch
                extra = flat.levels[above].batch[len(self._handle.info.nested) :]
        return (*base, *(extra[: extra.index(-1)] if -1 in extra else extra))

    def _take_over(self, local: Any, before: Flat | None = None) -> None:
        """Write what a changed copy of this level holds, but for the leaves that are as before."""
        flat, top = self._flat(local, self._prefix), self._prefix
        kept = before or Flat()
        fresh = Flat(
            {p: v for p, v in flat.tensors.items() if not is_same(v, kept.tensors.get(p))},
            {p: v for p, v in flat.values.items() if not is_same(v[0], kept.values.get(p, v)[0])},
            {p: level for p, level in flat.levels.items() if p != top},
        )
        if before is None:
            fresh.values = flat.values

        def replacing() -> Operation[Edit]:
            edit = yield from self._putting(fresh, False)
            levels = {**self._no_levels(top), **edit.levels}
            levels.pop(top, None)
            if top and not flat.paths and top not in self._handle.info.levels:
                levels[top] = flat.levels.get(top)
            return Edit([*edit.changes, *self._drops(self._under(top) - flat.paths)], levels)

        self._apply(replacing)

    def _under(self, path: str) -> set[str]:
        """Return the full paths of the leaves below a full path."""
        start = path + "." if path else ""
        return {start + rest for rest in below(self._handle.paths, path)}

    def _no_levels(self, path: str) -> dict[str, Level | None]:
        """Return the removal of a level and of those below it."""
        start = path + "." if path else ""
        levels = self._handle.info.levels
        return {level: None for level in levels if level == path or level.startswith(start)}

    def _drops(self, paths: set[str]) -> list[Drop]:
        if paths:
            self._check_may_rekey()
        return [Drop(path) for path in sorted(paths)]

    def _check_may_rekey(self) -> None:
        """Refuse a change of keys where it is not this object's to make."""
        if self.is_locked:
            raise RuntimeError(_LOCK_ERROR)

    def _create_nested_tuple(self, key: tuple[str, ...]) -> None:
        self._set_tuple(key, self.empty(), inplace=False, validated=True)

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
        leaf = bool(flat.tensors) and not self._has_level(path)
        self._apply(lambda: self._writing_at(flat, _Index(idx, self._frame(prefix), leaf)))
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        if any(part is Ellipsis for part in parts):
            # What it stands for is seen when the write is made: this handle may be stale.
            self._setitem_index(index, value)
        else:
            super().__setitem__(index, value)

    def _setitem_index(self, index: Any, value: Any) -> None:
        if isinstance(value, Number):
            self._apply(lambda: self._writing_number(value, index))
            return
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

    def _writing_number(self, value: Any, index: Any) -> Operation[Edit]:
        """Write a number to the tensors of this level; values stay."""
        specs = yield from self._handle.loading_under(self._prefix)
        flat = Flat({p: value for p, s in specs.items() if not isinstance(s, ValueSpec)})
        return (yield from self._writing_at(flat, _Index(index, self._frame(self._prefix))))

    def _check_same_leaves(self, flat: Flat, index: Any) -> None:
        expected = {self._full(path) for path in self._leaf_paths()}
        where = f"{self._handle.location}[{index!r}]"
        check_leaves(expected, flat.paths, where, ". Write single entries with set_at_")

    def _del(self, key: tuple[str, ...]) -> None:
        if self._full(key) not in self._handle.known() and not self._has_level(self._full(key)):
            raise self._missing(key if len(key) > 1 else key[0])
        self._keep(lambda held: held.exclude(key))

    def _keep(self, rule: Callable[[TensorDict], TensorDict]) -> None:
        """Remove the entries and levels that ``rule`` takes from a skeleton of this level.

        A level that is left without entries stays.
        """
        self._check_may_rekey()

        def keeping() -> Operation[Edit]:
            return self._without(rule(self._skeleton(True)))
            yield  # makes this a generator

        self._apply(keeping)

    def _without(self, rest: TensorDict) -> Edit:
        flat = flatten(rest, ()).under(self._prefix)
        info = self._handle.info
        held = {parent for path in (*flat.paths, *flat.levels) for parent in parents(path)}
        levels: dict[str, Level | None] = {
            path: None
            for path in self._no_levels(self._prefix)
            if path != self._prefix and path not in held and path not in flat.levels
        }
        empty = set(flat.levels) | ({self._prefix} - held if self._prefix else set())
        for path in empty - set(info.levels):
            levels[path] = self._stored_level(Level(self._frame(path).batch))
        drops = [Drop(old) for old in sorted(self._under(self._prefix) - flat.paths)]
        return Edit(drops, levels)

    def clear(self) -> Any:
        """Delete all entries of this level, in one transaction; the level itself stays."""
        self._keep(lambda held: TensorDict())
        return self

    def _select(self, *keys: Any, inplace: bool = False, **options: Any) -> Any:
        if not inplace:
            return super()._select(*keys, inplace=False, **options)
        self._keep(lambda held: held.select(*keys, strict=options.get("strict", True)))
        return self

    def _exclude(self, *keys: Any, inplace: bool = False, **options: Any) -> Any:
        if not inplace:
            return super()._exclude(*keys, inplace=False, **options)
        self._keep(lambda held: held.exclude(*keys))
        return self

    def _rename_key(self, old_key: NestedKey, new_key: NestedKey) -> None:
        with self._together():
            super()._rename_key(old_key, new_key)
