"""Rows of successive tensordicts regrouped into batches of one size, each row copied once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tdio._td import consolidated
from tdio.data.batches import flat_leaves, stack_leaves
from tdio.errors import EntryMismatch, TdioError, UnsupportedValue
from tdio.layout.buffers import allocate, pack


class _Batch:
    """A batch that is being filled."""

    def __init__(self, like: Any, leaves: dict[str, torch.Tensor], rows: int):
        slots, nbytes = pack([(x.dtype, (rows, *x.shape[1:])) for x in leaves.values()])
        storage = allocate(nbytes)
        named = dict(zip(leaves, slots, strict=True))
        self.td = consolidated(storage, named, (rows, *like.batch_size[1:]), like.device)
        self._views = {path: slot.view(storage) for path, slot in named.items()}
        self._rows, self.filled = rows, 0

    def take(self, leaves: dict[str, torch.Tensor], start: int, rows: int, who: str) -> int:
        """Copy rows from ``start`` on, as many of ``rows`` as there is room for; return how many.

        ``who`` sent them, for errors.

        Raises:
            EntryMismatch: they do not fit to those that are in it.
        """
        views = self._views
        if leaves.keys() != views.keys():
            odd = sorted(leaves.keys() ^ views.keys())
            raise EntryMismatch(
                f"{who}: rebatch= needs the same entries in all tensordicts, and only some have "
                f"{odd}"
            )
        for path, leaf in leaves.items():
            view = views[path]
            if leaf.shape[1:] != view.shape[1:] or leaf.dtype != view.dtype:
                raise EntryMismatch(
                    f"{who}: rebatch= puts rows of one kind together; those of {path!r} are "
                    f"{tuple(leaf.shape[1:])} of {leaf.dtype} and were {tuple(view.shape[1:])} of "
                    f"{view.dtype}"
                )
        count = min(rows, self._rows - self.filled)
        into = slice(self.filled, self.filled + count)
        torch._foreach_copy_(
            [view[into] for view in views.values()],
            [leaves[path][start : start + count] for path in views],
        )
        self.filled += count
        return count

    @property
    def full(self) -> bool:
        return self.filled == self._rows

    def rest(self) -> Any:
        """Return a smaller batch of what is in it."""
        columns = {path: [view[: self.filled]] for path, view in self._views.items()}
        return stack_leaves(columns, self.td[: self.filled], None)


def rebatch(
    items: Iterator[tuple[Any, str]], rows: int, skip: int = 0
) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Yield batches of ``rows`` rows, the last one smaller, and how much was used up for each.

    Args:
        items: TensorDicts ``[B, *]`` of plain CPU tensors, B of any size, with who sent each; they
            may be overwritten when the next is asked for.
        rows: of a batch.
        skip: so many rows of the first are left out.

    Returns:
        Consolidated TensorDicts ``[rows, *]``; with each the number of items that were used up
        and of rows that were taken from the next one.

    Raises:
        UnsupportedValue: an item without a batch dim, or with entries that are no plain tensors.
        EntryMismatch: two items differ in an entry elsewhere than in the number of rows.
        TdioError: what ``items`` raised, after the rows that had arrived.
    """
    batch: _Batch | None = None
    lost: TdioError | None = None
    used = 0
    while True:
        try:
            item, who = next(items, (None, ""))
        except TdioError as error:
            lost, item = error, None
        if item is None:
            break
        used += 1
        leaves = flat_leaves(item)
        if leaves is None or not leaves or not item.batch_size:
            raise UnsupportedValue(
                f"{who}: rebatch= regroups the rows of tensordicts with a batch dim that hold "
                "tensors on the CPU (nested ones of the same batch size), not of "
                f"{type(item).__name__} {tuple(item.batch_size)} with {list(item.keys())}"
            )
        at, skip = skip, 0
        count = int(item.batch_size[0])
        while at < count:
            batch = batch or _Batch(item, leaves, rows)
            at += batch.take(leaves, at, count - at, who)
            if batch.full:
                ready, batch = batch.td, None
                yield ready, (used, 0) if at == count else (used - 1, at)
    if batch is not None:
        yield batch.rest(), (used, 0)
    if lost is not None:
        raise lost
