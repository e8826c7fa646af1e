"""The kinds of tensordicts that the suite of pipes sends, and how they compare."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    is_non_tensor,
    lazy_stack,
    tensorclass,
)

from tdio.layout.dtypes import BY_NAME
from tdio.pipe.tree import plain


@tensorclass
class Sample:
    """A tensorclass that both ends know."""

    x: torch.Tensor
    label: str


#: The decorator adds arguments that its types do not show.
_sample: Any = Sample


def kinds() -> dict[str, Any]:
    """Return one tensordict of each kind, by name; what differs from it after a trip is a fault."""
    bits = torch.arange(64, dtype=torch.uint8)
    dtypes = {
        # A float that is not a number is not equal to itself: bits are compared.
        name.removeprefix("torch."): bits.remainder(2).view(dtype)
        if dtype == torch.bool
        else bits.view(dtype)
        for name, dtype in BY_NAME.items()
    }
    nested = TensorDict(
        a=torch.rand(3, 2),
        deep=TensorDict(b=torch.ones(3, 5, dtype=torch.uint8), c=TensorDict(batch_size=[3])),
        batch_size=[3],
    )
    named = TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3], names=["time", "x"])
    jagged = torch.nested.nested_tensor([torch.rand(2), torch.rand(5)], layout=torch.jagged)
    stack = lazy_stack([TensorDict(a=torch.rand(2)), TensorDict(a=torch.rand(3), z="k")])
    return {
        "flat": TensorDict(a=torch.rand(4), b=torch.arange(3)),
        "nested": nested,
        "named": named,
        "locked": TensorDict(a=torch.rand(4)).lock_(),
        "device": TensorDict(a=torch.rand(4), device="cpu"),
        "dtypes": TensorDict(dtypes),
        "0-d": TensorDict(a=torch.tensor(3), b=torch.tensor(2.5, dtype=torch.float64)),
        "empty leaves": TensorDict(a=torch.zeros(0, 3), b=torch.ones(2), c=torch.zeros(0)),
        "no leaves": TensorDict(batch_size=[7]),
        "strided": TensorDict(a=torch.rand(6, 4).t(), b=torch.rand(9)[::2]),
        "odd names": TensorDict(
            {"leaves": TensorDict(size=TensorDict(cls=torch.ones(2))), "a.b": torch.ones(1)}
        ),
        "values": TensorDict(
            a=torch.ones(2),
            text="é\n",
            number=NonTensorData(1, batch_size=[2]),
            flag=NonTensorData(True, batch_size=[2]),
            some=NonTensorData([1, {"k": None}], batch_size=[2]),
            each=NonTensorStack("x", "y"),
            batch_size=[2],
        ),
        "tensorclass": TensorDict(s=_sample(x=torch.rand(2), label="q", batch_size=[2])),
        "jagged": TensorDict(j=jagged, batch_size=[2]),
        "lazy stack": stack,
        "lazy below": TensorDict(s=stack, batch_size=[2]),
        "gradient": TensorDict(a=torch.rand(3, requires_grad=True)),
        "consolidated": TensorDict(a=torch.rand(4), n=TensorDict(b=torch.ones(1))).consolidate(
            metadata=True
        ),
    }


#: Kinds that cannot be sent leaf by leaf, or lose structure that way.
STORAGE_ONLY = {"tensorclass", "jagged", "lazy stack", "lazy below", "nested", "named", "values"}


def leaf_kinds() -> dict[str, Any]:
    """Return what can be sent with ``consolidated=False``."""
    found = {name: td for name, td in kinds().items() if name not in STORAGE_ONLY}
    found["values"] = TensorDict(
        a=torch.ones(2),
        text="é",
        some=NonTensorData([1, {"k": None}], batch_size=[2]),
        each=NonTensorStack("x", "y"),
        batch_size=2,
    )
    found["below"] = TensorDict({("n", "m"): torch.ones(2, 3), "a": torch.ones(2)}, batch_size=[2])
    found["unbatched"] = TensorDict(a=torch.ones(2), u=UnbatchedTensor(torch.rand(5)), batch_size=2)
    return found


def check_same(got: Any, want: Any) -> None:
    """Assert that two tensordicts have the same keys, classes, shapes, dtypes, values and bits."""
    assert type(got) is type(want), f"{type(got)} is not {type(want)}"
    assert got.batch_size == want.batch_size
    assert set(got.keys()) == set(want.keys())
    if hasattr(want, "tensordicts"):
        for pair in zip(got.tensordicts, want.tensordicts, strict=True):
            check_same(*pair)
        return
    got, want = plain(got), plain(want)
    assert got.names == want.names
    for name in want.keys():  # noqa: SIM118
        one: Any = got.get(name)
        other: Any = want.get(name)
        if isinstance(other, UnbatchedTensor):
            one, other = one.data, other.data
        if is_non_tensor(other):
            assert type(one) is type(other)
            assert repr(one.tolist()) == repr(other.tolist()), name
        elif not isinstance(other, torch.Tensor):
            check_same(one, other)
        elif other.is_nested:
            check_same_bits(one.values(), other.values(), name)
            assert torch.equal(one.offsets(), cast(Any, other).offsets())
        else:
            check_same_bits(one, other, name)


def check_same_bits(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Assert that two tensors have the same shape, dtype and bytes."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype), name
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    assert torch.equal(*raw), name
