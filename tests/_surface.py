"""The comparing half of the walk over TensorDictBase: kinds of stores, cases, and one comparison.

A case is a call. It is made on a stored tensordict and on the local one that it was copied from;
the results, and what is left of both afterwards, must be the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor, lazy_stack
from tensordict.base import is_tensor_collection

from tdio import LazyStackedTensorDictStore, TensorDictStore, open_store
from tdio.store.element import ElementView

STORES = (TensorDictStore, LazyStackedTensorDictStore, ElementView)
PLAIN, NESTED, LAZY, RAGGED, ELEMENT = KINDS = ("plain", "nested", "lazy", "ragged", "element")
STACKS = (LAZY, RAGGED, ELEMENT)


class Side:
    """What a call may use beside its tensordict."""

    def __init__(self, kind: str, data: str, where: Path, conn: dict[str, Any]) -> None:
        self._kind, self._data, self._where = kind, data, where
        self.conn = conn

    @cached_property
    def other(self) -> Any:
        """A local tensordict like the one that is called, with other values."""
        return local(self._kind, self._data, seed=100)[1]

    @cached_property
    def tmp(self) -> Path:
        """A directory of this side's own."""
        self._where.mkdir()
        return self._where


@dataclass
class Case:
    """One call of one public name.

    Args:
        call: what is called, on either side.
        data: the entries: a name in ``DATA``.
        kinds: where the call is made.
        stored: what is called on the stored side, where that needs other arguments.
        wants: by kind, what the result is compared with, where the local call says less.
        raises: the kinds where tensordict itself raises, so that a store must raise as well.
        refuses: by kind, the error of a store and a part of its message: what to call instead.
        view: the result may be a store (one that shows the same entries).
        state: compare what a second handle reads afterwards.
        grows: the call adds an entry: locally the other elements of a stack lack it, on the server
            they have zeros; what the element itself holds is compared.
    """

    call: Callable[[Any, Side], Any]
    data: str = "floats"
    kinds: tuple[str, ...] = KINDS
    stored: Callable[[Any, Side], Any] | None = None
    wants: Mapping[str, Callable[[Any, Side], Any]] = field(default_factory=dict)
    raises: tuple[str, ...] = ()
    refuses: Mapping[str, tuple[type[Exception], str]] = field(default_factory=dict)
    view: bool = False
    state: bool = True
    grows: bool = False


class Cases(dict[str, Case]):
    """Cases by name: a public name, or one with a variant, as in ``sum/dim``."""

    def add(self, name: str, *args: Any, **kwargs: Any) -> None:
        assert name not in self, name
        self[name] = Case(*args, **kwargs)


def leaf(t: Any) -> str:
    """Return the name of an entry of one shape for all elements."""
    return "b" if "b" in t.keys() else "c"


#: The kinds with an entry "nested", and those whose entries have one shape.
ROOTS = (PLAIN, LAZY, RAGGED, ELEMENT)
FIXED = (PLAIN, NESTED, LAZY)

#: Refusals: the copy to call it on, ...
COPY_FIRST = dict.fromkeys(KINDS, ((RuntimeError, NotImplementedError), "to_tensordict()"))
#: ... the same where there are two dims to move, ...
MORE_DIMS = {kind: COPY_FIRST[kind] for kind in KINDS if kind != ELEMENT}
#: ... a class method that cannot say where the store is to be, ...
LOCAL_FIRST: dict[str, Any] = {
    **dict.fromkeys((PLAIN, NESTED), ((TypeError, NotImplementedError), "from_tensordict")),
    **dict.fromkeys((LAZY, RAGGED), (NotImplementedError, "from_lazy_stack")),
    ELEMENT: (NotImplementedError, "store[i]"),
}
#: ... and what one element cannot have of its own: keys, dim names, non-tensor entries.
KEEPS_KEYS = {ELEMENT: (RuntimeError, "delete it from the store")}
NAMED_ON_STORE = {ELEMENT: (RuntimeError, "named on the store")}
WHOLE_FIRST = {ELEMENT: (ValueError, "whole store first")}


# ---- the entries


def _tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * 0.8 + 0.1


def _tree(batch: tuple[int, ...], seed: int, size: int, cast: Callable[[Any], Any]) -> TensorDict:
    nested = TensorDict(
        c=cast(_tensor((*batch, 2), seed + 2)), d=cast(_tensor((*batch, size), seed + 3))
    )
    nested.batch_size = batch
    return TensorDict(
        a=cast(_tensor((*batch, size), seed)),
        b=cast(_tensor(batch, seed + 1)),
        nested=nested,
        batch_size=batch,
    )


def _ints(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 10).long()


def _bools(tensor: torch.Tensor) -> torch.Tensor:
    return tensor > 0.5


CASTS: dict[str, Callable[[Any], Any]] = {
    "floats": lambda t: t, "ints": _ints, "bools": _bools,
}  # fmt: skip


def _decorate(td: TensorDict, data: str) -> TensorDict:
    """Add what ``data`` asks for beyond tensors of one dtype."""
    if data == "names":
        td.names = ["time", "agent"][-td.batch_dims :] if td.batch_dims else None
    elif data == "texts":
        for target in (td, td["nested"]):
            target.set_non_tensor("text", "abc")
            target.set_non_tensor("number", 3)
    elif data == "deep":
        del td["nested", "d"]
        td["nested"].batch_size = (*td.batch_size, 2)
        td["hollow"] = TensorDict(batch_size=td.batch_size)
    elif data == "square":
        return td.select("a", ("nested", "d"))
    return td


def local(kind: str, data: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a local root tensordict of a kind and what is called: the root or a part of it."""
    cast = CASTS.get(data, lambda t: t)
    if kind in (PLAIN, NESTED):
        root = _decorate(_tree((4, 3), seed, 3, cast), data)
        return root, root["nested"] if kind == NESTED else root
    sizes = (3,) * 4 if kind == LAZY else (3, 2, 1, 3)
    root = lazy_stack(
        [_decorate(_tree((3,), seed + 10 * i, n, cast), data) for i, n in enumerate(sizes)]
    )
    return root, root[1] if kind == ELEMENT else root


def stored(kind: str, root: Any, conn: dict[str, Any]) -> tuple[Any, Any]:
    """Return the store of a local root, and the part of it that is called."""
    store = TensorDictStore.from_tensordict(root, **conn)
    if kind == NESTED:
        return store, store["nested"]
    return store, store[1] if kind == ELEMENT else store


# ---- calls


@dataclass
class Raised:
    error: Exception


def outcome(call: Callable[[Any, Side], Any], target: Any, side: Side) -> Any:
    try:
        value = call(target, side)
        return list(value) if isinstance(value, Iterator) else value
    except Exception as error:
        return Raised(error)


def check(case: Case, kind: str, conn: dict[str, Any], tmp: Path) -> None:
    """Make the call on both sides and compare results and what is left."""
    root, target = local(kind, case.data)
    store, stored_target = stored(kind, root.clone(), conn)
    try:
        _check(case, kind, conn, tmp, root, target, store, stored_target)
    finally:
        store.clear_redis()
        store.close()


def _lacks_package(came: Any) -> bool:
    """Whether a side could not read or write its file for want of a package."""
    return isinstance(came, Raised) and isinstance(came.error, ImportError)


def _check(
    case: Case,
    kind: str,
    conn: dict[str, Any],
    tmp: Path,
    root: Any,
    target: Any,
    store: Any,
    stored_target: Any,
) -> None:
    sides = [Side(kind, case.data, tmp / name, conn) for name in ("local", "stored")]
    refusal = case.refuses.get(kind)
    want = outcome(case.wants.get(kind, case.call), target, sides[0])
    got = outcome(case.stored or case.call, stored_target, sides[1])
    lacking = [side for side in (want, got) if _lacks_package(side)]
    # Both lack it where tensordict raises in any case: then the errors are compared.
    if lacking and (kind not in case.raises or refusal is not None or len(lacking) == 1):
        pytest.skip(f"needs a package that is not installed: {lacking[0].error}")
    if refusal is not None:
        assert isinstance(got, Raised), f"no refusal but {got!r}"
        error, message = refusal
        if not isinstance(got.error, error):
            raise got.error
        assert message in str(got.error), f"the refusal lacks {message!r}: {got.error}"
        root = local(kind, case.data)[0]
    else:
        expected = kind in case.raises or (kind == RAGGED and cannot_stack(want))
        assert isinstance(want, Raised) == expected, f"tensordict itself: {want!r}"
        if isinstance(want, Raised):
            assert isinstance(got, Raised), f"tensordict raises {want.error!r}, the store: {got!r}"
            assert related(got.error, want.error), f"{got.error!r} for {want.error!r}"
        else:
            if isinstance(got, Raised):
                raise got.error
            same(got, want, (stored_target, target), case.view, "result")
            same_attributes(stored_target, target, "self")
    if case.state:
        with open_store(td_id=store.td_id, **conn) as again:
            if kind == ELEMENT and case.grows:
                again, root = again[1], root[1]
            same(again.to_tensordict(), root, (None, None), False, "reread", lock=False)


def cannot_stack(want: Any) -> bool:
    """Whether tensordict refuses a stack because its elements differ in shape."""
    words = ("Failed to stack", "cast to a regular TensorDict", "differ in shape")
    return isinstance(want, Raised) and any(part in str(want.error) for part in words)


_FAMILIES = (LookupError, ImportError, OSError, AttributeError)


def related(got: Exception, want: Exception) -> bool:
    """Whether one would be caught where the other is: wrong uses are one family."""
    for family in _FAMILIES:
        if isinstance(want, family):
            return isinstance(got, (family, TypeError, ValueError, RuntimeError))
    return isinstance(got, (TypeError, ValueError, RuntimeError, IndexError, AssertionError))


# ---- comparison


def same(
    got: Any, want: Any, selves: tuple[Any, Any], view: bool, at: str, *, lock: bool = True
) -> None:
    """Assert that two results are the same, going down into tensordicts and containers."""
    if want is selves[1] and want is not None:
        assert got is selves[0], f"{at}: tensordict returns itself, the store a {type(got)}"
        return
    if is_non_tensor(want):
        assert is_non_tensor(got), f"{at}: {type(got)} for {type(want)}"
        assert got.batch_size == want.batch_size, at
        assert got.tolist() == want.tolist(), at
    elif is_tensor_collection(want):
        assert isinstance(got, TensorDictBase) or type(got) is type(want), (
            f"{at}: {type(got).__name__} for {type(want).__name__}"
        )
        assert view or not isinstance(got, STORES), f"{at}: an alias of the store"
        same_tensordict(got, want, view, at, lock)
    elif isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{at}: {type(got)} for a tensor"
        assert got.is_nested == want.is_nested, f"{at}: nested {got.is_nested}"
        if not want.is_nested:
            assert got.shape == want.shape, f"{at}: shape {got.shape} for {want.shape}"
        assert (got.dtype, got.device) == (want.dtype, want.device), (
            f"{at}: {got.dtype}, {got.device}"
        )
        if want.is_nested:
            for i, (one, other) in enumerate(zip(got.unbind(), want.unbind(), strict=True)):
                same(one, other, selves, view, f"{at}[{i}]", lock=lock)
        else:
            equal(got, want, at)
    elif isinstance(want, (dict, OrderedDict)):
        assert isinstance(got, Mapping), f"{at}: {type(got)} for a dict"
        assert set(map(str, got)) == set(map(str, want)), f"{at}: {set(got)} for {set(want)}"
        for key, value in want.items():
            same(got[key], value, selves, view, f"{at}[{key!r}]", lock=lock)
    elif isinstance(want, (list, tuple)):
        assert isinstance(got, (list, tuple)), f"{at}: {type(got)} for {type(want)}"
        assert len(got) == len(want), f"{at}: {got} for {want}"
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, selves, view, f"{at}[{i}]", lock=lock)
    elif isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray) and got.dtype == want.dtype, at
        np.testing.assert_array_equal(got, want)
    else:
        assert got == want, f"{at}: {got!r} for {want!r}"


def equal(got: torch.Tensor, want: torch.Tensor, at: str) -> None:
    """Values: to the bit but for the order in which a reduction adds."""
    assert got.requires_grad == want.requires_grad, f"{at}: requires_grad"
    if want.is_quantized:
        got, want = got.dequantize(), want.dequantize()
    got, want = got.detach(), want.detach()
    if want.is_floating_point():
        got, want = got.double(), want.double()
        assert torch.allclose(got, want, rtol=1e-5, equal_nan=True), f"{at}: {got} for {want}"
    elif want.dtype == torch.complex32:
        equal(
            torch.view_as_real(got.to(torch.complex64)),
            torch.view_as_real(want.to(torch.complex64)),
            at,
        )
    else:
        assert torch.equal(got, want), f"{at}: {got} for {want}"


def same_attributes(got: Any, want: Any, at: str, lock: bool = True) -> None:
    assert got.batch_size == want.batch_size, (
        f"{at}: batch size {got.batch_size} for {want.batch_size}"
    )
    assert list(got.names) == list(want.names), f"{at}: names {got.names} for {want.names}"
    assert got.device == want.device, f"{at}: device {got.device} for {want.device}"
    if lock:
        assert got.is_locked == want.is_locked, f"{at}: locked {got.is_locked}"


def same_tensordict(got: Any, want: Any, view: bool, at: str, lock: bool) -> None:
    same_attributes(got, want, at, lock)
    if isinstance(want, LazyStackedTensorDict):
        # Ragged entries have no tensor of their own: compare element by element.
        lazy = isinstance(got, LazyStackedTensorDictStore)
        elements = list(got) if lazy else got.unbind(want.stack_dim)
        assert len(elements) == len(want.tensordicts), at
        for i, (one, other) in enumerate(zip(elements, want.tensordicts, strict=True)):
            same(one, other, (None, None), True, f"{at}[{i}]", lock=lock)
        return
    assert set(got.keys()) == set(want.keys()), (
        f"{at}: keys {set(got.keys())} for {set(want.keys())}"
    )
    for key in want.keys():
        same(got.get(key), want.get(key), (None, None), view, f"{at}[{key!r}]", lock=lock)
