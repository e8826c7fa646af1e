"""Cases of the walk over TensorDictBase: arithmetic, dtypes, reductions, shapes, splitting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _surface import (
    COPY_FIRST,
    ELEMENT,
    KINDS,
    LAZY,
    MORE_DIMS,
    NESTED,
    PLAIN,
    RAGGED,
    STACKS,
    Cases,
)
from tensordict import TensorDictBase

UNARY = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
TESTS = ["isfinite", "isnan", "isneginf", "isposinf", "isreal"]
BINARY = ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min", "mod"]
BITS = ["bitwise_and", "logical_and"]
DTYPES = [
    "bfloat16",
    "bool",
    "complex128",
    "complex32",
    "complex64",
    "double",
    "float",
    "float16",
    "float32",
    "float64",
    "half",
    "int",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
]
QUANTISED = ["qint32", "qint8", "quint4x2", "quint8"]
REDUCTIONS = ["mean", "nanmean", "sum", "nansum", "prod", "std", "var"]
EXTREMES = ["amax", "amin", "max", "min"]

CASES = Cases()
add = CASES.add

# ---- arithmetic

for _name in [*UNARY, *TESTS]:
    add(_name, lambda t, x, n=_name: getattr(t, n)())
for _name in UNARY:
    add(f"{_name}_", lambda t, x, n=f"{_name}_": getattr(t, n)())
for _name in BINARY:
    add(_name, lambda t, x, n=_name: getattr(t, n)(x.other))
    add(f"{_name}/tensor", lambda t, x, n=_name: getattr(t, n)(torch.tensor(0.5)))
for _name in (n for n in BINARY if n != "mod"):
    add(f"{_name}_", lambda t, x, n=f"{_name}_": getattr(t, n)(x.other))
    add(f"{_name}_/tensor", lambda t, x, n=f"{_name}_": getattr(t, n)(torch.tensor(0.5)))
for _name in ["add", "sub", "mul", "div", "pow"]:
    add(f"{_name}/number", lambda t, x, n=_name: getattr(t, n)(2))
    add(f"{_name}_/number", lambda t, x, n=f"{_name}_": getattr(t, n)(2))
    add(
        f"{_name}/default",
        lambda t, x, n=_name: getattr(t, n)(x.other.exclude("b", "c"), default="intersection"),
    )
for _name in BITS:
    add(_name, lambda t, x, n=_name: getattr(t, n)(x.other), data="bools")
add("rsub", lambda t, x: t.rsub(x.other))
add("add/alpha", lambda t, x: t.add(x.other, alpha=2.0))
add("add_/alpha", lambda t, x: t.add_(x.other, alpha=2.0))
add("sub_/alpha", lambda t, x: t.sub_(x.other, alpha=2.0))
for _name in ("addcdiv", "addcmul"):
    for _suffix in ("", "_"):
        add(
            f"{_name}{_suffix}",
            lambda t, x, n=_name + _suffix: getattr(t, n)(x.other, x.other, value=2),
        )
for _name in ("lerp", "lerp_"):
    add(_name, lambda t, x, n=_name: getattr(t, n)(x.other, 0.25))
add("clamp", lambda t, x: t.clamp(0.3, 0.6))
add("clamp/tensordict", lambda t, x: t.clamp(x.other.mul(0.5), x.other))
add("abs/operators", lambda t, x: (abs(t), -t, t + x.other, 1 - t, t * 2, t / x.other, t**2))
add(
    "isnan/operators",
    lambda t, x: (t == x.other, t != x.other, t < x.other, t >= 0.5, t <= 1, t > 0),
)
add("logical_and/operators", lambda t, x: (t & x.other, t | x.other, t ^ x.other, ~t), data="bools")


def _augmented(t: Any, x: Any) -> Any:
    t += x.other
    t -= 0.5
    t *= 2
    t /= x.other
    return t


add("add_/operators", _augmented)
add("zero_", lambda t, x: t.zero_())
add("zero_/ints", lambda t, x: t.zero_(), data="ints")
add("fill_", lambda t, x: t.fill_("b" if "b" in t.keys() else "c", 0.25))
add("fill_/nested", lambda t, x: t.fill_(("nested", "c"), 0.25), kinds=(PLAIN, *STACKS))
add("fill_/bools", lambda t, x: t.fill_("b", True), data="bools", kinds=(PLAIN, *STACKS))


def _mask(t: Any) -> torch.Tensor:
    return torch.arange(t.numel()).view(t.batch_size) % 2 == 0


add("masked_fill", lambda t, x: t.masked_fill(_mask(t), 0.0))
add("masked_fill_", lambda t, x: t.masked_fill_(_mask(t), 0.0))
add("masked_fill_/first", lambda t, x: t.masked_fill_(_mask(t[..., 0]), 0.0))
add("masked_select", lambda t, x: t.masked_select(_mask(t)))
add("where", lambda t, x: t.where(_mask(t), x.other))
add("where/number", lambda t, x: t.where(_mask(t), 0.0))
add("where/out", lambda t, x: t.where(_mask(t), x.other, out=x.other))
add("softmax", lambda t, x: t.softmax(dim=-1))
add("norm", lambda t, x: t.norm())

# ---- dtypes and devices

for _name in DTYPES:
    add(_name, lambda t, x, n=_name: getattr(t, n)())
for _name in QUANTISED:
    # torch converts by quantize_per_tensor only.
    add(_name, lambda t, x, n=_name: getattr(t, n)(), raises=KINDS)
add("type", lambda t, x: t.type(torch.float64))
add("to/dtype", lambda t, x: t.to(torch.float64))
add("to/device", lambda t, x: t.to("cpu"))
add("to/meta", lambda t, x: t.to("meta").is_meta)
add("cpu", lambda t, x: t.cpu())
add("cuda", lambda t, x: t.cuda(), raises=KINDS)
add("pin_memory", lambda t, x: t.pin_memory(), raises=KINDS)
add("pin_memory_", lambda t, x: t.pin_memory_(), raises=KINDS)
add("record_stream", lambda t, x: t.record_stream(None), raises=KINDS)
add("dtype", lambda t, x: t.dtype)
add("device", lambda t, x: t.device)


def _set_device(t: Any, x: Any) -> Any:
    t.device = "cpu"
    return t.device


add("device/set", _set_device, raises=KINDS)
# The device is that of the handle: what its reads return, not what the server holds.
add("clear_device_", lambda t, x: t.clear_device_(), state=False)
add("auto_device_", lambda t, x: t.auto_device_(), state=False)
add("is_cpu", lambda t, x: t.is_cpu)
add("is_cuda", lambda t, x: t.is_cuda)
add("is_meta", lambda t, x: t.is_meta)
add("is_floating_point", lambda t, x: t.is_floating_point())
add("is_floating_point/ints", lambda t, x: t.is_floating_point(), data="ints")

# ---- gradients: a store keeps none

add("requires_grad", lambda t, x: t.requires_grad)
add("requires_grad_", lambda t, x: t.requires_grad_(), refuses=COPY_FIRST)
add("grad", lambda t, x: t.grad)
add("zero_grad", lambda t, x: t.zero_grad())
add("backward", lambda t, x: t.backward(), raises=KINDS)
add("data", lambda t, x: t.data)
add("detach", lambda t, x: t.detach())
add("detach_", lambda t, x: t.detach_())

# ---- reductions

for _name in REDUCTIONS:
    add(_name, lambda t, x, n=_name: getattr(t, n)(), raises=())
    add(f"{_name}/dim", lambda t, x, n=_name: getattr(t, n)(dim=-1))
    add(f"{_name}/first", lambda t, x, n=_name: getattr(t, n)(dim=0, keepdim=True))
    add(f"{_name}/feature", lambda t, x, n=_name: getattr(t, n)(dim="feature"))
    add(f"{_name}/reduce", lambda t, x, n=_name: getattr(t, n)(reduce=True))
for _name in EXTREMES:
    add(_name, lambda t, x, n=_name: getattr(t, n)())
    add(f"{_name}/dim", lambda t, x, n=_name: getattr(t, n)(dim=-1))
    add(f"{_name}/first", lambda t, x, n=_name: getattr(t, n)(dim=0, keepdim=True))
for _name in ("cummax", "cummin"):
    add(_name, lambda t, x, n=_name: getattr(t, n)(dim=-1))
    add(f"{_name}/first", lambda t, x, n=_name: getattr(t, n)(dim=0, return_indices=False))
for _name in ("all", "any"):
    add(_name, lambda t, x, n=_name: getattr(t, n)(), data="bools")
    add(f"{_name}/dim", lambda t, x, n=_name: getattr(t, n)(dim=-1), data="bools")
    add(f"{_name}/first", lambda t, x, n=_name: getattr(t, n)(dim=0), data="bools")
add("quantile", lambda t, x: t.quantile(0.5, dim=-1))
add("quantile/first", lambda t, x: t.quantile(torch.tensor([0.1, 0.9]), dim=0))
add("logsumexp", lambda t, x: t.logsumexp(dim=-1))
add("logsumexp/first", lambda t, x: t.logsumexp(dim=0, keepdim=True))

# ---- shapes

add("batch_size", lambda t, x: t.batch_size)


def _set_batch_size(t: Any, x: Any) -> None:
    t.batch_size = t.batch_size[:1] if t.batch_dims > 1 else []


add("batch_size/set", _set_batch_size, refuses=COPY_FIRST)
add("shape", lambda t, x: t.shape)
add("size", lambda t, x: (t.size(), t.size(-1)))
add("dim", lambda t, x: t.dim())
add("ndim", lambda t, x: t.ndim)
add("ndimension", lambda t, x: t.ndimension())
add("batch_dims", lambda t, x: t.batch_dims)
add("numel", lambda t, x: t.numel())
add("auto_batch_size_", lambda t, x: t.auto_batch_size_(), refuses={ELEMENT: COPY_FIRST[ELEMENT]})
add("auto_batch_size_/dims", lambda t, x: t.auto_batch_size_(1), refuses=MORE_DIMS)
add("reshape", lambda t, x: t.reshape(-1))
add("reshape/shape", lambda t, x: t.reshape(*t.batch_size[:-1], 1, t.batch_size[-1]))
add("view", lambda t, x: t.view(-1), refuses=COPY_FIRST)
add("view/dtype", lambda t, x: t.view(torch.int32))
add("flatten", lambda t, x: t.flatten())
add("unflatten", lambda t, x: t.unflatten(-1, (3, 1)))
add("transpose", lambda t, x: t.transpose(0, -1), refuses=MORE_DIMS)
add("swapaxes", lambda t, x: t.swapaxes(0, -1), refuses=MORE_DIMS)
add("swapdims", lambda t, x: t.swapdims(0, -1), refuses=MORE_DIMS)
add("permute", lambda t, x: t.permute(*reversed(range(t.ndim))), refuses=COPY_FIRST)
add("moveaxis", lambda t, x: t.moveaxis(0, -1), refuses=MORE_DIMS)
add("movedim", lambda t, x: t.movedim(0, -1), refuses=MORE_DIMS)
add("squeeze", lambda t, x: t.squeeze(), refuses=COPY_FIRST)
add("squeeze/dim", lambda t, x: t.squeeze(0))
add("unsqueeze", lambda t, x: t.unsqueeze(0), refuses=COPY_FIRST)
add("unsqueeze/last", lambda t, x: t.unsqueeze(-1), refuses=COPY_FIRST)
add("expand", lambda t, x: t.expand(2, *t.batch_size))
add("expand_as", lambda t, x: t.expand_as(x.other.expand(2, *t.batch_size)))
add("broadcast_to", lambda t, x: t.broadcast_to((2, *t.batch_size)))
add("atleast_1d", lambda t, x: t.atleast_1d())
add("atleast_2d", lambda t, x: t.atleast_2d(), refuses={ELEMENT: COPY_FIRST[ELEMENT]})
add("atleast_3d", lambda t, x: t.atleast_3d(), refuses=COPY_FIRST)
add("flip", lambda t, x: t.flip(0))
add("fliplr", lambda t, x: t.fliplr(), raises=(ELEMENT,))
add("flipud", lambda t, x: t.flipud())
add("roll", lambda t, x: t.roll(1, 0))
add("rot90", lambda t, x: t.rot90(), raises=(ELEMENT,))
add("repeat", lambda t, x: t.repeat(*(2,) * t.ndim))
add("repeat_interleave", lambda t, x: t.repeat_interleave(2, dim=0))
add("repeat_interleave/last", lambda t, x: t.repeat_interleave(torch.tensor([1, 2, 0]), dim=-1))
add("tile", lambda t, x: t.tile((2,) * t.ndim))
add("contiguous", lambda t, x: t.contiguous(), wants={RAGGED: lambda t, x: t.clone()})
# Each read builds its tensors anew: as for a lazy stack, the answer is False without a read.
add("is_contiguous", lambda t, x: t.is_contiguous(), wants=dict.fromkeys(KINDS, lambda t, x: False))
add("densify", lambda t, x: t.densify())
add("to_padded_tensor", lambda t, x: t.to_padded_tensor())
add("pad", lambda t, x: t.pad([0, 1, *(0, 0) * (t.ndim - 1)], value=0.5))
add("pack", lambda t, x: t.pack()[0])
add("gather", lambda t, x: t.gather(-1, torch.zeros(t.batch_size, dtype=torch.int64)))
add(
    "gather/first",
    lambda t, x: t.gather(
        0, torch.tensor([2, 0]).view(2, *(1,) * (t.ndim - 1)).expand(2, *t.batch_size[1:])
    ),
)
add("narrow", lambda t, x: t.narrow(-1, 1, 2))
add("split", lambda t, x: t.split(2))
add("split/list", lambda t, x: t.split([1, 2], dim=-1))
add("tensor_split", lambda t, x: t.tensor_split(2))
add("chunk", lambda t, x: t.chunk(2))
add("chunk/last", lambda t, x: t.chunk(3, dim=-1))
add("unbind", lambda t, x: t.unbind(0), view=True)
add("unbind/last", lambda t, x: t.unbind(-1), view=True)
add("new_empty", lambda t, x: _shapes(t.new_empty(2, 3)))
add("new_full", lambda t, x: t.new_full((2, 3), 7.0))
add("new_ones", lambda t, x: t.new_ones(2, 3))
add("new_zeros", lambda t, x: t.new_zeros(2, 3))
add("new_tensor", lambda t, x: t.new_tensor(x.other))


def _shapes(td: TensorDictBase) -> dict[str, Any]:
    """Return what of uninitialised entries is known."""

    def below(td: TensorDictBase) -> Iterator[tuple[str, Any]]:
        for key in td.keys():
            value = td.get(key)
            yield (
                key,
                _shapes(value) if isinstance(value, TensorDictBase) else (value.shape, value.dtype),
            )

    return {"": td.batch_size, **dict(below(td))}


# ---- stacking

add("stack", lambda t, x: t.stack([t, x.other]))
add("stack/function", lambda t, x: torch.stack([t, x.other], -1))
add("cat", lambda t, x: t.cat([t, x.other]))
add("cat/function", lambda t, x: torch.cat([t, x.other], -1))
add("lazy_stack", lambda t, x: t.lazy_stack([t, x.other]), view=True)
add("maybe_dense_stack", lambda t, x: t.maybe_dense_stack([t, x.other]), view=True)
add(
    "cat_from_tensordict",
    lambda t, x: t.cat_from_tensordict(-1),
    data="square",
    kinds=(PLAIN, NESTED),
)
add(
    "stack_from_tensordict",
    lambda t, x: t.select("a").stack_from_tensordict(0),
    kinds=(PLAIN, LAZY, ELEMENT),
)
add(
    "cat_tensors",
    lambda t, x: t.cat_tensors("a", ("nested", "d"), out_key="e", dim=-1),
    refuses={ELEMENT: (RuntimeError, "delete it from the store")},
    kinds=(PLAIN, LAZY, RAGGED, ELEMENT),
)
add(
    "stack_tensors",
    lambda t, x: t.stack_tensors("a", ("nested", "d"), out_key="e", dim=-1, keep_entries=True),
    grows=True,
    kinds=(PLAIN, LAZY, RAGGED, ELEMENT),
)

# ---- with inplace=True: the shape of what is stored cannot change

for _name, _arguments in {
    "reshape": (-1,),
    "flatten": (),
    "unflatten": (-1, (3, 1)),
    "repeat_interleave": (2, 0),
    "contiguous": (),
}.items():
    add(
        f"{_name}/inplace",
        lambda t, x, n=_name, a=_arguments: getattr(t, n)(*a, inplace=True),
        refuses=COPY_FIRST,
    )
add("repeat/inplace", lambda t, x: t.repeat(*(2,) * t.ndim, inplace=True), refuses=COPY_FIRST)
add("roll/inplace", lambda t, x: t.roll(1, 0, inplace=True))
add("pin_memory/inplace", lambda t, x: t.pin_memory(inplace=True), raises=KINDS)
add(
    "pad/inplace",
    lambda t, x: t.pad([0, 1, *(0, 0) * (t.ndim - 1)], inplace=True),
    refuses=COPY_FIRST,
)
add(
    "masked_select/inplace",
    lambda t, x: t.masked_select(_mask(t), inplace=True),
    refuses=COPY_FIRST,
)
add(
    "gather/inplace",
    lambda t, x: t.gather(-1, torch.zeros(t.batch_size, dtype=torch.int64), inplace=True),
    raises=(LAZY, RAGGED),
)

# ---- functions of torch

add(
    "new_zeros/like",
    lambda t, x: (torch.zeros_like(t), torch.ones_like(t), torch.full_like(t, 2.0)),
)
add("clone/function", lambda t, x: torch.clone(t))
add("unbind/function", lambda t, x: torch.unbind(t, 0), view=True)
add("split/function", lambda t, x: torch.split(t, 2))
add("flatten/function", lambda t, x: torch.flatten(t))
add("where/function", lambda t, x: torch.where(_mask(t), t, x.other))
add("mean/function", lambda t, x: (torch.mean(t, -1), torch.sum(t, -1)))
add(
    "permute/function",
    lambda t, x: torch.permute(t, tuple(range(t.ndim))[::-1]),
    # Functions of torch take a stack of elements of different shapes as a local lazy stack.
    refuses={kind: COPY_FIRST[kind] for kind in KINDS if kind != RAGGED},
)
