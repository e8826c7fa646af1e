"""Writes of several elements of a lazy stack at once, whose leaves may differ in shape."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

from tdio._td import TensorDict, is_tensor_collection
from tdio.errors import EntryMismatch, InvalidIndex
from tdio.layout.index import normalise, select
from tdio.layout.plan import Ranges
from tdio.layout.spec import LeafSpec
from tdio.store._keys import _Index
from tdio.store.element import element_shape, replaced, writing_part
from tdio.store.flat import Flat, flatten
from tdio.store.handle import Edit, Handle
from tdio.store.shape import Frame
from tdio.store.writer import number_as, one_value, rows_changes, value_patch
from tdio.wire.changes import PutRows
from tdio.wire.requests import Operation


def positions_of(index: Any, frame: Frame, where: str) -> tuple[list[int], bool, tuple[Any, ...]]:
    """Return the elements that an index selects, whether it is one, and what indexes each.

    Raises:
        InvalidIndex: the stack dim is not the first, or is indexed by an array of more dims.
    """
    items = normalise(index, len(frame.batch))
    first, rest = (items[0], items[1:]) if items else (slice(None), ())
    if frame.stack or first is None or (isinstance(first, torch.Tensor) and first.ndim > 1):
        raise InvalidIndex(
            f"{where}: entries of different shapes are written by an index on dim 0 that selects "
            "whole elements, or by element: store[i] = td"
            if not frame.stack
            else f"{where}: entries of different shapes, whose stack dim is {frame.stack}, are "
            "written whole: store.update(a lazy stack), or store[key] = ..."
        )
    rows = select(frame.batch[:1], (first,))
    return rows.positions.tolist(), not rows.shape, rest


def elements_of(value: Any, count: int, single: bool, where: str) -> list[Any]:
    """Return what each of ``count`` elements is to be: a tensordict, or a number for all leaves.

    Raises:
        EntryMismatch: another number of elements.
    """
    if isinstance(value, Number):
        return [value] * count
    if single:
        td = value if is_tensor_collection(value) else TensorDict.from_dict(value, batch_size=[])
        return [td]
    if not is_tensor_collection(value):
        value = TensorDict.from_dict(value, batch_size=[count])
    if value.batch_size[:1] != (count,):
        raise EntryMismatch(
            f"{where}: {count} elements are written, the value has batch size "
            f"{list(value.batch_size)}; nothing was written"
        )
    return list(value.unbind(0))


def writing_elements(
    handle: Handle, positions: Sequence[int], flats: Sequence[Flat], rest: Any, frame: Frame
) -> Operation[Edit]:
    """Write ``flats``, one for each element, whole or at the index ``rest`` of each."""
    if rest:
        return (yield from _writing_parts(handle, positions, flats, rest, frame))
    info, where = handle.info, str(handle.location)
    specs = yield from handle.load(flats[0].paths if flats else ())
    changes: list[Any] = []
    for path in flats[0].tensors if flats else ():
        values = [flat.tensors[path] for flat in flats]
        spec = specs[path]
        if isinstance(spec, LeafSpec) and isinstance(values[0], Number):
            shapes = [element_shape(spec, info, position) for position in positions]
            values = [number_as(values[0], spec.dtype, shape) for shape in shapes]
        if isinstance(spec, LeafSpec) and (spec.ragged or len({v.shape for v in values}) > 1):
            changes.append(replaced(handle, spec, dict(zip(positions, values, strict=True))))
            continue
        rows = select(info.batch, normalise(list(positions), len(info.batch)))
        whole = {path: torch.stack(values)}
        changes += rows_changes(specs, whole, rows, info.batch, info.stack, where)
    at = np.asarray(positions, np.int64)
    for path in flats[0].values if flats else ():
        each = [one_value(*flat.values[path], path, where) for flat in flats]
        changes.append(value_patch(path, each, at, info.count, handle.allow_pickle, where))
    return Edit(changes)


def _writing_parts(
    handle: Handle, positions: Sequence[int], flats: Sequence[Flat], rest: Any, frame: Frame
) -> Operation[Edit]:
    """Write a part of each element: ranges of one entry become one change."""
    parts: dict[str, list[PutRows]] = {}
    inner = _Index(rest, Frame(frame.prefix, frame.batch[1:], None))
    for position, flat in zip(positions, flats, strict=True):
        edit = yield from writing_part(handle, position, flat, inner)
        for change in edit.changes:
            assert isinstance(change, PutRows)
            parts.setdefault(change.path, []).append(change)
    return Edit([_joined(changes) for changes in parts.values()])


def _joined(changes: list[PutRows]) -> PutRows:
    ranges = [change.ranges for change in changes]
    starts = np.concatenate([one.starts for one in ranges])
    sizes = np.concatenate([one.sizes for one in ranges])
    payload = torch.cat([change.payload for change in changes])
    return PutRows(changes[0].spec, Ranges(starts, sizes, None, ranges[0].row_bytes), payload)


def flats_of(elements: Sequence[Any], prefix: str, paths: Sequence[str]) -> list[Flat]:
    """Return elements by full path; a number stands for each of ``paths``."""
    return [
        Flat(dict.fromkeys(paths, one)) if isinstance(one, Number) else flatten(one).under(prefix)  # type: ignore[arg-type]
        for one in elements
    ]
