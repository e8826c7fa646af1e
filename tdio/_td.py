"""The one file that imports private names of tensordict, written for its 0.15 series.

It also builds what tdio returns: TensorDicts whose leaves are views of one storage.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensordict.base
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
)
from tensordict._base.unsupported import _NoShapeOps, _NoVmap
from tensordict._nestedkey import NestedKey
from tensordict.base import (
    _ACCEPTED_CLASSES,
    NO_DEFAULT,
    _is_leaf_nontensor,
    _register_tensor_class,
    is_tensor_collection,
)
from tensordict.utils import (
    _LOCK_ERROR,
    _STR_DTYPE_TO_DTYPE,
    _is_tensorclass,
    _unravel_key_to_tuple,
    is_non_tensor,
)

from tdio.errors import UnsupportedValue
from tdio.layout.buffers import Slot, views
from tdio.layout.levels import Level
from tdio.layout.paths import nest, nest_level

__all__ = [
    "NO_DEFAULT",
    "REBUILDABLE",
    "_ACCEPTED_CLASSES",
    "_LOCK_ERROR",
    "LazyStackedTensorDict",
    "NestedKey",
    "NonTensorData",
    "NonTensorStack",
    "TensorDict",
    "TensorDictBase",
    "UnbatchedTensor",
    "_NoShapeOps",
    "_NoVmap",
    "_is_leaf_nontensor",
    "_is_tensorclass",
    "_register_tensor_class",
    "_unravel_key_to_tuple",
    "build",
    "consolidated",
    "imported_tensorclass",
    "is_non_tensor",
    "is_tensor_collection",
    "tensorclass_named",
]

#: The dtypes that tensordict can rebuild from its consolidated metadata (float8 is not among them).
REBUILDABLE = frozenset(_STR_DTYPE_TO_DTYPE.values())


def build(
    flat: Mapping[str, Any],
    batch: Sequence[int],
    device: torch.device | None = None,
    levels: Mapping[str, Level] | None = None,
) -> TensorDict:
    """Return a TensorDict of entries by path, unchecked.

    Args:
        flat: tensors and non-tensor entries by path.
        batch: batch size of every level that ``levels`` does not name.
        device: device of every level, None for none.
        levels: batch size, names and class of other levels, by path; those without entries are
            made too.

    Raises:
        UnsupportedValue: a level is of a tensorclass that has not been imported.
    """
    tree = nest(flat)
    for path in levels or ():
        if path:
            nest_level(tree, path)
    td: TensorDict = _build(tree, torch.Size(batch), device, levels or {}, "", None)
    return td


def _build(
    tree: dict[str, Any],
    batch: torch.Size,
    device: torch.device | None,
    levels: Mapping[str, Level],
    path: str,
    above: Level | None,
) -> Any:
    level = levels.get(path, above)
    # A nested level that is not named itself is as the nested one above it.
    passed = Level(level.batch, level.names) if level is not None and path else None
    source: dict[Any, Any] = {
        name: _build(value, batch, device, levels, f"{path}.{name}" if path else name, passed)
        if type(value) is dict
        else value
        for name, value in tree.items()
    }
    if level is None:
        return TensorDict._new_unsafe(source=source, batch_size=batch, device=device)
    size = level.batch
    if -1 in size:
        first = next((value for value in source.values()), None)
        size = tuple(first.shape[: len(size)]) if first is not None else size[: size.index(-1)]
    td = TensorDict._new_unsafe(
        source=source,
        batch_size=torch.Size(size),
        device=device,
        names=list(level.names) if level.names else None,  # type: ignore[arg-type]
    )
    return imported_tensorclass(level.kind)._from_tensordict(td) if level.kind else td


def imported_tensorclass(name: str) -> Any:
    """Return the tensorclass that a store names: imported classes only.

    Raises:
        UnsupportedValue: it has not been imported. A server's word never imports a module.
    """
    known = tensorclass_named(f"<class '{name}'>")
    if known is not None:
        return known
    module, _, attribute = name.rpartition(".")
    kind = getattr(sys.modules.get(module), attribute, None)
    if isinstance(kind, type) and _is_tensorclass(kind):
        return kind
    raise UnsupportedValue(
        f"the store holds a tensorclass {name[:100]!r} that has not been imported; import it "
        "first, or pass tensorclass_cls="
    )


def value_entry(value: Any, dims: int, batch: Sequence[int], axis: int = 0) -> Any:
    """Return a non-tensor entry.

    Args:
        value: one value for all of ``batch``, or lists nested ``dims`` deep.
        dims: how many dims of ``batch``, from ``axis`` on, the lists spell out.
        batch: batch size of the entry.
        axis: the first of these dims.
    """
    if not dims or not value:
        return NonTensorData(data=value, batch_size=batch)
    rest = (*batch[:axis], *batch[axis + 1 :])
    return NonTensorStack(
        *(value_entry(item, dims - 1, rest, axis) for item in value), stack_dim=axis
    )


def value_of(entry: Any) -> tuple[Any, int]:
    """Return the value of a non-tensor entry, and how many batch dims it spells out."""
    if isinstance(entry, NonTensorStack):
        return entry.tolist(), len(entry.batch_size)
    return entry.data, 0


def consolidated(
    storage: torch.Tensor,
    slots: Mapping[str, Slot],
    batch: Sequence[int],
    device: torch.device | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    levels: Mapping[str, Level] | None = None,
) -> TensorDict:
    """Return a TensorDict of views into ``storage``, marked so that it pickles as one storage.

    Args:
        storage: uint8 ``[nbytes]``, on ``device``.
        slots: the place of each leaf, by path.
        batch: batch size of every level that ``levels`` does not name.
        device: device of the TensorDict, None for none.
        values: non-tensor entries by path.
        levels: as in ``build``.
    """
    flat: dict[str, Any] = dict(zip(slots, views(storage, list(slots.values())), strict=True))
    td = build({**flat, **values} if values else flat, batch, device, levels)
    plain = not levels or not any(level.kind for level in levels.values())
    if plain and all(slot.dtype in REBUILDABLE for slot in slots.values()):
        _mark(td, nest({**slots, **values} if values else slots), storage, device, None)
    return td


def _mark(
    td: TensorDict,
    tree: dict[str, Any],
    storage: torch.Tensor,
    device: torch.device | None,
    parent: dict[str, Any] | None,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": {},
        "cls_metadata": {
            "device": None if device is None else str(device),
            "names": td.names,
            "batch_size": list(td.batch_size),
            "is_locked": False,
        },
    }
    state = {"storage": storage, "metadata": metadata}
    if parent is not None:
        # A write to a sub-tensordict makes the parent's state stale too.
        state["parent"] = parent
    for name, slot in tree.items():
        if isinstance(slot, Slot):
            pad = -slot.nbytes % 8
            stop = slot.start + slot.nbytes + pad
            leaf = (str(slot.dtype), list(slot.shape), slot.start, stop, pad)
            metadata["leaves"][name] = leaf
        elif isinstance(slot, dict):
            inner: Any = td.get(name)
            metadata[name] = _mark(inner, slot, storage, device, state)
        else:
            _mark_value(metadata, name, slot)
    value: Any
    for name, value in td.items():
        if name not in tree:  # a level without entries
            metadata[name] = _mark(value, {}, storage, device, state)
    td._consolidated = state
    return metadata


def _mark_value(metadata: dict[str, Any], name: str, value: Any) -> None:
    if not isinstance(value, NonTensorStack):
        metadata["non_tensors"][name] = (value.data, list(value.batch_size), None)
        return
    inner: dict[str, Any] = {
        "cls": "NonTensorStack",
        "non_tensors": {},
        "leaves": {},
        "cls_metadata": {
            "stack_dim": value.stack_dim,
            "stack_dim_name": None,
            "is_locked": False,
        },
    }
    for position, item in enumerate(value.tensordicts):
        _mark_value(inner, str(position), item)
    metadata[name] = inner


def tensorclass_named(text: str) -> Any:
    """Return the tensorclass whose ``str`` is ``text`` if it is defined by now, else None."""
    if text == "TensorDict":
        return None  # by far the most: the loop below takes 5 us
    # The tuple is replaced each time that a class is defined: look at the module's own.
    for known in tensordict.base._ACCEPTED_CLASSES:
        if str(known) == text and _is_tensorclass(known):
            return known
    return None
