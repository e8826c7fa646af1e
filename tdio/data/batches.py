"""A batch as one storage: making it so, pinning it, sending it from a worker to the trainer.

Four hooks are installed on import, each where torch or tensordict looks such things up:

- ``TensorDict.pin_memory`` of a consolidated batch pins its one storage. tensordict's own method
  pins leaf by leaf and returns a batch that is no longer consolidated; a ``DataLoader`` with
  ``pin_memory=True`` calls this method and nothing else, so there is no other place for it.
- ``LazyStackedTensorDict.pin_memory`` does the same for a ragged batch, as the first does for one
  with dtypes that tensordict cannot rebuild, float8.
- ``to`` of such a batch, whose leaves share one storage, copies that to the device, and no leaf.
- ``ForkingPickler`` sends a ragged batch as one storage and what else it holds: shapes, batch
  sizes, names, classes, entries that are no tensors. tensordict sends each leaf of each element:
  1,024 descriptors for 256 elements of 4 leaves, and 0.8 s. So it sends a batch with float8.
  Leaves in shared memory stay there.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass
from torch.compiler import is_compiling

from tdio._td import REBUILDABLE, consolidated
from tdio.data.gathering import (
    Run,
    gather,
    gathered,
    in_one,
    is_plain,
    parts_of,
    scatter,
)
from tdio.layout.buffers import allocate, pack
from tdio.layout.paths import SEPARATOR


def one_storage(batch: Any) -> Any:
    """Return ``batch`` with its leaves in one storage.

    Args:
        batch: a TensorDict, tensorclass or lazy stack, any batch size.

    Returns:
        ``batch`` itself where it has one storage already, else a copy.
    """
    inner = batch._tensordict if is_tensorclass(batch) else batch
    if isinstance(inner, LazyStackedTensorDict):
        if _is_one_storage(inner):
            return batch
        made = gathered(inner, lambda tensor: tensor)
        return made if inner is batch else type(batch)._from_tensordict(made)
    if is_rebuildable(inner):
        return batch
    leaves = flat_leaves(batch)
    if leaves is not None:
        return stack_leaves({path: [leaf] for path, leaf in leaves.items()}, batch, None)
    if not _has_known_dtypes(batch):
        return gathered(batch, lambda tensor: tensor)
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
        if is_plain(value):
            into[prefix + name] = value
        elif not _collect(value, prefix + name + SEPARATOR, batch, into) or value.is_empty():
            return False
    return True


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


# ---- to other processes


class _Skeleton(ForkingPickler):
    """Pickles everything of a batch but its tensors, which are left in ``found``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        # Without the state of consolidation, whose storage is another tensor; and no stack within
        # the stack is packed by itself.
        self.dispatch_table = {
            **self.dispatch_table,
            TensorDict: _reduce_bare,
            LazyStackedTensorDict: _reduce_bare,
        }

    def persistent_id(self, value: Any) -> int | None:
        # A jagged tensor is taken apart by its own reduction.
        if not isinstance(value, torch.Tensor) or value.is_nested:
            return None
        number = self._numbers.setdefault(id(value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number


class _Filled(pickle.Unpickler):
    """Unpickles a skeleton, with tensors by number in their places."""

    def __init__(self, skeleton: bytes, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def _reduce_bare(td: Any) -> Any:
    state = td.__getstate__()
    state.pop("_consolidated", None)
    return _remade, (type(td), state)


def _remade(kind: Any, state: dict[str, Any]) -> Any:
    td = kind.__new__(kind)
    td.__setstate__(state)
    return td


def _unpack(
    skeleton: bytes, storage: torch.Tensor, runs: list[Run], others: dict[int, torch.Tensor]
) -> Any:
    return _Filled(skeleton, {**scatter(storage, runs), **others}).load()


def _reduce_stack(stack: Any) -> Any:
    """Send all that is no plain tensor as it is, and the plain tensors as one storage."""
    file = io.BytesIO()
    skeleton = _Skeleton(file)
    skeleton.dump(stack)
    found = dict(enumerate(skeleton.found))
    plain = {n: leaf for n, leaf in found.items() if is_plain(leaf) and not _shared(leaf)}
    storage, runs = _numbered(plain)
    others = {n: leaf for n, leaf in found.items() if n not in plain}
    return _unpack, (file.getvalue(), storage, runs, others)


def _shared(leaf: torch.Tensor) -> bool:
    return bool(leaf.is_shared())  # type: ignore[no-untyped-call]


def _reduce_plain(td: TensorDict) -> Any:
    reduce: Any = copyreg.dispatch_table[TensorDict]
    return reduce(td) if _has_known_dtypes(td) else _reduce_stack(td)


def _has_known_dtypes(td: TensorDictBase) -> bool:
    dtypes = {leaf.dtype for leaf in td.values(True, True) if isinstance(leaf, torch.Tensor)}
    return dtypes <= REBUILDABLE


def _numbered(leaves: dict[int, torch.Tensor]) -> tuple[torch.Tensor, list[Run]]:
    numbers = list(leaves)
    storage, runs = gather(list(leaves.values()))
    return storage, [replace(run, numbers=[numbers[n] for n in run.numbers]) for run in runs]


# ---- pinned, and to other devices


def _pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    def pin_memory(self: Any, num_threads: int | None = None, inplace: bool = False) -> Any:
        """Return the batch in page-locked memory; one that has one storage keeps it."""
        if inplace:
            return original(self, num_threads, inplace)
        if type(self) is LazyStackedTensorDict:
            return gathered(self, torch.Tensor.pin_memory)
        if type(self) is TensorDict and is_rebuildable(self):
            pinned = _rebuilt(self, torch.Tensor.pin_memory)
            return pinned.lock_() if self.is_locked else pinned
        if type(self) is TensorDict and not _has_known_dtypes(self):
            return gathered(self, torch.Tensor.pin_memory)
        return original(self, num_threads, inplace)

    return pin_memory


def _moving(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the batch on a device, or as what else is asked for; one storage is one copy."""
        device = args[0] if args else kwargs.get("device")
        alone = len(args) + ("device" in kwargs) == 1
        alone = alone and kwargs.keys() <= {"device", "non_blocking"}
        ours = type(self) in (TensorDict, LazyStackedTensorDict) and not is_compiling()
        if ours and alone and isinstance(device, (str, int, torch.device)):
            target, non_blocking = torch.device(device), bool(kwargs.get("non_blocking"))
            # What is to be moved lies on the CPU.
            if target.type != "cpu" and _is_one_storage(self):

                def move(tensor: torch.Tensor) -> torch.Tensor:
                    return tensor.to(target, non_blocking=non_blocking)

                return gathered(self, move, device=target)
        return original(self, *args, **kwargs)

    return to


def _is_one_storage(batch: Any) -> bool:
    """Whether tensordict would copy leaf by leaf what is in one storage."""
    if type(batch) is TensorDict and (is_rebuildable(batch) or _has_known_dtypes(batch)):
        return False
    leaves: list[torch.Tensor] = []
    batch.apply(leaves.append, filter_empty=True)
    parts = [part for leaf in leaves for part in parts_of(leaf)]
    return bool(parts) and all(map(is_plain, parts)) and in_one(parts)


for _kind in (TensorDict, LazyStackedTensorDict):
    setattr(_kind, "pin_memory", _pinning(_kind.pin_memory))  # noqa: B010
    setattr(_kind, "to", _moving(_kind.to))  # noqa: B010
ForkingPickler.register(LazyStackedTensorDict, _reduce_stack)
ForkingPickler.register(TensorDict, _reduce_plain)
