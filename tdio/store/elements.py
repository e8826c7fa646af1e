"""Reads of single elements of a lazy stack, each in its own shape, one round trip for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tdio._td import LazyStackedTensorDict, TensorDict, build, value_entry
from tdio.layout.buffers import Slot, pack, views
from tdio.layout.index import Rows, dims_taken, normalise, select
from tdio.layout.plan import plan_elements
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.store.entries import decoded, entries_of
from tdio.store.fetching import Plan, fetch
from tdio.store.handle import ATTEMPTS, Contended, Handle
from tdio.store.placing import Planned, feature, landing, plan_leaves
from tdio.store.shape import Frame, levels_at
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Operation

#: A read that writers come between again and again is done so many rows or elements at a time.
FEW = 8


def reading_elements(
    handle: Handle,
    paths: Sequence[str] | None,
    positions: Int64Array,
    device: torch.device | None = None,
    prefix: str = "",
) -> Operation[list[TensorDict]]:
    """Read the elements ``positions`` (int64 ``[n]``, in range) of a lazy stack.

    One round trip once the metadata is known; the leaves of all elements share one storage.

    Raises:
        EntryNotFound: the server lost an entry.
        CorruptEntry: an entry is shorter than its metadata says.
    """
    plan = partial(_planning, handle, paths, device, prefix)
    try:
        return (yield from fetch(handle, lambda: plan(positions)))
    except Contended:
        if len(positions) < 2:
            raise
    few = range(0, len(positions), FEW)
    parts = yield from fetching_parts(handle, (partial(plan, positions[n : n + FEW]) for n in few))
    return [element for part in parts for element in part]


def fetching_parts(
    handle: Handle, plans: Iterable[Callable[[], Operation[Plan]]]
) -> Operation[list[Any]]:
    """Fetch one plan after the other, all of one schema.

    Raises:
        Contended: keys, shapes or dtypes changed between the parts.
    """
    schema, parts = handle.state.tokens.schema, []
    for plan in plans:
        parts.append((yield from fetch(handle, plan)))
        if handle.state.tokens.schema != schema:
            where = handle.location
            raise Contended(f"{where}: its keys, shapes or dtypes changed during this read")
    return parts


def _planning(
    handle: Handle,
    paths: Sequence[str] | None,
    device: torch.device | None,
    prefix: str,
    positions: Int64Array,
) -> Operation[Plan]:
    entries = yield from entries_of(handle, paths, prefix)
    info, tensors = handle.info, entries.tensors
    assert info.stack is not None
    rows = select(info.batch, (slice(None),) * info.stack + (torch.from_numpy(positions),))
    slots, nbytes = pack([_leaf(spec, positions, rows, info) for spec in tensors])
    plans = _plans(tensors, positions, rows, info)
    landed = yield from landing(handle, tensors, plans, slots, nbytes)

    def finish(blobs: list[bytes | None]) -> list[TensorDict]:
        storage = landed.storage(device)
        columns: list[Sequence[Any]] = [
            _split(spec, slot, storage, positions, info.stack or 0)
            for spec, slot in zip(tensors, slots, strict=True)
        ]
        for spec, blob in zip(entries.values, blobs, strict=True):
            value, dims = decoded(handle, spec, blob)
            chosen = positions.tolist()
            picked = [value[i] for i in chosen] if dims else [value] * len(chosen)
            columns.append([value_entry(one, 0, info.inner) for one in picked])
        names = [*entries.names, *entries.value_names]
        frame = Frame.of_element(info, prefix)
        levels = levels_at(info, frame, None, None)
        return [
            build(dict(zip(names, one, strict=True)), frame.batch, device, levels)
            for one in (zip(*columns, strict=True) if columns else [()] * len(positions))
        ]

    return Plan(landed.reads, [spec.path for spec in entries.values], finish)


def _plans(
    tensors: Sequence[LeafSpec], positions: Int64Array, rows: Rows, info: StoreInfo
) -> Iterator[Planned]:
    dense = [at for at, spec in enumerate(tensors) if not spec.ragged]
    for nth, plan in plan_leaves([tensors[at] for at in dense], rows, info.batch, info.stack):
        yield dense[nth], plan
    for at, spec in enumerate(tensors):
        if spec.offsets is not None:
            yield at, plan_elements(positions, spec.offsets)


def _leaf(
    spec: LeafSpec, positions: Int64Array, rows: Rows, info: StoreInfo
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of what is read of a leaf; elements of different shapes as one row."""
    if spec.offsets is not None:
        nbytes = int((spec.offsets[positions + 1] - spec.offsets[positions]).sum())
        return spec.dtype, (nbytes // spec.dtype.itemsize,)
    return spec.dtype, (*rows.shape, *info.batch[rows.depth :], *feature(spec, info.batch))


def reading_ragged(
    handle: Handle,
    paths: Sequence[str] | None,
    index: Any,
    device: torch.device | None,
    prefix: str,
) -> Operation[TensorDict | LazyStackedTensorDict]:
    """Read what an index selects of a lazy stack whose elements differ in shape.

    Raises:
        IndexOutOfRange: an index outside the batch size.
        EntryNotFound: the server lost an entry.
        CorruptEntry: an entry is shorter than its metadata says.
    """
    for _ in range(ATTEMPTS):
        info, frame = handle.info, Frame.of(handle.info, prefix)
        positions, inner = _elements_at(frame, normalise(index, len(frame.batch)))
        if not len(positions):
            empty = yield from _empty_stack(handle, paths, device, prefix)
            return indexed_locally(empty, inner)
        elements = yield from reading_elements(handle, paths, positions, device, prefix)
        # Another handle may have changed the batch size of the level, and with it what an index is.
        if Frame.of(handle.info, prefix) == frame:
            return indexed_locally(_stacked(elements, info), inner)
    raise Contended(f"{handle.location}: the batch size of {prefix!r} changed at every attempt")


def _elements_at(frame: Frame, items: tuple[Any, ...]) -> tuple[Int64Array, tuple[Any, ...]]:
    """Return the elements that an index needs, and what indexes the stack of them."""
    stack = frame.stack or 0
    select(frame.batch, items)  # raises for a bad index before torch does
    at, item = _stack_item(items, stack)
    if at is None or item == slice(None):
        positions = np.arange(frame.batch[stack])
        local: Any = slice(None)
    else:
        rows = select((frame.batch[stack],), (item,))
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
    return positions, inner


def indexed_locally(td: Any, items: tuple[Any, ...]) -> Any:
    """Return ``td[items]``, also where a slice runs backwards, which torch refuses."""
    dim, rest = 0, []
    for item in items:
        if isinstance(item, slice) and (item.step or 1) < 0:
            span = torch.tensor(range(td.batch_size[dim])[item], dtype=torch.int64)
            td, item = td[(slice(None),) * dim + (span,)], slice(None)
        rest.append(item)
        dim += dims_taken(item)
    return td[tuple(rest)] if rest else td


def _stacked(elements: list[TensorDict], info: StoreInfo) -> LazyStackedTensorDict:
    root, dim = info.levels.get(""), info.stack or 0
    name = root.names[dim] if root is not None and root.names else None
    return LazyStackedTensorDict(*elements, stack_dim=dim, stack_dim_name=name)


def _empty_stack(
    handle: Handle, paths: Sequence[str] | None, device: torch.device | None, prefix: str
) -> Operation[TensorDict]:
    """Return the stack of no elements, dense: a dim in which elements differ becomes 0."""
    entries = yield from entries_of(handle, paths, prefix)
    frame, stack = entries.frame, handle.info.stack or 0
    batch = (*frame.batch[:stack], 0, *frame.batch[stack + 1 :])
    flat: dict[str, Any] = {}
    for name, spec in zip(entries.names, entries.tensors, strict=True):
        shape = (*batch, *_common(spec, len(frame.batch)))
        flat[name] = torch.empty(shape, dtype=spec.dtype, device=device)
    flat |= {name: value_entry([], 1, batch) for name in entries.value_names}
    return build(flat, batch, device)


def _common(spec: LeafSpec, ndim: int) -> list[int]:
    """Return the dims of a leaf below ``ndim`` batch dims, 0 where elements differ."""
    below = spec.shape[ndim:]
    if spec.shapes is None:
        return list(below)
    rows = spec.shapes[:, ndim - 1 :]
    same = (rows == rows[:1]).all(axis=0) if len(rows) else np.ones(0, bool)
    return [n if d < len(same) and same[d] else 0 for d, n in enumerate(below)]


def _stack_item(items: tuple[Any, ...], stack: int) -> tuple[int | None, Any]:
    """Return where in ``items`` the stack dim is indexed on its own, and by what."""
    dim = 0
    for at, item in enumerate(items):
        taken = dims_taken(item)
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
