"""``StoreDataset``: a store as a map-style dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensor_collection, is_tensorclass
from torch.utils.data import Dataset

from tdio.data.arguments import whole
from tdio.data.cache import RowCache
from tdio.data.collate import tensordict_collate
from tdio.data.windows import Windows
from tdio.errors import EntryNotFound, IndexOutOfRange, InvalidIndex, UnsupportedValue
from tdio.layout.paths import Key, below, key_of, path_of
from tdio.store import LazyStackedTensorDictStore, TensorDictStore, open_store
from tdio.store.reader import read

log = logging.getLogger("tdio")


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
        transform: called with each batch that ``__getitems__`` reads and each sample that
            ``__getitem__`` reads. Of a batch it makes another tensordict or tensorclass: whatever
            else it returned would be taken apart by the default collate of a ``DataLoader``. To
            make tuples or tensors of a batch, pass ``collate_fn=``, which is handed the batch.
        device: device of the batches; None takes that of the store.
        window: samples are windows of so many steps, T, of the elements of a ragged store: along
            the first dim of their entries, ``[B, T, *]`` in a batch, only their bytes are read.
            Elements with fewer steps have no windows; where no element has any, the log has a
            warning. Entries that are not ragged come whole.
        stride: steps from one window to the next; None takes ``window``: they do not overlap.
        key: which entries to take windows of, one or a list; None takes the ragged ones. They
            have the same number of steps in each element.
        cache: ``"memmap"`` keeps elements that were read in memory-mapped files, which all
            processes of this host share; the next epoch does not touch the server. A change of
            the store is noticed when the dataset is opened, and by the next read of the server.
        cache_dir: directory on a local disk for these files. A restart of the machine empties it.
        cache_bytes: the first elements that fit into so many bytes are kept; None keeps all.
        **connection: ``host``, ``port``, ``db``, ``unix_socket_path``, ``prefix`` and arguments of
            ``redis.Redis``.

    Raises:
        CacheUnavailable: ``cache_dir`` has no space, or may not be written.
        StoreNotFound: no such store.
        EntryNotFound: a key of ``keys`` that the store does not have.
        InvalidIndex: a store without batch dims; entries that have no steps to take windows of.
        EntryMismatch: entries whose numbers of steps differ, or a ragged one that ``key`` leaves
            out.
        UnsupportedValue: ``cache=`` of an entry that is no tensor.
        TypeError, ValueError: arguments that do not go together; nothing was opened.

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
        window: int | None = None,
        stride: int | None = None,
        key: Key | list[Key] | None = None,
        cache: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        **connection: Any,
    ) -> None:
        if (store is None) == (td_id is None):
            raise TypeError("pass either an open store or td_id=")
        if isinstance(store, str):
            raise TypeError(f"an id is passed by name: td_id={store!r}")
        if store is not None and connection:
            raise TypeError(
                f"the arguments {sorted(connection)} come with td_id=, not with an open store"
            )
        _check_cache(cache, cache_dir, cache_bytes, window)
        if window is None and (stride is not None or key is not None):
            raise TypeError("stride= and key= come with window=")
        if window is not None:
            window = whole("window", window, 1)
            stride = window if stride is None else whole("stride", stride, 1)
        if store is None:
            assert td_id is not None
            store = open_store(td_id=td_id, **connection)
        # A tensorclass wraps its store.
        inner: Any = store._tensordict if is_tensorclass(store) else store
        if not isinstance(inner, (TensorDictStore, LazyStackedTensorDictStore)):
            raise TypeError(
                f"a {type(store).__name__} is not a store of tdio: upload it with "
                "TensorDictStore.from_tensordict"
            )
        store = inner
        self._handle = store._handle
        self._prefix = store._prefix
        self._device = torch.device(device) if device is not None else store.device
        self._paths = self._resolve(keys)
        self.transform = transform
        if not self._handle.info.batch:
            raise InvalidIndex(
                f"{self._handle.location} has no batch dims, so it has no elements; upload it with "
                "batch_size=[N]"
            )
        self._handle.specs(self._paths)
        self._windows: Windows | None = None
        self._cache: RowCache | None = None
        if window is not None:
            self._windows = Windows(
                self._handle, self._paths, window, stride or window, key, self._prefix
            )
            if not len(self._windows):
                log.warning(
                    "%s has no windows: none of its elements has %d steps",
                    self._handle.location,
                    window,
                )
        if cache_dir is not None:
            self._cache = RowCache(self._handle, self._paths, cache_dir, cache_bytes)

    def _resolve(self, keys: Sequence[str | tuple[str, ...]] | None) -> list[str]:
        known = below(self._handle.known(), self._prefix)
        if isinstance(keys, str):
            raise TypeError(f"keys= is a list of keys: keys=[{keys!r}]")
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
        return str(self._handle.names.td_id)

    @property
    def ragged_keys(self) -> list[Key]:
        """The keys of the entries whose elements differ in shape: for ``collate_pad(keys=...)``."""
        specs = self._handle.specs(self._paths)
        ragged = [path for path, spec in specs.items() if getattr(spec, "ragged", False)]
        return [key_of(path) for path in below(ragged, self._prefix)]

    def __len__(self) -> int:
        return self._handle.info.batch[0] if self._windows is None else len(self._windows)

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
                raise InvalidIndex(
                    f"{index!r} is not a whole number or a slice; __getitems__ takes a list of them"
                ) from None
            if not -len(self) <= index < len(self):
                raise self._outside(index)
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
            InvalidIndex: not a list of whole numbers.
            UnsupportedValue: ``transform`` returned something else than a tensordict.
        """
        positions = np.asarray(indices)
        good = positions.ndim == 1 and (not len(positions) or positions.dtype.kind in "iu")
        if not good or (positions.dtype == np.uint64 and (positions >> np.uint64(63)).any()):
            raise InvalidIndex(
                f"a batch of {self._handle.location} is asked for by a list of whole numbers, not "
                f"by {str(indices)[:80]}; a StoreBatchSampler, whose items are such lists, is "
                "given to a DataLoader as batch_sampler="
            )
        batch = self._read(torch.from_numpy(positions.astype(np.int64, copy=False)))
        if self.transform is not None and not is_tensor_collection(batch):
            raise UnsupportedValue(
                f"transform= made {type(batch).__name__} of a batch, which a DataLoader would take "
                "for a list of samples: return a tensordict, and do the rest in collate_fn=, which "
                "is handed the batch and may return anything"
            )
        return batch

    def _read(self, index: Any) -> Any:
        if self._windows is None and self._cache is None:
            out = read(self._handle, self._paths, index, self._device)
        else:
            out = self._read_positions(index)
        for name in filter(None, self._prefix.split(".")):
            out = out.get(name)
        return out if self.transform is None else self.transform(out)

    def _read_positions(self, index: Any) -> Any:
        """Read windows, or through the cache: row numbers only."""
        one = isinstance(index, int)
        if isinstance(index, torch.Tensor):
            positions = self._checked(index.numpy())
        else:
            positions = np.arange(len(self))[index].reshape(-1)
        source = self._cache if self._windows is None else self._windows
        assert source is not None
        batch = source.read(positions, self._device)
        return batch[0] if one else batch

    def _checked(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        count = len(self)
        bad = np.flatnonzero((positions < -count) | (positions >= count))
        if len(bad):
            raise self._outside(int(positions[bad[0]]))
        return np.where(positions < 0, positions + count, positions)

    def _outside(self, index: int) -> IndexOutOfRange:
        return IndexOutOfRange(
            f"index {index} of a dataset of {len(self)} elements ({self._handle.location}); a "
            "sampler is made anew when the dataset is"
        )

    #: Returns a ready batch unchanged and stacks a list.
    collate_fn = staticmethod(tensordict_collate)

    def close(self) -> None:
        """Close the connections of this process."""
        self._handle.close()

    def __repr__(self) -> str:
        return f"StoreDataset({len(self)} elements, {self._handle.location}, keys={self._paths})"


def _check_cache(cache: str | None, cache_dir: Any, cache_bytes: Any, window: Any) -> None:
    if cache is not None and cache != "memmap":
        raise ValueError(f'cache={cache!r}: there is only cache="memmap", or None for no cache')
    if cache is not None and cache_dir is None:
        raise TypeError('cache="memmap" needs cache_dir=, a directory on a local disk')
    if cache is not None and window is not None:
        raise TypeError("cache= keeps whole elements, so it does not come with window=")
    if cache is None and (cache_dir is not None or cache_bytes is not None):
        raise TypeError('cache_dir= and cache_bytes= come with cache="memmap"')
