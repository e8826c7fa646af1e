"""The entries of one level as reads need them, worked out once for what is known of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tdio.layout.buffers import Slot, allocate, pack
from tdio.layout.index import Rows
from tdio.layout.plan import Ranges
from tdio.layout.spec import LeafSpec
from tdio.store.handle import Handle
from tdio.store.placing import check_held, feature, leaf_shape, plan_leaves, reads_into
from tdio.store.shape import Frame
from tdio.wire.reading import Spec, StoreInfo
from tdio.wire.requests import Operation, RangeRead

#: So many levels, and layouts of one level, are remembered: then it is begun anew.
_KEPT = 64


class Columns:
    """Dense leaves that share batch dims, and the non-tensor entries beside them.

    Attributes:
        frame: the level, whose batch dims are those of every leaf.
        specs: all entries.
        tensors: the tensor entries.
        values: the others.
        ragged: whether elements of an entry differ in shape.
        names: the paths of ``tensors`` below the level.
    """

    def __init__(self, info: StoreInfo, frame: Frame, specs: Iterable[Spec]):
        self.frame = frame
        self.specs = list(specs)
        self.tensors = [spec for spec in self.specs if isinstance(spec, LeafSpec)]
        self.values = [spec for spec in self.specs if not isinstance(spec, LeafSpec)]
        self.ragged = any(spec.ragged for spec in self.tensors)
        cut = len(frame.prefix) + 1 if frame.prefix else 0
        self.names = [spec.path[cut:] for spec in self.tensors]
        self.value_names = [spec.path[cut:] for spec in self.values]
        self._stack = info.stack
        self._layouts: dict[tuple[int, ...], tuple[list[Slot], int]] = {}
        self._all: list[Ranges] | None = None

    def batch(self, rows: Rows) -> tuple[int, ...]:
        """Return the batch size of the selected rows."""
        return (*rows.shape, *self.frame.batch[rows.depth :])

    def prepare(
        self, handle: Handle, rows: Rows
    ) -> Operation[tuple[torch.Tensor, list[Slot], list[RangeRead], Callable[[], None]]]:
        """Take memory for the selected rows of the dense leaves.

        Returns the storage, the place of each leaf in it, the reads that fill it, and what is to
        be called when they are done.

        Raises:
            CorruptEntry: an entry is shorter than its metadata says.
        """
        slots, nbytes = self._layout(self.batch(rows))
        yield from check_held(handle, self.tensors, nbytes)
        storage = allocate(nbytes)
        reads, place = reads_into(handle, self.tensors, self._plans(rows), slots, storage)
        return storage, slots, reads, place

    def _layout(self, batch: tuple[int, ...]) -> tuple[list[Slot], int]:
        found = self._layouts.get(batch)
        if found is None:
            below = self.frame.batch
            found = pack([(spec.dtype, (*batch, *feature(spec, below))) for spec in self.tensors])
            _keep(self._layouts, batch, found)
        return found

    def _plans(self, rows: Rows) -> Sequence[Ranges]:
        if rows.depth or len(rows.positions) != 1:
            return plan_leaves(self.tensors, rows, self.frame.batch, self._stack)
        if self._all is None:
            self._all = plan_leaves(self.tensors, rows, self.frame.batch, self._stack)
        return self._all


def columns_of(handle: Handle, paths: Sequence[str] | None, prefix: str = "") -> Operation[Columns]:
    """Return the entries ``paths`` under a level; those of None are all that it has.

    Raises:
        EntryNotFound: an entry that is not registered, a level that is gone.
    """
    known = handle.state
    key = prefix, None if paths is None else tuple(paths)
    found = known.columns.get(key)
    if found is None:
        specs = yield from handle.load(handle.under(prefix) if paths is None else paths)
        found = Columns(known.info, Frame.of(known.info, prefix), specs.values())
        _keep(known.columns, key, found)
    return found


def column_of(handle: Handle, path: str) -> Operation[Columns]:
    """Return one entry, the dims of a dense leaf as its batch dims.

    Raises:
        EntryNotFound: an entry that is not registered.
    """
    known = handle.state
    found = known.columns.get(path)
    if found is None:
        (spec,) = (yield from handle.load((path,))).values()
        info, prefix = known.info, path.rpartition(".")[0]
        batch = leaf_shape(info, spec) if isinstance(spec, LeafSpec) else info.batch
        found = Columns(info, Frame(prefix, batch, info.stack), [spec])
        _keep(known.columns, path, found)
    return found


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
