"""Which rows an index selects: ``select(shape, index)``, with ``tensor[index]`` as the oracle.

A *row* is the run of elements under the dims that the index does not touch. The common case, one
index on the first dim, is direct arithmetic. Any other index is applied by torch itself to
stride-0 coordinate tensors, so the answer is torch's by construction and the memory used is that
of the answer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tdio.errors import IndexOutOfRange, InvalidIndex
from tdio.layout.spec import Int64Array

#: Row numbers take 8 bytes each.
_MAX_ROWS = 2**28


@dataclass(frozen=True)
class Rows:
    """The rows that an index selects.

    Attributes:
        positions: row numbers, int64 ``[n]``, in the order of the result; each lies in
            ``[0, prod(shape[:depth]))``.
        shape: the shape of the indexed dims in the result (``[]`` for an int).
        depth: how many leading dims of the tensor the index touches.
    """

    positions: Int64Array
    shape: tuple[int, ...]
    depth: int


def as_int(index: Any) -> Any:
    """Return an int for what selects like one (``np.int64(3)``, a 0-d tensor), else the index."""
    if isinstance(index, (bool, np.bool_, list, tuple, str, slice)):
        return index
    if isinstance(index, torch.Tensor) and (index.ndim or index.dtype == torch.bool):
        return index
    try:
        return operator.index(index)
    except TypeError:
        return index


def normalise(index: Any, ndim: int) -> tuple[Any, ...]:
    """Return ``index`` as a tuple without Ellipsis, lists as tensors, trailing full slices cut.

    ``ndim`` is the number of dims that an Ellipsis stands for (the batch dims of a store).

    Raises:
        InvalidIndex: a float, a string, too many dims, two Ellipses, a ragged list.
    """
    # What single reads come with.
    if isinstance(index, tuple) and not index:
        return ()
    if type(index) is int and ndim:
        return (index,)
    items = list(index) if isinstance(index, tuple) else [index]
    items = [_item(item) for item in items]
    used = sum(dims_taken(item) for item in items if item is not Ellipsis)
    if used > ndim:
        raise InvalidIndex(f"the index {_show(index)} takes {used} dims, there are {ndim}")
    if any(item is Ellipsis for item in items):
        at = [i for i, item in enumerate(items) if item is Ellipsis]
        if len(at) > 1:
            raise InvalidIndex(f"the index {_show(index)} holds more than one Ellipsis")
        items[at[0] : at[0] + 1] = [slice(None)] * (ndim - used)
    while items and isinstance(items[-1], slice) and items[-1] == slice(None):
        items.pop()
    return tuple(items)


def select(shape: tuple[int, ...], items: tuple[Any, ...]) -> Rows:
    """Return the rows that the normalised index ``items`` selects in a tensor of ``shape``.

    Raises:
        IndexOutOfRange: an index outside its dim; never wrapped around.
        InvalidIndex: a mask whose shape is not that of its dims, index tensors that do not
            broadcast.
    """
    if not items:
        return Rows(np.zeros(1, np.int64), (), 0)
    if len(items) == 1 and items[0] is not None and dims_taken(items[0]) == 1:
        positions, out = _select_one(shape[0], items[0])
        return Rows(positions, out, 1)
    return _select_many(shape, items)


def _select_one(size: int, item: Any) -> tuple[Int64Array, tuple[int, ...]]:
    if isinstance(item, int):
        if not -size <= item < size:
            raise IndexOutOfRange(f"index {item} is out of range for {size} rows")
        return np.array([item % size], np.int64), ()
    if isinstance(item, slice):
        try:
            span = range(size)[item]
        except (TypeError, ValueError) as error:
            raise InvalidIndex(f"{item} is not a slice of whole numbers") from error
        if len(span) > _MAX_ROWS:
            raise InvalidIndex(f"{len(span)} rows at once are too many; read fewer, or all")
        return np.arange(span.start, span.stop, span.step, dtype=np.int64), (len(span),)
    if item.dtype is torch.bool:
        if item.shape[0] != size:
            raise InvalidIndex(f"the mask has {item.shape[0]} entries for {size} rows")
        positions = item.numpy().nonzero()[0]
        return positions, (len(positions),)
    positions = _wrap(item.numpy().astype(np.int64, copy=False).reshape(-1), size)
    return positions, tuple(item.shape)


def _wrap(positions: Int64Array, size: int) -> Int64Array:
    if not len(positions):
        return positions
    low, high = int(positions.min()), int(positions.max())
    if low < -size or high >= size:
        raise IndexOutOfRange(f"index {high if high >= size else low} is out of range for {size}")
    return np.where(positions < 0, positions + size, positions) if low < 0 else positions


def _select_many(shape: tuple[int, ...], items: tuple[Any, ...]) -> Rows:
    depth = sum(dims_taken(item) for item in items)
    dims = shape[:depth]
    _check_bounds(dims, items)
    items, flips = _without_negative_steps(dims, items)
    flat = torch.zeros((), dtype=torch.int64)
    stride = 1
    for dim in reversed(range(depth)):
        steps = torch.arange(dims[dim]) * stride
        steps = steps.flip(0) if dim in flips else steps
        view = steps.view([-1 if d == dim else 1 for d in range(depth)]).expand(dims)
        try:
            flat = flat + view[items]
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidIndex(f"index {_show(items)} on dims {list(dims)}: {error}") from error
        stride *= dims[dim]
    if not depth:
        flat = torch.zeros(1, dtype=torch.int64).select(0, 0)[items]
    return Rows(flat.reshape(-1).numpy(), tuple(flat.shape), depth)


def _check_bounds(dims: tuple[int, ...], items: tuple[Any, ...]) -> None:
    dim = 0
    for item in items:
        taken = dims_taken(item)
        if isinstance(item, int) or (isinstance(item, torch.Tensor) and item.dtype != torch.bool):
            _select_one(dims[dim], item)
        elif isinstance(item, torch.Tensor) and tuple(item.shape) != dims[dim : dim + taken]:
            raise InvalidIndex(
                f"a mask of shape {list(item.shape)} on dims {list(dims[dim : dim + taken])}"
            )
        dim += taken


def _without_negative_steps(
    dims: tuple[int, ...], items: tuple[Any, ...]
) -> tuple[tuple[Any, ...], set[int]]:
    """Torch has no negative steps: mirror the dim and the slice instead."""
    out: list[Any] = []
    flips: set[int] = set()
    dim = 0
    for item in items:
        taken = dims_taken(item)
        if isinstance(item, slice):
            try:
                span = range(dims[dim])[item]
            except (TypeError, ValueError) as error:
                raise InvalidIndex(f"{item} is not a slice of whole numbers") from error
            if span.step < 0:
                flips.add(dim)
                last = dims[dim] - 1
                item = slice(last - span.start, last - span.stop, -span.step)
        out.append(item)
        dim += taken
    return tuple(out), flips


def dims_taken(item: Any) -> int:
    """Return how many dims one part of an index takes."""
    if item is None:
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype is torch.bool else 1


def _item(item: Any) -> Any:
    """Turn one part of an index into an int, a slice, None, Ellipsis or a tensor."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, (bool, np.bool_)):
        return torch.tensor(bool(item))
    if isinstance(item, range):
        return torch.tensor(item, dtype=torch.int64)
    if isinstance(item, np.ndarray) and not item.ndim:
        item = torch.as_tensor(item)
    if isinstance(item, (list, np.ndarray)):
        try:
            item = (
                torch.as_tensor(np.asarray(item))
                if len(item)
                else torch.zeros(0, dtype=torch.int64)
            )
        except (TypeError, ValueError) as error:
            raise InvalidIndex(f"{_show(item)} is not a list of whole numbers") from error
    if isinstance(item, torch.Tensor):
        if item.dtype.is_floating_point or item.dtype.is_complex:
            raise InvalidIndex(f"a tensor of {item.dtype} is not an index; use whole numbers")
        if item.dtype in (torch.int8, torch.int16, torch.int32):
            # Alone torch takes them, beside others it does not.
            item = item.long()
        # As in torch, a 0-d tensor of whole numbers selects like an int.
        return int(item) if item.ndim == 0 and item.dtype != torch.bool else item.cpu()
    try:
        return operator.index(item)
    except TypeError:
        raise InvalidIndex(f"{_show(item)} ({type(item).__name__}) is not an index") from None


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
