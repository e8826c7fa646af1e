"""Cases of the walk over TensorDictBase: conversions, files, modules, construction."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import torch
from _surface import (
    ELEMENT,
    FIXED,
    KINDS,
    LAZY,
    LOCAL_FIRST,
    NESTED,
    PLAIN,
    RAGGED,
    ROOTS,
    Cases,
    leaf,
)
from tensordict import TensorDict
from torch import nn

CASES = Cases()
add = CASES.add

# ---- conversions

add("to", lambda t, x: t.to("cpu", torch.float64))
add("to_tensordict", lambda t, x: t.to_tensordict(), wants={RAGGED: lambda t, x: t.clone()})
add("empty", lambda t, x: t.empty())
add("empty/recurse", lambda t, x: t.empty(recurse=True))
add("to_dict", lambda t, x: t.to_dict())
add("to_dict/numpy", lambda t, x: t.to_dict(convert_tensors="numpy"), kinds=FIXED)
add("tolist", lambda t, x: t.tolist(), kinds=(PLAIN, NESTED, LAZY, RAGGED, ELEMENT))
add("numpy", lambda t, x: t.numpy(), kinds=(*FIXED, ELEMENT))
add("to_namedtuple", lambda t, x: t.to_namedtuple()._asdict().keys())
add("to_pytree", lambda t, x: t.to_pytree())
add(
    "to_lazystack",
    lambda t, x: t.to_lazystack(0),
    view=True,
    wants=dict.fromkeys((LAZY, RAGGED), lambda t, x: t.clone()),
)
add("to_struct_array", lambda t, x: t.select(leaf(t)).to_struct_array())
add("as_tensor", lambda t, x: t.as_tensor())
add("to_pandas", lambda t, x: t.select("b").reshape(-1).to_pandas().to_dict(), kinds=ROOTS)
for _format in ("csv", "json", "parquet"):
    add(
        f"to_{_format}",
        lambda t, x, f=_format: (
            getattr(t.select("b").reshape(-1), f"to_{f}")(x.tmp / "file"),
            (x.tmp / "file").read_bytes(),
        )[1],
        kinds=ROOTS,
    )
    add(
        f"from_{_format}",
        lambda t, x, f=_format: getattr(t, f"from_{f}")(_table(x, f)),
        refuses=LOCAL_FIRST,
        raises=(LAZY, RAGGED),
    )
add("to_h5", lambda t, x: t.to_h5(x.tmp / "file").to_tensordict())
add(
    "from_h5",
    lambda t, x: (
        x.other.to_tensordict().to_h5(x.tmp / "file"),
        t.from_h5(x.tmp / "file").to_tensordict(),
    )[1],
)
add("to_zarr", lambda t, x: t.to_zarr(x.tmp / "file").to_tensordict())
add(
    "from_zarr",
    lambda t, x: (
        x.other.to_tensordict().to_zarr(x.tmp / "file"),
        t.from_zarr(x.tmp / "file").to_tensordict(),
    )[1],
)
add("to_mds", lambda t, x: t.to_mds(out=str(x.tmp / "file")), raises=KINDS)
add("from_pandas", lambda t, x: t.from_pandas(_frame()), refuses=LOCAL_FIRST)
add("to_store", lambda t, x: t.to_store(**x.conn).to_tensordict())


def _frame() -> Any:
    import pandas

    return pandas.DataFrame({"i": [1, 2, 3], "f": [0.5, 1.0, 1.5]})


def _table(x: Any, kind: str) -> Any:
    path = x.tmp / f"table.{kind}"
    getattr(TensorDict(i=torch.arange(3), f=torch.ones(3), batch_size=[3]), f"to_{kind}")(path)
    return path


# ---- files and modules

add("memmap", lambda t, x: t.memmap(x.tmp))
add(
    "memmap_",
    lambda t, x: t.memmap_(x.tmp),
    refuses=dict.fromkeys(KINDS, (RuntimeError, "use memmap()")),
)
add("memmap_like", lambda t, x: t.memmap_like(x.tmp).apply(torch.zeros_like))
add("memmap_refresh_", lambda t, x: t.memmap_refresh_(), raises=KINDS)
add("save", lambda t, x: (t.save(x.tmp), TensorDict.load(x.tmp))[1])
add("dumps", lambda t, x: (t.dumps(x.tmp), TensorDict.load(x.tmp))[1])
add("load", lambda t, x: (x.other.memmap(x.tmp), t.load(x.tmp))[1])
add("load_", lambda t, x: (x.other.memmap(x.tmp), t.load_(x.tmp))[1])
add("load_memmap", lambda t, x: (x.other.memmap(x.tmp), t.load_memmap(x.tmp))[1])
add("load_memmap_", lambda t, x: (x.other.memmap(x.tmp), t.load_memmap_(x.tmp))[1])
add("make_memmap", lambda t, x: t.make_memmap("fresh", (*t.batch_size, 2)), raises=KINDS)
add(
    "make_memmap_from_tensor",
    lambda t, x: t.make_memmap_from_tensor("fresh", torch.zeros(t.batch_size)),
    raises=KINDS,
)
add(
    "make_memmap_from_storage",
    lambda t, x: t.make_memmap_from_storage(
        "fresh", torch.zeros(t.batch_size).untyped_storage(), t.batch_size
    ),
    raises=KINDS,
)
add("state_dict", lambda t, x: t.state_dict())
add("state_dict/nested", lambda t, x: t.state_dict(flatten=False))
add("load_state_dict", lambda t, x: t.load_state_dict(x.other.state_dict()))
add("load_state_dict/assign", lambda t, x: t.load_state_dict(x.other.state_dict(), assign=True))


class Net(nn.Module):
    """A module whose parameters are the entries of a tensordict."""

    def __init__(self, t: Any) -> None:
        super().__init__()
        for key in t.keys():
            value = t.get(key)
            child = isinstance(value, torch.Tensor)
            setattr(self, key, nn.Parameter(torch.zeros_like(value)) if child else Net(value))


def _to_module(t: Any, x: Any) -> Any:
    net = Net(x.other)
    with t.to_module(net):
        inside = {k: v.detach().clone() for k, v in net.named_parameters()} or {
            k: getattr(net, k).detach().clone() for k in ("b", "c") if hasattr(net, k)
        }
    return inside, [v.sum().item() for v in net.parameters()]


add("to_module", _to_module, kinds=(PLAIN, NESTED, ELEMENT))
add("from_module", lambda t, x: t.from_module(nn.Linear(2, 2)).keys().__len__())
add("from_modules", lambda t, x: t.from_modules(nn.Linear(2, 2), nn.Linear(2, 2)).batch_size)

# ---- construction: calls of the class

_DICT = {"e": torch.ones(4, 3), "n": {"f": torch.zeros(4, 3)}}


@dataclasses.dataclass
class _Data:
    e: torch.Tensor


_Tuple = collections.namedtuple("_Tuple", ["e", "f"])

add(
    "from_dict",
    lambda t, x: t.from_dict(_DICT, batch_size=[4]),
    refuses=dict(list(LOCAL_FIRST.items())[2:]),
    stored=lambda t, x: t.from_dict(_DICT, batch_size=[4], **x.conn),
    view=True,
)
add(
    "from_dict_instance",
    lambda t, x: t.from_dict_instance({"b": torch.ones(t.batch_size)}, batch_size=t.batch_size),
    kinds=(PLAIN, ELEMENT),
)
add("from_any", lambda t, x: t.from_any(_DICT, batch_size=[4]), refuses=LOCAL_FIRST)
add(
    "from_list",
    lambda t, x: t.from_list([{"e": torch.ones(3)}, {"e": torch.ones(3)}]),
    refuses=LOCAL_FIRST,
)
add(
    "from_tuple",
    lambda t, x: t.from_tuple((torch.ones(4), torch.zeros(4)), batch_size=[4]),
    refuses=LOCAL_FIRST,
)
add(
    "from_namedtuple",
    lambda t, x: t.from_namedtuple(_Tuple(torch.ones(4), torch.zeros(4)), batch_size=[4]),
    refuses=LOCAL_FIRST,
)
add(
    "from_dataclass",
    lambda t, x: t.from_dataclass(_Data(torch.ones(4)), batch_size=[4]),
    refuses=LOCAL_FIRST,
)
add("from_pytree", lambda t, x: t.from_pytree({"e": torch.ones(4)}, batch_size=[4]))
add(
    "from_struct_array",
    lambda t, x: t.from_struct_array(np.array([(1, 2.0)], dtype=[("i", "i8"), ("f", "f4")])),
    refuses=LOCAL_FIRST,
)
add("fromkeys", lambda t, x: t.fromkeys(["e", "f"], 0))
add(
    "from_schema",
    lambda t, x: t.from_schema({"e": ([3], torch.int64)}, batch_size=[4]).zero_(),
    stored=lambda t, x: t.from_schema({"e": ([3], torch.int64)}, batch_size=[4], **x.conn),
    view=True,
)
