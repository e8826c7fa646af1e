"""A store as seen by this process: its address, what its entries are, reads and writes.

The tensordict classes on top of it know nothing of the wire; a dataset reads batches from it
without the cost of a tensordict subclass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdio.errors import EntryMismatch, EntryNotFound
from tdio.layout.spec import LeafSpec
from tdio.transport.address import Address
from tdio.transport.client import Client
from tdio.wire import reading, writing
from tdio.wire.names import Names
from tdio.wire.reading import StoreInfo


@dataclass(frozen=True)
class Location:
    """Which store: server, prefix and id. Pickles as an address."""

    address: Address
    names: Names

    def __str__(self) -> str:
        return f"td_id={self.names.td_id!r} at {self.address} (prefix={self.names.prefix!r})"


class Handle:
    """One store. Metadata is read once and kept until ``refresh``.

    Attributes:
        location: server, prefix and id.
        client: runs the operations.
        info: batch size, kind, device and the registered paths.
    """

    def __init__(
        self,
        location: Location,
        info: StoreInfo,
        *,
        cache: bool = True,
        client: Client | None = None,
    ):
        self.location = location
        self.client = client or Client(location.address)
        self.info = info
        self.cache = cache
        self._specs: dict[str, LeafSpec] = {}
        self._registry: set[str] | None = set(info.paths)

    @classmethod
    def open(cls, location: Location, *, cache: bool = True) -> Handle:
        """Open a store for reading or writing. Writes nothing. One round trip.

        Raises:
            StoreNotFound: there is none under this id; the message says where it was looked for.
            IncompleteStore: its writer has not finished.
        """
        client = Client(location.address)
        info = client.read(lambda: reading.find(location.names, str(location)))
        return cls(location, info, cache=cache, client=client)

    @property
    def names(self) -> Names:
        """The names of the store's keys."""
        return self.location.names

    @property
    def lazy(self) -> bool:
        """Whether this is a lazy stack."""
        return self.info.stack is not None

    # ---- metadata

    def refresh(self) -> None:
        """Read the global keys and the registry again; forget the entries' metadata."""
        self.info = self.client.read(lambda: reading.find(self.names, str(self.location)))
        self._registry = set(self.info.paths)
        self._specs.clear()

    def paths(self) -> set[str]:
        """Return the paths of all leaf entries. One round trip where metadata is not cached."""
        if self._registry is None or not self.cache:
            self.refresh()
        assert self._registry is not None
        return self._registry

    def specs(self, paths: Iterable[str]) -> dict[str, LeafSpec]:
        """Return the specs of entries; what is not cached is read, in one or two round trips.

        Raises:
            EntryNotFound: an entry that is not registered.
        """
        wanted = list(paths)
        missing = [path for path in wanted if path not in self._specs]
        if missing:
            unknown = set(missing) - self.paths()
            if unknown:
                raise EntryNotFound(
                    f"the store {self.location} has no entry {sorted(unknown)[0]!r}; it has "
                    f"{sorted(self.paths())[:20]}"
                )
            self._specs |= self.client.read(
                lambda: reading.load_specs(self.names, self.info, missing, str(self.location))
            )
        specs = {path: self._specs[path] for path in wanted}
        if not self.cache:
            self._specs.clear()
        return specs

    def learn(self, spec: LeafSpec) -> None:
        """Take note of an entry that this handle has written."""
        self._specs[spec.path] = spec
        self.paths().add(spec.path)

    def forget(self, paths: Iterable[str]) -> None:
        """Take note that entries are gone."""
        for path in paths:
            self._specs.pop(path, None)
            self.paths().discard(path)

    # ---- writes

    def set_entry(self, upload: writing.Upload) -> None:
        """Write or replace one whole entry, atomically.

        Raises:
            EntryTooLarge: above the server's string limit; nothing was sent.
        """
        self.check_sizes([upload.spec])
        self.client.write(writing.set_entry(self.names, upload, lazy=self.lazy))
        self.learn(upload.spec)

    def check_sizes(self, specs: Sequence[LeafSpec]) -> None:
        """Refuse entries that the server would refuse half way."""
        # Every server takes this much; the limit is asked for only above it.
        if max((spec.nbytes for spec in specs), default=0) <= 64 * 1024 * 1024:
            return
        limit = self.client.read(writing.string_limit)
        writing.check_sizes(specs, limit, str(self.location))

    def write_ranges(self, writes: Sequence[writing.RangeWrite]) -> None:
        """Write byte ranges of existing entries, all in one transaction."""
        self.client.write(writing.write_ranges(self.names, writes, str(self.location)))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete entries."""
        self.client.write(writing.delete_entries(self.names, paths))
        self.forget(paths)

    def clear(self) -> None:
        """Delete the whole store."""
        operation = writing.delete_store(self.names, str(self.location), missing_ok=True)
        self.client.write(operation)
        self._specs.clear()
        self._registry = set()

    def close(self) -> None:
        """Close the connections; the data stays on the server."""
        self.client.close()

    # ---- pickling: an address and what is known, no connection

    def __getstate__(self) -> dict[str, Any]:
        return {
            "location": self.location,
            "info": self.info,
            "cache": self.cache,
            "specs": self._specs,
            "registry": self._registry,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.location, self.info, self.cache = state["location"], state["info"], state["cache"]
        self._specs, self._registry = state["specs"], state["registry"]
        self.client = Client(self.location.address)


def create(location: Location, info: StoreInfo, uploads: Sequence[writing.Upload] = ()) -> Handle:
    """Create a store with its entries; they become visible last.

    Raises:
        StoreExists: the id is taken.
        EntryTooLarge: an entry is above the server's string limit; nothing was sent.
        EntryMismatch: a batch size with a negative number.
    """
    where, names = str(location), location.names
    if any(type(n) is not int or n < 0 for n in info.batch):
        raise EntryMismatch(f"{list(info.batch)} is not a batch size: sizes are whole numbers >= 0")
    handle = Handle(location, info)
    specs = [upload.spec for upload in uploads]
    handle.check_sizes(specs)
    handle.client.write(writing.claim(names, where))
    try:
        handle.client.write(writing.announce(names, specs))
        for upload in uploads:
            handle.client.write(writing.put_data(names, upload))
        handle.client.write(
            writing.register(names, specs, lazy=info.stack is not None, globals_of=info)
        )
    except BaseException:
        _undo(location)
        raise
    for spec in specs:
        handle.learn(spec)
    return handle


def _undo(location: Location) -> None:
    """Remove what a failed upload left, as far as the server can still be reached."""
    client = Client(location.address)
    try:
        client.write(writing.delete_store(location.names, str(location), missing_ok=True))
    except ConnectionError:
        pass  # The store stays marked as incomplete, and is refused as such.
    finally:
        client.close()


def delete_store(location: Location) -> None:
    """Delete a store, complete or not."""
    client = Client(location.address)
    try:
        client.write(writing.delete_store(location.names, str(location), missing_ok=False))
    finally:
        client.close()


def device_of(info: StoreInfo, override: Any) -> torch.device | None:
    """Return the device that reads return: the caller's, else the one that was stored."""
    chosen = override if override is not None else (info.device or None)
    return None if chosen is None else torch.device(chosen)
