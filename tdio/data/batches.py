"""A batch as one storage: making it so, pinning it, sending it from a worker to the trainer.

Three hooks are installed on import, each where torch or tensordict looks such things up:

- ``TensorDict.pin_memory`` of a consolidated batch pins its one storage. tensordict's own method
  pins leaf by leaf and returns a batch that is no longer consolidated; a ``DataLoader`` with
  ``pin_memory=True`` calls this method and nothing else, so there is no other place for it.
- ``LazyStackedTensorDict.pin_memory`` does the same for a ragged batch.
- ``ForkingPickler`` sends a ragged batch as one storage and its shapes. tensordict sends each
  leaf of each element: 1,024 descriptors for 256 elements of 4 leaves, and 0.8 s.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass

from tdio._td import build, consolidated
from tdio.layout.buffers import allocate, pack
from tdio.layout.paths import SEPARATOR


def one_storage(batch: Any) -> Any:
    """Return ``batch`` with its leaves in one storage.

    Args:
        batch: a TensorDict or tensorclass, any batch size.

    Returns:
        ``batch`` itself where it is consolidated already, else a copy.
    """
    if is_rebuildable(batch._tensordict if is_tensorclass(batch) else batch):
        return batch
    leaves = flat_leaves(batch)
    if leaves is not None:
        return stack_leaves({path: [leaf] for path, leaf in leaves.items()}, batch, None)
    copy = batch.consolidate(metadata=True)
    # consolidate() locks, which would keep the user from adding an entry.
    return _rebuilt(copy, lambda storage: storage) if type(copy) is TensorDict else copy


def _rebuilt(td: TensorDict, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the views of ``td`` over its moved storage, as unpickling would, not locked."""
    reduce: Any = copyreg.dispatch_table[TensorDict]
    rebuild, (metadata, storage) = reduce(td)
    return rebuild(metadata, move(storage))


def is_rebuildable(td: Any) -> bool:
    """Whether ``td`` is consolidated and its storage and metadata say all of it."""
    return td.is_consolidated() and td._consolidated.get("metadata") is not None


def flat_leaves(td: Any) -> dict[str, torch.Tensor] | None:
    """Return the leaves by path, or None where a list of plain CPU tensors does not say it all."""
    leaves: dict[str, torch.Tensor] = {}
    return leaves if _collect(td, "", td.batch_size, leaves) else None


def _collect(td: Any, prefix: str, batch: torch.Size, into: dict[str, torch.Tensor]) -> bool:
    if type(td) is not TensorDict or td.batch_size != batch or any(td.names):
        return False
    value: Any
    for name, value in td.items():
        if SEPARATOR in name:
            return False
        if type(value) is torch.Tensor and _plain(value):
            into[prefix + name] = value
        elif not _collect(value, prefix + name + SEPARATOR, batch, into) or value.is_empty():
            return False
    return True


def _plain(value: torch.Tensor) -> bool:
    strided = value.layout is torch.strided and value.device.type == "cpu"
    return strided and not value.requires_grad and not value.is_nested


def stack_leaves(
    columns: dict[str, list[torch.Tensor]], like: TensorDictBase, count: int | None
) -> TensorDict:
    """Return the columns as a consolidated TensorDict.

    Args:
        columns: for each path the leaves of all samples, of one shape and dtype.
        like: a sample: its batch size and device.
        count: number of samples, the first dim of the result; None takes the only sample as it
            is, without a dim for it.
    """
    lead = () if count is None else (count,)
    slots, nbytes = pack([(c[0].dtype, (*lead, *c[0].shape)) for c in columns.values()])
    storage = allocate(nbytes)
    for slot, column in zip(slots, columns.values(), strict=True):
        view = slot.view(storage)
        if count is None:
            view.copy_(column[0])
        else:
            torch.stack(column, out=view)
    placed = dict(zip(columns, slots, strict=True))
    return consolidated(storage, placed, (*lead, *like.batch_size), like.device)


# ---- ragged batches


@dataclass(frozen=True)
class Packed:
    """A lazy stack of plain elements as one storage and what is needed to take views of it.

    Attributes:
        storage: uint8 ``[nbytes]``: for each leaf the elements one after the other.
        leaves: path, dtype, byte offset of the first element, and the shapes of all elements;
            one shape where they are the same.
        count: number of elements.
        inner: batch size of an element.
        stack_dim: position of the stack dim.
        device: device of the elements, or None.
    """

    storage: torch.Tensor
    leaves: list[tuple[str, torch.dtype, int, list[tuple[int, ...]]]]
    count: int
    inner: tuple[int, ...]
    stack_dim: int
    device: torch.device | None

    def unpack(self) -> LazyStackedTensorDict:
        """Return the lazy stack of views of ``storage``."""
        columns: dict[str, Sequence[torch.Tensor]] = {}
        for path, dtype, start, shapes in self.leaves:
            shapes = shapes * self.count if len(shapes) == 1 else shapes
            counts = [torch.Size(shape).numel() for shape in shapes]
            stop = start + sum(counts) * dtype.itemsize
            parts = torch.split(self.storage[start:stop].view(dtype), counts)
            columns[path] = [p.view(s) for p, s in zip(parts, shapes, strict=True)]
        elements = [
            build({path: column[i] for path, column in columns.items()}, self.inner, self.device)
            for i in range(self.count)
        ]
        return LazyStackedTensorDict(*elements, stack_dim=self.stack_dim)


def pack_stack(stack: LazyStackedTensorDict) -> Packed | None:
    """Copy the leaves of a lazy stack into one storage; None where it holds more than tensors."""
    elements = stack.tensordicts
    flats = [flat_leaves(element) for element in elements]
    first = flats[0] if flats else None
    inner, device = elements[0].batch_size, elements[0].device
    columns: dict[str, list[torch.Tensor]] = {path: [] for path in first or ()}
    for flat, element in zip(flats, elements, strict=True):
        if first is None or flat is None or flat.keys() != first.keys():
            return None
        if element.batch_size != inner or element.device != device:
            return None
        for path, column in columns.items():
            column.append(flat[path])
    if any(leaf.dtype != column[0].dtype for column in columns.values() for leaf in column):
        return None
    slots, nbytes = pack([(c[0].dtype, (sum(t.numel() for t in c),)) for c in columns.values()])
    storage = allocate(nbytes)
    leaves = []
    for (path, column), slot in zip(columns.items(), slots, strict=True):
        torch.cat([leaf.reshape(-1) for leaf in column], out=slot.view(storage))
        shapes = [tuple(leaf.shape) for leaf in column]
        same = all(shape == shapes[0] for shape in shapes)
        leaves.append((path, slot.dtype, slot.start, shapes[:1] if same else shapes))
    return Packed(storage, leaves, len(elements), tuple(inner), stack.stack_dim, device)


def _unpack(packed: Packed) -> LazyStackedTensorDict:
    return packed.unpack()


def _reduce_stack(stack: LazyStackedTensorDict) -> Any:
    packed = pack_stack(stack)
    if packed is None:
        return copyreg.dispatch_table[LazyStackedTensorDict](stack)
    return _unpack, (packed,)


# ---- pinning


def _pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    def pin_memory(self: Any, num_threads: int | None = None, inplace: bool = False) -> Any:
        """Return the batch in page-locked memory; one that has one storage keeps it."""
        packed = pack_stack(self) if isinstance(self, LazyStackedTensorDict) else None
        if inplace:
            return original(self, num_threads, inplace)
        if packed is not None:
            return replace(packed, storage=packed.storage.pin_memory()).unpack()
        if type(self) is TensorDict and is_rebuildable(self):
            return _rebuilt(self, torch.Tensor.pin_memory)
        return original(self, num_threads, inplace)

    return pin_memory


for _kind in (TensorDict, LazyStackedTensorDict):
    setattr(_kind, "pin_memory", _pinning(_kind.pin_memory))  # noqa: B010
ForkingPickler.register(LazyStackedTensorDict, _reduce_stack)
