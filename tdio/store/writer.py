"""From tensors to uploads and range writes: checks first, then bytes in bounded chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tdio._td import TensorDictBase, _unravel_key_to_tuple, is_non_tensor
from tdio.errors import EntryMismatch, UnsupportedValue
from tdio.layout.dtypes import as_bytes, dtype_name
from tdio.layout.index import Rows
from tdio.layout.paths import check_key
from tdio.layout.spec import LeafSpec, ragged_offsets, shapes_array
from tdio.store.reader import feature, plan_leaves
from tdio.wire.requests import Body, Buffer
from tdio.wire.writing import RangeWrite, Upload

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


def leaves_of(td: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return the tensor leaves of ``td`` by path.

    Raises:
        UnsupportedValue: a non-tensor leaf, or a key that would not round-trip.
    """
    leaves: dict[str, torch.Tensor] = {}
    for key in td.keys(include_nested=True, leaves_only=False):
        value = td.get(key)
        if is_non_tensor(value):
            raise UnsupportedValue(
                f"the entry {key!r} is not a tensor; this version stores tensors only, take it "
                f"out with td.exclude({key!r})"
            )
        if isinstance(value, torch.Tensor):
            leaves[check_key(_unravel_key_to_tuple(key))] = value
    return leaves


def upload_tensor(path: str, tensor: torch.Tensor, progress: Progress = _no_progress) -> Upload:
    """Return the upload of one dense tensor ``[*batch, *]``, in the layout of the tensor."""
    dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        as_bytes(tensor)  # raises
    spec = LeafSpec(path, tensor.dtype, tuple(tensor.shape), stack_first=False)
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

    return Upload(spec, body)


def _report(view: memoryview, progress: Progress) -> Iterator[memoryview]:
    for at in range(0, len(view), CHUNK_BYTES):
        piece = view[at : at + CHUNK_BYTES]
        yield piece
        progress(len(piece))


def upload_elements(
    path: str, elements: Sequence[torch.Tensor], progress: Progress = _no_progress
) -> Upload:
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

    return Upload(spec, body)


def upload_zeros(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Upload:
    """Return the upload of an entry of zeros, made a megabyte at a time."""
    spec = LeafSpec(path, dtype, shape)
    block = bytes(min(spec.nbytes, 1024 * 1024))

    def body(start: int, stop: int) -> Body:
        def chunks() -> Iterator[Buffer]:
            for at in range(start, stop, max(1, len(block))):
                yield memoryview(block)[: stop - at]

        return Body(stop - start, chunks)

    return Upload(spec, body)


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


def rows_writes(
    specs: Mapping[str, LeafSpec],
    values: Mapping[str, torch.Tensor],
    rows: Rows,
    batch: tuple[int, ...],
    stack: int | None,
    where: str,
) -> list[RangeWrite]:
    """Return the writes of ``values`` at ``rows`` of homogeneous leaves; all checked first."""
    writes = []
    for path, value in values.items():
        spec = specs[path]
        shape = (*rows.shape, *batch[rows.depth :], *feature(spec, batch))
        if value.dtype == spec.dtype and value.shape != torch.Size(shape):
            value = _broadcast(value, shape)
        check_fit(path, value, spec.dtype, shape, where)
        # A write may not touch the gaps between rows: runs only, never gathered.
        (plan,) = plan_leaves([spec], rows, batch, stack, gather=False)
        writes.append(RangeWrite(spec, plan, as_bytes(value)))
    return writes


def _broadcast(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:
        return value  # check_fit names both shapes


def scalar_values(value: Any, spec: LeafSpec, rows: Rows, batch: tuple[int, ...]) -> torch.Tensor:
    """Return a number as the tensor of the entry's dtype that it fills the rows with."""
    shape = (*rows.shape, *batch[rows.depth :], *feature(spec, batch))
    return number_as(value, spec.dtype, shape)


def number_as(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of ``shape`` filled with a number; float8 has no fill of its own."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.full(shape, value, dtype=torch.float32).to(dtype)
    return torch.full(shape, value, dtype=dtype)
