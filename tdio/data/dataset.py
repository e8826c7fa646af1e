"""``StoreDataset``: a store as a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils.data import Dataset

from tdio.data.collate import tensordict_collate
from tdio.errors import EntryNotFound, IndexOutOfRange, InvalidIndex
from tdio.layout.paths import below, path_of
from tdio.store import LazyStackedTensorDictStore, TensorDictStore, open_store
from tdio.store.reader import read


class StoreDataset(Dataset[Any]):
    """The elements of a store along its first batch dim, read by index.

    ``DataLoader`` finds ``__getitems__`` and reads each batch in one round trip; the ready batch
    goes through its default collate unchanged (``collate_fn`` is that function). Workers of any
    start method open connections of their own. Offset tables are read once, and shared with
    forked workers.

    Args:
        store: an open store; or None, and ``td_id=`` says which.
        td_id: id of a store of either kind.
        keys: the leaves (or nested tensordicts) to read; None reads all.
        transform: called with each batch that ``__getitems__`` returns and each sample that
            ``__getitem__`` returns.
        device: device of the batches; None takes that of the store.
        **connection: ``host``, ``port``, ``db``, ``unix_socket_path``, ``prefix`` and arguments of
            ``redis.Redis``.

    Raises:
        StoreNotFound: no such store.
        EntryNotFound: a key of ``keys`` that the store does not have.
        InvalidIndex: a store without batch dims.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torch.utils.data import DataLoader
        >>> from tdio import StoreDataset, TensorDictStore
        >>> from tdio.server import embedded_server
        >>> with embedded_server() as server:
        ...     data = TensorDict(x=torch.arange(10), batch_size=[10])
        ...     store = TensorDictStore.from_tensordict(data, **server.connection_kwargs)
        ...     dataset = StoreDataset(td_id=store.td_id, **server.connection_kwargs)
        ...     loader = DataLoader(dataset, batch_size=4)
        ...     [batch["x"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        store: Any = None,
        *,
        td_id: str | None = None,
        keys: Sequence[str | tuple[str, ...]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        device: Any = None,
        **connection: Any,
    ) -> None:
        if (store is None) == (td_id is None):
            raise TypeError("pass either an open store or td_id=")
        if store is None:
            assert td_id is not None
            store = open_store(td_id=td_id, **connection)
        elif connection:
            raise TypeError(f"{sorted(connection)} come with td_id=, not with an open store")
        # A tensorclass wraps its store.
        store = getattr(store, "_tensordict", store)
        if not isinstance(store, (TensorDictStore, LazyStackedTensorDictStore)):
            raise TypeError(f"{type(store).__name__} is not a store of tdio")
        self._handle = store._handle
        self._prefix = store._prefix
        self._device = torch.device(device) if device is not None else store.device
        self._paths = self._resolve(keys)
        self.transform = transform
        if not self._handle.info.batch:
            raise InvalidIndex(f"{self._handle.location} has no batch dims, so it has no elements")
        self._handle.specs(self._paths)

    def _resolve(self, keys: Sequence[str | tuple[str, ...]] | None) -> list[str]:
        known = below(self._handle.paths(), self._prefix)
        if keys is None:
            chosen = known
        else:
            chosen = []
            for key in keys:
                path = path_of(key)
                found = [p for p in known if p == path or p.startswith(path + ".")]
                if not found:
                    raise EntryNotFound(
                        f"no entry {key!r} in {self._handle.location}; it has {known}"
                    )
                chosen += [p for p in found if p not in chosen]
        return [f"{self._prefix}.{path}" if self._prefix else path for path in chosen]

    @property
    def td_id(self) -> str:
        """The id of the store."""
        return self._handle.names.td_id

    def __len__(self) -> int:
        return self._handle.info.batch[0]

    def __getitem__(self, index: int | slice) -> Any:
        """Read one sample, or a batch for a slice. One round trip.

        Args:
            index: a whole number, negative from the end, or a slice.

        Returns:
            A TensorDict of batch size ``[*]`` (``[n, *]`` for a slice); a lazy stack for a slice
            of a ragged store. Fresh tensors.

        Raises:
            IndexOutOfRange: outside ``[-len, len)``.
            InvalidIndex: not a whole number or slice.
        """
        if not isinstance(index, slice):
            try:
                index = index.__index__()
            except (AttributeError, TypeError):
                raise InvalidIndex(f"{index!r} is not a whole number or a slice") from None
            if not -len(self) <= index < len(self):
                raise IndexOutOfRange(f"index {index} of a dataset of {len(self)} elements")
        return self._read(index)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Read a batch, in one round trip.

        Args:
            indices: B whole numbers in any order, repeats allowed.

        Returns:
            A TensorDict of batch size ``[B, *]`` whose leaves share one storage; for a ragged
            store a lazy stack of B elements with their own shapes. Fresh tensors.

        Raises:
            IndexOutOfRange: an index outside ``[-len, len)``; nothing was read.
        """
        positions = np.asarray(indices)
        if positions.ndim != 1 or (len(positions) and positions.dtype.kind not in "iu"):
            raise InvalidIndex("a batch is asked for by a list of whole numbers")
        return self._read(torch.from_numpy(positions.astype(np.int64, copy=False)))

    def _read(self, index: Any) -> Any:
        out: TensorDictBase = read(self._handle, self._paths, index, self._device)
        for name in filter(None, self._prefix.split(".")):
            out = out.get(name)
        return out if self.transform is None else self.transform(out)

    #: Returns a ready batch unchanged and stacks a list.
    collate_fn = staticmethod(tensordict_collate)

    def close(self) -> None:
        """Close the connections of this process."""
        self._handle.close()

    def __repr__(self) -> str:
        return f"StoreDataset({len(self)} elements, {self._handle.location}, keys={self._paths})"
