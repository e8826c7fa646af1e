"""From rows to reads: which ranges of which string land where in one storage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tdio.errors import CorruptEntry, UnsupportedValue
from tdio.layout.buffers import Slot, allocate
from tdio.layout.index import Rows
from tdio.layout.plan import BLOCK_ROWS, MAX_GAP_BYTES, Ranges, Selection, plan_rows
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.store.handle import Handle
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Commands, Operation, RangeRead, Reads

#: A read above this asks first whether the bytes are there: another round trip is then nothing.
_UNASKED_BYTES = 16 * 1024 * 1024


#: The position of a leaf among those that are read, and its ranges.
Planned = tuple[int, Ranges]


def feature(spec: LeafSpec, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a homogeneous entry below the batch dims."""
    return spec.shape[len(batch) :]


def leaf_shape(info: StoreInfo, spec: LeafSpec) -> tuple[int, ...]:
    """Return the shape of a homogeneous leaf, in the layout of the batch."""
    return (*info.batch, *feature(spec, info.batch))


def plan_leaves(
    specs: Sequence[LeafSpec],
    rows: Rows,
    batch: tuple[int, ...],
    stack: int | None,
    *,
    gather: bool = True,
) -> Iterator[Planned]:
    """Plan the same rows of several homogeneous leaves, in the order to ask for them.

    Rows too large to be merged come first, as there is little to plan; then from the smallest leaf
    on. What is read between the rows of all of them is at most as much as what is returned, or
    4 MiB for gaps below the size of a command, or 64 bytes for each row of a leaf.
    """
    plain = Selection(rows.positions)
    swapped: Selection | None = None
    inner = math.prod(batch[rows.depth :])
    chosen: list[tuple[Selection, int]] = []
    for spec in specs:
        row = math.prod(feature(spec, batch)) * spec.dtype.itemsize
        if stack and spec.stack_first:
            if swapped is None:
                swapped = Selection(_to_stack_first(rows, batch, stack))
            chosen.append((swapped, row))
        else:
            chosen.append((plain, inner * row))
    sizes = [len(selection.positions) * row for selection, row in chosen]
    spare = sum(sizes)
    for at in sorted(range(len(specs)), key=lambda at: (chosen[at][1] <= MAX_GAP_BYTES, sizes[at])):
        selection, row = chosen[at]
        plan = plan_rows(selection, row, gather=gather, spare=spare)
        if plan.rows is not None:
            spare = max(0, spare - max(0, plan.moved_bytes - sizes[at]))
        yield at, plan


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


def _place(into: Any, plan: Ranges, first: int, read: RangeRead) -> None:
    """Put the rows of a plan that are among those that were read in their places.

    These are the rows from ``first`` of the entry's on. What they were in is free then.
    """
    rows, size = plan.rows, plan.row_bytes
    assert rows is not None
    table, target = read.into.reshape(-1, size), into.reshape(-1, size)
    if size % 8 == 0:
        # Whole words (slots are aligned): a gather of bytes costs three times as much.
        table, target = table.view(np.int64), target.view(np.int64)
    for at in range(0, len(rows), BLOCK_ROWS):
        some = rows[at : at + BLOCK_ROWS]
        some = some - first if first else some
        if len(read.into) == plan.moved_bytes:
            np.take(table, some, axis=0, out=target[at : at + BLOCK_ROWS], mode="clip")
        else:
            here = np.flatnonzero((some >= 0) & (some < len(table)))
            target[here + at] = table[some[here]]
    read.into = _NOTHING


def _gathering(
    key: str, plan: Ranges, into: Any, what: tuple[str, object], whole: bool
) -> Iterator[RangeRead]:
    """Yield what reads the rows of a plan to pick them out of; a long span piece by piece."""
    size = plan.row_bytes
    if plan.single is None or plan.moved_bytes <= max(2 * len(into), _SPAN_BYTES):
        scratch = np.empty(plan.moved_bytes, np.uint8)
        yield RangeRead(key, plan, scratch, what, whole, partial(_place, into, plan, plan.first))
        return
    start, end = plan.single[0], plan.single[0] + plan.moved_bytes
    step = max(1, _SPAN_BYTES // size) * size
    for at in range(start, end, step):
        count = min(step, end - at)
        arrived = partial(_place, into, plan, plan.first + (at - start) // size)
        scratch = np.empty(count, np.uint8)
        yield RangeRead(key, Ranges.one(at, count, None, size), scratch, what, False, arrived)


#: A span that is longer than this, and than twice what is returned, is read in pieces of this size.
_SPAN_BYTES = 4 * 1024 * 1024
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Landing:
    """Memory that a read fills: one storage for all of its leaves.

    Attributes:
        slots: the place of each leaf in it.
        reads: what fills it.
        memory: the storage, uint8 ``[nbytes]``, before anything has been read.
    """

    slots: Sequence[Slot]
    reads: Reads
    memory: torch.Tensor
    _where: object

    def storage(self, device: torch.device | None) -> torch.Tensor:
        """Return the storage, uint8 ``[nbytes]``, on a device, once the reads are done.

        Raises:
            UnsupportedValue: this machine has no such device.
        """
        try:
            return self.memory if device is None else self.memory.to(device)
        except (RuntimeError, AssertionError) as error:
            raise UnsupportedValue(
                f"{self._where}: its tensors are to go to {device}, where they cannot ({error}); "
                "pass device="
            ) from error


def landing(
    handle: Handle,
    specs: Sequence[LeafSpec],
    plans: Iterable[Planned],
    slots: Sequence[Slot],
    nbytes: int,
) -> Operation[Landing]:
    """Take memory for the ranges of several leaves, which are planned as they are asked for.

    Raises:
        CorruptEntry: an entry is shorter than its metadata says; asked for large reads only.
    """
    if nbytes > _UNASKED_BYTES:
        yield from _check_held(handle, specs)
    memory = allocate(nbytes)
    reads = Reads(_reads(handle, specs, plans, slots, memory.numpy()))
    return Landing(slots, reads, memory, handle.location)


def _reads(
    handle: Handle,
    specs: Sequence[LeafSpec],
    plans: Iterable[Planned],
    slots: Sequence[Slot],
    target: Any,
) -> Iterator[RangeRead]:
    names, location = handle.names, handle.location
    for at, plan in plans:
        spec, slot = specs[at], slots[at]
        if not slot.nbytes:
            continue
        into = target[slot.start : slot.start + slot.nbytes]
        key, what = names.data(spec.path), (spec.path, location)
        whole = plan.single == (0, spec.nbytes)
        if plan.rows is None:
            yield RangeRead(key, plan, into, what, whole)
        else:
            yield from _gathering(key, plan, into, what, whole)


def _check_held(handle: Handle, specs: Sequence[LeafSpec]) -> Operation[None]:
    """See that the server holds what is to be read."""
    held = yield Commands([("STRLEN", handle.names.data(spec.path)) for spec in specs])
    for spec, size in zip(specs, held, strict=True):
        if not isinstance(size, int) or size < spec.nbytes:
            raise CorruptEntry(
                f"{handle.location}: the entry {spec.path!r} holds {size} bytes where its metadata "
                f"says {spec.nbytes}: it was deleted, cut short, or is being replaced"
            )
