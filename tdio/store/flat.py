"""A tensordict by path: tensors, non-tensor values, and the levels between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tdio._td import (
    UnbatchedTensor,
    _is_tensorclass,
    is_non_tensor,
    is_tensor_collection,
    value_of,
)
from tdio.errors import UnsupportedValue
from tdio.layout.levels import Level
from tdio.layout.paths import check_key


@dataclass
class Flat:
    """A tensordict by path.

    Attributes:
        tensors: the tensor leaves.
        values: the non-tensor entries: value, and how many batch dims it spells out.
        levels: the levels that are not the default: names, other batch sizes, classes, empty.
        replaces: the path of a level that goes as a whole for what is here, or None.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    levels: dict[str, Level] = field(default_factory=dict)
    replaces: str | None = None

    @property
    def paths(self) -> set[str]:
        """The paths of all leaf entries."""
        return self.tensors.keys() | self.values.keys()

    def under(self, prefix: str) -> Flat:
        """Return the same entries below another level."""
        if not prefix:
            return self
        return Flat(
            {f"{prefix}.{path}": v for path, v in self.tensors.items()},
            {f"{prefix}.{path}": v for path, v in self.values.items()},
            {f"{prefix}.{path}" if path else prefix: v for path, v in self.levels.items()},
        )


def flatten(td: Any, root: Sequence[int] | None = None, *, root_kind: bool = False) -> Flat:
    """Return a tensordict or tensorclass by path.

    Args:
        td: what to take apart.
        root: the batch size that is the default for its levels; None takes that of ``td``.
        root_kind: note the class of ``td`` itself, which is to be a nested level.

    Raises:
        UnsupportedValue: a leaf of another kind, or a key that would not round-trip.
    """
    flat = Flat()
    _flatten(td, "", tuple(td.batch_size if root is None else root), flat, root_kind)
    return flat


def _flatten(td: Any, path: str, root: tuple[int, ...], flat: Flat, with_kind: bool) -> None:
    kind = type(td)
    if _is_tensorclass(kind):
        td = td._tensordict
    name = f"{kind.__module__}.{kind.__qualname__}" if _is_tensorclass(kind) and with_kind else ""
    names = tuple(td.names) if td._has_names() else ()
    keys = list(td.keys())
    if names or name or tuple(td.batch_size) != root or (path and not keys):
        flat.levels[path] = Level(tuple(td.batch_size), names, name)
    for key in keys:
        below = f"{path}.{check_key(key)}" if path else check_key(key)
        value = td._get_str(key, None)
        if isinstance(value, torch.Tensor):
            flat.tensors[below] = value
        elif is_non_tensor(value):
            flat.values[below] = value_of(value)
        elif is_tensor_collection(value) and not isinstance(value, UnbatchedTensor):
            _flatten(value, below, root, flat, True)
        else:
            raise UnsupportedValue(
                f"the entry {below!r} is a {type(value).__name__}, which cannot be stored: store "
                "its tensors as entries"
            )
