"""A tensordict seen as what a pipe sends: a key that tells schemas apart, metadata, leaves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from tensordict import UnbatchedTensor

from tdio._td import (
    REBUILDABLE,
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    _is_tensorclass,
    is_non_tensor,
)
from tdio.errors import UnsupportedValue
from tdio.layout.buffers import Slot
from tdio.layout.dtypes import dtype_name
from tdio.wire.pipe_schema import JAGGED, RESERVED, STACKS

_is_class: Any = lru_cache(_is_tensorclass)


def plain(td: Any) -> Any:
    """Return what of ``td`` is sent: of a tensorclass its tensordict, of a store its content."""
    if type(td) is TensorDict:
        return td
    if _is_class(type(td)):
        td = td._tensordict
    if type(td) is TensorDict or isinstance(td, LazyStackedTensorDict):
        return td
    if isinstance(td, TensorDictBase):
        return td.to_tensordict()
    raise UnsupportedValue(f"a pipe sends tensordicts, not {type(td).__name__}")


def _members(td: Any) -> Iterable[tuple[str, Any]]:
    if type(td) is TensorDict:
        items: Iterable[tuple[str, Any]] = td._tensordict.items()
        return items
    return ((str(i), member) for i, member in enumerate(td.tensordicts))


def _kind(value: Any) -> str:
    """Return what an entry is that is no plain tensor: jagged, leaf, value, class or level."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, UnbatchedTensor):
            return "unbatched"
        return "jagged" if value.is_nested and value.layout is torch.jagged else "leaf"
    if isinstance(value, LazyStackedTensorDict):
        return "level"
    if is_non_tensor(value):
        return "value"
    return "class" if _is_class(type(value)) else "level"


def _parts(name: str, value: Any) -> list[tuple[str, torch.Tensor, int | None]]:
    """Return the tensors of a jagged leaf, under the names that they have in the metadata."""
    parts = [(f"<NJT_VALUES>{name}", value._values, None)]
    if value._lengths is not None:
        parts.append((f"<NJT_LENGTHS>{name}", value._lengths, None))
    return [*parts, (f"<NJT_OFFSETS>{name}", value._offsets, value._ragged_idx)]


def describe(td: Any) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return what tells the schema of ``td`` from others, and its tensors in storage order.

    This runs for each tensordict that is not consolidated: 0.5 us a leaf.
    """
    key: list[Any] = []
    leaves: list[torch.Tensor] = []
    _describe(td, key, leaves)
    return tuple(key), leaves


def _describe(td: Any, key: list[Any], leaves: list[torch.Tensor]) -> None:
    if type(td) is TensorDict:
        names = td._td_dim_names
        names = None if names is None else tuple(names)
        key += (td._batch_size, td._device, td._is_locked, names)
    else:
        key += (type(td), td.stack_dim, td._td_dim_name, td.is_locked)
    for name, value in _members(td):
        if type(value) is torch.Tensor and value.layout is torch.strided:
            key += (name, value.dtype, value.shape)
            leaves.append(value)
            continue
        kind = _kind(value)
        key += (name, kind)
        if kind == "value":
            key += (_json(name, value.data), value.batch_size, value.device)
        elif kind == "jagged":
            for part, tensor, ragged in _parts(name, value):
                key += (part, tensor.dtype, tensor.shape, ragged)
                leaves.append(tensor)
        elif isinstance(value, torch.Tensor):
            key += (value.dtype, value.shape, value.layout)
            leaves.append(value)
        else:
            key.append(type(value))
            _describe(plain(value), key, leaves)
    key.append(None)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedValue(
            f"the value {name!r} of type {type(value).__name__} cannot be sent: only what JSON "
            f"holds can be ({error})"
        ) from error


@dataclass
class Tree:
    """The metadata of a tensordict, in tensordict's own form, and where its leaves go.

    Attributes:
        metadata: the tree, without the size and device of the storage.
        slots: the place of each leaf, in the order of ``describe``.
        nbytes: the size of the storage.
        reserved: nested names that are fields of the metadata too.
        foreign: dtypes that tensordict cannot read back.
        holds_values: whether there are non-tensor values.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    nbytes: int = 0
    reserved: list[str] = field(default_factory=list)
    foreign: set[torch.dtype] = field(default_factory=set)
    holds_values: bool = False
    _items: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def add(self, leaves: dict[str, Any], name: str, tensor: Any, ragged: int | None) -> None:
        """Place a leaf behind the others, padded to 8 bytes."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedValue(
                f"the entry {name!r} of layout {tensor.layout} on {tensor.device} cannot be sent; "
                "send its values and indices as entries, or use layout=torch.jagged"
            )
        text, nbytes = dtype_name(tensor.dtype), tensor.numel() * tensor.dtype.itemsize
        if nbytes and self.nbytes % tensor.dtype.itemsize:
            self._widen_last(8)
        pad = -nbytes % 8
        start, self.nbytes = self.nbytes, self.nbytes + nbytes + pad
        item = (text, list(tensor.shape), start, self.nbytes, pad)
        leaves[name] = item if ragged is None else (*item, ragged)
        self.slots.append(Slot(tensor.dtype, tuple(tensor.shape), start, nbytes))
        self._items.append((leaves, name))
        if tensor.dtype not in REBUILDABLE:
            self.foreign.add(tensor.dtype)

    def _widen_last(self, nbytes: int) -> None:
        # complex128 has 16 bytes, and a view of it must begin at a multiple of them.
        for leaves, name in reversed(self._items):
            dtype, shape, start, stop, pad, *ragged = leaves[name]
            if start != stop:
                leaves[name] = (dtype, shape, start, stop + nbytes, pad + nbytes, *ragged)
                break
        self.nbytes += nbytes


def tree_of(td: Any) -> Tree:
    """Return the metadata of ``td``, leaves in the order of ``describe``.

    Raises:
        UnsupportedValue: an entry that one storage cannot hold.
    """
    tree = Tree()
    tree.metadata = _level(tree, td, td)
    return tree


def _level(tree: Tree, td: Any, owner: Any) -> dict[str, Any]:
    name = type(owner).__name__
    own = name if name in STACKS or name == "TensorDict" else str(type(owner))
    leaves: dict[str, Any] = {}
    values: dict[str, Any] = {}
    below = {
        "cls": own,
        "non_tensors": values,
        "leaves": leaves,
        "cls_metadata": td._reduce_get_metadata(),
    }
    levels: dict[str, Any] = {}
    for name, value in _members(td):
        kind = _kind(value)
        if kind == "value":
            _json(name, value.data)
            tree.holds_values = True
            device = None if value.device is None else str(value.device)
            values[name] = (value.data, list(value.batch_size), device)
        elif kind == "unbatched":
            raise UnsupportedValue(f"the UnbatchedTensor {name!r} needs consolidated=False")
        elif kind == "jagged":
            for part, tensor, ragged in _parts(name, value):
                tree.add(leaves, part, tensor, ragged)
        elif kind == "leaf":
            if name.startswith(JAGGED):
                raise UnsupportedValue(
                    f"the entry {name!r} has the name of a part of a jagged tensor; rename it, or "
                    "use consolidated=False"
                )
            tree.add(leaves, name, value, None)
        else:
            if name in RESERVED:
                tree.reserved.append(name)
            # tensordict takes the tensorclass members of a stack for tensordicts.
            member = kind == "class" and type(td) is not TensorDict
            levels[name] = _level(tree, plain(value), plain(value) if member else value)
    return _Nested(below, levels)


class _Nested(dict[str, Any]):
    """A level of the metadata that knows its nested levels apart from its own fields."""

    def __init__(self, below: dict[str, Any], levels: dict[str, Any]):
        super().__init__(below)
        self.levels = levels


def flatten(metadata: Any, escape: bool) -> dict[str, Any]:
    """Return the metadata as plain dicts, nested levels beside the fields."""
    mark = "/" if escape else ""
    levels = {mark + name: flatten(level, escape) for name, level in metadata.levels.items()}
    return {**metadata, **levels}
