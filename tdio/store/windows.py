"""Reads of windows: steps ``[first, first + length)`` of elements, only their bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tdio._td import TensorDict, consolidated, value_entry
from tdio.errors import IndexOutOfRange, InvalidIndex
from tdio.layout.buffers import pack
from tdio.layout.plan import Ranges, Selection, plan_rows
from tdio.layout.spec import Int64Array, LeafSpec
from tdio.layout.values import ValueSpec
from tdio.store.entries import decoded
from tdio.store.fetching import Plan, fetch
from tdio.store.handle import Handle
from tdio.store.placing import landing
from tdio.wire.reading import Spec
from tdio.wire.requests import Operation


def lengths(spec: LeafSpec) -> Int64Array:
    """Return the number of steps of each element, int64 ``[N]``: its first dim."""
    if spec.shapes is None:
        return np.full(spec.shape[0], spec.shape[1], np.int64)
    return np.ascontiguousarray(spec.shapes[:, 0])


def step_shape(spec: LeafSpec, where: str) -> tuple[int, ...]:
    """Return the shape of one step, the same in all elements.

    Raises:
        InvalidIndex: elements without a first dim, or whose other dims differ.
    """
    if spec.shapes is None:
        shape = spec.shape[1:]
    else:
        if len(spec.shapes) and (spec.shapes[:, 1:] != spec.shapes[0, 1:]).any():
            raise InvalidIndex(
                f"{where}: the elements of {spec.path!r} differ in more than their first dim, so "
                "windows of it have no common shape; leave it out with keys= or key="
            )
        shape = spec.element_shape(0) if len(spec.shapes) else ()
    if not shape:
        raise InvalidIndex(f"{where}: the elements of {spec.path!r} have no dim to take windows of")
    return shape[1:]


def tensors_of(specs: Mapping[str, Spec]) -> dict[str, LeafSpec]:
    """Return the entries that are tensors."""
    return {path: spec for path, spec in specs.items() if isinstance(spec, LeafSpec)}


def read_windows(
    handle: Handle,
    paths: Sequence[str],
    sliced: Sequence[str],
    elements: Int64Array,
    firsts: Int64Array,
    length: int,
    device: torch.device | None = None,
) -> TensorDict:
    """Read B windows, in one round trip; their leaves share one storage.

    Args:
        handle: a store with one batch dim.
        paths: the entries to read.
        sliced: those of them to take windows of; of the others an element's whole value is read.
        elements: the element of each window, int64 ``[B]``.
        firsts: the first step of each window, int64 ``[B]``.
        length: steps of a window, T.
        device: device of the result.

    Returns:
        A TensorDict ``[B]``: sliced entries ``[B, T, *]``, others ``[B, *]``; of those that are no
        tensors the value of each window's element.

    Raises:
        IndexOutOfRange: the store has become shorter since the windows were computed.
    """

    def planning() -> Operation[Plan]:
        where = str(handle.location)
        found = yield from handle.load(paths)
        specs = tensors_of(found)
        values = [spec for spec in found.values() if isinstance(spec, ValueSpec)]
        count = len(elements)
        plans: list[Ranges] = []
        leaves: list[tuple[torch.dtype, tuple[int, ...]]] = []
        whole = Selection(elements)
        for path, spec in specs.items():
            if path not in sliced:
                shape = spec.shape[1:]
                plans.append(plan_rows(whole, math.prod(shape) * spec.dtype.itemsize))
                leaves.append((spec.dtype, (count, *shape)))
                continue
            if count and (firsts + length > lengths(spec)[elements]).any():
                raise IndexOutOfRange(
                    f"{where}: elements of {path!r} have become shorter; open the dataset again"
                )
            step = step_shape(spec, where)
            row_bytes = math.prod(step) * spec.dtype.itemsize
            rows = _first_rows(spec, elements, row_bytes) + firsts
            steps = (rows[:, None] + np.arange(length)).reshape(-1)
            plans.append(plan_rows(Selection(steps), row_bytes))
            leaves.append((spec.dtype, (count, length, *step)))
        slots, nbytes = pack(leaves)
        landed = yield from landing(handle, list(specs.values()), enumerate(plans), slots, nbytes)

        def finish(blobs: list[bytes | None]) -> TensorDict:
            placed = dict(zip(specs, slots, strict=True))
            others = {
                spec.path: _value_of_each(decoded(handle, spec, blob), elements)
                for spec, blob in zip(values, blobs, strict=True)
            }
            return consolidated(landed.storage(device), placed, (count,), device, values=others)

        return Plan(landed.reads, [spec.path for spec in values], finish)

    out: TensorDict = handle.client.read(lambda: handle.doubting(lambda: fetch(handle, planning)))
    return out


def _value_of_each(value_dims: tuple[Any, int], elements: Int64Array) -> Any:
    """Return a non-tensor entry: the value of the element of each window."""
    value, dims = value_dims
    chosen = [value[at] for at in elements.tolist()] if dims else value
    return value_entry(chosen, 1 if dims else 0, (len(elements),))


def _first_rows(spec: LeafSpec, elements: Int64Array, row_bytes: int) -> Int64Array:
    """Return where elements begin, in steps of the whole entry."""
    if spec.offsets is None:
        return elements * spec.shape[1]
    return spec.offsets[elements] // max(1, row_bytes)
