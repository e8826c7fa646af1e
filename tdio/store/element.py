"""``store[i]`` of a lazy stack: a view of one element that reads and writes on the server."""

from __future__ import annotations

from typing import Any

import torch

from tdio._td import TensorDictBase, _register_tensor_class
from tdio.layout.spec import LeafSpec
from tdio.store._stored import Stored
from tdio.wire.reading import StoreInfo


class ElementView(Stored):
    """Element ``i`` of a ``LazyStackedTensorDictStore``: reads and writes go to the server."""

    def __init__(self, parent: Any, position: int) -> None:
        self._setup(parent._handle, parent._handle.info.inner, parent._device)
        self._parent = parent
        self._position = position

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an element belongs to a stack."""
        raise NotImplementedError("an element view is made by store[i]")

    def _read_paths(self, paths: list[str], index: Any) -> TensorDictBase:
        element = self._parent._read_element(self._position, paths)
        return element if isinstance(index, tuple) and not index else element[index]

    def _write_path(self, path: str, value: torch.Tensor) -> None:
        self._parent._write_element(self._position, {path: value})

    def _write_at(self, values: dict[str, Any], index: Any) -> None:
        element = self._parent._read_element(self._position, list(values))
        for path, value in values.items():
            key = tuple(path.split("."))
            element.get(key)[index] = value
        changed = {path: element.get(tuple(path.split("."))) for path in values}
        self._parent._write_element(self._position, changed)

    def _del(self, key: tuple[str, ...]) -> None:
        raise RuntimeError("an entry cannot be deleted from one element; delete it from the store")

    def _repr_parts(self) -> list[str]:
        info, specs = self._handle.info, self._handle.specs(self._leaf_paths())
        shapes = {path: element_shape(s, info, self._position) for path, s in specs.items()}
        entries = ", ".join(
            f"{path}: {str(specs[path].dtype).removeprefix('torch.')}{list(shape)}"
            for path, shape in shapes.items()
        )
        return [
            f"    entries={{{entries}}}",
            f"    element={self._position}",
            f"    batch_size={self.batch_size}",
            f"    device={self.device}",
            f"    td_id={self.td_id!r}",
        ]


def element_shape(spec: LeafSpec, info: StoreInfo, position: int) -> tuple[int, ...]:
    """Return the shape of one element of an entry of a lazy stack."""
    if spec.ragged:
        return spec.element_shape(position)
    return (*info.inner, *spec.shape[len(info.batch) :])


_register_tensor_class(ElementView)
