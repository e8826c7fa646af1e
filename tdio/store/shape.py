"""Batch sizes and dim names of the levels of a store, before and after an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tdio._td import TensorDict
from tdio.layout.index import Rows
from tdio.layout.levels import Level
from tdio.layout.paths import parents
from tdio.wire.reading import StoreInfo


@dataclass(frozen=True)
class Frame:
    """The level that an index is applied to.

    Attributes:
        prefix: path of the level, "" for the root.
        batch: its batch size, ``[*]``; every leaf below starts with it.
        stack: position of the stack dim in ``batch``, or None.
    """

    prefix: str
    batch: tuple[int, ...]
    stack: int | None

    @classmethod
    def of(cls, info: StoreInfo, prefix: str) -> Frame:
        """Return the frame of a level of the whole store."""
        return cls(prefix, (*info.batch, *_extra(info, prefix)), info.stack)

    @classmethod
    def of_element(cls, info: StoreInfo, prefix: str) -> Frame:
        """Return the frame of a level of one element of a lazy stack."""
        return cls(prefix, (*info.inner, *_extra(info, prefix)), None)


def _extra(info: StoreInfo, prefix: str) -> tuple[int, ...]:
    """Return the batch dims that a nested level has beyond those of the root."""
    level = nearest(info, prefix)
    if level is None:
        return ()
    extra = level.batch[len(info.nested) :]
    # A dim that differs between elements is no batch dim of the whole.
    return extra[: extra.index(-1)] if -1 in extra else extra


def nearest(info: StoreInfo, prefix: str) -> Level | None:
    """Return what is stored of a level, or of the nearest nested one above it: it inherits."""
    for path in reversed([*parents(prefix), prefix] if prefix else []):
        if path in info.levels:
            return info.levels[path]
    return None


def names_of(info: StoreInfo, frame: Frame) -> list[str | None] | None:
    """Return the names of the dims of a level, or None where it has none."""
    level = nearest(info, frame.prefix) if frame.prefix else info.levels.get("")
    if level is None or not level.names:
        return None
    names = list(level.names)
    if frame.prefix and frame.stack is not None:
        root = info.levels.get("")
        names.insert(frame.stack, root.names[frame.stack] if root and root.names else None)
    if not frame.prefix and frame.stack is None and info.stack is not None:
        del names[info.stack]
    return names[: len(frame.batch)]


def levels_at(
    info: StoreInfo, frame: Frame, rows: Rows | None, items: tuple[Any, ...] | None
) -> dict[str, Level]:
    """Return what the levels under ``frame`` are after an index, by path relative to it."""
    out: dict[str, Level] = {}
    start = frame.prefix + "." if frame.prefix else ""
    for path, level in info.levels.items():
        if path != frame.prefix and not (path and path.startswith(start)):
            continue
        base = info.batch if frame.stack is not None or info.stack is None else info.inner
        batch = base if not path else (*base, *level.batch[len(info.nested) :])
        if frame.stack is not None and -1 in batch:
            batch = batch[: batch.index(-1)]
        names = names_of(info, Frame(path, batch, frame.stack))
        if rows is not None:
            if names and items:
                names = TensorDict(batch_size=batch, names=names)[items].names  # type: ignore[arg-type]
            batch = (*rows.shape, *batch[rows.depth :])
        relative = path[len(start) :] if path != frame.prefix else ""
        out[relative] = Level(batch, tuple(names or ()), level.kind if path else "")
    return out
