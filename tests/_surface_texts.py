"""Cases of the walk over TensorDictBase: non-tensor entries, dim names, locks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from _surface import (
    COPY_FIRST,
    ELEMENT,
    KINDS,
    LAZY,
    NAMED_ON_STORE,
    NESTED,
    PLAIN,
    RAGGED,
    ROOTS,
    WHOLE_FIRST,
    Cases,
    leaf,
)
from tensordict import NonTensorData

CASES = Cases()
add = CASES.add

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


add(
    "set/texts_other",
    _set_other_text,
    data="texts",
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
    # A row holds one value for all its places, locally one for each.
    wants=dict.fromkeys((PLAIN, NESTED), lambda t, x: (_set_other_text(t, x), ("abc", "other"))[1]),
)
add("set/texts_element", _set_element, data="texts", kinds=(PLAIN, NESTED, LAZY, RAGGED), view=True)
add(
    "set/over_text",
    lambda t, x: t.set("text", t.get(leaf(t)) + 1),
    data="texts",
    kinds=(PLAIN, NESTED, LAZY, RAGGED),
)
add(
    "set/text_over",
    lambda t, x: t.set_non_tensor(leaf(t), "now a text"),
    data="texts",
    refuses=WHOLE_FIRST,
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
add("refine_names", lambda t, x: t.refine_names(..., "x"), view=True, refuses=NAMED_ON_STORE)
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
add(
    "clear_refs_for_compile_",
    lambda t, x: t.clear_refs_for_compile_(),
    wants={RAGGED: lambda t, x: t},
)
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
