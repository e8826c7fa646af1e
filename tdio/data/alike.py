"""The samples of a batch: what they have in common, and where they must not differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdio._td import _is_leaf_nontensor, is_non_tensor
from tdio.errors import EntryMismatch, EntryNotFound
from tdio.layout.paths import SEPARATOR, Key, path_of


def samples_of(batch: Any) -> list[Any]:
    """Return the samples of a list or of a ready batch."""
    if is_tensor_collection(batch):
        if not batch.batch_size or not batch.batch_size[0]:
            raise ValueError(
                f"a batch of batch size {list(batch.batch_size)} has no samples to put together"
            )
        return list(batch.unbind(0))
    if (
        not isinstance(batch, (list, tuple))
        or not batch
        or not all(map(is_tensor_collection, batch))
    ):
        raise TypeError(f"a batch is a TensorDict or a list of them, not {type(batch).__name__}")
    return list(batch)


def inner_size(samples: Sequence[Any]) -> tuple[int, ...]:
    """Return the batch size of the samples, () where they differ."""
    sizes = {tuple(sample.batch_size) for sample in samples}
    return sizes.pop() if len(sizes) == 1 else ()


def tensors_of(sample: Any) -> dict[str, torch.Tensor]:
    """Return the tensor entries by path."""
    return {path_of(key): leaf for key, leaf in sample.items(True, True)}


def _kinds(sample: Any) -> dict[str, str]:
    """Return what each entry is, those that are no tensors too."""
    out = {}
    for key, value in sample.items(True, is_leaf=_is_leaf_nontensor):
        if isinstance(value, torch.Tensor):
            out[path_of(key)] = str(value.dtype)
        else:
            out[path_of(key)] = "a value" if is_non_tensor(value) else "a tensordict"
    return out


def check_alike(samples: Sequence[Any]) -> None:
    """Raise EntryMismatch where samples differ in their entries, or in the dtype of one."""
    first = _kinds(samples[0])
    for number, sample in enumerate(samples[1:], 1):
        kinds = _kinds(sample)
        if odd := sorted(kinds.keys() ^ first.keys()):
            has, lacks = (0, number) if odd[0] in first else (number, 0)
            raise EntryMismatch(
                f"only some of the samples have the entries {odd}: sample {has} has {odd[0]!r}, "
                f"sample {lacks} has not"
            )
        for path, kind in kinds.items():
            if kind != first[path]:
                raise EntryMismatch(
                    f"{path!r} is {first[path]} in sample 0 and {kind} in sample {number}"
                )


def differing(samples: Sequence[Any]) -> dict[str, list[tuple[int, ...]]]:
    """Return the entries that differ in shape, with two of the shapes."""
    first = tensors_of(samples[0])
    out: dict[str, list[tuple[int, ...]]] = {}
    for sample in samples[1:]:
        leaves = tensors_of(sample)
        if leaves.keys() != first.keys():
            check_alike(samples)
        for path, leaf in leaves.items():
            if leaf.shape != first[path].shape:
                out.setdefault(path, [tuple(first[path].shape), tuple(leaf.shape)])
    return out


def chosen_paths(samples: Sequence[Any], keys: Sequence[Key] | None, inner: int) -> set[str]:
    """Return the paths of ``keys``; None stands for all tensors of more dims than ``inner``.

    Raises:
        EntryNotFound: the samples have no such tensor.
        EntryMismatch: it has no further dim, or is a nested tensor; a name holds a ".".
    """
    leaves = tensors_of(samples[0])
    for key in samples[0].keys(True, True):
        if any(SEPARATOR in part for part in ((key,) if isinstance(key, str) else key)):
            raise EntryMismatch(
                f"the key {key!r} of the samples holds a {SEPARATOR!r}, which stands for nesting "
                "in the names of entries; rename it, or use collate_lazy"
            )
    if keys is None:
        chosen = {path for path, leaf in leaves.items() if leaf.ndim > inner}
    else:
        chosen = set(map(path_of, keys))
    if missing := sorted(chosen - leaves.keys()):
        raise EntryNotFound(f"the samples have no tensor {missing[0]!r}; they have {list(leaves)}")
    for path in sorted(chosen):
        if leaves[path].is_nested or leaves[path].ndim <= inner:
            why = "is a nested tensor" if leaves[path].is_nested else f"has only {inner} dims"
            raise EntryMismatch(
                f"{path!r} {why}, so it cannot be padded or joined along its first dim below the "
                "batch size; leave it out of keys=, or use collate_lazy"
            )
    return chosen


def check_rest(samples: Sequence[Any], chosen: set[str], inner: int) -> None:
    """Refuse samples that differ elsewhere than in the first dim of ``chosen`` entries.

    Raises:
        EntryMismatch: naming the entry.
    """
    check_alike(samples)
    for path, (a, b) in differing(samples).items():
        same = (*a[:inner], *a[inner + 1 :]) == (*b[:inner], *b[inner + 1 :]) and len(a) == len(b)
        if path not in chosen or not same:
            raise EntryMismatch(
                f"the samples differ in the shape of {path!r} ({a} and {b}) elsewhere than in the "
                "first dim of an entry that keys= names; use collate_lazy"
            )


def common_size(samples: Sequence[Any], key: Any, level: Any) -> tuple[int, ...]:
    """Return the batch size of a nested level, the same in all samples.

    Raises:
        EntryMismatch: it is not.
    """
    for number, sample in enumerate(samples):
        if sample.get(key).batch_size != level.batch_size:
            raise EntryMismatch(
                f"the batch size of {path_of(key)!r} is {list(level.batch_size)} in sample 0 and "
                f"{list(sample.get(key).batch_size)} in sample {number}; use collate_lazy"
            )
    return tuple(level.batch_size)
