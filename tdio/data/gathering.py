"""The leaves of a batch put into one storage, and that storage moved as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdio.layout.buffers import Slot, allocate, pack


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor on the host without anything to it, and not expanded."""
    if type(value) is not torch.Tensor or value.is_nested:
        return False
    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
        return False
    # A copy of an expanded one would take up what only seems to be there.
    return all(step or size < 2 for size, step in zip(value.shape, value.stride(), strict=True))


def gather(leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Run]]:
    """Copy leaves into one storage, those of a dtype one after the other.

    Args:
        leaves: plain CPU tensors of any shapes and dtypes.

    Returns:
        The storage, uint8 ``[nbytes]``, and where in it the leaves of each dtype are.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(number)
    slots, nbytes = pack(
        [(dtype, (sum(leaves[n].numel() for n in group),)) for dtype, group in groups.items()]
    )
    storage = allocate(nbytes)
    runs = []
    for slot, group in zip(slots, groups.values(), strict=True):
        torch.cat([leaves[n].reshape(-1) for n in group], out=slot.view(storage))
        runs.append(Run(slot, group, [tuple(leaves[n].shape) for n in group]))
    return storage, runs


@dataclass(frozen=True)
class Run:
    """Leaves of one dtype in a storage.

    Attributes:
        slot: where they are, one after the other.
        numbers: which leaves they are.
        shapes: the shape of each.
    """

    slot: Slot
    numbers: list[int]
    shapes: list[tuple[int, ...]]


def scatter(storage: torch.Tensor, runs: Sequence[Run]) -> dict[int, torch.Tensor]:
    """Return the leaves by number, as views of the storage that ``gather`` made."""
    out: dict[int, torch.Tensor] = {}
    for run in runs:
        counts = [math.prod(shape) for shape in run.shapes]
        parts = torch.split(run.slot.view(storage), counts)
        for number, part, shape in zip(run.numbers, parts, run.shapes, strict=True):
            out[number] = part.view(shape)
    return out


def gathered(batch: Any, move: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Any:
    """Return ``batch`` with its plain leaves in one storage, which ``move`` makes of theirs.

    They are copied into one first where they are not in one.
    """
    leaves: list[torch.Tensor] = []
    batch.apply(leaves.append, filter_empty=True)
    parts = [parts_of(leaf) for leaf in leaves]
    moved = iter(_moved([x for some in parts for x in some if is_plain(x)], move))
    made = iter(
        [
            _joined(leaf, [next(moved) if is_plain(x) else move(x) for x in some])
            for leaf, some in zip(leaves, parts, strict=True)
        ]
    )
    return batch.apply(lambda leaf: next(made), filter_empty=False, propagate_lock=True, **options)


def _moved(
    leaves: Sequence[torch.Tensor], move: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    if not leaves:
        return []
    if not in_one(leaves):
        copy, runs = gather(leaves)
        placed = scatter(move(copy), runs)
        return [placed[number] for number in range(len(leaves))]
    whole = torch.empty(0, dtype=torch.uint8).set_(leaves[0].untyped_storage())
    storage = move(whole).untyped_storage()
    return [
        torch.empty(0, dtype=leaf.dtype, device=storage.device).set_(
            storage, leaf.storage_offset(), leaf.shape, leaf.stride()
        )
        for leaf in leaves
    ]


def in_one(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether leaves are in one storage that holds little else."""
    own = leaves[0].untyped_storage()
    at, nbytes = own.data_ptr(), sum(leaf.nbytes for leaf in leaves)
    return 2 * nbytes >= own.nbytes() and all(
        leaf.untyped_storage().data_ptr() == at for leaf in leaves
    )


def parts_of(leaf: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a leaf consists of: a jagged one of several."""
    if not leaf.is_nested or leaf.layout is not torch.jagged:
        return [leaf]
    nested: Any = leaf
    return [
        part for part in (nested.values(), nested.offsets(), nested.lengths()) if part is not None
    ]


def _joined(leaf: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if not leaf.is_nested or leaf.layout is not torch.jagged:
        return parts[0]
    nested: Any = leaf
    values, offsets, *lengths = parts
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths[0] if lengths else None, jagged_dim=nested._ragged_idx
    )
