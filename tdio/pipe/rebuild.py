"""From checked metadata and a storage to a tensordict of views, in tensordict's own form."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from tensordict import NonTensorData, NonTensorStack, UnbatchedTensor

from tdio._td import REBUILDABLE, LazyStackedTensorDict, TensorDict, tensorclass_named
from tdio.errors import ProtocolError
from tdio.wire.pipe_leaves import LeavesHeader, Stack
from tdio.wire.pipe_schema import JAGGED, RESERVED, STACKS, Leaf, Level


def is_markable(root: Level) -> bool:
    """Whether tensordict could rebuild this from metadata of its own form."""
    return not has_reserved(root) and all(
        leaf.slot.dtype in REBUILDABLE for level in root.walk() for leaf in level.leaves.values()
    )


def has_reserved(root: Level) -> bool:
    """Whether a nested level has the name of a field of the metadata."""
    return any(RESERVED & level.levels.keys() for level in root.walk())


def metadata_of(root: Level, device: torch.device) -> dict[str, Any]:
    """Return the metadata of a tensordict whose storage lies on ``device``.

    It is in tensordict's form, where that can hold it; else with "/" before the nested names.
    """
    return _metadata(root, device, "/" if has_reserved(root) else "")


def _metadata(level: Level, device: torch.device, mark: str) -> dict[str, Any]:
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
        **{mark + name: _metadata(below, device, mark) for name, below in level.levels.items()},
    }


def rebuild(
    level: Level,
    storage: torch.Tensor,
    metadata: dict[str, Any],
    parent: dict[str, Any] | None,
    marked: bool,
    mark: str = "",
) -> Any:
    """Return the tensordict of a level, its leaves views of ``storage``.

    ``mark`` is what the names of nested levels have before them in ``metadata``.

    It is marked as consolidated in tensordict's way: it pickles and moves as one storage.
    """
    state = {"storage": storage, "metadata": metadata}
    if parent is not None:
        # A write to a nested tensordict makes the state of those above it stale too.
        state["parent"] = parent
    source: dict[Any, Any] = {}
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
        source[name] = rebuild(below, storage, metadata[mark + name], state, marked, mark)
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


def _assemble(level: Level, source: dict[Any, Any], device: torch.device) -> Any:
    if level.cls in STACKS:
        kind = NonTensorStack if level.cls == "NonTensorStack" else LazyStackedTensorDict
        members = [source[str(i)] for i in range(len(source))]
        return kind(*members, stack_dim=level.stack_dim, stack_dim_name=level.stack_name)
    td = TensorDict._new_unsafe(
        source=source,
        batch_size=torch.Size(level.batch),
        device=None if level.device is None else device,
        names=cast(Any, level.names),
    )
    known = tensorclass_named(level.cls)
    return td if known is None else known.from_tensordict(td)


def check_offsets(root: Level, storage: torch.Tensor, where: str) -> None:
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


#: Untyped in tensordict.
_unbatched: Any = UnbatchedTensor


def td_of_leaves(header: LeavesHeader, buffers: list[torch.Tensor]) -> TensorDict:
    """Return the tensordict of a header and the leaves that followed it."""
    tree: dict[str, Any] = {}
    for (path, dtype, shape), buffer in zip(header.leaves, buffers, strict=True):
        tensor: Any = buffer.view(dtype).view(shape)
        _put(tree, path, _unbatched(tensor) if path in header.unbatched else tensor)
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
