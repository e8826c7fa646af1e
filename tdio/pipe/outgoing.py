"""From a tensordict to the buffers that are sent: its own storage, or one that is used again."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, UnbatchedTensor

from tdio._td import _is_leaf_nontensor
from tdio.errors import UnsupportedValue
from tdio.pipe.tree import Tree, describe, flatten, plain, tree_of
from tdio.wire.frames import ESCAPED
from tdio.wire.pipe import Outgoing, Parcel


@dataclass
class _Whole:
    """The schema of the last consolidated tensordict, recognised by its metadata.

    ``same`` is that metadata itself where nobody changes it: without values, which it shares.
    """

    metadata: dict[str, Any]
    schema: Outgoing
    holds_values: bool
    parcel: Parcel
    same: dict[str, Any] | None = None

    def describes(self, metadata: dict[str, Any]) -> bool:
        """Whether ``metadata`` is what was announced."""
        if self.holds_values:
            # 1 == True, so comparing the values is not enough.
            return self.schema.identity == _identity(metadata)
        return self.metadata == metadata


def _identity(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, default=_class_text)


def _class_text(value: Any) -> str:
    if isinstance(value, type):
        return str(value)
    raise UnsupportedValue(
        f"a value of type {type(value).__name__} cannot be sent: only what JSON holds can be"
    )


@dataclass
class _Gathered:
    """The schema of the last tensordict that was gathered, and the buffer it was gathered in."""

    key: tuple[Any, ...]
    schema: Outgoing
    views: list[torch.Tensor]
    parcel: Parcel

    def fill(self, leaves: list[torch.Tensor]) -> Parcel:
        """Copy the leaves to their places."""
        if leaves:
            leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
            torch._foreach_copy_(self.views, leaves)
        return self.parcel


class Packer:
    """Makes parcels of the tensordicts of one pipe; a parcel is good until the next is made.

    Args:
        tdio_peer: the other end reads what only tdio writes.
        consolidated: one storage, or leaf by leaf.
    """

    def __init__(self, tdio_peer: bool, consolidated: bool):
        self._tdio_peer = tdio_peer
        self._consolidated = consolidated
        self._whole: _Whole | None = None
        self._gathered: _Gathered | None = None

    def pack(self, td: Any) -> Parcel:
        """Return what is sent of ``td``.

        Raises:
            UnsupportedValue: ``td`` holds what this pipe cannot send; nothing was sent.
        """
        td = plain(td)
        if not self._consolidated:
            parcel = leaves_parcel(td)
        else:
            parcel = self._pack_whole(td) or self._gather(td)
        for device in parcel.cuda:
            synchronize(device)
        return parcel

    def _pack_whole(self, td: Any) -> Parcel | None:
        state = td.__dict__.get("_consolidated")
        if state is None or state.get("stale") or state.get("metadata") is None:
            return None
        metadata, storage = state["metadata"], state["storage"]
        last = self._whole
        if last is not None and last.schema.nbytes != storage.nbytes:
            last = None
        if last is None or (metadata is not last.same and not last.describes(metadata)):
            last = self._learn(td, metadata, storage)
            if last is None:
                return None
            self._whole = last
        parcel = last.parcel
        if parcel.buffers[0] is not storage:
            last.parcel = parcel = Parcel([storage], last.schema, nbytes=last.schema.nbytes)
        last.same = None if last.holds_values else metadata
        return parcel

    def _learn(self, td: Any, metadata: dict[str, Any], storage: torch.Tensor) -> _Whole | None:
        tree = tree_of(td)
        # A nested consolidated tensordict has the storage of all; some are not in plain order.
        if tree.reserved or tree.foreign or tree.nbytes != storage.nbytes:
            return None
        if storage.dim() != 1 or not storage.is_contiguous():
            return None
        schema = _outgoing(_identity(metadata), storage.nbytes, storage.device)
        parcel = Parcel([storage], schema, nbytes=schema.nbytes)
        return _Whole(copy.deepcopy(metadata), schema, tree.holds_values, parcel)

    def _gather(self, td: Any) -> Parcel:
        key, leaves = describe(td)
        device = td.device or (leaves[0].device if leaves else torch.device("cpu"))
        last = self._gathered
        if last is None or last.key != key or last.parcel.buffers[0].device != device:
            last = self._gathered = self._prepare(td, key, device)
        return last.fill(leaves)

    def _prepare(self, td: Any, key: tuple[Any, ...], device: torch.device) -> _Gathered:
        tree = tree_of(td)
        schema = outgoing_of(tree, device, self._tdio_peer)
        # Zeros: what lies between leaves is sent too, and must not be old memory.
        buffer = torch.zeros(tree.nbytes, dtype=torch.uint8, device=device)
        views = [slot.view(buffer) for slot in tree.slots]
        return _Gathered(key, schema, views, Parcel([buffer], schema, nbytes=tree.nbytes))


def outgoing_of(tree: Tree, device: torch.device, tdio_peer: bool) -> Outgoing:
    """Return the schema of a gathered tensordict.

    Raises:
        UnsupportedValue: the other end is tensordict, which could not read it.
    """
    if not tdio_peer and (tree.reserved or tree.foreign):
        what = f"a nested tensordict named {tree.reserved[0]!r}" if tree.reserved else ""
        what = what or f"{tree.foreign.pop()}"
        raise UnsupportedValue(
            f"{what} cannot be sent to tensordict's pipe in one storage; use consolidated=False"
        )
    identity = json.dumps(flatten(tree.metadata, bool(tree.reserved)))
    return _outgoing(identity, tree.nbytes, device, ESCAPED if tree.reserved else 0)


def _outgoing(identity: str, nbytes: int, device: torch.device, flags: int = 0) -> Outgoing:
    text = f'{identity[:-1]}, "_total_bytes": {nbytes}, "_device": "{device}"}}'
    return Outgoing(identity, text.encode(), nbytes, flags)


def synchronize(device: torch.device) -> None:
    """Wait for what the current stream of ``device`` does with the buffers of a transfer."""
    torch.cuda.current_stream(device).synchronize()


def leaves_parcel(td: Any) -> Parcel:
    """Return ``td`` leaf by leaf.

    Raises:
        UnsupportedValue: an entry that has no plain bytes, or a value that JSON would change.
    """
    header: dict[str, Any] = {name: [] for name in ("keys", "dtypes", "shapes")}
    header["batch_size"] = list(td.batch_size)
    unbatched: list[Any] = []
    values: list[Any] = []
    buffers = []
    for key, value in _items(td):
        path = list(key) if isinstance(key, tuple) else key
        if isinstance(value, torch.Tensor):
            header["keys"].append(path)
            header["dtypes"].append(str(value.dtype))
            header["shapes"].append(list(value.shape))
            if isinstance(value, UnbatchedTensor):
                unbatched.append(path)
            buffers.append(_bytes_of(key, value))
        elif type(value) is NonTensorData and _survives(value.data):
            values.append([path, value.data])
        elif type(value) is NonTensorStack and _survives(value.tolist()):
            values.append([path, value.tolist(), list(value.batch_size), value.stack_dim])
        else:
            raise UnsupportedValue(
                f"the entry {key!r} of type {type(value).__name__} cannot be sent leaf by leaf: "
                "only text, numbers, None, and lists and dicts of them; try consolidated=True"
            )
    text = json.dumps({**header, "unbatched": unbatched, "non_tensors": values}).encode()
    return Parcel(buffers, None, text, sum(buffer.nbytes for buffer in buffers))


def _items(td: Any) -> list[tuple[Any, Any]]:
    try:
        return list(td.items(True, True, is_leaf=_is_leaf_nontensor, sort=True))
    except RuntimeError as error:
        raise UnsupportedValue(
            f"a lazy stack whose members differ needs consolidated=True ({error})"
        ) from error


def _bytes_of(key: Any, value: torch.Tensor) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise UnsupportedValue(
            f"the entry {key!r} of layout {value.layout} and {value.dtype} on {value.device} "
            "cannot be sent leaf by leaf"
        )
    if isinstance(value, UnbatchedTensor):
        value = value.data
    whole = value.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _survives(value: Any) -> bool:
    """Whether JSON gives the value back with the same types."""
    if type(value) is list:
        return all(_survives(item) for item in value)
    if type(value) is dict:
        return all(type(name) is str and _survives(item) for name, item in value.items())
    return value is None or type(value) in (str, int, float, bool)
