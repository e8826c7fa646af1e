"""Consolidated buffers: one storage, whose leaves are aligned views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: As in the consolidated layout of tensordict, each leaf starts at a multiple of 8 bytes.
ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class Slot:
    """Where one leaf lies in a consolidated buffer: bytes ``[start, start + nbytes)``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the leaf as a view of ``storage``, shape ``self.shape``."""
        flat = storage[self.start : self.start + self.nbytes]
        return flat.view(self.dtype).view(self.shape)


def pack(leaves: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Slot], int]:
    """Lay leaves one after the other; return their slots and the total size in bytes."""
    slots: list[Slot] = []
    end = 0
    for dtype, shape in leaves:
        nbytes = math.prod(shape) * dtype.itemsize
        slots.append(Slot(dtype, shape, end, nbytes))
        end += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return slots, end


def allocate(nbytes: int) -> torch.Tensor:
    """Return an uninitialised uint8 storage ``[nbytes]``; every byte is to be received into.

    Padding between leaves stays uninitialised; readers of the leaves never see it.
    """
    return torch.empty(nbytes, dtype=torch.uint8)
