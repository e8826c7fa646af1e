"""From received buffers to tensordicts: views of one storage, filled again by the next message."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, UnbatchedTensor

from tdio._td import (
    REBUILDABLE,
    LazyStackedTensorDict,
    TensorDict,
    tensorclass_named,
)
from tdio.errors import ProtocolError
from tdio.pipe.outgoing import synchronize
from tdio.pipe.tree import describe, plain
from tdio.wire.frames import ESCAPED
from tdio.wire.pipe import Sink
from tdio.wire.pipe_leaves import LeavesHeader, Stack, parse_leaves
from tdio.wire.pipe_schema import JAGGED, RESERVED, STACKS, Leaf, Level, Schema, parse_schema


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
        self._schema: Schema | None = None
        self._storage: torch.Tensor | None = None
        self._built: _Built | None = None
        self._filled: Any = None
        self._leaves: tuple[LeavesHeader, list[torch.Tensor]] | None = None
        self._plain_metadata: dict[torch.device, dict[str, Any]] = {}

    def want(self, into: Any, device: torch.device | None) -> None:
        """Note what the caller of this receive wants: a tensordict to fill, a device."""
        self._into, self._device = into, device

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
        self._storage = self._built = None
        self._plain_metadata = {}

    def target(self) -> torch.Tensor:
        """Return the storage that the next message is received into."""
        into, built = self._into, self._built
        if into is not None and (built is None or into is not built.td) and self._fits(into):
            storage: torch.Tensor = plain(into)._consolidated["storage"]
            if self._storage is None:
                # As in tensordict's pipe: what the first message of a schema is received into is
                # what the next ones are.
                self._storage = storage
                self._built = _Built.of(into, self._metadata(storage.device))
            self._filled = into
            return storage
        self._filled = None
        if self._storage is None or (
            self._device is not None and self._device != self._storage.device
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
        storage = self._storage
        assert storage is not None
        assert self._schema is not None
        if storage.is_cuda:
            synchronize(storage.device)
        if self._filled is not None:
            filled, self._filled, self._into = self._filled, None, None
            return filled
        built = self._built
        if built is None or not built.intact():
            built = self._built = _Built.new(self._schema.root, storage, self._where)
        if built.jagged:
            _check_offsets(self._schema.root, storage, self._where)
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
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise ProtocolError(
                f"{self._where} sent leaves that make no tensordict: {error}"
            ) from error


def _device(text: str) -> torch.device:
    device = torch.device(text)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


class _Built:
    """A tensordict that was handed out, and how to see whether it is still what it was."""

    def __init__(self, td: Any, state: dict[str, Any] | None, expected: dict[str, Any]):
        self.td = td
        self.jagged = False
        self._state = state
        self._expected = expected
        self._inner = plain(td)
        self._device = self._inner.device
        # A stack can grow without a mark, and values are shared with the metadata: look closer.
        self._key = describe(self._inner)[0] if _needs_a_look(expected) else None

    @classmethod
    def new(cls, root: Level, storage: torch.Tensor, where: str) -> _Built:
        """Build the views of ``storage``. Raises ProtocolError."""
        metadata = metadata_of(root, storage.device)
        marked = is_markable(root)
        try:
            td = rebuild(root, storage, metadata, None, marked)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise ProtocolError(
                f"{where} sent metadata that makes no tensordict: {error}"
            ) from error
        state = plain(td).__dict__.get("_consolidated") if marked else None
        built = cls(td, state, metadata_of(root, storage.device))
        built.jagged = any(name.startswith(JAGGED) for n in root.walk() for name in n.leaves)
        return built

    @classmethod
    def of(cls, td: Any, expected: dict[str, Any]) -> _Built:
        """Take a tensordict of the caller, whose metadata is as expected."""
        return cls(td, plain(td).__dict__["_consolidated"], expected)

    def intact(self) -> bool:
        """Whether the leaves are still views of the storage, under their names."""
        td, state = self._inner, self._state
        if state is None or td.__dict__.get("_consolidated") is not state:
            return False
        if "stale" in state or state["metadata"] != self._expected or td.device != self._device:
            return False
        return self._key is None or bool(describe(td)[0] == self._key)


def _needs_a_look(metadata: dict[str, Any]) -> bool:
    if metadata["cls"] in STACKS or metadata["non_tensors"]:
        return True
    return any(
        _needs_a_look(level)
        for level in metadata.values()
        if type(level) is dict and "cls_metadata" in level
    )


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


def is_markable(root: Level) -> bool:
    """Whether tensordict could rebuild this from metadata of its own form."""
    for level in root.walk():
        if RESERVED & level.levels.keys():
            return False
        if any(leaf.slot.dtype not in REBUILDABLE for leaf in level.leaves.values()):
            return False
    return True


def metadata_of(level: Level, device: torch.device) -> dict[str, Any]:
    """Return the metadata of a tensordict whose storage lies on ``device``."""
    own: dict[str, Any]
    if level.cls in STACKS:
        own = {"stack_dim": level.stack_dim, "stack_dim_name": level.stack_name}
    else:
        own = {
            "device": None if level.device is None else str(device),
            "names": level.names or [None] * len(level.batch),
            "batch_size": list(level.batch),
        }
    values = {
        name: (copy.deepcopy(value), list(batch), None if at is None else str(device))
        for name, (value, batch, at) in level.non_tensors.items()
    }
    return {
        "cls": tensorclass_named(level.cls) or level.cls,
        "non_tensors": values,
        "leaves": {name: leaf.item for name, leaf in level.leaves.items()},
        "cls_metadata": {**own, "is_locked": level.locked},
        **{name: metadata_of(below, device) for name, below in level.levels.items()},
    }


def rebuild(
    level: Level,
    storage: torch.Tensor,
    metadata: dict[str, Any],
    parent: dict[str, Any] | None,
    marked: bool,
) -> Any:
    """Return the tensordict of a level, its leaves views of ``storage``.

    It is marked as consolidated in tensordict's way: it pickles and moves as one storage.
    """
    state = {"storage": storage, "metadata": metadata}
    if parent is not None:
        # A write to a nested tensordict makes the state of those above it stale too.
        state["parent"] = parent
    source: dict[str, Any] = {}
    for name, (value, batch, device) in metadata["non_tensors"].items():
        source[name] = NonTensorData(
            value, batch_size=batch, device=None if device is None else torch.device(device)
        )
    for name, leaf in level.leaves.items():
        if not name.startswith(JAGGED):
            source[name] = leaf.slot.view(storage)
        elif name.startswith("<NJT_OFFSETS>"):
            name = name.removeprefix("<NJT_OFFSETS>")
            source[name] = _jagged(level, name, leaf, storage)
    for name, below in level.levels.items():
        source[name] = rebuild(below, storage, metadata.get(name, {}), state, marked)
    td = _assemble(level, source, storage.device)
    inner = td._tensordict if tensorclass_named(level.cls) else td
    if marked:
        inner._consolidated = state
    if level.locked:
        td.lock_()
    return td


def _jagged(level: Level, name: str, offsets: Leaf, storage: torch.Tensor) -> Any:
    values = level.leaves[f"<NJT_VALUES>{name}"].slot.view(storage)
    lengths = level.leaves.get(f"<NJT_LENGTHS>{name}")
    table = offsets.slot.view(storage)
    return torch.nested.nested_tensor_from_jagged(
        values,
        table,
        None if lengths is None else lengths.slot.view(storage),
        jagged_dim=offsets.ragged or 1,
    )


def _assemble(level: Level, source: dict[str, Any], device: torch.device) -> Any:
    if level.cls in STACKS:
        kind = NonTensorStack if level.cls == "NonTensorStack" else LazyStackedTensorDict
        members = [source[str(i)] for i in range(len(source))]
        return kind(*members, stack_dim=level.stack_dim, stack_dim_name=level.stack_name)
    td = TensorDict._new_unsafe(
        source=source,
        batch_size=torch.Size(level.batch),
        device=None if level.device is None else device,
        names=level.names,
    )
    known = tensorclass_named(level.cls)
    return td if known is None else known.from_tensordict(td)


def _check_offsets(root: Level, storage: torch.Tensor, where: str) -> None:
    """Refuse offsets outside the values: torch reads wherever they point."""
    for level in root.walk():
        for name, leaf in level.leaves.items():
            if not name.startswith("<NJT_OFFSETS>"):
                continue
            base = name.removeprefix("<NJT_OFFSETS>")
            offsets = leaf.slot.view(storage).to("cpu", torch.int64)
            values = level.leaves[f"<NJT_VALUES>{base}"].slot
            end = values.shape[(leaf.ragged or 1) - 1]
            spans = offsets.diff()
            bad = bool((spans < 0).any()) or int(offsets[0]) < 0 or int(offsets[-1]) > end
            lengths = level.leaves.get(f"<NJT_LENGTHS>{base}")
            if lengths is not None:
                own = lengths.slot.view(storage).to("cpu", torch.int64)
                bad = bad or bool((own < 0).any()) or bool((own > spans).any())
            if bad:
                raise ProtocolError(f"{where} sent offsets of {base!r} that leave its values")


def td_of_leaves(header: LeavesHeader, buffers: list[torch.Tensor]) -> TensorDict:
    """Return the tensordict of a header and the leaves that followed it."""
    tree: dict[str, Any] = {}
    for (path, dtype, shape), buffer in zip(header.leaves, buffers, strict=True):
        tensor: Any = buffer.view(dtype).view(shape)
        _put(tree, path, UnbatchedTensor(tensor) if path in header.unbatched else tensor)
    for path, value in header.values.items():
        _put(tree, path, _value(value, header.batch))
    return _nested(tree, torch.Size(header.batch))


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _nested(tree: dict[str, Any], batch: torch.Size) -> TensorDict:
    source: dict[Any, Any] = {
        name: _nested(value, batch) if type(value) is dict else value
        for name, value in tree.items()
    }
    return TensorDict._new_unsafe(source=source, batch_size=batch)


def _value(value: Any, batch: tuple[int, ...]) -> Any:
    if not isinstance(value, Stack):
        return NonTensorData(value, batch_size=batch)
    stack = NonTensorStack._from_list(value.values, device=None, ndim=len(value.batch))
    if value.stack_dim:
        stack = torch.stack(list(stack.unbind(value.stack_dim)), value.stack_dim)
    return stack
