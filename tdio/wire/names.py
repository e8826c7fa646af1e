"""The names of a store's keys on the server (``docs/format.md``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Builds server keys: ``<prefix>:{<td_id>}:<suffix>``. The braces are a cluster hash tag."""

    prefix: str
    td_id: str

    def key(self, suffix: str) -> str:
        """Return the server key of a suffix."""
        return f"{self.prefix}:{{{self.td_id}}}:{suffix}"

    def data(self, path: str) -> str:
        """Return the key of the bytes of an entry."""
        return self.key(f"d:{path}")

    def meta(self, path: str) -> str:
        """Return the key of the metadata hash of an entry."""
        return self.key(f"m:{path}")

    def offsets(self, path: str) -> str:
        """Return the key of the offset table of a ragged entry."""
        return self.key(f"d:{path}:idx")

    def entry(self, path: str) -> tuple[str, str, str]:
        """Return every key that an entry may have."""
        return self.data(path), self.offsets(path), self.meta(path)

    @property
    def registry(self) -> str:
        """The set of the paths of all entries."""
        return self.key("__keys__")

    @property
    def commit(self) -> str:
        """Tdio's hash: format version, and whether the writer has finished."""
        return self.key("__tdio_commit__")

    @property
    def planned(self) -> str:
        """Tdio's set of the paths that an upload under way will register."""
        return self.key("__tdio_planned__")


#: Suffixes of the keys that describe a whole store, of either kind.
GLOBAL_SUFFIXES = (
    "__keys__",
    "__batch_size__",
    "__device__",
    "__tensorclass__",
    "__type__",
    "__count__",
    "__stack_dim__",
    "__inner_batch_size__",
    "__tdio_commit__",
    "__tdio_planned__",
)
