"""A stored lazy stack as a stack: elements may differ in the shapes of their leaves."""

from __future__ import annotations

from dataclasses import replace
from numbers import Number
from typing import Any

from tdio._td import (
    _LOCK_ERROR,
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
)
from tdio.errors import EntryMismatch, IndexOutOfRange, UnsupportedValue
from tdio.layout.index import as_int
from tdio.layout.levels import Level
from tdio.layout.spec import LeafSpec
from tdio.store._local import for_stacks, plain, plain_all
from tdio.store._stored import Stored
from tdio.store.element import element_spec, writing_element
from tdio.store.flat import Flat
from tdio.store.handle import Edit
from tdio.store.ragged import elements_of, flats_of, positions_of, writing_elements
from tdio.store.shape import Frame
from tdio.store.stacking import Column, columns_of, only
from tdio.store.uploading import put_value, upload_elements, upload_tensor
from tdio.store.writer import check_batch, into_entry, one_value
from tdio.wire.changes import PutTensor
from tdio.wire.requests import Operation


@for_stacks
class StoredStack(Stored):
    """Reads and writes of a lazy stack, whole or by elements."""

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
        specs = self._handle.specs_under(self._prefix)
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
        args, values = plain_all(tuple(args)), plain_all(tuple((kwargs or {}).values()))
        kwargs = dict(zip(kwargs or (), values, strict=True))
        if any(isinstance(one, StoredStack) for one in _flat_arguments((*args, *values))):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

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

    # ---- hooks

    _value_class = NonTensorStack

    def _read_entry(self, path: str, index: Any, **kwargs: Any) -> Any:
        if not kwargs or index != ():
            return super()._read_entry(path, index, **kwargs)
        prefix, _, name = path.rpartition(".")
        return self._as_stack(self._read([path], (), prefix)).get(name, **kwargs)

    def _flat(self, value: Any, path: str) -> Flat:
        """Take a lazy stack apart by elements: an entry may have no tensor of its own."""
        value = plain(value)
        if type(value) is not LazyStackedTensorDict or value.stack_dim != self.stack_dim:
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
        source = plain(source)
        if type(source) is not LazyStackedTensorDict or source.stack_dim != self.stack_dim:
            return super()._update_entries(
                source, inplace=inplace, keys_to_update=keys_to_update, **kw
            )
        if keys_to_update is not None:
            source = source.select(*keys_to_update, strict=False)
        flat = self._flat(source, self._prefix)
        flat.levels.pop(self._prefix, None)
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
        index = as_int(index)
        if self._ragged() and not (type(index) is int and self.stack_dim == 0):
            self._write_elements(index, value, self._check_same_leaves)
        else:
            super()._setitem_index(index, value)

    def _write_elements(self, index: Any, value: Any, check: Any = None) -> None:
        """Write several elements of different shapes in one transaction."""
        where = f"{self._handle.location}[{index!r}]"
        frame = self._frame(self._prefix)
        positions, single, rest = positions_of(index, frame, where)
        elements = elements_of(value, len(positions), single, where)
        specs = self._handle.specs_under(self._prefix)
        tensors = [path for path, spec in specs.items() if isinstance(spec, LeafSpec)]
        flats = flats_of(elements, self._prefix, tensors)
        check = None if isinstance(value, Number) else check
        for flat in flats if check is not None else ():
            check(flat, index)
        self._apply(lambda: writing_elements(self._handle, positions, flats, rest, frame))

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
            check_batch(path, value, self._batch_above(flat, path), handle.location)
            put = upload_tensor(path, value)
            # With the stack dim in front both layouts are the same.
            puts.append(replace(put, spec=replace(put.spec, stack_first=self.stack_dim == 0)))
        for path, (content, dims) in flat.values.items():
            if isinstance(content, Column):
                rows = list(content)
            else:
                # One for each element, as a lazy stack of tensordicts has it.
                rows = [content] * handle.info.count
                if dims:
                    moved = _moved_first(content, self.stack_dim)
                    rows = [one_value(row, dims - 1, path, options["where"]) for row in moved]
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
        handle, where = self._handle, str(self._handle.location)
        if type(index.index) is int and self.stack_dim == 0:
            position = self._position(index.index)
            return (yield from writing_element(handle, position, flat))
        specs = yield from handle.load(flat.paths)
        if any(isinstance(spec, LeafSpec) and spec.ragged for spec in specs.values()):
            raise UnsupportedValue(
                f"{where}: entries of different shapes are written by their elements: "
                "store[index] = a lazy stack"
            )
        return (yield from super()._writing_at(flat, index))


def _flat_arguments(args: Any) -> list[Any]:
    return [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else (arg,))]


def _moved_first(value: Any, dim: int) -> list[Any]:
    """Return nested lists with dim ``dim`` in front."""
    for _ in range(dim):
        value = [list(row) for row in zip(*value, strict=True)]
    return list(value)
