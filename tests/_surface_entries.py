"""Cases of the walk over TensorDictBase: entries, keys, names, locks, copies, conversions, files."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import torch
from _surface import ELEMENT, KINDS, LAZY, NESTED, PLAIN, RAGGED, STACKS, Case
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import nn

#: A class method that cannot say where the store is to be: make a local one, and copy it.
LOCAL_FIRST: dict[str, Any] = {
    **dict.fromkeys((PLAIN, NESTED), ((TypeError, NotImplementedError), "from_tensordict")),
    **dict.fromkeys((LAZY, RAGGED), (NotImplementedError, "from_lazy_stack")),
    ELEMENT: (NotImplementedError, "store[i]"),
}
#: One element cannot have other keys than its stack.
KEEPS_KEYS = {ELEMENT: (RuntimeError, "delete it from the store")}
NAMED_ON_STORE = {ELEMENT: (RuntimeError, "named on the store")}
#: A non-tensor entry has a value for each element: one of them cannot add it.
WHOLE_FIRST = {ELEMENT: (ValueError, "whole store first")}
COPY_FIRST = dict.fromkeys(KINDS, ((RuntimeError, NotImplementedError), "to_tensordict()"))

CASES: dict[str, Case] = {}
ROOTS = (PLAIN, LAZY, RAGGED, ELEMENT)  # the kinds with an entry "nested"
FIXED = (PLAIN, NESTED, LAZY)  # the kinds whose entries have one shape


def add(name: str, *args: Any, **kwargs: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(*args, **kwargs)


def leaf(t: Any) -> str:
    """Return the name of an entry of one shape for all elements."""
    return "b" if "b" in t.keys() else "c"


# ---- reading

add("get", lambda t, x: t.get(leaf(t)))
add("get/nested", lambda t, x: t.get(("nested", "c")), kinds=ROOTS)
add("get/nested_tensordict", lambda t, x: t.get("nested"), kinds=ROOTS, view=True)
add("get/default", lambda t, x: (t.get("no", None), t.get("no", 3), t.get(("no", "way"), None)))
add("get/missing", lambda t, x: t["no"], raises=KINDS)
add("get/ragged", lambda t, x: t.get("a"), kinds=(RAGGED,))
add("get/ragged_list", lambda t, x: t.get("a", as_list=True), kinds=(LAZY, RAGGED))
add("get/ragged_padded", lambda t, x: t.get("a", as_padded_tensor=True), kinds=(LAZY, RAGGED))
add("get/ragged_nested", lambda t, x: t.get("a", as_nested_tensor=True), kinds=(LAZY, RAGGED))
add(
    "get/item",
    lambda t, x: (t[leaf(t)], t[0], t[-1], t[1:], t[[0, 2]], t[..., 0], t[:, None]),
    view=True,
)
add(
    "get/mask",
    lambda t, x: (t[torch.arange(t.batch_size[0]) > 1], t[torch.tensor([[0, 1], [1, 0]])]),
)
add("get/beyond", lambda t, x: t[9], raises=KINDS)
add("get/iterate", lambda t, x: list(t), view=True)
add("get/length", lambda t, x: (len(t), leaf(t) in t.keys(), ("no", "way") in t.keys(True)))
add("get/bool", lambda t, x: bool(t), raises=KINDS)
add("get/contains", lambda t, x: (leaf(t) in t, "no" in t))
add("get_at", lambda t, x: t.get_at(leaf(t), slice(1, None)))
add("get_at/nested", lambda t, x: t.get_at(("nested", "c"), 0), kinds=ROOTS)
add("get_at/default", lambda t, x: t.get_at("no", 0, None))
add("get_item_shape", lambda t, x: t.get_item_shape(leaf(t)))
add("get_item_shape/ragged", lambda t, x: t.get_item_shape("a"), kinds=ROOTS)
add("get_item_shape/nested", lambda t, x: t.get_item_shape("nested"), kinds=ROOTS)
add("entry_class", lambda t, x: issubclass(t.entry_class(leaf(t)), torch.Tensor))
add(
    "entry_class/nested",
    lambda t, x: issubclass(t.entry_class("nested"), TensorDictBase),
    kinds=ROOTS,
)
add(
    "entry_class/missing",
    lambda t, x: t.entry_class("no"),
    refuses=dict.fromkeys(KINDS, (KeyError, "no entry 'no'")),
)
add("setdefault", lambda t, x: t.setdefault(leaf(t), 0))

# ---- non-tensor entries

for _value in ("text", 3, 2.5, True, None, [1, "a"], (1, 2), {"k": [1, None]}, b"\x00"):
    _name = type(_value).__name__
    _refuses: dict[str, Any] = WHOLE_FIRST
    if isinstance(_value, bytes):
        _refuses = dict.fromkeys(KINDS, (TypeError, "allow_pickle")) | WHOLE_FIRST
    add(
        f"set_non_tensor/{_name}",
        lambda t, x, v=_value: t.set_non_tensor("extra", v).get_non_tensor("extra"),
        grows=True,
        refuses=_refuses,
    )
    add(
        f"set/{_name}_data",
        lambda t, x, v=_value: t.set("extra", NonTensorData(v, batch_size=t.batch_size)),
        grows=True,
        refuses=_refuses,
    )
    add(
        f"set/{_name}_item",
        lambda t, x, v=_value: t.update({"extra": v}) if v is None else t.__setitem__("extra", v),
        kinds=(PLAIN, NESTED, ELEMENT),
        grows=True,
        raises=() if _value is None or isinstance(_value, (str, bytes)) else KINDS,
        refuses=_refuses if _value is None or isinstance(_value, (str, bytes)) else {},
    )
add("set_non_tensor", lambda t, x: t.set_non_tensor("text", "other"), data="texts")
add(
    "set_non_tensor/nested",
    lambda t, x: t.set_non_tensor(("nested", "text"), "other"),
    data="texts",
    kinds=ROOTS,
)
add(
    "get_non_tensor",
    lambda t, x: (t.get_non_tensor("text"), t.get_non_tensor("number")),
    data="texts",
)
add(
    "get_non_tensor/default",
    lambda t, x: (t.get_non_tensor("no", None), t.get_non_tensor(leaf(t))),
    data="texts",
)
add("get_non_tensor/missing", lambda t, x: t.get_non_tensor("no"), raises=KINDS, data="texts")
add("is_non_tensor", lambda t, x: (t.is_non_tensor("text"), t.is_non_tensor(leaf(t))), data="texts")
add(
    "is_non_tensor/nested",
    lambda t, x: t.is_non_tensor(("nested", "text")),
    data="texts",
    kinds=ROOTS,
)
add("non_tensor_items", lambda t, x: dict(t.non_tensor_items()), data="texts")
add(
    "non_tensor_items/nested",
    lambda t, x: dict(t.non_tensor_items(include_nested=True)),
    data="texts",
)
add("filter_non_tensor_data", lambda t, x: t.filter_non_tensor_data(), data="texts")
add("get/texts", lambda t, x: (t.get("text"), t["number"]), data="texts")
add("get/texts_index", lambda t, x: (t[0], t[1:]), data="texts", view=True)
add("keys/texts", lambda t, x: (set(t.keys(True, True)), set(t.keys())), data="texts")
add(
    "to_tensordict/texts",
    lambda t, x: t.to_tensordict(),
    data="texts",
    wants={RAGGED: lambda t, x: t.clone()},
)
add("to_dict/texts", lambda t, x: t.to_dict(), data="texts")
add("del_/texts", lambda t, x: t.del_("text"), data="texts", kinds=(PLAIN, NESTED, LAZY, RAGGED))
add(
    "update/texts",
    lambda t, x: t.update({"text": "other"}),
    data="texts",
    kinds=(PLAIN, NESTED, ELEMENT),
)
add("zero_/texts", lambda t, x: t.zero_(), data="texts")
add("add/texts", lambda t, x: t.add(1), data="texts")
add("entry_class/texts", lambda t, x: t.entry_class("text").__name__, data="texts")
add("clone/texts", lambda t, x: t.clone(), data="texts")


def _set_element(t: Any, x: Any) -> Any:
    t[1] = x.other[1]
    return t["text"], t[1]


def _set_other_text(t: Any, x: Any) -> Any:
    x.other.set_non_tensor("text", "other")
    t[1] = x.other[1]
    return t[0]["text"], t[1]["text"]


add("set/texts_other", _set_other_text, data="texts", kinds=(PLAIN, NESTED, LAZY, RAGGED))
add("set/texts_element", _set_element, data="texts", kinds=(PLAIN, NESTED, LAZY, RAGGED), view=True)
add(
    "set/over_text",
    lambda t, x: t.set("text", t.get(leaf(t)) + 1),
    data="texts",
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add("set/text_over", lambda t, x: t.set_non_tensor(leaf(t), "now a text"), data="texts")

# ---- keys

add("keys", lambda t, x: set(t.keys()))
add(
    "keys/leaves",
    lambda t, x: (set(t.keys(True, True)), set(t.keys(True)), set(t.keys(False, True))),
)
add("keys/sorted", lambda t, x: (list(t.keys(sort=True)), list(t.keys(True, True, sort=True))))
add("sorted_keys", lambda t, x: t.sorted_keys)
add("items", lambda t, x: {k: v for k, v in t.items() if k not in ("a", "d", "nested")})
add("items/leaves", lambda t, x: {k: v for k, v in t.items(True, True) if k[-1] in "bc"})
add("items/all", lambda t, x: dict(t.items()), kinds=FIXED, view=True)
add("values", lambda t, x: list(t.values(sort=True)), kinds=FIXED, view=True)
add("values/leaves", lambda t, x: list(t.values(True, True, sort=True)), kinds=FIXED)
add("values/element", lambda t, x: list(t.values(True, True, sort=True)), kinds=(ELEMENT,))
add("is_empty", lambda t, x: t.is_empty())
add("depth", lambda t, x: t.depth)
add("keys/deep", lambda t, x: (set(t.keys(True)), t["nested"].batch_size), data="deep", kinds=ROOTS)
add(
    "to_tensordict/deep",
    lambda t, x: t.to_tensordict(),
    data="deep",
    wants={RAGGED: lambda t, x: t.clone()},
)
add("is_empty/deep", lambda t, x: t["hollow"].is_empty(), data="deep", kinds=ROOTS)
add("select", lambda t, x: t.select(leaf(t)), view=True)
add("select/nested", lambda t, x: t.select("a", ("nested", "c")), kinds=ROOTS, view=True)
add("select/missing", lambda t, x: t.select("no"), raises=KINDS)
add("select/lax", lambda t, x: t.select("no", leaf(t), strict=False), view=True)
add("select/inplace", lambda t, x: t.select(leaf(t), inplace=True), refuses=KEEPS_KEYS)
add("exclude", lambda t, x: t.exclude(leaf(t)), view=True)
add("exclude/nested", lambda t, x: t.exclude(("nested", "c"), "no"), kinds=ROOTS, view=True)
add("exclude/inplace", lambda t, x: t.exclude(leaf(t), inplace=True), refuses=KEEPS_KEYS)
add("separates", lambda t, x: (t.separates(leaf(t)), set(t.keys())), refuses=KEEPS_KEYS)
add("split_keys", lambda t, x: t.split_keys([leaf(t)]), view=True)
add(
    "split_keys/inplace",
    lambda t, x: t.split_keys([leaf(t)], inplace=True),
    view=True,
    refuses=KEEPS_KEYS,
)
add("flatten_keys", lambda t, x: t.flatten_keys("_"))
add("flatten_keys/dot", lambda t, x: t.flatten_keys())
add("flatten_keys/inplace", lambda t, x: t.flatten_keys("_", inplace=True), refuses=KEEPS_KEYS)
add("unflatten_keys", lambda t, x: t.flatten_keys("_").unflatten_keys("_"))
add(
    "unflatten_keys/inplace",
    lambda t, x: t.rename_key_(leaf(t), "u_v").unflatten_keys("_", inplace=True),
    refuses=KEEPS_KEYS,
)
add("rename_key_", lambda t, x: t.rename_key_(leaf(t), "new"), refuses=KEEPS_KEYS)
add(
    "rename_key_/nested",
    lambda t, x: t.rename_key_(("nested", "c"), "new"),
    kinds=ROOTS,
    refuses=KEEPS_KEYS,
)
add(
    "rename_key_/tree", lambda t, x: t.rename_key_("nested", "new"), kinds=ROOTS, refuses=KEEPS_KEYS
)
add(
    "rename_key_/safe",
    lambda t, x: t.rename_key_(leaf(t), "nested" if "nested" in t.keys() else "d", safe=True),
    raises=KINDS,
)
add("rename_key_/missing", lambda t, x: t.rename_key_("no", "new"), raises=KINDS)
add("rename_keys", lambda t, x: t.rename_keys({leaf(t): "new"}), view=True)
add("pop", lambda t, x: t.pop(leaf(t)), refuses=KEEPS_KEYS)
add("pop/default", lambda t, x: t.pop("no", None))
add("pop/missing", lambda t, x: t.pop("no"), raises=KINDS)
add(
    "popitem",
    lambda t, x: t.popitem()[0] not in t.keys(),
    state=False,
    data="square",
    refuses=KEEPS_KEYS,
)
add("del_", lambda t, x: t.del_(leaf(t)), refuses=KEEPS_KEYS)
add("del_/nested", lambda t, x: t.del_(("nested", "c")), kinds=ROOTS, refuses=KEEPS_KEYS)
add("del_/tree", lambda t, x: t.del_("nested"), kinds=ROOTS, refuses=KEEPS_KEYS)
add("del_/missing", lambda t, x: t.del_("no"), raises=KINDS)
add("del_/statement", lambda t, x: t.__delitem__(leaf(t)), refuses=KEEPS_KEYS)
add("clear", lambda t, x: t.clear(), refuses=KEEPS_KEYS)
add("filter_empty_", lambda t, x: t.filter_empty_())
add("filter_empty_/deep", lambda t, x: t.filter_empty_(), data="deep", refuses=KEEPS_KEYS)
add("create_nested", lambda t, x: t.create_nested("fresh"), grows=True)
add(
    "create_nested/filled",
    lambda t, x: t.create_nested("fresh").set(("fresh", "e"), t.get(leaf(t)) + 1),
    grows=True,
)

# ---- writing

add("set", lambda t, x: t.set(leaf(t), x.other.get(leaf(t))))
add(
    "set/new",
    lambda t, x: t.set("fresh", t.get(leaf(t)).double()),
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add(
    "set/nested_new",
    lambda t, x: t.set(("fresh", "deep"), t.get(leaf(t))),
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add("set/element_new", lambda t, x: t.set("fresh", t.get("b")), kinds=(ELEMENT,), grows=True)
add("set/tensordict", lambda t, x: t.set("nested", x.other.get("nested")), kinds=ROOTS)
add("set/dict", lambda t, x: t.set("fresh", {"e": t.get(leaf(t))}), kinds=(PLAIN, NESTED))
add(
    "set/dtype",
    lambda t, x: t.set(leaf(t), t.get(leaf(t)).long()),
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add(
    "set/shape",
    lambda t, x: t.set(leaf(t), torch.zeros(*t.batch_size, 5)),
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add(
    "set/tree_over_tensor",
    lambda t, x: t.set(leaf(t), TensorDict(e=torch.zeros(t.batch_size), batch_size=t.batch_size)),
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add(
    "set/tensor_over_tree",
    lambda t, x: t.set("nested", torch.zeros(t.batch_size)),
    kinds=(PLAIN, LAZY, RAGGED),
)
add("set/bad_batch", lambda t, x: t.set(leaf(t), torch.zeros(7)), raises=KINDS)
add("set/inplace", lambda t, x: t.set(leaf(t), x.other.get(leaf(t)), inplace=True))
add("set/numpy", lambda t, x: t.set(leaf(t), x.other.get(leaf(t)).numpy()))
add("set/ragged", lambda t, x: t.set("a", torch.zeros(3, 7)), kinds=(ELEMENT,))
add("set_", lambda t, x: t.set_(leaf(t), x.other.get(leaf(t))))
add("set_/nested", lambda t, x: t.set_(("nested", "c"), x.other.get(("nested", "c"))), kinds=ROOTS)
add("set_/missing", lambda t, x: t.set_("no", x.other.get(leaf(t))), raises=KINDS)
add("set_/cast", lambda t, x: t.set_(leaf(t), x.other.get(leaf(t)).double()))
add("set_at_", lambda t, x: t.set_at_(leaf(t), x.other.get(leaf(t))[1:], slice(1, None)))
add("set_at_/number", lambda t, x: t.set_at_(leaf(t), 0.5, 0))
add(
    "set_at_/nested",
    lambda t, x: t.set_at_(("nested", "c"), x.other.get(("nested", "c"))[[0, 2]], [0, 2]),
    kinds=ROOTS,
)
add("set_at_/mask", lambda t, x: t.set_at_(leaf(t), 0.5, torch.arange(t.batch_size[0]) > 1))
add("set_at_/missing", lambda t, x: t.set_at_("no", 0.5, 0), raises=KINDS)


def _assign(index: Any) -> Any:
    def call(t: Any, x: Any) -> None:
        t[index] = x.other[index]

    return call


def _assign_value(index: Any, value: Any) -> Any:
    return lambda t, x: t.__setitem__(index, value)


for _name, _index in {"int": 1, "slice": slice(1, 3), "list": [0, 2], "last": (..., 0)}.items():
    add(f"set/item_{_name}", _assign(_index))
add("set/item_number", _assign_value(0, 0.5))
add("set/item_beyond", _assign_value(9, 0.5), raises=KINDS)
add("set/item_dict", lambda t, x: t.__setitem__(0, x.other[0].to_dict()))
add(
    "set/item_part",
    lambda t, x: t.__setitem__(0, x.other[0].select(leaf(t))),
    kinds=(PLAIN, NESTED),
    refuses=dict.fromkeys((PLAIN, NESTED), (ValueError, "set_at_")),
)
add("update", lambda t, x: t.update(x.other))
add("update/dict", lambda t, x: t.update({leaf(t): x.other.get(leaf(t))}))
add(
    "update/nested",
    lambda t, x: t.update({"nested": {"c": x.other.get(("nested", "c"))}}),
    kinds=ROOTS,
)
add(
    "update/new",
    lambda t, x: t.update({"fresh": x.other.get(leaf(t))}),
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add("update/keys", lambda t, x: t.update(x.other, keys_to_update=[leaf(t)]))
add("update/clone", lambda t, x: t.update(x.other, clone=True))
add("update/inplace", lambda t, x: t.update(x.other, inplace=True))
add("update/self", lambda t, x: t.update(t))
add("update_", lambda t, x: t.update_(x.other))
add("update_/dict", lambda t, x: t.update_({leaf(t): x.other.get(leaf(t))}))
add("update_/keys", lambda t, x: t.update_(x.other, keys_to_update=[leaf(t)]))
add("update_/missing", lambda t, x: t.update_({"no": x.other.get(leaf(t))}), raises=KINDS)
add("update_at_", lambda t, x: t.update_at_(x.other[1], 1))
add("update_at_/slice", lambda t, x: t.update_at_(x.other[1:], slice(1, None)))
add("update_at_/keys", lambda t, x: t.update_at_(x.other[0], 0, keys_to_update=[leaf(t)]))
add("replace", lambda t, x: t.replace({leaf(t): x.other.get(leaf(t))}), view=True)
add("copy_", lambda t, x: t.copy_(x.other))
add(
    "copy_at_",
    lambda t, x: t.copy_at_(x.other[1], 1),
    raises=(LAZY, RAGGED),
    refuses=dict.fromkeys((PLAIN, NESTED, ELEMENT), (RuntimeError, "fast=False")),
)
add("copy_at_/slow", lambda t, x: t.copy_at_(x.other[1], 1, fast=False))
add("apply", lambda t, x: t.apply(lambda v: v + 1))
add("apply/others", lambda t, x: t.apply(lambda v, w: v * w, x.other))
add(
    "apply/batch_size",
    lambda t, x: t.apply(lambda v: v.sum(), batch_size=[]),
    kinds=(PLAIN, NESTED, ELEMENT),
)
add("apply/inplace", lambda t, x: t.apply(lambda v: v + 1, inplace=True))
add("apply_", lambda t, x: t.apply_(lambda v: v.mul_(2)))
add("apply_/returned", lambda t, x: t.apply_(lambda v: v * 2))
add("named_apply", lambda t, x: t.named_apply(lambda k, v: v + len(k), nested_keys=True))
add("named_apply/inplace", lambda t, x: t.named_apply(lambda k, v: v + len(k), inplace=True))
add("attrs", lambda t, x: t.attrs().to_dict(), kinds=(PLAIN, NESTED, ELEMENT))
add("attrs/stack", lambda t, x: t.attrs(fields=("dtype",)).to_dict(), kinds=(LAZY, RAGGED))


def plus_one(td: TensorDict) -> TensorDict:
    return td + 1


add("map", lambda t, x: t.map(plus_one, num_workers=1, chunksize=2, mp_start_method="fork"))
add(
    "map_iter",
    lambda t, x: torch.cat(
        list(t.map_iter(plus_one, num_workers=1, chunksize=2, mp_start_method="fork")), 0
    ),
)

# ---- names

add("names", lambda t, x: t.names, data="names")
add("names/none", lambda t, x: t.names)


def _set_names(t: Any, x: Any) -> Any:
    t.names = ["x", "y"][-t.ndim :]
    return t.names


add("names/set", _set_names, refuses=NAMED_ON_STORE)
add("rename", lambda t, x: t.rename(*["x", "y"][-t.ndim :]), view=True)
add("rename/map", lambda t, x: t.rename(agent="x"), data="names", view=True)
add("rename_", lambda t, x: t.rename_(*["x", "y"][-t.ndim :]), refuses=NAMED_ON_STORE)
add("rename_/map", lambda t, x: t.rename_(agent="x"), data="names", refuses=NAMED_ON_STORE)
add("refine_names", lambda t, x: t.refine_names(..., "x"), view=True)
add(
    "to_tensordict/names",
    lambda t, x: t.to_tensordict(),
    data="names",
    wants={RAGGED: lambda t, x: t.clone()},
)
add("get/names_index", lambda t, x: (t[0], t[1:], t[..., 0]), data="names", view=True)
add("add/names", lambda t, x: t.add(1), data="names")

# ---- locks, sharing, copies

add("is_locked", lambda t, x: t.is_locked)
add("lock_", lambda t, x: t.lock_())
add("lock_/set_new", lambda t, x: t.lock_().set("fresh", x.other.get(leaf(t))), raises=KINDS)
add("lock_/set", lambda t, x: t.lock_().set(leaf(t), x.other.get(leaf(t))), raises=KINDS)
add("lock_/set_", lambda t, x: t.lock_().set_(leaf(t), x.other.get(leaf(t))))
add("lock_/update_", lambda t, x: t.lock_().update_(x.other))
add("lock_/update", lambda t, x: t.lock_().update({"fresh": x.other.get(leaf(t))}), raises=KINDS)
add("lock_/del", lambda t, x: t.lock_().del_(leaf(t)), raises=KINDS)
add("lock_/pop", lambda t, x: t.lock_().pop(leaf(t)), raises=KINDS)
add("lock_/rename_key_", lambda t, x: t.lock_().rename_key_(leaf(t), "new"), raises=KINDS)
add("lock_/clear", lambda t, x: t.lock_().clear(), raises=KINDS)
add("lock_/set_non_tensor", lambda t, x: t.lock_().set_non_tensor("extra", "text"), raises=KINDS)
add("lock_/create_nested", lambda t, x: t.lock_().create_nested("fresh"), raises=KINDS)
add("lock_/nested", lambda t, x: (t.lock_(), t["nested"].is_locked)[1], kinds=ROOTS)
add(
    "lock_/nested_set",
    lambda t, x: (t.lock_(), t["nested"].set("fresh", t.get("b"))),
    kinds=ROOTS,
    raises=ROOTS,
)
add("lock_/clone", lambda t, x: (t.lock_().clone().is_locked, t.copy().is_locked))
add("unlock_", lambda t, x: t.lock_().unlock_().set(leaf(t), x.other.get(leaf(t))))


def _unlocked(t: Any, x: Any) -> Any:
    t.lock_()
    with t.unlock_():
        t.set(leaf(t), x.other.get(leaf(t)))
    return t.is_locked


add("unlock_/with", _unlocked)
add("clone", lambda t, x: t.clone())
add("clone/shallow", lambda t, x: t.clone(False), view=True)
add(
    "clone/shallow_write",
    lambda t, x: t.clone(False).set_(leaf(t), x.other.get(leaf(t))),
    view=True,
)
add("copy", lambda t, x: t.copy(), view=True)
add("copy/module", lambda t, x: (copy.copy(t), copy.deepcopy(t)), view=True)
add("copy/pickle", lambda t, x: pickle.loads(pickle.dumps(t)), view=True)
add("is_shared", lambda t, x: t.is_shared())
add("share_memory_", lambda t, x: t.share_memory_(), refuses=COPY_FIRST)
add("is_memmap", lambda t, x: t.is_memmap())
add("saved_path", lambda t, x: t.saved_path, raises=KINDS)
add("data_ptr", lambda t, x: isinstance(t.select("b").data_ptr(), int), kinds=(PLAIN,))
add("bytes", lambda t, x: t.bytes())
add("param_count", lambda t, x: t.param_count())
add("clear_refs_for_compile_", lambda t, x: t.clear_refs_for_compile_())
add(
    "consolidate",
    lambda t, x: (c := t.consolidate(), c.is_consolidated()),
    wants={LAZY: lambda t, x: (t.contiguous().lock_(), True)},
)
add("is_consolidated", lambda t, x: t.is_consolidated())
add(
    "from_consolidated",
    lambda t, x: (t.consolidate(x.tmp / "file"), t.from_consolidated(x.tmp / "file"))[1],
)

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
add("from_tuple", lambda t, x: t.from_tuple((torch.ones(4), torch.zeros(4)), batch_size=[4]))
add(
    "from_namedtuple",
    lambda t, x: t.from_namedtuple(_Tuple(torch.ones(4), torch.zeros(4)), batch_size=[4]),
)
add("from_dataclass", lambda t, x: t.from_dataclass(_Data(torch.ones(4)), batch_size=[4]))
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
