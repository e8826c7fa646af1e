"""From tensors and values to writes at an index: checks first, then the bytes of rows."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch

from tdio.errors import EntryMismatch, UnsupportedValue
from tdio.layout.dtypes import as_bytes
from tdio.layout.index import Rows, normalise, select
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.layout.values import PICKLE, ValueSpec, decode_value
from tdio.store.flat import Flat
from tdio.store.handle import Edit, Handle
from tdio.store.placing import feature, leaf_shape, plan_leaves
from tdio.store.shape import Frame
from tdio.store.uploading import put_value
from tdio.wire.changes import Patch, PutRows, PutValue
from tdio.wire.reading import Spec
from tdio.wire.requests import Operation


def check_leaves(expected: set[str], given: set[str], where: str, advice: str = "") -> None:
    """Refuse a value whose leaves are not those of the store, or of the other elements.

    Raises:
        EntryMismatch: naming the missing and the extra ones.
    """
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing or extra:
        lacks = [f"lacks the entries {missing}"] if missing else []
        has = [f"has the unknown entries {extra}"] if extra else []
        raise EntryMismatch(
            f"{where}: the value {' and '.join(lacks + has)}; nothing was written{advice}"
        )


def check_fit(
    path: str, value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], where: str
) -> None:
    """Refuse a tensor of another dtype or shape.

    Raises:
        EntryMismatch: naming both.
    """
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise EntryMismatch(
            f"{where}: the entry {path!r} takes {dtype} of shape {list(shape)}, the value is "
            f"{value.dtype} of shape {list(value.shape)}; nothing was written"
        )


def check_batch(path: str, value: torch.Tensor, batch: tuple[int, ...], where: Any) -> None:
    """Refuse a whole entry that does not start with the batch size.

    Raises:
        EntryMismatch: naming both.
    """
    if tuple(value.shape[: len(batch)]) != batch:
        raise EntryMismatch(
            f"{where}: the entry {path!r} must start with the batch size {list(batch)}, the value "
            f"has shape {list(value.shape)}"
        )


def into_entry(value: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return a value as an in-place write takes it: broadcast and cast as by ``copy_``.

    Raises:
        EntryMismatch: it does not broadcast to the entry.
    """
    if not isinstance(spec, LeafSpec) or spec.ragged:
        return value
    if tuple(value.shape) != spec.shape:
        value = _broadcast(value, spec.shape)
        check_fit(spec.path, value, value.dtype, spec.shape, "in place")
    return value.to(spec.dtype)


def rows_changes(
    specs: Mapping[str, Spec],
    values: Mapping[str, Any],
    rows: Rows,
    batch: tuple[int, ...],
    stack: int | None,
    where: str,
) -> list[Any]:
    """Return the writes of tensors and numbers at ``rows`` of homogeneous leaves, all checked."""
    writes: list[Any] = []
    for path, value in values.items():
        spec = specs[path]
        if not isinstance(spec, LeafSpec):
            raise EntryMismatch(
                f"{where}: the entry {path!r} holds no tensor, the value is one; nothing was "
                "written. Replace the whole entry with set"
            )
        shape = (*rows.shape, *batch[rows.depth :], *feature(spec, batch))
        if isinstance(value, Number):
            value = number_as(value, spec.dtype, shape)
        if value.dtype == spec.dtype and value.shape != torch.Size(shape):
            value = _broadcast(value, shape)
        check_fit(path, value, spec.dtype, shape, where)
        # A write may not touch the gaps between rows: runs only, never gathered.
        ((_, plan),) = plan_leaves([spec], rows, batch, stack, gather=False)
        writes.append(PutRows(spec, plan, as_bytes(value)))
    return writes


def first_dim_rows(path: str, rows: Rows, frame: Frame, where: str) -> Int64Array:
    """Return the rows of dim 0 that a write to a non-tensor entry touches, int64 ``[n]``.

    Raises:
        EntryMismatch: an index of more dims, or a stack dim that is not the first.
    """
    if not frame.batch or frame.stack or rows.depth > 1:
        raise EntryMismatch(
            f"{where}: the non-tensor entry {path!r} is written by an index on dim 0 only; write "
            "the whole entry with set"
        )
    return rows.positions if rows.depth else np.arange(frame.batch[0])


def one_value(value: Any, dims: int, path: str, where: str) -> Any:
    """Return the one value that nested lists ``dims`` deep hold.

    Raises:
        UnsupportedValue: they hold several.
    """
    flat = [value]
    for _ in range(dims):
        flat = [item for row in flat for item in row]
    if len({repr(item) for item in flat}) > 1:
        raise UnsupportedValue(
            f"{where}: the entry {path!r} has one value for each row of dim 0 (each element of a "
            "stack); several below it cannot be stored. Store them as one list"
        )
    return flat[0] if flat else None


def per_row(value: tuple[Any, int], rank: int, count: int, path: str, where: str) -> list[Any]:
    """Return a value for each of ``count`` rows.

    Args:
        value: one value for all, or lists nested as deep as the number that stands beside them.
        rank: how many dims the rows have in the result of the index.
        count: how many rows there are.
        path: names the entry in errors.
        where: names the store in errors.

    Raises:
        EntryMismatch: another number of values.
    """
    given, dims = value
    if not dims:
        return [given] * count
    rows = [given]
    for _ in range(min(dims, rank)):
        rows = [item for row in rows for item in row]
    if dims > rank:
        rows = [one_value(row, dims - rank, path, where) for row in rows]
    if len(rows) != count:
        raise EntryMismatch(f"{where}: {len(rows)} values for {count} rows of the entry {path!r}")
    return rows


def value_patch(
    path: str,
    each: list[Any],
    positions: Int64Array,
    count: int,
    allow_pickle: bool,
    where: str,
) -> Patch:
    """Return the write of a non-tensor value for each of some of ``count`` rows."""

    def patch(now: Spec, blob: bytes) -> PutValue:
        if not isinstance(now, ValueSpec):
            raise EntryMismatch(f"{where}: the entry {path!r} holds a tensor now, not a value")
        held, held_dims = decode_value(now, blob, allow_pickle=allow_pickle, where=where)
        if not held_dims and now.encoding != PICKLE and {repr(held)} == {repr(o) for o in each}:
            return put_value(path, (held, 0), allow_pickle=allow_pickle, where=where)
        whole = list(held) if held_dims else [held] * count
        for position, one in zip(positions.tolist(), each, strict=True):
            whole[position] = one
        return put_value(path, (whole, 1), allow_pickle=allow_pickle, where=where)

    return Patch(path, patch)


def _broadcast(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:
        return value  # check_fit names both shapes


def number_as(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of ``shape`` filled with a number; float8 has no fill of its own.

    Raises:
        EntryMismatch: the dtype cannot hold the number.
    """
    try:
        if dtype.is_floating_point and dtype.itemsize == 1:
            return torch.full(shape, value, dtype=torch.float32).to(dtype)
        return torch.full(shape, value, dtype=dtype)
    except (RuntimeError, OverflowError) as error:
        raise EntryMismatch(f"{value!r} cannot be written into {dtype}: {error}") from error


def writing_rows(handle: Handle, flat: Flat, index: Any) -> Operation[Edit]:
    """Write what an index selects of entries that are all homogeneous.

    ``index`` says what it indexes: a level, or one leaf, below whose batch dims it may reach.
    """
    where, frame = str(handle.location), index.frame
    specs = yield from handle.load(flat.paths)
    batch = frame.batch
    for spec in specs.values():
        if index.leaf and isinstance(spec, LeafSpec):
            batch = leaf_shape(handle.info, spec)
    rows = select(batch, normalise(index.index, len(batch)))
    changes: list[Any] = rows_changes(specs, flat.tensors, rows, batch, frame.stack, where)
    for path, value in flat.values.items():
        at = first_dim_rows(path, rows, frame, where)
        each = per_row(value, len(rows.shape) if rows.depth else 1, len(at), path, where)
        changes.append(value_patch(path, each, at, frame.batch[0], handle.allow_pickle, where))
    return Edit(changes)
