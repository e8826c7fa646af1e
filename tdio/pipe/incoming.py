"""From received buffers to tensordicts: views of one storage, filled again by the next message."""

from __future__ import annotations

from typing import Any

import torch

from tdio._td import tensorclass_named
from tdio.errors import ProtocolError
from tdio.pipe.outgoing import synchronize
from tdio.pipe.rebuild import (
    check_offsets,
    has_reserved,
    is_markable,
    metadata_of,
    rebuild,
    td_of_leaves,
)
from tdio.pipe.tree import describe, plain
from tdio.wire.frames import ESCAPED
from tdio.wire.pipe import Sink
from tdio.wire.pipe_leaves import LeavesHeader, parse_leaves
from tdio.wire.pipe_schema import JAGGED, STACKS, Level, Schema, parse_schema

#: How torch and tensordict refuse what does not fit together.
_UNFIT = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)


class Incoming(Sink):
    """Receives the tensordicts of one pipe into one storage, for as long as the schema stays.

    Args:
        where: names the peer in errors.
        max_message_bytes: more than this is never allocated for one tensordict.
    """

    def __init__(self, where: str, max_message_bytes: int):
        self._where = where
        self._limit = max_message_bytes
        self._into: Any = None
        self._device: torch.device | None = None
        self._keep = self._marked = self._jagged = False
        self._schema: Schema | None = None
        self._storage: torch.Tensor | None = None
        self._built: _Built | None = None
        self._filled: Any = None
        self._leaves: tuple[LeavesHeader, list[torch.Tensor]] | None = None
        self._plain_metadata: dict[torch.device, dict[str, Any]] = {}

    def want(self, into: Any, device: torch.device | None, keep: bool = False) -> None:
        """Note what the caller of this receive wants: a tensordict to fill, a device, its own."""
        self._into, self._device, self._keep = into, device, keep

    # ---- one storage

    def announce(self, text: bytes, flags: int) -> None:
        """Take a new schema; the storage is allocated when it is due."""
        schema = parse_schema(text, self._where, escaped=bool(flags & ESCAPED))
        if schema.nbytes > self._limit:
            raise ProtocolError(
                f"{self._where} announces {schema.nbytes} bytes, above max_message_bytes="
                f"{self._limit}; raise it if that is expected"
            )
        _check_classes(schema.root, self._where)
        self._schema, self.nbytes = schema, schema.nbytes
        self._marked = is_markable(schema.root)
        self._jagged = any(
            n.startswith(JAGGED) for level in schema.root.walk() for n in level.leaves
        )
        self._storage = self._built = None
        self._plain_metadata = {}

    def target(self) -> torch.Tensor:
        """Return the storage that the next message is received into."""
        into, built = self._into, self._built
        assert self._schema is not None
        if into is not None and (built is None or into is not built.td) and self._fits(into):
            storage: torch.Tensor = plain(into)._consolidated["storage"]
            if self._storage is None and not self._keep:
                # As in tensordict's pipe: what the first message of a schema is received into is
                # what the next ones are.
                self._storage = storage
                expected = self._metadata(storage.device)
                self._built = _Built.of(into, expected, self._schema.root)
            self._filled = into
            return storage
        self._filled = None
        if (
            self._keep
            or self._storage is None
            or (self._device is not None and self._device != self._storage.device)
        ):
            self._storage, self._built = self._allocate(), None
        return self._storage

    def _allocate(self) -> torch.Tensor:
        assert self._schema is not None
        device = self._device or _device(self._schema.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ProtocolError(
                f"{self._where} sends tensors of {device}, which this process does not have; "
                "receive them with device='cpu'"
            )
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def _fits(self, td: Any) -> bool:
        td = plain(td)
        state = td.__dict__.get("_consolidated")
        if state is None or state.get("stale") or state.get("metadata") is None:
            return False
        assert self._schema is not None
        storage = state["storage"]
        device = self._device or _device(self._schema.device)
        return (
            storage.numel() == self.nbytes
            and storage.device == device
            and storage.is_contiguous()
            and bool(state["metadata"] == self._metadata(device))
        )

    def _metadata(self, device: torch.device) -> dict[str, Any]:
        """Return the metadata as a tensordict on ``device`` has it, to compare with."""
        assert self._schema is not None
        if device not in self._plain_metadata:
            self._plain_metadata[device] = metadata_of(self._schema.root, device)
        return self._plain_metadata[device]

    def finish(self) -> Any:
        """Return the tensordict whose storage is full: the same as last time if it is intact."""
        storage, filled = self._storage, self._filled
        assert self._schema is not None
        if filled is not None:
            storage = plain(filled)._consolidated["storage"]
        assert storage is not None
        if storage.is_cuda:
            synchronize(storage.device)
        if self._jagged:
            check_offsets(self._schema.root, storage, self._where)
        if filled is not None:
            self._filled = self._into = None
            return filled
        root = self._schema.root
        if self._keep:
            # The caller's from now on: nothing here remembers it.
            self._storage = self._built = None
            return _views(root, storage, self._marked, self._where)[0]
        built = self._built
        if built is None or not built.intact():
            built = self._built = _Built.new(root, storage, self._marked, self._where)
        return built.td

    # ---- leaf by leaf

    def announce_leaves(self, text: bytes) -> list[torch.Tensor]:
        """Take a header; allocate a buffer for each leaf."""
        header = parse_leaves(text, self._limit, self._where)
        device = self._device or torch.device("cpu")
        buffers = [torch.empty(n, dtype=torch.uint8, device=device) for n in header.nbytes()]
        self._leaves = header, buffers
        return buffers

    def finish_leaves(self) -> Any:
        """Return a new tensordict of the leaves."""
        assert self._leaves is not None
        (header, buffers), self._leaves = self._leaves, None
        if buffers and buffers[0].is_cuda:
            synchronize(buffers[0].device)
        try:
            return td_of_leaves(header, buffers)
        except _UNFIT as error:
            raise ProtocolError(
                f"{self._where} sent leaves that make no tensordict: {error}"
            ) from error


def _device(text: str) -> torch.device:
    device = torch.device(text)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _views(
    root: Level, storage: torch.Tensor, marked: bool, where: str
) -> tuple[Any, dict[str, Any] | None]:
    """Return the tensordict of views of ``storage``, and its mark. Raises ProtocolError."""
    try:
        mark = "/" if has_reserved(root) else ""
        td = rebuild(root, storage, metadata_of(root, storage.device), None, marked, mark)
    except _UNFIT as error:
        raise ProtocolError(f"{where} sent metadata that makes no tensordict: {error}") from error
    return td, plain(td).__dict__.get("_consolidated") if marked else None


class _Built:
    """A tensordict that was handed out, and how to see whether it is still what it was."""

    def __init__(
        self, td: Any, state: dict[str, Any] | None, expected: dict[str, Any], root: Level
    ):
        self.td = td
        self._state = state
        self._expected = expected
        #: The metadata that was found as expected: nobody changes it in place.
        self._same: dict[str, Any] | None = None
        self._inner = plain(td)
        self._device = self._inner.device
        # A stack can grow without a mark, and values are shared with the metadata: look closer.
        self._key = describe(self._inner)[0] if _needs_a_look(root) else None

    @classmethod
    def new(cls, root: Level, storage: torch.Tensor, marked: bool, where: str) -> _Built:
        """Build the views of ``storage``. Raises ProtocolError."""
        td, state = _views(root, storage, marked, where)
        return cls(td, state, metadata_of(root, storage.device), root)

    @classmethod
    def of(cls, td: Any, expected: dict[str, Any], root: Level) -> _Built:
        """Take a tensordict of the caller, whose metadata is as expected."""
        return cls(td, plain(td).__dict__["_consolidated"], expected, root)

    def intact(self) -> bool:
        """Whether the leaves are still views of the storage, under their names."""
        td, state = self._inner, self._state
        if state is None or td.__dict__.get("_consolidated") is not state:
            return False
        if "stale" in state or td.device != self._device:
            return False
        if state["metadata"] is not self._same:
            if state["metadata"] != self._expected:
                return False
            self._same = state["metadata"]
        return self._key is None or bool(describe(td)[0] == self._key)


def _needs_a_look(root: Level) -> bool:
    return any(level.cls in STACKS or level.non_tensors for level in root.walk())


def _check_classes(root: Level, where: str) -> None:
    for level in root.walk():
        if (
            level.cls not in STACKS
            and level.cls != "TensorDict"
            and tensorclass_named(level.cls) is None
        ):
            raise ProtocolError(
                f"{where} sent a {level.cls[:100]}; import the module that defines this "
                "tensorclass before it is received"
            )
