"""A store as seen by this process: its address, what its entries are, reads and writes.

The tensordict classes on top of it know nothing of the wire; a dataset reads batches from it
without the cost of a tensordict subclass. Its methods that return an ``Operation`` do no I/O
themselves: a sync or an async client runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tdio.errors import (
    CorruptEntry,
    EntryNotFound,
    IndexOutOfRange,
    InvalidIndex,
    ServerTimeout,
    StoreNotFound,
    TdioError,
    UnsupportedValue,
)
from tdio.layout.levels import Level
from tdio.layout.paths import below
from tdio.transport.address import Address
from tdio.transport.aio import AsyncClient
from tdio.transport.client import Client
from tdio.transport.fake import MemoryServer
from tdio.wire import reading, uploading
from tdio.wire.changes import Change
from tdio.wire.names import Names
from tdio.wire.reading import Spec, StoreInfo, Tokens, token_items
from tdio.wire.requests import Operation

T = TypeVar("T")
#: Attempts of a read or write that others come between.
ATTEMPTS = 100
#: So many times an operation whose error may follow from what is stale is done again.
_DOUBTS = 25
#: Tokens that are on no server: what is done after ``clear`` finds that the store is gone.
CLEARED = Tokens(b"cleared." * 2, b"cleared.")


@dataclass(frozen=True)
class Location:
    """Which store: server, prefix and id. Pickles as an address."""

    address: Address | MemoryServer
    names: Names

    def __str__(self) -> str:
        return f"td_id={self.names.td_id!r} at {self.address} (prefix={self.names.prefix!r})"


class Contended(ServerTimeout):
    """Writers came between again and again; a read of fewer rows may succeed."""


@dataclass(frozen=True)
class Edit:
    """What one write does, all of it or nothing.

    Attributes:
        changes: at most one for each entry.
        levels: levels to set; None takes one away.
    """

    changes: Sequence[Change]
    levels: Mapping[str, Level | None] = field(default_factory=dict)


class Known:
    """What a handle knows of a store, all of it read under one schema token.

    A handle that learns that it is stale drops the whole of it for a new one, so that another
    thread's plan never mixes two.
    """

    def __init__(self, info: StoreInfo):
        self.info = info
        self.tokens = info.tokens
        self.paths = set(info.paths)
        self.specs: dict[str, Spec] = {}
        #: What reads of a level, and of one leaf, have worked out from it; not worth pickling.
        self.levels_read: dict[tuple[str, tuple[str, ...] | None], Any] = {}
        self.leaves_read: dict[str, Any] = {}

    def same_as(self, other: Known) -> bool:
        """Whether nothing that an index or a key depends on has changed."""
        schemas, infos = (self.tokens.schema, other.tokens.schema), (self.info, other.info)
        return (
            schemas[0] == schemas[1]
            and infos[0].levels == infos[1].levels
            and (self.paths == other.paths)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "levels_read": {}, "leaves_read": {}}


class Handle:
    """One store. Metadata is read once; the schema token of each read tells when it is stale.

    Attributes:
        location: server, prefix and id.
        client: runs the operations.
        cache: whether metadata is kept.
        allow_pickle: whether pickled values are read and written.
    """

    def __init__(
        self,
        location: Location,
        info: StoreInfo,
        *,
        cache: bool = True,
        allow_pickle: bool = False,
        client: Client | None = None,
    ):
        self.location = location
        self.client = client or Client(location.address)
        self.cache = cache
        self.allow_pickle = allow_pickle
        self.may_transact = True
        self.may_script = True
        #: For so many more reads others may write between.
        self.wary = 0
        #: How the version is asked for, behind the ranges of a read.
        self.ask_version = token_items(location.names)[0]
        self.state = Known(info)
        self._aio: AsyncClient | None = None

    @property
    def info(self) -> StoreInfo:
        """Batch size, kind, device and levels."""
        return self.state.info

    @property
    def paths(self) -> set[str]:
        """The paths of all leaf entries, as last seen."""
        return self.state.paths

    @classmethod
    def open(cls, location: Location, *, cache: bool = True, allow_pickle: bool = False) -> Handle:
        """Open a store for reading or writing. Writes nothing. One round trip.

        Raises:
            StoreNotFound: there is none under this id; the message says where it was looked for.
            IncompleteStore: its writer has not finished.
        """
        client = Client(location.address)
        info, _ = client.read(lambda: reading.find(location.names, str(location)))
        return cls(location, info, cache=cache, allow_pickle=allow_pickle, client=client)

    @property
    def names(self) -> Names:
        """The names of the store's keys."""
        return self.location.names

    @property
    def lazy(self) -> bool:
        """Whether this is a lazy stack."""
        return self.info.stack is not None

    # ---- metadata

    def reload(self) -> Operation[None]:
        """Read again what is known, in one round trip."""
        known = sorted(self.state.specs)
        info, specs = yield from reading.find(self.names, str(self.location), known)
        if (info.batch, info.stack) != (self.info.batch, self.info.stack):
            raise StoreNotFound(
                f"{self.location} holds another store now, of batch size {list(info.batch)}; open "
                "it again"
            )
        state = Known(info)
        state.specs.update(specs)
        self.state = state

    def refresh(self) -> None:
        """Run ``reload``. One round trip."""
        self.client.read(self.reload)

    def known(self) -> set[str]:
        """Return the paths of all leaf entries. One round trip where metadata is not kept."""
        if not self.cache:
            self.refresh()
        return self.paths

    def has_level(self, path: str) -> bool:
        """Return whether a nested tensordict is at a full path, as last seen."""
        levels = self.info.levels
        return path in levels or bool(below(self.paths, path) or (path and below(levels, path)))

    def under(self, prefix: str) -> list[str]:
        """Return the full paths of the leaves below a level.

        Raises:
            EntryNotFound: there is no such level any more.
        """
        start = prefix + "." if prefix else ""
        paths = [start + rest for rest in below(self.paths, prefix)]
        if prefix and not self.has_level(prefix):
            raise EntryNotFound(f"{self.location} has no level {prefix!r} any more")
        return paths

    def load(self, paths: Iterable[str]) -> Operation[dict[str, Spec]]:
        """Return the specs of entries; what is not kept is read, in one or two round trips.

        Raises:
            EntryNotFound: an entry that is not registered.
        """
        wanted = list(paths)
        state = self.state
        missing = [path for path in wanted if path not in state.specs]
        if missing:
            unknown = set(missing) - state.paths
            if unknown:
                raise EntryNotFound(
                    f"the store {self.location} has no entry {sorted(unknown)[0]!r}; it has "
                    f"{sorted(state.paths)[:20]}"
                )
            found = yield from reading.load_specs(
                self.names, state.info, missing, str(self.location)
            )
            state.specs.update(found)
        return {path: state.specs[path] for path in wanted}

    def specs(self, paths: Iterable[str]) -> dict[str, Spec]:
        """Run ``load``. Nothing is connected to for what is kept."""
        wanted = list(paths)
        kept = self.state.specs
        if self.cache and all(path in kept for path in wanted):
            return {path: kept[path] for path in wanted}
        return self.client.read(lambda: self.doubting(lambda: self._loading(wanted)))

    def specs_under(self, prefix: str) -> dict[str, Spec]:
        """Return the specs of the leaves that a level has, by full path; as ``specs``."""
        return self.client.read(lambda: self.doubting(lambda: self.loading_under(prefix)))

    def loading_under(self, prefix: str) -> Operation[dict[str, Spec]]:
        """The operation of ``specs_under``."""
        if not self.cache:
            yield from self.reload()
        return (yield from self.load(self.under(prefix)))

    def doubting(self, make: Callable[[], Operation[T]]) -> Operation[T]:
        """Run an operation; again where it failed by what this handle knew and others changed.

        An error that follows from what is known is true only of a store that is still so: an index
        outside a batch size, an entry that is not there.
        """
        said: TdioError | None = None
        for _ in range(_DOUBTS):
            known = self.state
            try:
                return (yield from make())
            except (IndexOutOfRange, InvalidIndex, EntryNotFound, CorruptEntry) as error:
                # It may have read the store anew itself, and others have changed it since.
                seen, said = self.state, error
                if seen.same_as(known):
                    yield from self.reload()
                    if self.state.same_as(seen):
                        raise
        raise Contended(
            f"{self.location}: its keys or shapes changed at each of {_DOUBTS} attempts; the last "
            f"one said: {said}"
        ) from said

    def _loading(self, paths: list[str]) -> Operation[dict[str, Spec]]:
        if not self.cache:
            yield from self.reload()
        return (yield from self.load(paths))

    # ---- writes

    def clear(self) -> None:
        """Delete the whole store."""
        where = str(self.location)
        self.client.write(uploading.delete_store(self.names, where, missing_ok=True))
        self.state = Known(replace(self.info, paths=frozenset(), tokens=CLEARED))

    def async_client(self) -> AsyncClient:
        """Return the client of the running event loop.

        Raises:
            UnsupportedValue: a server in memory, which plain code reads.
        """
        client = self._aio
        if client is None or not client.usable:
            if isinstance(self.location.address, MemoryServer):
                raise UnsupportedValue("a MemoryServer has no async face; read it from plain code")
            client = self._aio = AsyncClient(self.location.address)
        return client

    def close(self) -> None:
        """Close the connections; the data stays on the server."""
        self.client.close()

    # ---- pickling: an address and what is known, no connection

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("client", "_aio")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.client, self._aio = Client(self.location.address), None
