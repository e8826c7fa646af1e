"""``RowCache``: elements that were read once, kept in memory-mapped files of this host.

A cache is a directory: one file for each entry with the bytes of the elements at their places,
and one with a byte for each element, 1 where all its bytes are there. The bytes come first, the
flag last, and both are shared memory of the host, so workers write at the same time without a
lock (the same bytes), and one that is killed half way leaves an element without its flag.

The directory's name is a digest of the server, the store, its version and entries, and of this
boot of the machine: what a crash of the whole machine left on disk may have flags without bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdio._td import LazyStackedTensorDict, TensorDict, build, consolidated
from tdio.errors import CacheUnavailable, InvalidIndex, UnsupportedValue
from tdio.layout.buffers import allocate, pack
from tdio.layout.index import select
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.store.handle import Handle
from tdio.store.reader import read
from tdio.store.shape import Frame, levels_at
from tdio.store.version import current_version
from tdio.store.windows import tensors_of

_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: How often one read begins anew because the store was written to meanwhile. A read that still
#: meets a new version then is served past the cache.
_RENEWALS = 4


class RowCache:
    """The elements of a store, from the cache where it has them, else from the server.

    Attributes:
        handle: the store; elements along its first batch dim.
        paths: the entries to read.
        directory: where caches lie, on a local disk.
        limit_bytes: the first elements that fit into so many bytes are kept; None keeps all.

    Raises:
        ValueError: ``limit_bytes`` is negative.
        CacheUnavailable: the files cannot be made.
        InvalidIndex: the store is stacked along another dim than the first.
    """

    def __init__(
        self,
        handle: Handle,
        paths: Sequence[str],
        directory: str | os.PathLike[str],
        limit_bytes: int | None,
    ) -> None:
        if handle.info.stack not in (None, 0):
            raise InvalidIndex(f"{handle.location} is stacked along another dim than the first")
        whole = limit_bytes is None or hasattr(limit_bytes, "__index__")
        if not whole or (limit_bytes is not None and limit_bytes < 0):
            raise ValueError(
                f"cache_bytes={limit_bytes!r}: a whole number of at least 0, or None to keep all"
            )
        self.handle, self.paths = handle, list(paths)
        # Workers may run in another directory.
        self.directory, self.limit_bytes = Path(directory).absolute(), limit_bytes
        self._renew()

    # ---- files

    def _renew(self) -> None:
        """Look which version there is now, and open its files."""
        version = current_version(self.handle)
        # Read after the token: what is known is of this version, or the next fetch tells.
        self.handle.refresh()
        self._open(version)

    def _open(self, version: bytes) -> None:
        """Map the files of this version of the store, made anew where they are missing."""
        self.version = version
        found = self.handle.specs(self.paths)
        self.specs = tensors_of(found)
        if odd := sorted(found.keys() - self.specs.keys()):
            raise UnsupportedValue(
                f"{self.handle.location}: the entry {odd[0]!r} is not a tensor, which cache= does "
                "not keep; leave it out with keys="
            )
        self.kept = self._fitting()
        home = self.directory / _digest(str(self.handle.location), *sorted(self.paths))
        boot = _BOOT.read_text() if _BOOT.exists() else ""
        # The same entries in another order are the same files.
        identities = [_identity(self.specs[path]) for path in sorted(self.specs)]
        self.home = home / _digest(version.hex(), boot, *identities)
        try:
            home.mkdir(parents=True, exist_ok=True)
            # The kernel lets go of the lock when its holder dies.
            with open(home / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for other in home.iterdir():
                    if other.is_dir() and other != self.home:
                        # Of another version, or another boot. Who has it mapped keeps it.
                        shutil.rmtree(other, ignore_errors=True)
                self.home.mkdir(exist_ok=True)
                self._map()
        except OSError as error:
            raise CacheUnavailable(
                f"no cache in {self.home}: {error}; free the space, or set cache_bytes= or another "
                "cache_dir="
            ) from error

    def _map(self) -> None:
        count = self.handle.info.batch[0]
        places = {path: self.home / str(number) for number, path in enumerate(sorted(self.specs))}
        elements = self.home / "elements"
        if not all(_has_size(places[path], spec.nbytes) for path, spec in self.specs.items()):
            # Flags speak of all tables. Unlinked, not cleared: who has the old files mapped goes
            # on with them, and sets no flag for bytes that are not in the new ones.
            elements.unlink(missing_ok=True)
        self._tables = {
            path: _mapped(places[path], spec.nbytes, _end(spec, self.kept))
            for path, spec in self.specs.items()
        }
        self._flags = _mapped(elements, count, count).numpy()

    def _fitting(self) -> int:
        """Return how many elements are kept: the first ones, so that no count must be shared."""
        count = self.handle.info.batch[0]
        if self.limit_bytes is None:
            return count
        ends = sum(_ends(spec, count) for spec in self.specs.values())
        return int(np.searchsorted(ends, self.limit_bytes, side="right"))

    # ---- reads

    def read(self, positions: Int64Array, device: torch.device | None) -> Any:
        """Return elements, int64 ``[B]``; one read of the server for those that are not kept.

        Raises:
            StoreNotFound: the store was deleted, or replaced by one of another batch size.
        """
        for _ in range(_RENEWALS):
            missing = self._missing(positions)
            fetched = self._fetch(missing) if len(missing) else {}
            if fetched is not None:
                break
            # Another version: nothing that was kept, nor what was missing, holds for it.
            self._renew()
        else:
            return read(self.handle, self.paths, torch.from_numpy(positions), device)
        if len(missing):
            self._keep(missing, fetched)
        if any(spec.ragged for spec in self.specs.values()):
            return self._stack(positions, missing, fetched, device)
        return self._batch(positions, missing, fetched, device)

    def _missing(self, positions: Int64Array) -> Int64Array:
        # Others may keep more elements in the same files than this limit allows.
        absent = (self._flags[positions] == 0) | (positions >= self.kept)
        return np.unique(positions[absent])

    def _fetch(self, missing: Int64Array) -> dict[str, Any] | None:
        """Read elements from the server; None where they are not of this cache's version."""
        batch = read(self.handle, self.paths, torch.from_numpy(missing), None)
        if current_version(self.handle) != self.version:
            return None
        return _columns(batch, self.paths)

    def _keep(self, missing: Int64Array, fetched: dict[str, Any]) -> None:
        count = int(np.searchsorted(missing, self.kept))
        if not count:
            return
        rows = torch.from_numpy(missing[:count])
        for path, spec in self.specs.items():
            table, column = self._tables[path], fetched[path]
            if spec.offsets is None:
                _rows(table, spec)[rows] = column[:count]
                continue
            for position, value in zip(missing[:count].tolist(), column, strict=False):
                lo, hi = int(spec.offsets[position]), int(spec.offsets[position + 1])
                if hi > lo:
                    table[lo:hi] = value.contiguous().view(-1).view(torch.uint8)
        self._flags[missing[:count]] = 1

    def _batch(
        self,
        positions: Int64Array,
        missing: Int64Array,
        fetched: dict[str, Any],
        device: torch.device | None,
    ) -> TensorDict:
        info = self.handle.info
        index = torch.from_numpy(positions)
        batch = (len(positions), *info.batch[1:])
        slots, nbytes = pack(
            [(s.dtype, (len(positions), *s.shape[1:])) for s in self.specs.values()]
        )
        storage = allocate(nbytes)
        late = np.flatnonzero(positions >= self.kept)
        # Rows beyond the limit come from what was fetched; the table is still read in its bounds.
        inside = torch.from_numpy(np.minimum(positions, max(0, self.kept - 1)))
        for path, slot in zip(self.specs, slots, strict=True):
            view = slot.view(storage)
            if not view.numel():
                continue
            if self.kept:
                cells = _cells(self._tables[path], len(self._flags))
                torch.index_select(cells, 0, inside, out=_like(view, cells))
            if len(late):
                places = np.searchsorted(missing, positions[late])
                view[torch.from_numpy(late)] = fetched[path][torch.from_numpy(places)]
        placed = dict(zip(self.specs, slots, strict=True))
        storage = storage if device is None else storage.to(device)
        frame = Frame.of(info, "")
        levels = levels_at(info, frame, select(frame.batch, (index,)), (index,))
        return consolidated(storage, placed, batch, device, levels=levels)

    def _stack(
        self,
        positions: Int64Array,
        missing: Int64Array,
        fetched: dict[str, Any],
        device: torch.device | None,
    ) -> LazyStackedTensorDict | TensorDict:
        if not len(positions):
            empty: TensorDict = read(
                self.handle, self.paths, torch.zeros(0, dtype=torch.long), device
            )
            return empty
        found = dict(zip(missing.tolist(), range(len(missing)), strict=True))
        chosen = positions.tolist()
        columns: dict[str, list[torch.Tensor]] = {}
        for path, spec in self.specs.items():
            columns[path] = [
                fetched[path][found[p]] if p >= self.kept else _element(self._tables[path], spec, p)
                for p in chosen
            ]
        slots, nbytes = pack(
            [(s.dtype, (sum(t.numel() for t in columns[p]),)) for p, s in self.specs.items()]
        )
        storage = allocate(nbytes)
        target = storage if device is None else storage.to(device)
        for (path, column), slot in zip(columns.items(), slots, strict=True):
            torch.cat([t.reshape(-1) for t in column], out=slot.view(storage))
            parts = torch.split(slot.view(target), [t.numel() for t in column])
            columns[path] = [p.view(t.shape) for p, t in zip(parts, column, strict=True)]
        if target is not storage:
            target.copy_(storage)
        info = self.handle.info
        levels = levels_at(info, Frame.of_element(info, ""), None, None)
        elements = [
            build({path: column[i] for path, column in columns.items()}, info.inner, device, levels)
            for i in range(len(chosen))
        ]
        return LazyStackedTensorDict(*elements, stack_dim=0)

    # ---- pickling: maps are made anew in the process that uses them

    def __getstate__(self) -> dict[str, Any]:
        return {
            "handle": self.handle,
            "paths": self.paths,
            "directory": self.directory,
            "limit_bytes": self.limit_bytes,
            "version": self.version,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.handle, self.paths = state["handle"], state["paths"]
        self.directory, self.limit_bytes = state["directory"], state["limit_bytes"]
        self._open(state["version"])


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _identity(spec: LeafSpec) -> str:
    offsets = "" if spec.offsets is None else hashlib.sha256(spec.offsets.tobytes()).hexdigest()
    return f"{spec.path} {spec.dtype} {spec.shape} {offsets}"


def _mapped(path: Path, size: int, reserved: int) -> torch.Tensor:
    """Map ``size`` bytes of a file, zeros at first; the first ``reserved`` have space on disk.

    Without the reservation, a write to a full disk would kill the process (SIGBUS).
    """
    if not size:
        return torch.zeros(0, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        if reserved:
            os.posix_fallocate(descriptor, 0, reserved)
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _has_size(path: Path, size: int) -> bool:
    return not size or (path.exists() and path.stat().st_size == size)


def _ends(spec: LeafSpec, count: int) -> Int64Array:
    """Return the bytes of the elements up to and including each, int64 ``[N]``."""
    if spec.offsets is not None:
        return spec.offsets[1:]
    row = spec.nbytes // max(1, count)
    return np.arange(1, count + 1, dtype=np.int64) * row


def _end(spec: LeafSpec, kept: int) -> int:
    return 0 if not kept else int(_ends(spec, spec.shape[0])[kept - 1])


def _rows(table: torch.Tensor, spec: LeafSpec) -> torch.Tensor:
    return table.view(spec.dtype).view(spec.shape)


def _cells(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bytes of the rows, ``[rows, *]``, as the widest numbers: fewer to copy."""
    cells = table.view(rows, -1)
    return cells.view(torch.int64) if cells.shape[1] % 8 == 0 else cells


def _like(view: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    return view.view(-1).view(torch.uint8).view(cells.dtype).view(len(view), -1)


def _element(table: torch.Tensor, spec: LeafSpec, position: int) -> torch.Tensor:
    if spec.offsets is None:
        return _rows(table, spec)[position]
    lo, hi = int(spec.offsets[position]), int(spec.offsets[position + 1])
    return table[lo:hi].view(spec.dtype).view(spec.element_shape(position))


def _columns(batch: Any, paths: Sequence[str]) -> dict[str, Any]:
    """Return the leaves by path: a tensor ``[n, *]``, or a list of the elements' tensors."""
    keys = {path: tuple(path.split(".")) for path in paths}
    if isinstance(batch, LazyStackedTensorDict):
        columns = {p: [one.get(key) for one in batch.tensordicts] for p, key in keys.items()}
        return {
            p: torch.stack(c) if all(t.shape == c[0].shape for t in c) else c
            for p, c in columns.items()
        }
    return {path: batch.get(key) for path, key in keys.items()}
