"""Batch reads: what an entry is and an index in, one consolidated batch out, one round trip.

Functions that return an ``Operation`` do no I/O; ``read`` and ``read_elements`` run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tdio._td import LazyStackedTensorDict, TensorDict, build, consolidated, value_entry
from tdio.layout.buffers import Slot, allocate, pack, views
from tdio.layout.index import Rows, normalise, select
from tdio.layout.plan import Ranges, plan_elements
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.layout.values import decode_value
from tdio.store.columns import column_of, columns_of
from tdio.store.handle import Contended, Handle, Plan
from tdio.store.placing import check_held, feature, leaf_shape, on_device, plan_leaves, reads_into
from tdio.store.shape import Frame, levels_at
from tdio.wire.reading import Spec, StoreInfo
from tdio.wire.requests import Operation

#: Result of a read: a TensorDict, or a lazy stack where entries are ragged.
Batch = TensorDict | LazyStackedTensorDict


def read(
    handle: Handle,
    paths: Sequence[str] | None,
    index: Any,
    device: torch.device | None = None,
    prefix: str = "",
) -> Batch:
    """Read ``store[index]`` of the leaves ``paths``, all under the level ``prefix``.

    ``paths`` of None are those that the level has when it is read.

    One round trip once the metadata is known. A homogeneous batch is one storage of which the
    leaves are views; with ragged entries the result is a lazy stack of elements (a TensorDict
    for an int on the stack dim) that share one storage.

    Raises:
        IndexOutOfRange: an index outside the batch size.
        InvalidIndex: a float, a mask of another length.
        EntryNotFound: the server lost an entry.
        CorruptEntry: an entry is shorter than its metadata says.
    """
    return handle.client.read(lambda: reading(handle, paths, index, device, prefix))


def reading(
    handle: Handle,
    paths: Sequence[str] | None,
    index: Any,
    device: torch.device | None = None,
    prefix: str = "",
) -> Operation[Batch]:
    """The operation of ``read``."""
    columns = yield from columns_of(handle, paths, prefix)
    frame = columns.frame
    items = normalise(index, len(frame.batch))
    if columns.ragged:
        return (yield from _ragged(handle, paths, items, device, prefix))
    plan = partial(_planning, handle, paths, device=device, prefix=prefix)
    try:
        return (yield from handle.fetch(lambda: plan(None, items)))
    except _BecameRagged:
        return (yield from _ragged(handle, paths, items, device, prefix))
    except Contended:
        rows = select(frame.batch, items)
        if len(rows.positions) < 2 or not rows.depth:
            raise
    # Fewer rows at once: writers come between less often.
    flat = Rows(rows.positions, (len(rows.positions),), rows.depth)
    parts = []
    for lo in range(0, len(flat.positions), _FEW_ROWS):
        some = flat.positions[lo : lo + _FEW_ROWS]
        part = Rows(some, (len(some),), flat.depth)
        parts.append((yield from handle.fetch(partial(plan, part, None))))
    whole: Any = torch.cat(parts, 0).reshape(*rows.shape, *frame.batch[rows.depth :])
    return whole.consolidate()


_FEW_ROWS = 8


def reading_leaf(
    handle: Handle, path: str, index: Any, device: torch.device | None = None
) -> Operation[Any]:
    """Read one leaf at an index of the level that holds it: as ``reading``, less what is around it.

    Returns a tensor or a non-tensor entry.
    """
    prefix, _, name = path.rpartition(".")
    column = yield from column_of(handle, path)
    if column.tensors and not column.ragged:
        try:
            return (yield from handle.fetch(partial(_planning_leaf, handle, path, index, device)))
        except (_BecameRagged, Contended):
            pass
    if column.tensors:
        out = yield from reading(handle, (path,), (), device, prefix)
        leaf = out._get_str(name, None)
        return leaf if isinstance(index, tuple) and not index else leaf[index]
    out = yield from reading(handle, (path,), index, device, prefix)
    return out._get_str(name, None)


def indexed(info: StoreInfo, specs: Mapping[str, Spec], index: Any) -> tuple[int, ...]:
    """Return the shape that the index of a write is applied to: of a level, or of one leaf."""
    for spec in specs.values():
        if index.leaf and isinstance(spec, LeafSpec):
            return leaf_shape(info, spec)
    batch: tuple[int, ...] = index.frame.batch
    return batch


def _planning_leaf(
    handle: Handle, path: str, index: Any, device: torch.device | None
) -> Operation[Plan]:
    column = yield from column_of(handle, path)
    if not column.tensors or column.ragged:
        raise _BecameRagged
    whole = column.frame.batch
    rows = select(whole, normalise(index, len(whole)))
    storage, slots, reads, place = yield from column.prepare(handle, rows)

    def finish(blobs: list[bytes | None]) -> torch.Tensor:
        place()
        (leaf,) = views(storage, slots)
        return on_device(leaf, device, handle)

    return Plan(reads, (), finish)


class _BecameRagged(Exception):
    """Another writer resized an element while a read of dense entries was planned."""


def _planning(
    handle: Handle,
    paths: Sequence[str] | None,
    rows: Rows | None,
    items: tuple[Any, ...] | None,
    device: torch.device | None,
    prefix: str,
) -> Operation[Plan]:
    """Plan ``rows`` of entries that are all homogeneous, or those that ``items`` selects."""
    columns = yield from columns_of(handle, paths, prefix)
    if columns.ragged:
        raise _BecameRagged
    frame, info = columns.frame, handle.info
    chosen = rows = select(frame.batch, items or ()) if rows is None else rows
    storage, slots, reads, place = yield from columns.prepare(handle, rows)

    def finish(blobs: list[bytes | None]) -> Batch:
        place()
        target = on_device(storage, device, handle)
        placed = dict(zip(columns.names, slots, strict=True))
        flat = {
            name: _value_at(handle, spec, blob, frame, chosen, items)
            for name, spec, blob in zip(columns.value_names, columns.values, blobs, strict=True)
        }
        levels = levels_at(info, frame, chosen, items)
        return consolidated(
            target, placed, columns.batch(chosen), device, values=flat, levels=levels
        )

    return Plan(reads, [spec.path for spec in columns.values], finish)


def _value_at(
    handle: Handle,
    spec: Spec,
    blob: bytes | None,
    frame: Frame,
    rows: Rows,
    items: tuple[Any, ...] | None,
) -> Any:
    """Return the non-tensor entry of the selected rows."""
    value, dims = _decode(handle, spec, blob)
    after = (*rows.shape, *frame.batch[rows.depth :])
    if not dims:
        return value_entry(value, 0, after)
    axis = frame.stack or 0
    if dims == 1 and axis == 0 and rows.depth == 1 and len(rows.shape) <= 1:
        chosen = [value[position] for position in rows.positions.tolist()]
        return value_entry(chosen, 1, after) if rows.shape else value_entry(chosen[0], 0, after)
    whole = value_entry(value, dims, frame.batch, axis)
    return whole if not items else whole[items]


def _decode(handle: Handle, spec: Spec, blob: bytes | None) -> tuple[Any, int]:
    assert not isinstance(spec, LeafSpec)
    return decode_value(
        spec, blob or b"", allow_pickle=handle.allow_pickle, where=str(handle.location)
    )


# ---- elements of a lazy stack


def read_elements(
    handle: Handle,
    paths: Sequence[str] | None,
    positions: Int64Array,
    device: torch.device | None = None,
    prefix: str = "",
) -> list[TensorDict]:
    """Read the elements ``positions`` (int64 ``[n]``, in range) of a lazy stack.

    One round trip once the metadata is known; the leaves of all elements share one storage.
    """
    return handle.client.read(lambda: reading_elements(handle, paths, positions, device, prefix))


def reading_elements(
    handle: Handle,
    paths: Sequence[str] | None,
    positions: Int64Array,
    device: torch.device | None = None,
    prefix: str = "",
) -> Operation[list[TensorDict]]:
    """The operation of ``read_elements``."""
    plan = partial(_planning_elements, handle, paths, device=device, prefix=prefix)
    try:
        return (yield from handle.fetch(lambda: plan(positions)))
    except Contended:
        if len(positions) < 2:
            raise
    out: list[TensorDict] = []
    for lo in range(0, len(positions), _FEW_ROWS):
        out += yield from handle.fetch(partial(plan, positions[lo : lo + _FEW_ROWS]))
    return out


def _planning_elements(
    handle: Handle,
    paths: Sequence[str] | None,
    positions: Int64Array,
    device: torch.device | None,
    prefix: str,
) -> Operation[Plan]:
    specs = yield from handle.load(handle.under(prefix) if paths is None else paths)
    info = handle.info
    assert info.stack is not None
    tensors = [spec for spec in specs.values() if isinstance(spec, LeafSpec)]
    values = [spec for spec in specs.values() if not isinstance(spec, LeafSpec)]
    plans: list[Ranges] = []
    leaves: list[tuple[torch.dtype, tuple[int, ...]]] = []
    for spec in tensors:
        if spec.offsets is not None:
            plans.append(plan_elements(positions, spec.offsets))
            sizes = spec.offsets[positions + 1] - spec.offsets[positions]
            leaves.append((spec.dtype, (int(sizes.sum()) // spec.dtype.itemsize,)))
            continue
        items: tuple[Any, ...] = (slice(None),) * info.stack + (torch.from_numpy(positions),)
        rows = select(info.batch, items)
        plans += plan_leaves([spec], rows, info.batch, info.stack)
        shape = (*rows.shape, *info.batch[rows.depth :], *feature(spec, info.batch))
        leaves.append((spec.dtype, shape))
    slots, nbytes = pack(leaves)
    yield from check_held(handle, tensors, nbytes)
    storage = allocate(nbytes)
    reads, place = reads_into(handle, tensors, plans, slots, storage)

    def finish(blobs: list[bytes | None]) -> list[TensorDict]:
        place()
        target = on_device(storage, device, handle)
        columns: list[Sequence[Any]] = [
            _split(spec, slot, target, positions, info.stack or 0)
            for spec, slot in zip(tensors, slots, strict=True)
        ]
        for value, blob in zip(values, blobs, strict=True):
            content, dims = _decode(handle, value, blob)
            chosen = positions.tolist()
            picked = [content[i] for i in chosen] if dims else [content] * len(chosen)
            columns.append([value_entry(one, 0, info.inner) for one in picked])
        cut = len(prefix) + 1 if prefix else 0
        names = [path[cut:] for path in (*(s.path for s in tensors), *(s.path for s in values))]
        frame = Frame.of_element(info, prefix)
        levels = levels_at(info, frame, None, None)
        return [
            build(dict(zip(names, one, strict=True)), frame.batch, device, levels)
            for one in (zip(*columns, strict=True) if columns else [()] * len(positions))
        ]

    return Plan(reads, [spec.path for spec in values], finish)


def _ragged(
    handle: Handle,
    paths: Sequence[str] | None,
    items: tuple[Any, ...],
    device: torch.device | None,
    prefix: str,
) -> Operation[Batch]:
    info = handle.info
    assert info.stack is not None
    frame = Frame.of(info, prefix)
    select(frame.batch, items)  # raises for a bad index before torch does
    at, item = _stack_item(items, info.stack)
    if at is None or item == slice(None):
        positions = np.arange(info.count)
        local: Any = slice(None)
    else:
        rows = select((info.count,), (item,))
        if isinstance(item, slice):
            # In the slice's own order; what indexes other dims keeps its meaning beside a slice.
            positions, local = rows.positions, slice(None)
        elif len(items) == 1 and len(rows.shape) == 1:
            # Each element of a batch has bytes of its own, also where an index repeats.
            positions, local = rows.positions, slice(None)
        else:
            positions, inverse = np.unique(rows.positions, return_inverse=True)
            local = torch.from_numpy(inverse.reshape(rows.shape))
            local = local if local.ndim else int(local)
    inner = items if at is None else (*items[:at], local, *items[at + 1 :])
    if all(isinstance(part, slice) and part == slice(None) for part in inner):
        inner = ()
    if not len(positions):
        empty = yield from _empty_stack(handle, paths, device, prefix)
        return empty[inner] if inner else empty
    elements = yield from reading_elements(handle, paths, positions, device, prefix)
    stack = _stacked(elements, info.stack, info)
    return stack[inner] if inner else stack


def _stacked(elements: list[TensorDict], dim: int, info: Any) -> LazyStackedTensorDict:
    root = info.levels.get("")
    name = root.names[info.stack] if root is not None and root.names else None
    return LazyStackedTensorDict(*elements, stack_dim=dim, stack_dim_name=name)


def _empty_stack(
    handle: Handle, paths: Sequence[str] | None, device: torch.device | None, prefix: str
) -> Operation[TensorDict]:
    """Return the stack of no elements, dense: ragged dims become 0."""
    specs = yield from handle.load(handle.under(prefix) if paths is None else paths)
    info, flat = handle.info, {}
    frame = Frame.of(info, prefix)
    assert info.stack is not None
    batch = (*frame.batch[: info.stack], 0, *frame.batch[info.stack + 1 :])
    cut = len(prefix) + 1 if prefix else 0
    for spec in specs.values():
        if isinstance(spec, LeafSpec):
            below = spec.shape[len(frame.batch) :]
            shape = (*batch, *(0 if spec.ragged else n for n in below))
            flat[spec.path[cut:]] = torch.empty(shape, dtype=spec.dtype, device=device)
        else:
            flat[spec.path[cut:]] = value_entry([], 1, batch)
    return build(flat, batch, device)


def _stack_item(items: tuple[Any, ...], stack: int) -> tuple[int | None, Any]:
    """Return where in ``items`` the stack dim is indexed on its own, and by what."""
    dim = 0
    for at, item in enumerate(items):
        if item is None:
            continue
        taken = item.ndim if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1
        if dim == stack and taken == 1:
            return at, item
        dim += taken
    return None, None


def _split(
    spec: LeafSpec, slot: Slot, storage: torch.Tensor, positions: Int64Array, stack: int
) -> Sequence[torch.Tensor]:
    (view,) = views(storage, [slot])
    if spec.offsets is None or spec.shapes is None:
        return list(view.movedim(stack, 0).unbind(0))
    counts = (spec.offsets[positions + 1] - spec.offsets[positions]) // spec.dtype.itemsize
    parts = view.split(counts.tolist())
    shapes = map(spec.element_shape, positions.tolist())
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
