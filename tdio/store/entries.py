"""The entries of one level as reads need them, worked out once for what is known of a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tdio.layout.buffers import Slot, pack
from tdio.layout.index import Rows
from tdio.layout.spec import LeafSpec
from tdio.layout.values import ValueSpec, decode_value
from tdio.store.handle import Handle
from tdio.store.placing import Landing, Planned, feature, landing, leaf_shape, plan_leaves
from tdio.store.shape import Frame
from tdio.wire.reading import Spec, StoreInfo
from tdio.wire.requests import Operation

#: So many levels, and layouts of one level, are remembered: then it is begun anew.
_KEPT = 64


class Entries:
    """Dense leaves that share batch dims, and the non-tensor entries beside them.

    Attributes:
        frame: the level, whose batch dims are those of every leaf.
        tensors: the tensor entries.
        values: the others.
        ragged: whether elements of an entry differ in shape.
        names: the paths of ``tensors`` below the level.
        value_names: those of ``values``.
    """

    def __init__(self, info: StoreInfo, frame: Frame, specs: Iterable[Spec]):
        self.frame = frame
        self.tensors: list[LeafSpec] = []
        self.values: list[ValueSpec] = []
        for spec in specs:
            if isinstance(spec, LeafSpec):
                self.tensors.append(spec)
            else:
                self.values.append(spec)
        self.ragged = any(spec.ragged for spec in self.tensors)
        cut = len(frame.prefix) + 1 if frame.prefix else 0
        self.names = [spec.path[cut:] for spec in self.tensors]
        self.value_names = [spec.path[cut:] for spec in self.values]
        self._stack = info.stack
        self._layouts: dict[tuple[int, ...], tuple[list[Slot], int]] = {}
        self._all: list[Planned] | None = None

    def batch(self, rows: Rows) -> tuple[int, ...]:
        """Return the batch size of the selected rows."""
        return (*rows.shape, *self.frame.batch[rows.depth :])

    def landing(self, handle: Handle, rows: Rows) -> Operation[Landing]:
        """Take memory for the selected rows of the dense leaves.

        Raises:
            CorruptEntry: an entry is shorter than its metadata says.
        """
        slots, nbytes = self._layout(self.batch(rows))
        return (yield from landing(handle, self.tensors, self._plans(rows), slots, nbytes))

    def _layout(self, batch: tuple[int, ...]) -> tuple[list[Slot], int]:
        found = self._layouts.get(batch)
        if found is None:
            below = self.frame.batch
            found = pack([(spec.dtype, (*batch, *feature(spec, below))) for spec in self.tensors])
            _keep(self._layouts, batch, found)
        return found

    def _plans(self, rows: Rows) -> Iterable[Planned]:
        everything = not rows.depth and len(rows.positions) == 1
        if everything and self._all is not None:
            return self._all
        plans = plan_leaves(self.tensors, rows, self.frame.batch, self._stack)
        if not everything:
            return plans
        every = list(plans)
        if sum(len(plan) for _, plan in every) <= _KEPT:
            self._all = every
        return every


def entries_of(handle: Handle, paths: Sequence[str] | None, prefix: str = "") -> Operation[Entries]:
    """Return the entries ``paths`` under a level; those of None are all that it has.

    Raises:
        EntryNotFound: an entry that is not registered, a level that is gone.
    """
    known = handle.state
    key = prefix, None if paths is None else tuple(paths)
    found: Entries | None = known.levels_read.get(key)
    if found is None:
        specs = yield from handle.load(handle.under(prefix) if paths is None else paths)
        found = Entries(known.info, Frame.of(known.info, prefix), specs.values())
        _keep(known.levels_read, key, found)
    return found


def entry_of(handle: Handle, path: str) -> Operation[Entries]:
    """Return one entry, the dims of a dense leaf as its batch dims.

    Raises:
        EntryNotFound: an entry that is not registered.
    """
    known = handle.state
    found: Entries | None = known.leaves_read.get(path)
    if found is None:
        (spec,) = (yield from handle.load((path,))).values()
        info, prefix = known.info, path.rpartition(".")[0]
        batch = leaf_shape(info, spec) if isinstance(spec, LeafSpec) else info.batch
        found = Entries(info, Frame(prefix, batch, info.stack), [spec])
        _keep(known.leaves_read, path, found)
    return found


def decoded(handle: Handle, spec: ValueSpec, blob: bytes | None) -> tuple[Any, int]:
    """Return the value of a non-tensor entry, and how many batch dims it spells out.

    Raises:
        CorruptEntry: bytes that make no sense.
        UnsupportedValue: it is pickled, and this handle reads no pickles.
    """
    where = str(handle.location)
    return decode_value(spec, blob or b"", allow_pickle=handle.allow_pickle, where=where)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
