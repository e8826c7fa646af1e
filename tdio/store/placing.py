"""From rows to reads: which ranges of which string land where in one storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tdio.errors import CorruptEntry, UnsupportedValue
from tdio.layout.buffers import Slot
from tdio.layout.index import Rows
from tdio.layout.plan import Ranges, Selection, in_pieces, plan_rows
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.store.handle import Handle
from tdio.wire.reading import StoreInfo
from tdio.wire.requests import Commands, Operation, RangeRead

#: A read above this asks first whether the bytes are there: another round trip is then nothing.
_UNASKED_BYTES = 16 * 1024 * 1024


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
) -> list[Ranges]:
    """Plan the same rows of several homogeneous leaves.

    What is read between the rows of all of them is at most as much as what is returned.
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
    plans: list[Any] = [None] * len(specs)
    for at in sorted(range(len(specs)), key=sizes.__getitem__):
        selection, row = chosen[at]
        plans[at] = plan_rows(selection, row, gather=gather, spare=spare)
        if plans[at].rows is not None:
            spare -= max(0, plans[at].moved_bytes - sizes[at])
    return plans


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


@dataclass(frozen=True)
class _Gather:
    """Rows that were read in ascending order, to be put in their places."""

    scratch: Any
    plan: Ranges
    into: Any

    def place(self) -> None:
        assert self.plan.rows is not None
        size = self.plan.row_bytes
        table, target = self.scratch.reshape(-1, size), self.into.reshape(-1, size)
        if size % 8 == 0:
            # Whole words (slots are aligned): a gather of bytes costs three times as much.
            table, target = table.view(np.int64), target.view(np.int64)
        np.take(table, self.plan.rows, axis=0, out=target, mode="clip")


def reads_into(
    handle: Handle,
    specs: Sequence[LeafSpec],
    plans: Sequence[Ranges],
    slots: Sequence[Slot],
    storage: torch.Tensor,
) -> tuple[list[RangeRead], Callable[[], None]]:
    """Return the reads that bring the planned ranges, and what puts gathered rows in place."""
    target = storage.numpy()
    reads: list[RangeRead] = []
    names, location = handle.names, handle.location
    gathers: list[_Gather] = []
    for spec, plan, slot in zip(specs, plans, slots, strict=True):
        if not slot.nbytes:
            continue
        into = target[slot.start : slot.start + slot.nbytes]
        if plan.rows is not None:
            gathers.append(_Gather(np.empty(plan.moved_bytes, np.uint8), plan, into))
            into = gathers[-1].scratch
        what = (spec.path, location)
        reads.append(RangeRead(names.data(spec.path), in_pieces(plan), into, what))
    # Small ones first: while the server is at them, the rest is encoded and prepared for.
    reads.sort(key=_nbytes)

    def place() -> None:
        for gather in gathers:
            gather.place()

    return reads, place


def _nbytes(read: RangeRead) -> int:
    return len(read.into)


def check_held(handle: Handle, specs: Sequence[LeafSpec], nbytes: int) -> Operation[None]:
    """Before memory is taken for a large read, see that the server holds so much.

    Raises:
        CorruptEntry: an entry is shorter than its metadata says.
    """
    if nbytes <= _UNASKED_BYTES:
        return
    held = yield Commands([("STRLEN", handle.names.data(spec.path)) for spec in specs])
    for spec, size in zip(specs, held, strict=True):
        if not isinstance(size, int) or size < spec.nbytes:
            raise CorruptEntry(
                f"{handle.location}: the entry {spec.path!r} holds {size} bytes where its metadata "
                f"says {spec.nbytes}: it was deleted, cut short, or is being replaced"
            )


def on_device(storage: torch.Tensor, device: torch.device | None, handle: Handle) -> torch.Tensor:
    """Return a storage on the device of the read.

    Raises:
        UnsupportedValue: this machine has no such device.
    """
    try:
        return storage if device is None else storage.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedValue(
            f"{handle.location}: its tensors are to go to {device}, where they cannot ({error}); "
            "pass device="
        ) from error
