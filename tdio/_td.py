"""The one file that imports private names of tensordict, written for its 0.15 series.

It also builds what tdio returns: TensorDicts whose leaves are views of one storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensordict.base
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
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

from tdio.layout.buffers import Slot
from tdio.layout.paths import nest

__all__ = [
    "NO_DEFAULT",
    "REBUILDABLE",
    "_ACCEPTED_CLASSES",
    "_LOCK_ERROR",
    "LazyStackedTensorDict",
    "NestedKey",
    "TensorDict",
    "TensorDictBase",
    "_NoShapeOps",
    "_NoVmap",
    "_is_leaf_nontensor",
    "_is_tensorclass",
    "_register_tensor_class",
    "_unravel_key_to_tuple",
    "build",
    "consolidated",
    "is_non_tensor",
    "is_tensor_collection",
    "tensorclass_named",
]

#: The dtypes that tensordict can rebuild from its consolidated metadata (float8 is not among them).
REBUILDABLE = frozenset(_STR_DTYPE_TO_DTYPE.values())


def build(
    flat: Mapping[str, Any], batch: Sequence[int], device: torch.device | None = None
) -> TensorDict:
    """Return a TensorDict of leaves by path, every level of batch size ``batch``, unchecked."""
    return _build(nest(flat), torch.Size(batch), device)


def _build(tree: dict[str, Any], batch: torch.Size, device: torch.device | None) -> TensorDict:
    source: dict[Any, Any] = {
        name: _build(value, batch, device) if type(value) is dict else value
        for name, value in tree.items()
    }
    return TensorDict._new_unsafe(source=source, batch_size=batch, device=device)


def consolidated(
    storage: torch.Tensor,
    slots: Mapping[str, Slot],
    batch: Sequence[int],
    device: torch.device | None = None,
) -> TensorDict:
    """Return a TensorDict of views into ``storage``, marked so that it pickles as one storage.

    Args:
        storage: uint8 ``[nbytes]``, on ``device``.
        slots: the place of each leaf, by path.
        batch: batch size of every level.
        device: device of the TensorDict, None for none.
    """
    td = build({path: slot.view(storage) for path, slot in slots.items()}, batch, device)
    if all(slot.dtype in REBUILDABLE for slot in slots.values()):
        _mark(td, nest(dict(slots)), storage, list(batch), device, None)
    return td


def _mark(
    td: TensorDict,
    tree: dict[str, Any],
    storage: torch.Tensor,
    batch: list[int],
    device: torch.device | None,
    parent: dict[str, Any] | None,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": {},
        "cls_metadata": {
            "device": None if device is None else str(device),
            "names": [None] * len(batch),
            "batch_size": list(batch),
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
        else:
            metadata[name] = _mark(
                td._get_str(name, NO_DEFAULT), slot, storage, batch, device, state
            )
    td._consolidated = state
    return metadata


def tensorclass_named(text: str) -> Any:
    """Return the tensorclass whose ``str`` is ``text`` if it is defined by now, else None."""
    # The tuple is replaced each time that a class is defined: look at the module's own.
    for known in tensordict.base._ACCEPTED_CLASSES:
        if str(known) == text and _is_tensorclass(known):
            return known
    return None
