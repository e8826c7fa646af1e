"""Cases of the walk over TensorDictBase: entries and keys, read and written."""

from __future__ import annotations

from typing import Any

import torch
from _surface import (
    ELEMENT,
    FIXED,
    KEEPS_KEYS,
    KINDS,
    LAZY,
    NESTED,
    PLAIN,
    RAGGED,
    ROOTS,
    Cases,
    leaf,
)
from tensordict import TensorDict, TensorDictBase, lazy_stack

CASES = Cases()
add = CASES.add

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
for _name in ("update", "update_", "copy_"):
    add(
        f"{_name}/stacked",
        lambda t, x, n=_name: getattr(t, n)(lazy_stack(list(x.other.unbind(0)))),
        kinds=(PLAIN, NESTED),
    )
add("update_/dense", lambda t, x: t.update_(x.other.contiguous()), kinds=(LAZY,))
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
