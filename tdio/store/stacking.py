"""The elements of a lazy stack as columns: one list for each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tdio._td import TensorDictBase
from tdio.layout.levels import Level
from tdio.store.flat import Flat, flatten
from tdio.store.writer import check_leaves, one_value
from tdio.wire.reading import StoreInfo


class Column(list[Any]):
    """One value or tensor for each element of a stack."""


def is_same(one: Any, other: Any) -> bool:
    """Return whether two leaves are the same objects."""
    if isinstance(one, Column) and isinstance(other, Column):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


@dataclass
class Columns:
    """What the elements hold, by path.

    Attributes:
        tensors: the tensor leaf of each element.
        values: the non-tensor value of each element.
        nested: the levels that are not the default; -1 where elements differ in a dim.
    """

    tensors: dict[str, Column]
    values: dict[str, Column]
    nested: dict[str, Level]

    def levels(self, info: StoreInfo, names: Sequence[str | None] | None) -> dict[str, Level]:
        """Return the levels of the stack, whose dims have ``names``."""
        levels = {path: level for path, level in self.nested.items() if path}
        if names is not None and any(names):
            levels[""] = Level(info.batch, tuple(names))
        return levels


def columns_of(elements: Sequence[TensorDictBase], root: Sequence[int]) -> Columns:
    """Take the elements of a stack apart; ``root`` is the batch size that needs no level.

    Raises:
        EntryMismatch: an element has other keys than the first.
    """
    first = flatten(elements[0], root)
    columns = Columns(
        {path: Column() for path in first.tensors},
        {path: Column() for path in first.values},
        first.levels,
    )
    for position, element in enumerate(elements):
        flat = flatten(element, root)
        where = f"element {position} of the stack"
        check_leaves(set(columns.tensors), set(flat.tensors), where)
        check_leaves(set(columns.values), set(flat.values), where)
        for path, column in columns.tensors.items():
            column.append(flat.tensors[path])
        for path, values in columns.values.items():
            values.append(one_value(*flat.values[path], path, where))
        if flat.levels != columns.nested:
            columns.nested = _merged(columns.nested, flat.levels)
    return columns


def _merged(a: dict[str, Level], b: dict[str, Level]) -> dict[str, Level]:
    """Return what levels of two elements have in common: -1 for a dim that differs."""
    out = {}
    for path in a.keys() & b.keys():
        one, two = a[path], b[path]
        pairs = zip(one.batch, two.batch, strict=False)
        size = tuple(m if m == n else -1 for m, n in pairs)
        names = one.names if one.names == two.names else ()
        out[path] = Level(size, names, one.kind if one.kind == two.kind else "")
    return out


def only(flat: Flat, paths: set[str]) -> Flat:
    """Return some of the entries, without levels."""
    return Flat(
        {path: value for path, value in flat.tensors.items() if path in paths},
        {path: value for path, value in flat.values.items() if path in paths},
    )
