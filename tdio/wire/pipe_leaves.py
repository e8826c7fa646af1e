"""The header of a tensordict that is sent leaf by leaf (``consolidated=False``)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from tdio.errors import ProtocolError
from tdio.wire.pipe_schema import sizes

#: Every dtype that torch knows by name: a leaf travels as its own bytes, whatever they mean.
DTYPES = {f"torch.{name}": v for name, v in vars(torch).items() if isinstance(v, torch.dtype)}
#: These have no plain byte view.
_OPAQUE = frozenset(str(v) for v in DTYPES.values() if "quint" in str(v) or "qint" in str(v))

Path = tuple[str, ...]


@dataclass(frozen=True)
class Stack:
    """The values of a non-tensor stack: nested lists, its batch size, its stack dim."""

    values: list[Any]
    batch: tuple[int, ...]
    stack_dim: int


@dataclass(frozen=True)
class LeavesHeader:
    """What follows, in the order in which it follows.

    Attributes:
        batch: batch size of every level.
        leaves: path, dtype and shape of each tensor.
        unbatched: those to wrap as UnbatchedTensor.
        values: non-tensor entries: a plain value, or a ``Stack``.
    """

    batch: tuple[int, ...]
    leaves: list[tuple[Path, torch.dtype, tuple[int, ...]]]
    unbatched: frozenset[Path]
    values: dict[Path, Any]

    def nbytes(self) -> list[int]:
        """Return the size of each message that follows."""
        return [math.prod(shape) * dtype.itemsize for _, dtype, shape in self.leaves]


def parse_leaves(text: bytes, limit: int, where: str) -> LeavesHeader:
    """Read and check the header; the leaves it announces have at most ``limit`` bytes together.

    Raises:
        ProtocolError: anything that does not describe the leaves of one tensordict.
    """
    try:
        tree = json.loads(text)
        if type(tree) is not dict:
            raise ValueError("it is not an object")
        batch = sizes(tree.get("batch_size", []))
        header = LeavesHeader(
            batch,
            _tensors(tree["keys"], tree["dtypes"], tree["shapes"]),
            frozenset(_path(key) for key in _list(tree.get("unbatched", []), "unbatched")),
            dict(_value(item, batch) for item in _list(tree.get("non_tensors", []), "non_tensors")),
        )
        _check(header, len(_list(tree.get("non_tensors", []), "non_tensors")))
        if sum(header.nbytes()) > limit:
            raise ValueError(f"its leaves have {sum(header.nbytes())} bytes, the limit is {limit}")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        message = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ProtocolError(f"{where} sent a header that is refused: {message}") from error
    return header


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{what} is no list")
    return value


def _path(key: Any, depth: int = 0) -> Path:
    if type(key) is str:
        return (key,)
    if type(key) is list and key and depth < 8:
        return tuple(part for item in key for part in _path(item, depth + 1))
    raise ValueError(f"{str(key)[:40]!r} is no key")


def _tensors(
    keys: Any, dtypes: Any, shapes: Any
) -> list[tuple[Path, torch.dtype, tuple[int, ...]]]:
    keys, dtypes, shapes = _list(keys, "keys"), _list(dtypes, "dtypes"), _list(shapes, "shapes")
    if not len(keys) == len(dtypes) == len(shapes):
        raise ValueError("keys, dtypes and shapes differ in length")
    for name in dtypes:
        if type(name) is not str or name not in DTYPES or name in _OPAQUE:
            raise ValueError(f"the dtype {str(name)[:40]!r} is unknown")
    return [
        (_path(key), DTYPES[name], sizes(shape))
        for key, name, shape in zip(keys, dtypes, shapes, strict=True)
    ]


def _value(item: Any, batch: tuple[int, ...]) -> tuple[Path, Any]:
    if type(item) is not list or len(item) not in (2, 4):
        raise ValueError("a non-tensor entry has neither two nor four items")
    if len(item) == 2:
        return _path(item[0]), item[1]
    own, dim = sizes(item[2]), item[3]
    if own[: len(batch)] != batch or type(dim) is not int or not 0 <= dim < len(own):
        raise ValueError(f"the stack {str(item[0])[:40]!r} does not fit the batch size")
    _check_nesting(item[1], own)
    return _path(item[0]), Stack(item[1], own, dim)


def _check_nesting(values: Any, shape: tuple[int, ...]) -> None:
    if not shape:
        return
    if len(_list(values, "a stack")) != shape[0]:
        raise ValueError("the values of a stack do not have its batch size")
    for value in values:
        _check_nesting(value, shape[1:])


def _check(header: LeavesHeader, n_values: int) -> None:
    paths = [path for path, _, _ in header.leaves]
    every = {*paths, *header.values}
    if len(every) != len(paths) + n_values:
        raise ValueError("a key occurs twice")
    if any(path[:i] in every for path in every for i in range(1, len(path))):
        raise ValueError("an entry lies below a leaf")
    if not header.unbatched <= set(paths):
        raise ValueError("an unbatched key has no tensor")
    for path, _, shape in header.leaves:
        if path not in header.unbatched and shape[: len(header.batch)] != header.batch:
            raise ValueError(f"the leaf {path!r} does not have the batch size"[:200])
