"""The common class of what is stored."""

from __future__ import annotations

from typing import Any

from tdio._td import (
    TensorDictBase,
)
from tdio.layout.values import ValueSpec
from tdio.store._writes import StoredWrites


class Stored(StoredWrites):
    """A tensordict whose leaves are on a server; subclasses say how a path is read and written.

    Reads return fresh copies (``_reads_return_copies``), so in-place methods of the base class
    read, change and write back instead of changing a copy that nobody keeps.
    """

    # ---- the rest

    def _lock_sub_tensordicts(self) -> list[TensorDictBase]:
        return []

    def _memmap_(self, *, inplace: bool, **kwargs: Any) -> Any:
        if inplace:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be memory-mapped in place; use memmap()"
            )
        return self.to_tensordict()._memmap_(inplace=False, **kwargs)

    def _repr_parts(self) -> list[str]:
        shapes = {}
        specs = self._handle.specs([self._full(path) for path in self._leaf_paths()])
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

    # ``with store.unlock_():`` is tensordict's; ``with store:`` closes the connections at its end.

    def __enter__(self) -> Any:
        resource = getattr(self, "_last_op", None) is None
        self.__dict__.setdefault("_entered", []).append(resource)
        return self if resource else super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        if self._entered.pop():
            self.close()
            return None
        return super().__exit__(kind, value, trace)
