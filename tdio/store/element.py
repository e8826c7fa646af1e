"""``store[i]`` of a lazy stack: a view of one element that reads and writes on the server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import torch

from tdio._td import NestedKey, _register_tensor_class
from tdio.errors import EntryMismatch, InvalidIndex
from tdio.layout.dtypes import as_bytes
from tdio.layout.index import normalise, select
from tdio.layout.paths import below, check_key, key_of, parents
from tdio.layout.plan import Ranges, one_range, plan_rows
from tdio.layout.spec import LeafSpec, ragged_offsets, shapes_array
from tdio.layout.values import ValueSpec
from tdio.store._local import no_server
from tdio.store._stored import Stored
from tdio.store.elements import indexed_locally, reading_elements
from tdio.store.flat import Flat
from tdio.store.handle import Edit, Handle
from tdio.store.placing import leaf_shape
from tdio.store.shape import Frame
from tdio.store.uploading import upload_zeros
from tdio.store.writer import (
    check_fit,
    into_entry,
    number_as,
    one_value,
    rows_changes,
    value_patch,
)
from tdio.wire.changes import Patch, PutRows, PutTensor
from tdio.wire.reading import Spec, StoreInfo
from tdio.wire.requests import Body, Operation


@no_server("an element view is made by store[i]; use TensorDict.{name}")
class ElementView(Stored):
    """Element ``i`` of a ``LazyStackedTensorDictStore``: reads and writes go to the server."""

    def __init__(self, parent: Any, position: int) -> None:
        self._setup(parent._handle, parent._device)
        self._owner = parent
        self._prefix = parent._prefix
        self._position = position

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an element belongs to a stack."""
        raise NotImplementedError("an element view is made by store[i]")

    def _frame(self, prefix: str) -> Frame:
        return Frame.of_element(self._handle.info, prefix)

    def _set_level_names(self, names: dict[str, list[str | None] | None]) -> None:
        if any(any(own or ()) for own in names.values()):
            raise RuntimeError("dims are named on the store, not on one of its elements")

    def _reading(self, paths: list[str] | None, index: Any, prefix: str) -> Operation[Any]:
        position = np.array([self._position], np.int64)
        handle, device = self._handle, self._device
        read = partial(reading_elements, handle, paths, position, device, prefix)
        (element,) = yield from handle.doubting(read)
        return indexed_locally(element, normalise(index, len(element.batch_size)))

    def _reading_leaf(self, path: str, index: Any) -> Operation[Any]:
        prefix, _, name = path.rpartition(".")
        out = yield from self._reading([path], (), prefix)
        leaf = out._get_str(name, None)
        # The index is that of the leaf: it may reach below the batch dims.
        return leaf if isinstance(index, tuple) and not index else leaf[index]

    def _putting(self, flat: Flat, inplace: bool) -> Operation[Edit]:
        if inplace:
            specs = yield from self._handle.load(flat.tensors)
            shaped = {
                path: into_entry(
                    value, element_spec(specs[path], self._handle.info, self._position)
                )
                for path, value in flat.tensors.items()
            }
            flat = replace(flat, tensors=shaped)
        return (yield from writing_element(self._handle, self._position, flat))

    def _writing_at(self, flat: Flat, index: Any) -> Operation[Edit]:
        return (yield from writing_part(self._handle, self._position, flat, index))

    def _check_may_rekey(self) -> None:
        super()._check_may_rekey()
        raise RuntimeError("an entry cannot be deleted from one element; delete it from the store")

    def _rename_key(self, old_key: NestedKey, new_key: NestedKey) -> None:
        self._check_may_rekey()

    def _repr_parts(self) -> list[str]:
        info = self._handle.info
        paths = self._leaf_paths()
        specs = self._handle.specs([self._full(path) for path in paths])
        shown = []
        for path, spec in zip(paths, specs.values(), strict=True):
            text = (
                spec.encoding
                if isinstance(spec, ValueSpec)
                else f"{str(spec.dtype).removeprefix('torch.')}"
                f"{list(element_shape(spec, info, self._position))}"
            )
            shown.append(f"{path}: {text}")
        return [
            f"    entries={{{', '.join(shown)}}}",
            f"    element={self._position}",
            f"    batch_size={self.batch_size}",
            f"    device={self.device}",
            f"    td_id={self.td_id!r}",
        ]


def element_shape(spec: LeafSpec, info: StoreInfo, position: int) -> tuple[int, ...]:
    """Return the shape of one element of an entry of a lazy stack."""
    if spec.ragged:
        return spec.element_shape(position)
    return (*info.inner, *spec.shape[len(info.batch) :])


def element_spec(spec: Spec, info: StoreInfo, position: int) -> Spec:
    """Return what one element of an entry is, on its own."""
    if not isinstance(spec, LeafSpec):
        return spec
    return LeafSpec(spec.path, spec.dtype, element_shape(spec, info, position))


def writing_element(handle: Handle, position: int, flat: Flat) -> Operation[Edit]:
    """Write leaves of one element: in place where the shape stays, else the entry anew."""
    info, where = handle.info, f"{handle.location}[{position}]"
    allow = handle.allow_pickle
    known = {path: value for path, value in flat.tensors.items() if path in handle.paths}
    new = [
        _first_element(handle, path, value, position, where)
        for path, value in flat.tensors.items()
        if path not in handle.paths
    ]
    specs = yield from handle.load(known)
    inner = len(info.inner)
    changes: list[Any] = new
    for path, value in known.items():
        spec = specs[path]
        if not isinstance(spec, LeafSpec):
            raise EntryMismatch(
                f"{where}: the entry {path!r} holds no tensor, the value is one; replace it in the "
                f"whole store first: store[{path!r}] = ..."
            )
        shape = element_shape(spec, info, position)
        if isinstance(value, Number):
            value = number_as(value, spec.dtype, shape)
        check_fit(path, value, spec.dtype, (*info.inner, *value.shape[inner:]), where)
        changes.append(_element_change(handle, spec, position, value, where))
    held = yield from handle.load(flat.values.keys() & handle.paths)
    for path, value_dims in flat.values.items():
        at = np.array([position], np.int64)
        one = [one_value(*value_dims, path, where)]
        if isinstance(held.get(path), LeafSpec):
            raise EntryMismatch(
                f"{where}: the entry {path!r} holds tensors; values replace them in the whole "
                f"store first: store.set_non_tensor({path!r}, ...)"
            )
        if path in handle.paths:
            changes.append(value_patch(path, one, at, info.count, allow, where))
        else:
            raise EntryMismatch(
                f"{where}: a new non-tensor entry {path!r} is written to the whole store first, "
                f"with one value for each element: store[{path!r}] = [...]"
            )
    return Edit(changes, flat.levels)


def _element_change(
    handle: Handle, spec: LeafSpec, position: int, value: torch.Tensor, where: str
) -> Any:
    info = handle.info
    if tuple(value.shape) != element_shape(spec, info, position):
        return _resized(handle, spec, position, value)
    if spec.offsets is not None:
        lo, hi = int(spec.offsets[position]), int(spec.offsets[position + 1])
        return PutRows(spec, one_range(lo, hi - lo), as_bytes(value))
    assert info.stack is not None
    index = (slice(None),) * info.stack + (position,)
    rows = select(info.batch, normalise(index, len(info.batch)))
    (change,) = rows_changes(
        {spec.path: spec}, {spec.path: value}, rows, info.batch, info.stack, where
    )
    return change


def writing_part(handle: Handle, position: int, flat: Flat, index: Any) -> Operation[Edit]:
    """Write ``store[i][index] = values``: only the bytes that the index selects."""
    info, frame = handle.info, index.frame
    where = f"{handle.location}[{position}]"
    if flat.values:
        raise EntryMismatch(f"{where}: a non-tensor value of an element is written whole")
    specs = yield from handle.load(flat.tensors)
    changes = []
    for path, value in flat.tensors.items():
        spec = specs[path]
        batch = frame.batch
        if index.leaf and isinstance(spec, LeafSpec):
            batch = element_shape(spec, info, position)
        items = normalise(index.index, len(batch))
        rows = select(batch, items)
        if isinstance(spec, LeafSpec) and spec.offsets is None:
            whole = (*items[: info.stack], *_at(info, items, position))
            shape = leaf_shape(info, spec) if index.leaf else info.batch
            every = select(shape, normalise(whole, len(shape)))
            changes += rows_changes({path: spec}, {path: value}, every, shape, info.stack, where)
            continue
        (part,) = rows_changes(
            {path: element_spec(spec, info, position)},
            {path: value},
            rows,
            batch,
            None,
            where,
        )
        assert isinstance(spec, LeafSpec)
        assert spec.offsets is not None
        shape = element_shape(spec, info, position)
        row_bytes = math.prod(shape[rows.depth :]) * spec.dtype.itemsize
        plan = plan_rows(rows.positions, row_bytes, gather=False)
        moved = Ranges(plan.starts + spec.offsets[position], plan.sizes, None, plan.row_bytes)
        changes.append(PutRows(spec, moved, part.payload))
    return Edit(changes)


def _at(info: StoreInfo, items: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    """Return the index of an element, continued by the rest of an index into it."""
    assert info.stack is not None
    before = items[: info.stack]
    if any(not isinstance(item, (int, slice)) for item in before):
        raise InvalidIndex(
            f"{items!r:.80} into an element whose stack dim is {info.stack}: write the element "
            "whole, or use numbers and slices"
        )
    missing = info.stack - len(before)
    return (*(slice(None),) * missing, position, *items[info.stack :])


def _first_element(handle: Handle, path: str, value: Any, position: int, where: str) -> PutTensor:
    """Make an entry of zeros with the shape of one element's value, and the value in its place."""
    info = handle.info
    if not isinstance(value, torch.Tensor) or value.shape[: len(info.inner)] != info.inner:
        raise EntryMismatch(
            f"{where}: a new entry {path!r} must be a tensor that starts with the batch size "
            f"of an element, {list(info.inner)}"
        )
    if below(handle.paths, path) or handle.paths.intersection(parents(path)):
        raise EntryMismatch(
            f"{where}: {path!r} cannot be an entry of one element where the others have another "
            f"tree; replace it in the whole store first: store[{path!r}] = ..."
        )
    check_key(key_of(path))
    shape = (info.count, *value.shape)
    return upload_zeros(path, shape, value.dtype, (position * value.nbytes, as_bytes(value)))


def _resized(handle: Handle, spec: LeafSpec, position: int, value: torch.Tensor) -> Patch:
    return replaced(handle, spec, {position: value})


def replaced(handle: Handle, spec: LeafSpec, values: Mapping[int, torch.Tensor]) -> Patch:
    """Return the write of some elements of an entry, of any shapes, by their positions."""
    info, where = handle.info, str(handle.location)

    def patch(now: Spec, blob: bytes) -> PutTensor:
        if not isinstance(now, LeafSpec):
            raise EntryMismatch(f"{where}: the entry {spec.path!r} holds no tensor any more")
        for position, value in values.items():
            at = f"{where}[{position}]"
            shape = (*info.inner, *value.shape[len(info.inner) :])
            check_fit(spec.path, value, now.dtype, shape, at)
        if now.shapes is None:
            blob = _stack_first(now, blob, info)
            shapes = np.array([element_shape(now, info, 0)] * info.count, np.int64)
            shapes = shapes.reshape(info.count, -1)
        else:
            shapes = now.shapes
        offsets = ragged_offsets(shapes, now.dtype.itemsize)
        rows = [tuple(n for n in row if n >= 0) for row in shapes.tolist()]
        pieces = [memoryview(blob)[offsets[i] : offsets[i + 1]] for i in range(info.count)]
        for position, value in values.items():
            rows[position] = tuple(value.shape)
            pieces[position] = as_bytes(value).numpy().data
        table = shapes_array(rows)
        ends = ragged_offsets(table, now.dtype.itemsize)
        new = LeafSpec(spec.path, now.dtype, (info.count, *rows[0]), True, table, ends)
        whole = b"".join(pieces)
        return PutTensor(new, lambda start, stop: Body(stop - start, lambda: [whole[start:stop]]))

    return Patch(spec.path, patch)


def _stack_first(spec: LeafSpec, blob: bytes, info: StoreInfo) -> bytes:
    """Return the bytes of a homogeneous entry with its elements one after the other."""
    assert info.stack is not None
    if spec.stack_first or info.stack == 0 or not blob:
        return blob
    rows = np.frombuffer(blob, np.uint8).reshape(*info.batch, -1)
    return np.ascontiguousarray(np.moveaxis(rows, info.stack, 0)).tobytes()


_register_tensor_class(ElementView)
