"""Consolidated buffers: one storage, whose leaves are aligned views."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

#: As in the consolidated layout of tensordict, each leaf starts at a multiple of 8 bytes; one of
#: complex128 at a multiple of 16, since torch views no others as that.
ALIGNMENT_BYTES = 8
_LARGEST_ITEM_BYTES = 16
_HUGE_BYTES = 4 * 1024 * 1024
_TORCH_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one leaf lies in a consolidated buffer: bytes ``[start, start + nbytes)``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the leaf as a view of ``storage``, shape ``self.shape``."""
        return views(storage, [self])[0]


def pack(leaves: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Slot], int]:
    """Lay leaves one after the other; return their slots and the total size in bytes."""
    slots: list[Slot] = []
    end = 0
    for dtype, shape in leaves:
        nbytes = math.prod(shape) * dtype.itemsize
        end += -end % dtype.itemsize
        slots.append(Slot(dtype, shape, end, nbytes))
        end += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return slots, end + -end % _LARGEST_ITEM_BYTES


def views(storage: torch.Tensor, slots: Sequence[Slot]) -> list[torch.Tensor]:
    """Return the leaves as views of ``storage``, uint8 ``[nbytes]``, each of the slot's shape.

    One torch call for each leaf: slicing and viewing take three, 20 us where this takes 5.
    """
    typed: dict[torch.dtype, torch.Tensor] = {}
    out = []
    for slot in slots:
        base = typed.get(slot.dtype)
        if base is None:
            base = typed[slot.dtype] = storage.view(slot.dtype)
        start = slot.start // slot.dtype.itemsize
        out.append(torch.as_strided(base, slot.shape, _strides(slot.shape), start))
    return out


@functools.lru_cache(1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(strides) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def allocate(nbytes: int) -> torch.Tensor:
    """Return an uninitialised uint8 storage ``[nbytes]``; every byte is to be received into.

    Padding between leaves stays uninitialised; readers of the leaves never see it. Large ones come
    from numpy, which asks the system for huge pages from 4 MiB on: to touch 160 MB of new memory
    takes 31 ms with them, 70 ms without.
    """
    if nbytes < _HUGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    block = np.empty(nbytes + _TORCH_ALIGNMENT, np.uint8)
    skip = -block.ctypes.data % _TORCH_ALIGNMENT
    return torch.from_numpy(block[skip : skip + nbytes])
