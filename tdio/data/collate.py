"""Collate functions that keep a batch in one storage."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.utils.data._utils.collate import default_collate_fn_map


def tensordict_collate(batch: Any) -> Any:
    """Return a ready batch unchanged, and stack a list of samples.

    Args:
        batch: what a ``DataLoader`` hands over: the batch that ``__getitems__`` returned, or a
            list of TensorDicts, batch size ``[*]`` each.

    Returns:
        A TensorDict ``[B, *]``, consolidated if its leaves share one storage; a lazy stack where
        the samples differ in shape.

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
    if isinstance(batch, TensorDictBase):
        return batch
    if not isinstance(batch, (list, tuple)) or not all(
        isinstance(sample, TensorDictBase) for sample in batch
    ):
        raise TypeError(f"a batch is a TensorDict or a list of them, not {type(batch).__name__}")
    stack = lazy_stack(list(batch), 0)
    shapes = [[leaf.shape for leaf in sample.values(True, True)] for sample in batch]
    if any(shape != shapes[0] for shape in shapes):
        return stack
    return stack.to_tensordict().consolidate(metadata=True)


def _default(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return tensordict_collate(batch)


# torch's registry of what its default collate does with a type: a DataLoader without collate_fn=
# would take a TensorDict for a mapping, and stack it again row by row.
default_collate_fn_map[TensorDict] = _default
