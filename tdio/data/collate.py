"""Collate functions that keep a batch in one storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data._utils.collate import default_collate_fn_map

from tdio._td import _is_leaf_nontensor, is_non_tensor
from tdio.data.alike import (
    check_alike,
    check_rest,
    chosen_paths,
    common_size,
    differing,
    inner_size,
    samples_of,
)
from tdio.data.batches import flat_leaves, one_storage, stack_leaves
from tdio.errors import EntryMismatch
from tdio.layout.paths import SEPARATOR, Key, path_of

Number = int | float | bool


def tensordict_collate(batch: Any) -> Any:
    """Return a ready batch as it is, stack samples of one shape, lazily stack others.

    Args:
        batch: what a ``DataLoader`` hands over: the batch that ``__getitems__`` returned, or a
            list of B TensorDicts or tensorclasses, batch size ``[*]`` each.

    Returns:
        A TensorDict ``[B, *]`` whose leaves share one storage; a lazy stack where the samples
        differ in shape. A ready batch is copied only if its leaves do not share a storage.

    Raises:
        TypeError: neither of the two.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tdio import tensordict_collate
        >>> samples = [TensorDict(x=torch.zeros(2)), TensorDict(x=torch.ones(2))]
        >>> tensordict_collate(samples)["x"].shape
        torch.Size([2, 2])
    """
    if isinstance(batch, LazyStackedTensorDict):
        return batch
    if is_tensor_collection(batch):
        return one_storage(batch)
    samples = samples_of(batch)
    return collate_stack(samples) if not differing(samples) else collate_lazy(samples)


def collate_stack(batch: Any) -> Any:
    """Stack samples of one shape.

    Args:
        batch: as in ``tensordict_collate``.

    Returns:
        A TensorDict or tensorclass ``[B, *]`` whose leaves share one storage, detached. Nested
        tensordicts keep their batch sizes and names, behind B.

    Raises:
        EntryMismatch: samples differ in their entries, in the shape or dtype of one, or in the
            batch size of a nested tensordict.
        TypeError: not a batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tdio import collate_stack
        >>> batch = collate_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.ones(2))])
        >>> batch.batch_size, batch.is_consolidated()
        (torch.Size([2]), True)
    """
    if is_tensor_collection(batch) and not isinstance(batch, LazyStackedTensorDict):
        return one_storage(batch)
    samples = samples_of(batch)
    columns = _columns(samples)
    if columns is not None:
        return stack_leaves(columns, samples[0], len(samples))
    check_alike(samples)
    for path, shapes in differing(samples).items():
        raise EntryMismatch(
            f"the samples differ in the shape of {path!r} ({shapes[0]} and {shapes[1]}), so they "
            "cannot be stacked; use collate_pad, collate_nested or collate_lazy"
        )
    return one_storage(_combine(samples, set(), lambda path, leaves: torch.stack(leaves)))


def _columns(samples: list[Any]) -> dict[str, list[torch.Tensor]] | None:
    """Return the leaves of all samples by path, or None where these do not say it all."""
    flats = [flat_leaves(sample) for sample in samples]
    first, size = flats[0], samples[0].batch_size
    for flat, sample in zip(flats, samples, strict=True):
        if first is None or flat is None or flat.keys() != first.keys():
            return None
        if sample.batch_size != size:
            return None
        for path, leaf in flat.items():
            if leaf.shape != first[path].shape or leaf.dtype != first[path].dtype:
                return None
    return {path: [flat[path] for flat in flats] for path in first or ()}  # type: ignore[index]


def collate_lazy(batch: Any) -> Any:
    """Stack samples lazily: each keeps its own shapes.

    Args:
        batch: as in ``tensordict_collate``.

    Returns:
        A ``LazyStackedTensorDict`` ``[B, *]`` of the samples, copied into one storage; a ready
        batch as it is. It crosses from worker to trainer, is pinned and moved as one storage.

    Raises:
        TypeError: not a batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tdio import collate_lazy
        >>> batch = collate_lazy([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.ones(5))])
        >>> [element["x"].shape[0] for element in batch.unbind(0)]
        [2, 5]
    """
    if isinstance(batch, LazyStackedTensorDict):
        return batch
    if not is_tensor_collection(batch):
        batch = LazyStackedTensorDict.lazy_stack(samples_of(batch), 0)
    return one_storage(batch)


def collate_pad(
    batch: Any,
    *,
    keys: Sequence[Key] | None = None,
    padding_value: Number | Mapping[Key, Number] = 0,
    padding_side: str | Mapping[Key, str] = "right",
    mask: str | None = "mask",
    lengths: str | None = "lengths",
) -> TensorDict:
    """Pad entries along their first dim below the sample's batch size, and stack them.

    Which entries are padded does not depend on the data, so every batch has the same entries.
    Pass arguments with ``functools.partial``.

    Args:
        batch: as in ``tensordict_collate``.
        keys: the entries to pad (``dataset.ragged_keys``); None: all that have such a dim.
            Others are stacked.
        padding_value: one for all, or one for each padded key (0 for those left out).
        padding_side: ``"right"`` or ``"left"``; one for all, or one for each padded key.
        mask: name of the nested tensordict of masks, bool ``[B, *, T]``, True where data is; None
            for none.
        lengths: name of the nested tensordict of lengths, int64 ``[B, *]``; None for none.

    Returns:
        A TensorDict ``[B, *]`` whose leaves share one storage: padded entries ``[B, *, T, ...]``
        with T the longest of the batch, the others, and ``mask`` and ``lengths`` with an entry
        of the same key for each padded one.

    Raises:
        EntryNotFound: a key that the samples do not have.
        EntryMismatch: samples differ in another dim, a dtype or in their entries, or have one of
            the name of ``mask`` or ``lengths``; an entry cannot be padded, or not hold the value.
        ValueError: ``padding_value`` or ``padding_side`` names an entry that is not padded, there
            is no such side, or a ready batch is empty.
        TypeError: not a batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tdio import collate_pad
        >>> batch = collate_pad([TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(3))])
        >>> batch["x"].tolist(), batch["lengths", "x"].tolist()
        ([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [1, 3])
        >>> batch["mask", "x"].tolist()
        [[True, False, False], [True, True, True]]
    """
    samples = samples_of(batch)
    inner = len(inner_size(samples))
    chosen = chosen_paths(samples, keys, inner)
    if taken := {mask, lengths} & set(samples[0].keys()):
        raise EntryMismatch(
            f"the samples have entries {sorted(map(str, taken))}: give other names by mask= and "
            "lengths="
        )
    if mask is not None and mask == lengths:
        raise ValueError(f"mask= and lengths= are both {mask!r}")
    _check_settings(padding_value, padding_side, chosen)
    sizes: dict[str, torch.Tensor] = {}

    def combine(path: str, leaves: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if path not in chosen:
            return torch.stack(leaves)
        sizes[path] = torch.tensor([leaf.shape[inner] for leaf in leaves])
        value, side = _setting(padding_value, path, 0), _setting(padding_side, path, "right")
        value = _checked_value(path, leaves[0].dtype, value)
        # dim 0 of each sample is padded.
        moved = [leaf.movedim(inner, 0) for leaf in leaves]
        return _padded(moved, value, side).movedim(1, inner + 1)

    check_rest(samples, chosen, inner)
    out = _combine(samples, chosen, combine)
    out = out.to_tensordict() if type(out) is not TensorDict else out
    ones = (1,) * inner
    for path, counts in sizes.items():
        per_sample = counts.view(-1, *ones).expand(out.batch_size)
        steps = torch.arange(int(counts.max()))
        if _setting(padding_side, path, "right") == "left":
            steps = steps.flip(0)
        if lengths is not None:
            out.set((lengths, *path.split(SEPARATOR)), per_sample)
        if mask is not None:
            out.set((mask, *path.split(SEPARATOR)), steps < per_sample.unsqueeze(-1))
    return one_storage(out)  # type: ignore[no-any-return]


def collate_nested(batch: Any, *, keys: Sequence[Key] | None = None) -> Any:
    """Join entries of different lengths to jagged nested tensors, without padding.

    Each entry has offsets of its own. For an operation on two of them, which torch allows only
    over the same offsets, join one anew: ``torch.nested.nested_tensor_from_jagged(a.values(),
    b.offsets())``.

    Args:
        batch: as in ``tensordict_collate``; samples of batch size ``[]``.
        keys: the entries to join (``dataset.ragged_keys``); None: all that have a dim. Others
            are stacked.

    Returns:
        A TensorDict ``[B]`` whose leaves share one storage; the entries are
        ``torch.nested.nested_tensor`` of layout ``torch.jagged``, ``[B, j, ...]``.

    Raises:
        EntryNotFound: a key that the samples do not have.
        EntryMismatch: samples differ in another dim than their first, a dtype or in their
            entries, or have batch dims.
        ValueError: a ready batch is empty.
        TypeError: not a batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tdio import collate_nested
        >>> batch = collate_nested([TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(3))])
        >>> batch["x"].offsets().tolist()
        [0, 1, 4]
    """
    samples = samples_of(batch)
    if inner_size(samples):
        raise EntryMismatch("collate_nested takes samples without batch dims; use collate_pad")
    chosen = chosen_paths(samples, keys, 0)

    def combine(path: str, leaves: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if path not in chosen:
            return torch.stack(leaves)
        offsets = torch.tensor([0, *(leaf.shape[0] for leaf in leaves)]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(leaves), offsets)

    check_rest(samples, chosen, 0)
    return one_storage(_combine(samples, chosen, combine))


def _check_settings(values: Any, sides: Any, chosen: set[str]) -> None:
    for name, given in (("padding_value", values), ("padding_side", sides)):
        for key in given if isinstance(given, Mapping) else ():
            if path_of(key) not in chosen:
                raise ValueError(f"{name}= names {key!r}, but padded are {sorted(chosen)}")
    for side in sides.values() if isinstance(sides, Mapping) else [sides]:
        if side not in ("left", "right"):
            raise ValueError(f"padding_side is {side!r}; it must be 'left' or 'right'")


def _checked_value(path: str, dtype: torch.dtype, value: Any) -> Any:
    """Return a padding value as a number of Python.

    Raises:
        EntryMismatch: the entry cannot hold it.
    """
    number = value.item() if isinstance(value, (np.generic, torch.Tensor)) else value
    if not isinstance(number, (int, float)):
        fits = False
    elif dtype.is_floating_point or dtype.is_complex:
        fits = number in (math.inf, -math.inf) or not abs(number) > torch.finfo(dtype).max
    else:
        limits = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = limits[0] <= number <= limits[1] and number == int(number)
    if not fits:
        raise EntryMismatch(f"padding_value={value!r} cannot be held by {path!r}, which is {dtype}")
    return number


#: Above this pad_sequence, which takes a float, would pad with another number.
_EXACT = 2**53


def _padded(rows: list[torch.Tensor], value: Any, side: str) -> torch.Tensor:
    if not isinstance(value, int) or abs(value) <= _EXACT:
        return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
    padded = pad_sequence(rows, batch_first=True, padding_side=side)
    counts = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    steps = torch.arange(padded.shape[1])
    beyond = (steps.flip(0) if side == "left" else steps) >= counts
    beyond = beyond.view(*beyond.shape, *(1,) * (padded.ndim - 2))
    # As int64 in any case: torch fills no uint64.
    padded.view(torch.int64).masked_fill_(beyond, value - (1 << 64) * (value >= 1 << 63))
    return padded


def _setting(given: Any, path: str, default: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    return {path_of(key): value for key, value in given.items()}.get(path, default)


def _combine(
    samples: Sequence[Any],
    chosen: set[str],
    how: Callable[[str, tuple[torch.Tensor, ...]], torch.Tensor],
) -> Any:
    """Return ``how`` of each entry of all samples; non-tensor entries become stacks.

    Args:
        samples: alike.
        chosen: entries whose samples' first dim is no dim of the result.
        how: is called with a path and the leaves of all samples.
    """
    batch = (len(samples), *inner_size(samples))
    first, *others = samples

    def named(key: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return how(path_of(key), leaves)

    values = [dict(sample.non_tensor_items(include_nested=True)) for sample in samples]
    out = first.named_apply(named, *others, batch_size=batch, nested_keys=True, filter_empty=False)
    for key, level in _levels(first):
        into = out.get(key) if key else out
        size, below = batch, f"{path_of(key)}{SEPARATOR}" if key else ""
        if key and not any(path.startswith(below) for path in chosen):
            size = (len(samples), *common_size(samples, key, level))
            into.batch_size = size
        if any(level.names):
            into.names = [None, *level.names[: len(size) - 1]]
    for key in values[0]:
        out.set(key, NonTensorStack(*(value[key] for value in values)))
    return out


def _levels(sample: Any) -> list[tuple[Any, Any]]:
    """Return the nested tensordicts by key, outer ones first; the sample's own key is ()."""
    nested = [
        (key, value)
        for key, value in sample.items(True, is_leaf=_is_leaf_nontensor)
        if is_tensor_collection(value) and not is_non_tensor(value)
    ]
    return [((), sample), *nested]


def _default(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return tensordict_collate(batch)


# torch's registry of what its default collate does with a type: a DataLoader without collate_fn=
# would take a TensorDict for a mapping, and stack it again row by row.
default_collate_fn_map[TensorDict] = _default
