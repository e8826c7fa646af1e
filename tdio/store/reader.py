"""Batch reads: a spec for each leaf and an index in, one consolidated batch out, one round trip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tdio._td import LazyStackedTensorDict, TensorDict, build, consolidated
from tdio.layout.buffers import Slot, allocate, pack
from tdio.layout.index import Rows, normalise, select
from tdio.layout.plan import Ranges, Selection, in_pieces, plan_elements, plan_rows
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.store.handle import Handle
from tdio.wire.requests import Fetch, Operation, RangeRead

#: Result of a read: a TensorDict, or a lazy stack where entries are ragged.
Batch = TensorDict | LazyStackedTensorDict


def read(
    handle: Handle, paths: Sequence[str], index: Any, device: torch.device | None = None
) -> Batch:
    """Read ``store[index]`` of the leaves ``paths``.

    One round trip once the metadata is known. A homogeneous batch is one storage of which the
    leaves are views; with ragged entries the result is a lazy stack of elements (a TensorDict
    for an int on the stack dim) that share one storage.

    Raises:
        IndexOutOfRange: an index outside the batch size.
        InvalidIndex: a float, a mask of another length.
        EntryNotFound: the server lost an entry.
        CorruptEntry: an entry is shorter than its metadata says.
    """
    info = handle.info
    items = normalise(index, len(info.batch))
    specs = list(handle.specs(paths).values())
    if any(spec.ragged for spec in specs):
        return _read_ragged(handle, specs, items, device)
    rows = select(info.batch, items)
    batch = (*rows.shape, *info.batch[rows.depth :])
    leaves = [(s.dtype, (*batch, *feature(s, info.batch))) for s in specs]
    slots, nbytes = pack(leaves)
    storage = allocate(nbytes)
    plans = plan_leaves(specs, rows, info.batch, info.stack)
    handle.client.read(lambda: _fetch(handle, specs, plans, slots, storage))
    placed = {spec.path: slot for spec, slot in zip(specs, slots, strict=True)}
    storage = storage if device is None else storage.to(device)
    return consolidated(storage, placed, batch, device)


def read_elements(
    handle: Handle, paths: Sequence[str], positions: Int64Array, device: torch.device | None = None
) -> list[TensorDict]:
    """Read the elements ``positions`` (int64 ``[n]``, in range) of a lazy stack.

    One round trip once the metadata is known; the leaves of all elements share one storage.
    """
    info, count = handle.info, len(positions)
    assert info.stack is not None
    specs = list(handle.specs(paths).values())
    plans: list[Ranges] = []
    leaves: list[tuple[torch.dtype, tuple[int, ...]]] = []
    for spec in specs:
        if spec.shapes is not None and spec.offsets is not None:
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
    storage = allocate(nbytes)
    handle.client.read(lambda: _fetch(handle, specs, plans, slots, storage))
    storage = storage if device is None else storage.to(device)
    columns = [
        _split(spec, slot, storage, positions, info.stack)
        for spec, slot in zip(specs, slots, strict=True)
    ]
    names = [spec.path for spec in specs]
    return [
        build(dict(zip(names, (column[i] for column in columns), strict=True)), info.inner, device)
        for i in range(count)
    ]


def _read_ragged(
    handle: Handle, specs: list[LeafSpec], items: tuple[Any, ...], device: torch.device | None
) -> Batch:
    info, paths = handle.info, [spec.path for spec in specs]
    assert info.stack is not None
    at, item = _stack_item(items, info.stack)
    if at is None:
        everything = read_elements(handle, paths, np.arange(info.count), device)
        whole = LazyStackedTensorDict(*everything, stack_dim=info.stack)
        if not items:
            return whole
        select(info.batch, items)  # raises for a bad index before torch does
        return whole[items]
    rows = select((info.count,), (item,))
    distinct, inverse = np.unique(rows.positions, return_inverse=True)
    if len(items) == 1 and at == 0 and len(rows.shape) == 1:
        if not len(rows.positions):
            return _empty_batch(specs, info.inner, device)
        # Each element of the batch has bytes of its own, also where an index repeats.
        elements = read_elements(handle, paths, rows.positions, device)
        return LazyStackedTensorDict(*elements, stack_dim=0)
    select(info.batch, items)
    elements = read_elements(handle, paths, distinct, device)
    if not len(elements):
        return _empty_batch(specs, info.inner, device)
    stack = LazyStackedTensorDict(*elements, stack_dim=info.stack)
    local = torch.from_numpy(inverse.reshape(rows.shape))
    inner = (*items[:at], local if local.ndim else int(local), *items[at + 1 :])
    return stack[inner]


def _empty_batch(
    specs: list[LeafSpec], inner: tuple[int, ...], device: torch.device | None
) -> TensorDict:
    """Return the batch of no elements: ragged dims become 0."""
    flat = {}
    for spec in specs:
        below = spec.shape[len(inner) + 1 :]
        shape = (0, *inner, *(0 if spec.ragged else n for n in below))
        flat[spec.path] = torch.empty(shape, dtype=spec.dtype, device=device)
    return build(flat, (0, *inner), device)


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


def feature(spec: LeafSpec, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a homogeneous entry below the batch dims."""
    return spec.shape[len(batch) :]


def plan_leaves(
    specs: Sequence[LeafSpec],
    rows: Rows,
    batch: tuple[int, ...],
    stack: int | None,
    *,
    gather: bool = True,
) -> list[Ranges]:
    """Plan the same rows of several homogeneous leaves."""
    plans: list[Ranges] = []
    plain = Selection(rows.positions)
    swapped: Selection | None = None
    for spec in specs:
        row = math.prod(feature(spec, batch)) * spec.dtype.itemsize
        if stack and spec.stack_first:
            if swapped is None:
                swapped = Selection(_to_stack_first(rows, batch, stack))
            plans.append(plan_rows(swapped, row, gather=gather))
        else:
            inner = math.prod(batch[rows.depth :])
            plans.append(plan_rows(plain, inner * row, gather=gather))
    return plans


def _to_stack_first(rows: Rows, batch: tuple[int, ...], stack: int) -> Int64Array:
    """Turn rows of the batch layout into positions of an entry whose stack dim comes first."""
    inner = math.prod(batch[rows.depth :])
    flat = (rows.positions[:, None] * inner + np.arange(inner)).reshape(-1)
    coords = list(np.unravel_index(flat, batch)) if flat.size else [flat for _ in batch]
    first = [coords.pop(stack), *coords]
    shape = (batch[stack], *batch[:stack], *batch[stack + 1 :])
    if not flat.size:
        return flat
    return np.ravel_multi_index(tuple(first), shape).astype(np.int64)


def _fetch(
    handle: Handle,
    specs: Sequence[LeafSpec],
    plans: Sequence[Ranges],
    slots: Sequence[Slot],
    storage: torch.Tensor,
) -> Operation[None]:
    """Bring the planned ranges into their slots of ``storage``, in one round trip."""
    target = storage.numpy()
    reads, gathers = [], []
    for spec, plan, slot in zip(specs, plans, slots, strict=True):
        if not slot.nbytes:
            continue
        into = target[slot.start : slot.start + slot.nbytes]
        if plan.rows is not None:
            scratch = np.empty(plan.moved_bytes, np.uint8)
            gathers.append((scratch, plan, into))
            into = scratch
        pieces = in_pieces(replace(plan, rows=None))
        what = f"entry {spec.path!r} of {handle.location}"
        reads.append(RangeRead(handle.names.data(spec.path), pieces, into, what))
    if reads:
        yield Fetch(reads)
    for scratch, plan, into in gathers:
        assert plan.rows is not None
        table = scratch.reshape(-1, plan.row_bytes)
        np.take(table, plan.rows, axis=0, out=into.reshape(-1, plan.row_bytes))


def _split(
    spec: LeafSpec, slot: Slot, storage: torch.Tensor, positions: Int64Array, stack: int
) -> Sequence[torch.Tensor]:
    view = slot.view(storage)
    if spec.offsets is None or spec.shapes is None:
        return list(view.movedim(stack, 0).unbind(0))
    counts = (spec.offsets[positions + 1] - spec.offsets[positions]) // spec.dtype.itemsize
    parts = view.split(counts.tolist())
    shapes = map(spec.element_shape, positions.tolist())
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
