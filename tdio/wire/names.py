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
    def version(self) -> str:
        """Tdio's token of the data: a writer replaces it by a new one with each write."""
        return self.key("__tdio_version__")

    @property
    def schema(self) -> str:
        """Tdio's token of the metadata: replaced when keys, shapes, dtypes or kinds change."""
        return self.key("__tdio_schema__")

    @property
    def levels(self) -> str:
        """Tdio's hash of what its levels are: names, nested batch sizes and classes."""
        return self.key("__tdio_levels__")

    @property
    def values(self) -> str:
        """Tdio's set of the paths of the non-tensor entries of a lazy stack.

        Not in the registry: the reference cannot read a lazy stack that lists one.
        """
        return self.key("__tdio_values__")

    @property
    def turn(self) -> str:
        """Tdio's mark of a writer that lost too often: the others wait until it is done."""
        return self.key("__tdio_turn__")

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
    "__tdio_version__",
    "__tdio_schema__",
    "__tdio_levels__",
    "__tdio_values__",
    "__tdio_turn__",
)
