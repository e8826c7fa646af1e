"""From whole entries to uploads: their bytes in bounded chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tdio.errors import EntryMismatch
from tdio.layout.dtypes import as_bytes, dtype_name
from tdio.layout.spec import LeafSpec, ragged_offsets, shapes_array
from tdio.layout.values import encode_value
from tdio.store.flat import Flat
from tdio.wire.changes import PutTensor, PutValue
from tdio.wire.requests import Body, Buffer

#: An upload holds at most this much beside what the caller holds.
CHUNK_BYTES = 32 * 1024 * 1024
CHUNK_ELEMENTS = 10_000

Progress = Callable[[int], Any]


def _no_progress(nbytes: int) -> None:
    pass


@contextmanager
def progress_bar(total_bytes: int, enabled: bool) -> Iterator[Progress]:
    """Give a function that counts uploaded bytes, and end the bar in any case."""
    if not enabled:
        yield _no_progress
        return
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="upload") as bar:
        yield bar.update


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
