"""Conformance of what can be resumed: loaders, and nodes of ``torchdata.nodes``.

Each check takes a function that makes the thing anew, as a process that was restarted would.
Items are compared with ``same``; a state must survive JSON, so that it holds no data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection

from tdio._td import is_non_tensor

#: A checkpoint of positions is small; one that holds data is not.
MAX_STATE_BYTES = 4096


def same(a: Any, b: Any) -> bool:
    """Whether two items are equal, to the bit: of one dtype, shape and set of keys; NaN is NaN.

    Args:
        a: a tensor (also a nested one), a tensordict, a lazy stack, an array, or lists, tuples and
            dicts of them.
        b: likewise.
    """
    if is_tensor_collection(a):
        return is_tensor_collection(b) and a.batch_size == b.batch_size and _same_entries(a, b)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping):
        fits = isinstance(b, Mapping) and not is_tensor_collection(b) and a.keys() == b.keys()
        return fits and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.is_nested == b.is_nested and _same_tensor(a, b)
    if isinstance(a, np.ndarray):
        one = isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return one and a.tobytes() == b.tobytes()
    return bool(a == b)


def _same_entries(a: Any, b: Any) -> bool:
    if is_non_tensor(a) or is_non_tensor(b):
        return is_non_tensor(a) and is_non_tensor(b) and same(a.tolist(), b.tolist())
    if isinstance(a, LazyStackedTensorDict):
        return same(list(a.unbind(0)), list(b.unbind(0)))
    return set(a.keys()) == set(b.keys()) and all(same(a.get(k), b.get(k)) for k in set(a.keys()))


def _same_tensor(a: Any, b: Any) -> bool:
    if a.is_nested:
        return same([a.values(), a.offsets()], [b.values(), b.offsets()])
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    one, other = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


def through_json(state: Any) -> Any:
    """Return ``state`` as a checkpoint file would give it back.

    Raises:
        AssertionError: it is no JSON, or too large to be a position.
    """
    text = json.dumps(state, default=_not_json)
    assert len(text) <= MAX_STATE_BYTES, f"a state of {len(text)} bytes: it holds data"
    return json.loads(text)


def _not_json(value: Any) -> Any:
    raise AssertionError(f"the state holds a {type(value).__name__}: {value!r}")


def run_resume_test(
    make: Callable[[], Any], *, json_state: bool = True, ends_first: bool = False
) -> None:
    """Check that a loader resumes exactly: in the middle, at the end, and twice in one epoch.

    Args:
        make: returns a new loader with ``__iter__``, ``state_dict`` and ``load_state_dict``:
            a ``torchdata.nodes.Loader``, a ``StatefulDataLoader``. An epoch has 3 items at least.
        ends_first: a state of the last item leads to the end of its epoch, and the next one comes
            after that: as a ``StatefulDataLoader`` does it, whose user had not asked for more.
        json_state: also check that a state is small JSON. A ``StatefulDataLoader`` keeps more
            than a position in its own part.

    Raises:
        AssertionError: it does not; the message says where.
    """
    keep = through_json if json_state else lambda state: state
    loader = make()
    first, second = list(loader), list(loader)
    assert len(first) >= 3, f"an epoch of {len(first)} items is too short to check"
    for stop in (1, len(first) // 2, len(first) - 1, len(first)):
        state = keep(_stopped(make(), stop))
        resumed = make()
        resumed.load_state_dict(state)
        rest = list(resumed)
        if stop == len(first):
            # At its end the next epoch comes whole, neither replayed nor dropped.
            if ends_first:
                _check(rest, [], "resumed at the end of an epoch")
                rest = list(resumed)
            _check(rest, second, "resumed at the end of an epoch")
            continue
        _check(rest, first[stop:], f"resumed after {stop} items")
        _check(list(resumed), second, f"the epoch after one that was resumed at {stop}")
    ended = make()
    list(ended)
    state = keep(ended.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    _check(list(resumed), second, "resumed after an epoch")
    state = keep(_stopped(make(), 1))
    again = make()
    again.load_state_dict(state)
    state = keep(_stopped(again, 1))
    resumed = make()
    resumed.load_state_dict(state)
    _check(list(resumed), first[2:], "resumed twice in one epoch")


def _stopped(loader: Any, count: int) -> Any:
    """Return the state of a loader whose user has got ``count`` items."""
    items: Iterator[Any] = iter(loader)
    assert len(list(islice(items, count))) == count
    return loader.state_dict()


def run_node_resume_test(make: Callable[[], Any]) -> None:
    """Check the contract of a ``torchdata.nodes.BaseNode``: ``reset``, ``next``, ``get_state``.

    Args:
        make: returns a new node whose passes have 3 items at least.

    Raises:
        AssertionError: it does not keep it; the message says where.
    """
    node = make()
    initial = through_json(node.state_dict())
    first = [next(node), next(node)]
    middle = through_json(node.state_dict())
    first += list(node)
    assert len(first) >= 3, f"a pass of {len(first)} items is too short to check"
    end = through_json(node.state_dict())
    node.reset()
    second = list(node)
    for where, state, left in (
        ("at the beginning", initial, first),
        ("in the middle", middle, first[2:]),
        ("at the end", end, []),
    ):
        for resumed in (node, make()):
            resumed.reset(state)
            assert through_json(resumed.state_dict()) is not None
            _check(list(resumed), left, f"reset to a state {where}")
            resumed.reset()
            _check(list(resumed), second, f"the pass after a reset to a state {where}")


def _check(got: list[Any], expected: list[Any], where: str) -> None:
    assert len(got) == len(expected), f"{where}: {len(got)} items instead of {len(expected)}"
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert same(a, b), f"{where}: item {number} differs"
