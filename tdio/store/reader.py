"""Batch reads: what an entry is and an index in, one consolidated batch out, one round trip.

Functions that return an ``Operation`` do no I/O; ``read`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tdio._td import (
    REBUILDABLE,
    LazyStackedTensorDict,
    TensorDict,
    consolidated,
    value_entry,
)
from tdio.layout.buffers import views
from tdio.layout.index import Rows, normalise, select
from tdio.store.elements import FEW, fetching_parts, reading_ragged
from tdio.store.entries import Entries, decoded, entries_of, entry_of
from tdio.store.fetching import Plan, fetch
from tdio.store.handle import Contended, Handle
from tdio.store.shape import Frame, levels_at
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
    return handle.doubting(lambda: _reading(handle, paths, index, device, prefix))


def _reading(
    handle: Handle,
    paths: Sequence[str] | None,
    index: Any,
    device: torch.device | None,
    prefix: str,
) -> Operation[Batch]:
    current = partial(entries_of, handle, paths, prefix)
    if not (yield from current()).ragged:
        try:
            plan = partial(_planning, handle, current, device)
            whole: Batch = yield from _fetching(handle, plan, current, index)
        except _BecameRagged:
            pass
        else:
            return whole
    return (yield from reading_ragged(handle, paths, index, device, prefix))


def reading_leaf(
    handle: Handle, path: str, index: Any, device: torch.device | None = None
) -> Operation[Any]:
    """Read one leaf at an index of the level that holds it: as ``reading``, less what is around it.

    Returns a tensor or a non-tensor entry.
    """
    return handle.doubting(lambda: _reading_leaf(handle, path, index, device))


def _reading_leaf(
    handle: Handle, path: str, index: Any, device: torch.device | None
) -> Operation[Any]:
    prefix, _, name = path.rpartition(".")
    current = partial(entry_of, handle, path)
    entry = yield from current()
    if entry.tensors and not entry.ragged:
        try:
            plan = partial(_planning_leaf, handle, current, device)
            return (yield from _fetching(handle, plan, current, index, leaf=True))
        except _BecameRagged:
            pass
    if entry.tensors:
        out = yield from _reading(handle, (path,), (), device, prefix)
        leaf = out._get_str(name, None)
        return leaf if isinstance(index, tuple) and not index else leaf[index]
    out = yield from _reading(handle, (path,), index, device, prefix)
    return out._get_str(name, None)


def _fetching(
    handle: Handle,
    plan: Callable[[Any], Operation[Plan]],
    current: Callable[[], Operation[Entries]],
    index: Any,
    *,
    leaf: bool = False,
) -> Operation[Any]:
    """Fetch what an index selects; a few rows at a time where writers come between too often.

    The index is looked at anew with each plan: another handle may have changed the batch size of
    the level.
    """
    try:
        return (yield from fetch(handle, lambda: plan(index)))
    except Contended:
        frame = (yield from current()).frame
        items = normalise(index, len(frame.batch)) or (slice(None),) * bool(frame.batch)
        rows = select(frame.batch, items)
        if len(rows.positions) < 2 or not rows.depth:
            raise

    def some(lo: int) -> tuple[torch.Tensor, ...]:
        coordinates = np.unravel_index(rows.positions[lo : lo + FEW], frame.batch[: rows.depth])
        return tuple(torch.from_numpy(np.ascontiguousarray(one)) for one in coordinates)

    few = range(0, len(rows.positions), FEW)
    parts = yield from fetching_parts(handle, (partial(plan, some(lo)) for lo in few))
    whole: Any = torch.cat(parts, 0).reshape(*rows.shape, *frame.batch[rows.depth :])
    if leaf:
        return whole
    for path, level in levels_at(handle.info, frame, rows, items).items():
        if level.names:
            (whole.get(tuple(path.split("."))) if path else whole).names = list(level.names)
    leaves = whole.values(include_nested=True, leaves_only=True)
    known = all(leaf.dtype in REBUILDABLE for leaf in leaves if isinstance(leaf, torch.Tensor))
    return whole.consolidate() if known else whole


class _BecameRagged(Exception):
    """Another writer resized an element while a read of dense entries was planned."""


def _planning_leaf(
    handle: Handle,
    current: Callable[[], Operation[Entries]],
    device: torch.device | None,
    index: Any,
) -> Operation[Plan]:
    entry = yield from current()
    if not entry.tensors or entry.ragged:
        raise _BecameRagged
    batch = entry.frame.batch
    landing = yield from entry.landing(handle, select(batch, normalise(index, len(batch))))
    early: list[torch.Tensor] = []

    def meanwhile() -> None:
        if device is None:
            early.extend(views(landing.memory, landing.slots))

    def finish(blobs: list[bytes | None]) -> torch.Tensor:
        storage = landing.storage(device)
        (leaf,) = early or views(storage, landing.slots)
        return leaf

    return Plan(landing.reads, (), finish, meanwhile)


def _planning(
    handle: Handle,
    current: Callable[[], Operation[Entries]],
    device: torch.device | None,
    index: Any,
) -> Operation[Plan]:
    """Plan the rows that an index selects of entries that are all homogeneous."""
    entries = yield from current()
    if entries.ragged:
        raise _BecameRagged
    info, batch = handle.info, entries.frame.batch
    items = normalise(index, len(batch))
    rows = select(batch, items)
    landing = yield from entries.landing(handle, rows)

    def build(storage: torch.Tensor, values: dict[str, Any]) -> Batch:
        placed = dict(zip(entries.names, landing.slots, strict=True))
        levels = levels_at(info, entries.frame, rows, items)
        size = entries.batch(rows)
        return consolidated(storage, placed, size, device, values=values, levels=levels)

    early: list[Batch] = []

    def meanwhile() -> None:
        if device is None and not entries.values:
            early.append(build(landing.memory, {}))

    def finish(blobs: list[bytes | None]) -> Batch:
        storage = landing.storage(device)
        if early:
            return early[0]
        return build(storage, _values_at(handle, entries, blobs, rows, items))

    return Plan(landing.reads, [spec.path for spec in entries.values], finish, meanwhile)


def _values_at(
    handle: Handle,
    entries: Entries,
    blobs: Sequence[bytes | None],
    rows: Rows,
    items: tuple[Any, ...],
) -> dict[str, Any]:
    """Return the non-tensor entries of the selected rows."""
    found = zip(entries.value_names, entries.values, blobs, strict=True)
    return {
        name: _value_at(decoded(handle, spec, blob), entries.frame, rows, items)
        for name, spec, blob in found
    }


def _value_at(value_dims: tuple[Any, int], frame: Frame, rows: Rows, items: tuple[Any, ...]) -> Any:
    value, dims = value_dims
    after = (*rows.shape, *frame.batch[rows.depth :])
    if not dims:
        return value_entry(value, 0, after)
    axis = frame.stack or 0
    if dims == 1 and axis == 0 and rows.depth == 1 and len(rows.shape) <= 1:
        chosen = [value[position] for position in rows.positions.tolist()]
        return value_entry(chosen, 1, after) if rows.shape else value_entry(chosen[0], 0, after)
    whole = value_entry(value, dims, frame.batch, axis)
    return whole if not items else whole[items]
