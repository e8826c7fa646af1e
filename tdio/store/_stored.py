"""The common class of what is stored."""

from __future__ import annotations

from typing import Any

import torch

from tdio.layout.values import ValueSpec
from tdio.store._local import for_stored
from tdio.store._writes import StoredWrites
from tdio.store.flat import Flat
from tdio.store.handle import Edit
from tdio.store.reader import reading, reading_leaf
from tdio.store.writer import writing_rows
from tdio.wire.requests import Operation


@for_stored
class Stored(StoredWrites):
    """A tensordict whose leaves are on a server; subclasses say how a path is read and written.

    Reads return fresh copies (``_reads_return_copies``), so in-place methods of the base class
    read, change and write back instead of changing a copy that nobody keeps.
    """

    def _reading(self, paths: list[str] | None, index: Any, prefix: str) -> Operation[Any]:
        return reading(self._handle, paths, index, self._device, prefix)

    def _reading_leaf(self, path: str, index: Any) -> Operation[Any]:
        return reading_leaf(self._handle, path, index, self._device)

    def _writing_at(self, flat: Flat, index: Any) -> Operation[Edit]:
        return writing_rows(self._handle, flat, index)

    def consolidate(self, *args: Any, **kwargs: Any) -> Any:
        """Return a consolidated local copy, also in a file: ``TensorDict.consolidate``."""
        return self.to_tensordict().unlock_().consolidate(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return a local copy with another device, dtype or class: ``TensorDict.to``."""
        local = self.to_tensordict().unlock_()
        out = local.to(*args, **kwargs)
        return self if out is local else out

    def _set_device(self, device: Any) -> Any:
        self._device = device
        return self

    def auto_device_(self) -> Any:
        """Set the device to that of the tensors that reads return."""
        return self._set_device(self._device or (torch.device("cpu") if self.dtype else None))

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse: a store keeps no gradients."""
        if not requires_grad:
            return self
        raise RuntimeError("a store keeps no gradients; call requires_grad_ on to_tensordict()")

    def _memmap_(self, *, inplace: bool, **kwargs: Any) -> Any:
        if inplace:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be memory-mapped in place; use memmap()"
            )
        return self.to_tensordict()._memmap_(inplace=False, **kwargs)

    def _repr_parts(self) -> list[str]:
        shapes = {}
        specs = self._handle.specs_under(self._prefix)
        for path, spec in zip(self._leaf_paths(), specs.values(), strict=True):
            if isinstance(spec, ValueSpec):
                shapes[path] = spec.encoding
                continue
            size = "ragged" if spec.ragged else list(spec.shape)
            shapes[path] = f"{str(spec.dtype).removeprefix('torch.')}{size}"
        entries = ", ".join(f"{path}: {text}" for path, text in shapes.items())
        return [
            f"    entries={{{entries}}}",
            f"    batch_size={self.batch_size}",
            f"    device={self.device}",
            f"    backend={self._backend!r}",
            f"    td_id={self.td_id!r}",
            f"    server={str(self._handle.location.address)!r}",
        ]

    def close(self) -> None:
        """Close the connections of this handle. The data stays on the server."""
        self._handle.close()

    def clear_redis(self) -> None:
        """Delete the store, all its entries and marks, from the server."""
        self._handle.clear()

    def refresh(self) -> None:
        """Forget what is known of keys and shapes, and read it again from the server."""
        self._handle.refresh()

    async def arecv(self, src: Any, *, device: Any = None) -> Any:
        """Receive a tensordict from a pipe and write it to the store, as ``update`` does.

        Args:
            src: a ``TensorDictPipe``.
            device: where the pipe receives.

        Returns:
            The store itself.

        Raises:
            EndOfStream: the other end closed the pipe.
            EntryMismatch: what came does not fit the batch size; nothing was written.
        """
        self.update(await src.arecv(device=device))
        return self

    # ``with store.unlock_():`` is tensordict's; ``with store:`` closes the connections at its end,
    # which a view of a level or of an element leaves to the store.

    def __enter__(self) -> Any:
        undoes = self.__dict__.get("_last_op") is not None
        # None is what a lock_ or unlock_ that changed nothing leaves: nothing to undo or to close.
        closes = not undoes and self.__dict__.pop("_last_op", True) is True
        self.__dict__.setdefault("_entered", []).append((undoes, closes))
        return super().__enter__() if undoes else self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        undoes, closes = self._entered.pop()
        if closes and self._owner is None:
            self.close()
        return super().__exit__(kind, value, trace) if undoes else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.pop("_last_op", None)
