"""What the metadata of one entry says, and how it is written: ``LeafSpec``.

The fields are those of tensordict 0.15 (``docs/format.md``). Ragged shapes are kept as one
int64 array ``[N, ndim]``: at N = 1,000,000 a list of lists costs half a second for each parse
and is copied page by page into forked workers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tdio.errors import CorruptEntry
from tdio.layout.dtypes import dtype_from_name, dtype_name

Int64Array = npt.NDArray[np.int64]
#: A sanity limit on elements: byte offsets then fit an int64 and 16 decimal digits.
_MAX_NUMEL = 2**48
_MAX_DIMS = 64


@dataclass(frozen=True)
class LeafSpec:
    """One tensor entry on the server.

    Attributes:
        path: the key path.
        dtype: the dtype of every element.
        shape: shape of the whole entry as stored, ``[*batch, *]``; for a ragged entry
            ``[N, *shape of element 0]``, indicative only.
        stack_first: for a lazy stack, whether elements lie one after the other (True) or the
            bytes are those of the dense tensor in the batch layout (False).
        shapes: for a ragged entry the element shapes, int64 ``[N, ndim]``, else None. A row
            of an entry whose elements differ in their number of dims is padded with -1.
        offsets: for a ragged entry the byte offsets, int64 ``[N + 1]``, else None.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stack_first: bool = True
    shapes: Int64Array | None = field(default=None, repr=False)
    offsets: Int64Array | None = field(default=None, repr=False)

    @property
    def ragged(self) -> bool:
        """Whether the elements differ in shape."""
        return self.shapes is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the data string."""
        if self.offsets is not None:
            return int(self.offsets[-1])
        return math.prod(self.shape) * self.dtype.itemsize

    def element_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of ragged element ``position``."""
        assert self.shapes is not None
        row = self.shapes[position].tolist()
        while row and row[-1] < 0:
            row.pop()
        return tuple(row)


def ragged_offsets(shapes: Int64Array, itemsize: int) -> Int64Array:
    """Return the byte offsets ``[N + 1]`` of elements of ``shapes`` laid one after the other."""
    sizes = np.where(shapes < 0, 1, shapes).prod(axis=1, dtype=np.int64) * itemsize
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def shapes_array(shapes: Sequence[Sequence[int]]) -> Int64Array:
    """Return element shapes as int64 ``[N, max ndim]``, padded with -1."""
    ndim = max((len(s) for s in shapes), default=0)
    if all(len(s) == ndim for s in shapes):
        return np.array(shapes, np.int64).reshape(len(shapes), ndim)
    out = np.full((len(shapes), ndim), -1, np.int64)
    for row, shape in zip(out, shapes, strict=True):
        row[: len(shape)] = shape
    return out


def encode(spec: LeafSpec, *, lazy: bool) -> dict[str, str]:
    """Return the fields of the metadata hash of ``spec``."""
    fields = {"shape": json.dumps(list(spec.shape)), "dtype": dtype_name(spec.dtype)}
    if lazy:
        fields["homogeneous"] = "0" if spec.ragged else "1"
        fields["layout"] = "stack" if spec.stack_first else "batch"
    if spec.shapes is not None:
        fields["shapes"] = _encode_shapes(spec.shapes)
    return fields


def _encode_shapes(shapes: Int64Array) -> str:
    if (shapes >= 0).all():
        return json.dumps(shapes.tolist())
    return json.dumps([[n for n in row if n >= 0] for row in shapes.tolist()])


def decode(
    path: str,
    fields: Mapping[str, str],
    *,
    where: str,
    batch: tuple[int, ...],
    stack: int | None = None,
    offsets: bytes | None = None,
) -> LeafSpec:
    """Return the spec that a metadata hash states, checked.

    Args:
        path: the key path of the entry.
        fields: the decoded hash.
        where: names the store and entry in errors.
        batch: the batch size of the store.
        stack: the position of the stack dim in ``batch`` for a lazy stack, else None.
        offsets: the bytes of the offset table of a ragged entry.

    Raises:
        CorruptEntry: fields are missing, not JSON, negative, absurdly large, or contradict
            each other or the store's batch size.
    """
    if "dtype" not in fields or "shape" not in fields:
        raise CorruptEntry(f"{where}: its metadata has no shape or dtype")
    dtype = dtype_from_name(fields["dtype"], where)
    shape = _decode_shape(fields["shape"], where)
    if stack is not None and fields.get("homogeneous", "1") != "1":
        inner = (*batch[:stack], *batch[stack + 1 :])
        return _decode_ragged(path, fields, where, dtype, batch[stack], inner, offsets)
    stack_first = True
    if stack is None:
        fits = shape[: len(batch)] == batch
    else:
        first = (batch[stack], *batch[:stack], *batch[stack + 1 :])
        lead = shape[: len(batch)]
        fits = lead in (batch, first)
        # The shape decides where it can: an older writer may have rewritten the entry without
        # touching the field. Where both fit and there is no field, whole reads of the reference
        # assume the batch layout.
        stack_first = fields.get("layout") == "stack" if batch == first else lead == first
        stack_first = stack_first or stack == 0
    if not fits:
        raise CorruptEntry(f"{where}: its shape {list(shape)} does not start with the batch size")
    return LeafSpec(path, dtype, shape, stack_first)


def _decode_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptEntry(f"{where}: its metadata is not JSON: {text[:80]!r}") from error


def _decode_shape(text: str, where: str) -> tuple[int, ...]:
    shape = _decode_json(text, where)
    sound = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not sound or len(shape) > _MAX_DIMS or math.prod(shape) > _MAX_NUMEL:
        raise CorruptEntry(f"{where}: absurd shape {text[:80]!r} in its metadata")
    return tuple(shape)


def _decode_ragged(
    path: str,
    fields: Mapping[str, str],
    where: str,
    dtype: torch.dtype,
    count: int,
    inner: tuple[int, ...],
    offsets: bytes | None,
) -> LeafSpec:
    shapes = _decode_shapes(fields.get("shapes", ""), where)
    lead = shapes[:, : len(inner)]
    if count and (lead.shape[1] < len(inner) or (lead != np.array(inner, object)).any()):
        raise CorruptEntry(
            f"{where}: its element shapes do not start with the batch size {list(inner)}"
        )
    if len(shapes) != count:
        raise CorruptEntry(f"{where}: shapes of {len(shapes)} elements in a stack of {count}")
    if offsets is None or len(offsets) != 8 * (count + 1):
        size = 0 if offsets is None else len(offsets)
        raise CorruptEntry(f"{where}: its offset table has {size} bytes, not {8 * (count + 1)}")
    table = np.frombuffer(offsets, "<i8").astype(np.int64)
    # Checked in floats first: absurd dimensions would wrap in int64.
    if np.where(shapes < 0, 1, shapes).astype(np.float64).prod(axis=1).sum() > _MAX_NUMEL / 16:
        raise CorruptEntry(f"{where}: absurd element shapes in its metadata")
    if not np.array_equal(table, ragged_offsets(shapes, dtype.itemsize)):
        raise CorruptEntry(f"{where}: its offset table does not fit its element shapes")
    first = [n for n in shapes[0].tolist() if n >= 0] if count else []
    return LeafSpec(path, dtype, (count, *first), True, shapes, table)


def _decode_shapes(text: str, where: str) -> Int64Array:
    """Parse ``[[3, 4], [5, 4]]`` in bulk where all rows have one number of dims."""
    raw = text.encode().translate(None, b" ")
    skeleton = raw.translate(None, b"0123456789")
    ndim = skeleton.partition(b"]")[0].count(b",") + 1
    row = b"[" + b"," * (ndim - 1) + b"]"
    count = raw.count(b"]") - 1
    if (
        count > 0
        and ndim <= _MAX_DIMS
        and skeleton == b"[" + b",".join([row] * count) + b"]"
        and b"[]" not in raw
    ):
        flat = raw.translate(None, b"[]")
        values = np.fromstring(flat, dtype=np.int64, sep=",")
        if len(values) == count * ndim:
            return values.reshape(count, ndim)
    shapes = _decode_json(text, where)
    sound = isinstance(shapes, list) and all(
        isinstance(s, list)
        and len(s) <= _MAX_DIMS
        and all(type(n) is int and 0 <= n < 2**62 for n in s)
        for s in shapes
    )
    if not sound:
        raise CorruptEntry(f"{where}: its element shapes are not a list of lists of sizes")
    return shapes_array(shapes)
