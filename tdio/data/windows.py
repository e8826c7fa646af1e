"""Windows over elements of different lengths: which are there, and reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tdio.errors import EntryMismatch, EntryNotFound, InvalidIndex
from tdio.layout.paths import Key, path_of
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.store.handle import Handle
from tdio.store.windows import lengths, read_windows, step_shape, tensors_of


class Windows:
    """The windows of a store: ``length`` steps each, one begins every ``stride`` steps.

    Computed from the offset table; elements shorter than a window have none.

    Attributes:
        handle: the store, with one batch dim.
        paths: the entries to read.
        sliced: those of them to take windows of.
        length: steps of a window.
        stride: steps from one window to the next.
        ends: how many windows the elements up to and including each have, int64 ``[N]``.
    """

    def __init__(
        self,
        handle: Handle,
        paths: Sequence[str],
        length: int,
        stride: int,
        key: Key | Sequence[Key] | None,
        prefix: str,
    ) -> None:
        self.handle, self.paths, where = handle, list(paths), str(handle.location)
        self.length, self.stride = length, stride
        if len(handle.info.batch) != 1:
            raise InvalidIndex(
                f"{where} has the batch size {list(handle.info.batch)}; windows are taken of "
                "stores with one batch dim, the elements"
            )
        specs = tensors_of(handle.specs(self.paths))
        ragged = {path for path, spec in specs.items() if spec.ragged}
        self.sliced = _named(specs, key, prefix, where) if key is not None else ragged
        if not self.sliced:
            raise InvalidIndex(
                f"{where} has no ragged entry: name those to take windows of by key="
            )
        if left := sorted(ragged - self.sliced):
            raise EntryMismatch(
                f"{where}: {left[0]!r} is ragged but not in key=: it has no value of one shape; "
                "leave it out with keys="
            )
        for path in self.sliced:
            step_shape(specs[path], where)  # raises where windows would have no common shape
        steps = {path: lengths(specs[path]) for path in self.sliced}
        first, *others = sorted(steps)
        for path in others:
            if not np.array_equal(steps[path], steps[first]):
                raise EntryMismatch(
                    f"{where}: {first!r} and {path!r} differ in their numbers of steps; take "
                    "windows of one of them by key=, and leave the other out with keys="
                )
        self.ends: Int64Array = np.cumsum(
            np.maximum(0, (steps[first] - self.length) // self.stride + 1), dtype=np.int64
        )

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the element and the first step of windows, int64 ``[B]`` each."""
        elements = np.searchsorted(self.ends, positions, side="right")
        before = np.where(elements > 0, self.ends[elements - 1], 0)
        return elements, (positions - before) * self.stride

    def read(self, positions: Int64Array, device: torch.device | None) -> Any:
        """Read windows, one round trip; see ``read_windows``."""
        elements, firsts = self.places(positions)
        return read_windows(
            self.handle, self.paths, sorted(self.sliced), elements, firsts, self.length, device
        )


def _named(
    specs: dict[str, LeafSpec], key: Key | Sequence[Key], prefix: str, where: str
) -> set[str]:
    """Return the paths that ``key`` names: one key, or a list of them."""
    keys = key if isinstance(key, list) else [key]
    start = f"{prefix}." if prefix else ""
    paths = {start + path_of(one) for one in keys}  # type: ignore[arg-type]
    if missing := sorted(paths - specs.keys()):
        raise EntryNotFound(f"{where}: key= names {missing[0]!r}, which is not among {list(specs)}")
    return paths
