"""From tensors to uploads and range writes: checks first, then bytes in bounded chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tdio._td import (
    UnbatchedTensor,
    _is_tensorclass,
    is_non_tensor,
    is_tensor_collection,
    value_of,
)
from tdio.errors import EntryMismatch, UnsupportedValue
from tdio.layout.dtypes import as_bytes, dtype_name
from tdio.layout.index import Rows
from tdio.layout.levels import Level
from tdio.layout.paths import check_key
from tdio.layout.spec import Int64Array, LeafSpec, ragged_offsets, shapes_array
from tdio.layout.values import PICKLE, ValueSpec, decode_value, encode_value
from tdio.store.placing import feature, plan_leaves
from tdio.store.shape import Frame
from tdio.wire.changes import Patch, PutRows, PutTensor, PutValue
from tdio.wire.reading import Spec
from tdio.wire.requests import Body, Buffer

#: An upload holds at most this much beside what the caller holds.
CHUNK_BYTES = 32 * 1024 * 1024
CHUNK_ELEMENTS = 10_000

Progress = Callable[[int], Any]


def _no_progress(nbytes: int) -> None:
    pass


def progress_bar(total_bytes: int, enabled: bool) -> tuple[Progress, Callable[[], None]]:
    """Return a function that counts uploaded bytes, and one that ends the bar."""
    if not enabled:
        return _no_progress, lambda: None
    bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="upload")
    return bar.update, bar.close


@dataclass
class Flat:
    """A tensordict by path.

    Attributes:
        tensors: the tensor leaves.
        values: the non-tensor entries: value, and how many batch dims it spells out.
        levels: the levels that are not the default: names, other batch sizes, classes, empty.
        replaces: the path of a level that goes as a whole for what is here, or None.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    levels: dict[str, Level] = field(default_factory=dict)
    replaces: str | None = None

    @property
    def paths(self) -> set[str]:
        """The paths of all leaf entries."""
        return self.tensors.keys() | self.values.keys()

    def under(self, prefix: str) -> Flat:
        """Return the same entries below another level."""
        if not prefix:
            return self
        return Flat(
            {f"{prefix}.{path}": v for path, v in self.tensors.items()},
            {f"{prefix}.{path}": v for path, v in self.values.items()},
            {f"{prefix}.{path}" if path else prefix: v for path, v in self.levels.items()},
        )


def flatten(td: Any, root: Sequence[int] | None = None, *, root_kind: bool = False) -> Flat:
    """Return a tensordict or tensorclass by path.

    Args:
        td: what to take apart.
        root: the batch size that is the default for its levels; None takes that of ``td``.
        root_kind: note the class of ``td`` itself, which is to be a nested level.

    Raises:
        UnsupportedValue: a leaf of another kind, or a key that would not round-trip.
    """
    flat = Flat()
    _flatten(td, "", tuple(td.batch_size if root is None else root), flat, root_kind)
    return flat


def _flatten(td: Any, path: str, root: tuple[int, ...], flat: Flat, with_kind: bool) -> None:
    kind = type(td)
    if _is_tensorclass(kind):
        td = td._tensordict
    name = f"{kind.__module__}.{kind.__qualname__}" if _is_tensorclass(kind) and with_kind else ""
    names = tuple(td.names) if td._has_names() else ()
    keys = list(td.keys())
    if names or name or tuple(td.batch_size) != root or (path and not keys):
        flat.levels[path] = Level(tuple(td.batch_size), names, name)
    for key in keys:
        below = f"{path}.{check_key(key)}" if path else check_key(key)
        value = td._get_str(key, None)
        if isinstance(value, torch.Tensor):
            flat.tensors[below] = value
        elif is_non_tensor(value):
            flat.values[below] = value_of(value)
        elif is_tensor_collection(value) and not isinstance(value, UnbatchedTensor):
            _flatten(value, below, root, flat, True)
        else:
            raise UnsupportedValue(
                f"the entry {below!r} is a {type(value).__name__}, which cannot be stored: store "
                "its tensors as entries"
            )


def put_value(path: str, value: tuple[Any, int], *, allow_pickle: bool, where: str) -> PutValue:
    """Return the write of one non-tensor entry.

    Raises:
        UnsupportedValue: JSON cannot hold it, and pickles are not allowed.
    """
    return PutValue(*encode_value(path, *value, allow_pickle=allow_pickle, where=where))


def puts_of(flat: Flat, progress: Progress | None = None, **options: Any) -> list[Any]:
    """Return the writes of all entries; ``options`` are those of ``put_value``."""
    report = progress or _no_progress
    tensors = [upload_tensor(path, tensor, report) for path, tensor in flat.tensors.items()]
    return [*tensors, *(put_value(path, v, **options) for path, v in flat.values.items())]


def upload_tensor(path: str, tensor: torch.Tensor, progress: Progress = _no_progress) -> PutTensor:
    """Return the upload of one dense tensor ``[*batch, *]``, in the layout of the tensor."""
    dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        as_bytes(tensor)  # raises
    spec = LeafSpec(path, tensor.dtype, tuple(tensor.shape))
    itemsize = tensor.dtype.itemsize

    def body(start: int, stop: int) -> Body:
        def chunks() -> Iterator[Buffer]:
            if tensor.is_contiguous() and tensor.device.type == "cpu":
                yield from _report(as_bytes(tensor)[start:stop].numpy().data, progress)
                return
            # A strided or device tensor is copied a chunk at a time. Rows of a large first dim
            # are the unit; a 0-d or one-row tensor is one chunk.
            flat = tensor.detach()
            rows = flat.reshape(1) if not flat.ndim else flat
            row_bytes = max(1, rows[0].numel() * itemsize) if len(rows) else 1
            per_chunk = max(1, min(CHUNK_ELEMENTS, CHUNK_BYTES // row_bytes))
            at = 0
            for first in range(0, len(rows), per_chunk):
                data = as_bytes(rows[first : first + per_chunk])
                lo, hi = max(start - at, 0), min(stop - at, len(data))
                if lo < hi:
                    yield from _report(data[lo:hi].numpy().data, progress)
                at += len(data)

        return Body(stop - start, chunks)

    return PutTensor(spec, body)


def _report(view: memoryview, progress: Progress) -> Iterator[memoryview]:
    for at in range(0, len(view), CHUNK_BYTES):
        piece = view[at : at + CHUNK_BYTES]
        yield piece
        progress(len(piece))


def upload_elements(
    path: str, elements: Sequence[torch.Tensor], progress: Progress = _no_progress
) -> PutTensor:
    """Return the upload of one entry of a lazy stack: its elements one after the other.

    Raises:
        EntryMismatch: the elements differ in dtype.
    """
    dtypes = {element.dtype for element in elements}
    if len(dtypes) > 1:
        names = sorted(map(str, dtypes))
        raise EntryMismatch(
            f"the elements of the entry {path!r} have different dtypes, {', '.join(names)}; "
            "convert them to one"
        )
    dtype = dtypes.pop()
    dtype_name(dtype)
    shapes = [tuple(element.shape) for element in elements]
    if len(set(shapes)) == 1:
        spec = LeafSpec(path, dtype, (len(elements), *shapes[0]))
        offsets = np.arange(len(elements) + 1, dtype=np.int64) * (spec.nbytes // len(elements))
    else:
        table = shapes_array(shapes)
        offsets = ragged_offsets(table, dtype.itemsize)
        spec = LeafSpec(path, dtype, (len(elements), *shapes[0]), True, table, offsets)

    def body(start: int, stop: int) -> Body:
        def chunks() -> Iterator[Buffer]:
            first = 0
            while first < len(elements):
                last = int(np.searchsorted(offsets, offsets[first] + CHUNK_BYTES, side="right")) - 1
                last = min(max(last, first + 1), first + CHUNK_ELEMENTS, len(elements))
                lo = max(start, int(offsets[first]))
                hi = min(stop, int(offsets[last]))
                if lo < hi:
                    data = _join(elements[first:last])
                    base = int(offsets[first])
                    yield from _report(data[lo - base : hi - base].numpy().data, progress)
                first = last

        return Body(stop - start, chunks)

    return PutTensor(spec, body)


def upload_zeros(
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    part: tuple[int, torch.Tensor] | None = None,
) -> PutTensor:
    """Return the upload of an entry of zeros, made a megabyte at a time.

    ``part`` is an offset in bytes and the uint8 ``[n]`` that stand there instead.
    """
    dtype_name(dtype)
    spec = LeafSpec(path, dtype, shape)
    step = 1024 * 1024
    at, data = (0, b"") if part is None else (part[0], part[1].numpy().tobytes())

    def body(start: int, stop: int) -> Body:
        def chunks() -> Iterator[Buffer]:
            for lo in range(start, stop, step):
                block = bytearray(min(step, stop - lo))
                first, last = max(at, lo), min(at + len(data), lo + len(block))
                if first < last:
                    block[first - lo : last - lo] = data[first - at : last - at]
                yield block

        return Body(stop - start, chunks)

    return PutTensor(spec, body)


def _join(elements: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(elements) == 1:
        return as_bytes(elements[0])
    with torch.no_grad():
        return as_bytes(torch.cat([element.detach().reshape(-1) for element in elements]))


# ---- indexed writes


def check_leaves(expected: set[str], given: set[str], where: str) -> None:
    """Refuse a value whose leaves are not those of the store.

    Raises:
        EntryMismatch: naming the missing and the extra ones.
    """
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing or extra:
        raise EntryMismatch(
            f"{where}: the value lacks the entries {missing} and has the unknown entries {extra}; "
            "nothing was written. Write single entries with set_at_"
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
        (plan,) = plan_leaves([spec], rows, batch, stack, gather=False)
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
    """Return a tensor of ``shape`` filled with a number; float8 has no fill of its own."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.full(shape, value, dtype=torch.float32).to(dtype)
    return torch.full(shape, value, dtype=dtype)
