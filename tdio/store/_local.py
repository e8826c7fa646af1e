"""Which methods of TensorDictBase work on a local copy of what is stored, and which refuse.

A store has no memory of its own that an in-place method could change, and an entry whose elements
differ in shape no tensor that an out-of-place one could take. The second answer from a local copy;
the first change the copy and write it back in one transaction. Where the result cannot be kept
under the batch size on the server, they refuse and say what to call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed

Method = Callable[..., Any]


def _names(text: str) -> list[str]:
    return text.split()


_UNARY = _names("""
    abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg
    reciprocal round sigmoid sign sin sinh sqrt tan tanh trunc
""")
_BINARY = _names("add sub mul div pow maximum minimum clamp_max clamp_min addcdiv addcmul lerp")
_OPERATORS = _names("""
    abs neg invert add radd sub rsub mul rmul truediv rtruediv mod pow rpow
    and or ror xor rxor eq ne lt le gt ge
""")
_REDUCTIONS = _names("""
    mean nanmean sum nansum prod std var all any amax amin max min cummax cummin quantile logsumexp
    norm softmax
""")
_DTYPES = _names("""
    bfloat16 bool complex128 complex32 complex64 double float float16 float32 float64 half int
    int16 int32 int64 int8 uint16 uint32 uint64 uint8 type
""")
#: Their result is made of the entries, and may not be a store that is changed with it.
COPIED = _names("replace rename")
#: They send a consolidated copy; what comes back is no store.
SENT = _names("broadcast init_remote all_gather")
#: With ``inplace=True`` they change keys, else they copy.
REKEYED = _names("flatten_keys unflatten_keys split_keys")
#: With ``inplace=True`` they change the batch size.
RESHAPED = _names("reshape flatten unflatten repeat repeat_interleave pad")
#: They receive values in place.
RECEIVED = _names("irecv all_reduce reduce")
#: Other ranks take part: all of them see tensors of one shape.
EXCHANGED = _names("""
    send recv isend irecv init_remote broadcast all_reduce reduce all_gather scatter
    gather_and_stack
""")
#: Constructors without an argument for the server.
BUILT = _names("""
    from_any from_list from_tuple from_namedtuple from_dataclass from_csv from_json from_parquet
    from_pandas from_struct_array
""")
#: Out of place, where elements differ in shape.
RAGGED_COPIED = [
    *_UNARY,
    *_BINARY,
    *_DTYPES,
    *_REDUCTIONS,
    *(f"__{name}__" for name in _OPERATORS),
    *_names("isfinite isnan isneginf isposinf isreal mod bitwise_and logical_and rsub clamp"),
    *_names("reshape flatten unflatten expand repeat repeat_interleave to_padded_tensor gather"),
    *_names("split tensor_split chunk unbind as_tensor to_lazystack tolist detach"),
    *_names("bytes param_count rename_keys filter_non_tensor_data map map_iter memmap_like"),
    *_names("non_tensor_items zero_grad get_item_shape"),
]
#: In place, where elements differ in shape.
RAGGED_CHANGED = [
    *(f"{name}_" for name in (*_UNARY, *_BINARY)),
    *(f"__{name}__" for name in ("iadd", "isub", "imul", "itruediv", "ipow")),
    *_names("zero_ masked_fill_ apply_"),
]
#: Keys in place, where elements differ in shape.
RAGGED_REKEYED = _names("separates rename_key_ filter_empty_")
#: Arithmetic whose operand may lack entries: a dense copy of a stack would pad them otherwise.
DEFAULTED = _names("add sub mul div pow")


def copied(name: str, inherited: Method) -> Method:
    """Answer from a local copy."""

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = self._local()
        out = getattr(local, name)(*map(plain, args), **kwargs)
        return self if out is local else out

    return method


def changed(name: str, inherited: Method) -> Method:
    """Change a local copy and write all of it back in one transaction."""

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = self._local()
        out = getattr(local, name)(*map(plain, args), **kwargs)
        self._take_over(local)
        return self if out is local else out

    return method


def rekeyed(name: str, inherited: Method) -> Method:
    """Change the keys of a local copy; write back what stands elsewhere then."""

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_may_rekey()
        local = self._local()
        before = self._flat(local, self._prefix)
        out = getattr(local, name)(*args, **kwargs)
        self._take_over(local, before)
        if isinstance(out, tuple):
            return tuple(self if one is local else one for one in out)
        return self if out is local else out

    return method


def sent(name: str, inherited: Method) -> Method:
    """Send a consolidated copy."""

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.to_tensordict().unlock_(), name)(*args, **kwargs)

    return method


def received(name: str, inherited: Method) -> Method:
    """Receive into a local copy, and write it back when all has come."""

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_given(inherited, args, kwargs, flag) for flag in ("async_op", "return_premature")):
            raise RuntimeError(
                f"{name} on a {type(self).__name__} cannot return before the values are there to "
                "be written to the server; call it on to_tensordict(), then update_ the store"
            )
        local = self.to_tensordict()
        out = getattr(local, name)(*args, **kwargs)
        self._take_over(local)
        return out

    return method


def either(special: Method, inherited: Method, when: Callable[..., bool]) -> Method:
    """Use ``special`` where ``when(self, args, kwargs)``, else what is inherited."""

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (special if when(self, args, kwargs) else inherited)(self, *args, **kwargs)

    return method


def inplace(special: Method, inherited: Method) -> Method:
    """Use ``special`` for ``inplace=True``."""
    return either(special, inherited, lambda _, args, kw: _given(inherited, args, kw, "inplace"))


def ragged(special: Method, inherited: Method) -> Method:
    """Use ``special`` where elements differ in shape."""
    return either(special, inherited, lambda self, args, kwargs: self._ragged())


def refused(name: str, error: type[Exception], why: str) -> Method:
    """Refuse before anything is read, written or sent."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error(f"{name} on a {type(self).__name__}: {why}")

    method.__name__ = name
    method.__doc__ = f"Refuse: {why}."
    return method


def plain(value: Any) -> Any:
    """Return a local copy of a store whose elements differ in shape, anything else as it is."""
    is_ragged = getattr(type(value), "_ragged", None)
    return value._local() if is_ragged is not None and is_ragged(value) else value


def plain_all(values: Any) -> Any:
    """Do ``plain`` for each of a list or tuple of arguments, also in lists among them."""
    return type(values)(
        plain_all(value) if type(value) in (list, tuple) else plain(value) for value in values
    )


def _given(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], flag: str) -> bool:
    """Return whether a call sets a flag, by name or by position."""
    if flag in kwargs or not args:
        return bool(kwargs.get(flag))
    at = list(inspect.signature(method).parameters).index(flag, 1) - 1 if _has(method, flag) else -1
    by_position = at >= 0 and _positional(method, flag) and len(args) > at
    return by_position and bool(args[at])


def _has(method: Method, flag: str) -> bool:
    return flag in inspect.signature(method).parameters


def _positional(method: Method, flag: str) -> bool:
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    kind = inspect.signature(method).parameters[flag].kind
    return kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and (
        inspect.Parameter.VAR_POSITIONAL not in kinds
    )


def install(cls: Any, names: Iterable[str], make: Callable[[str, Method], Any]) -> None:
    """Replace methods of a class by table."""
    for name in names:
        setattr(cls, name, make(name, getattr(cls, name)))


def _is_sender(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this rank of ``gather_and_stack(dst, group)`` is not the destination."""
    dst = kwargs["dst"] if "dst" in kwargs else args[0]
    group = kwargs.get("group", args[1] if len(args) > 1 else None)
    return bool(torch.distributed.get_rank(group) != dst)


def _batch_refused(name: str) -> Method:
    return refused(
        name,
        RuntimeError,
        "the batch size is fixed on the server; call it on to_tensordict()",
    )


def _fixed_batch(name: str, old: Method) -> Method:
    return inplace(_batch_refused(name), old)


def for_stored(cls: Any) -> Any:
    """Set what all stored classes do on local copies, or refuse."""
    install(cls, COPIED, copied)
    install(cls, SENT, sent)
    install(cls, ["gather_and_stack"], lambda name, old: either(sent(name, old), old, _is_sender))
    install(cls, RECEIVED, received)
    install(cls, REKEYED, lambda name, old: inplace(rekeyed(name, old), copied(name, old)))
    install(cls, RESHAPED, _fixed_batch)
    return cls


def for_stacks(cls: Any) -> Any:
    """Set what stacks do, whose elements may differ in shape."""
    why = "its entries differ in shape; exchange the elements of to_tensordict(), or pad them"
    install(cls, RAGGED_COPIED, lambda name, old: ragged(copied(name, old), old))
    install(cls, RAGGED_CHANGED, lambda name, old: ragged(changed(name, old), old))
    install(cls, RAGGED_REKEYED, lambda name, old: ragged(rekeyed(name, old), old))
    install(cls, EXCHANGED, lambda n, old: ragged(refused(n, NotImplementedError, why), old))
    for name in ("apply", "named_apply"):
        old = getattr(cls, name)
        special = inplace(changed(name, old), copied(name, old))
        setattr(cls, name, ragged(special, old))
    for name in ("data", "grad"):
        setattr(cls, name, _ragged_property(name, getattr(cls, name)))
    for name in DEFAULTED:
        old = getattr(cls, name)
        setattr(cls, name, either(copied(name, old), old, lambda _, args, kw: "default" in kw))
    install(cls, ["densify"], copied)
    install(cls, ["load_", "load_memmap_"], changed)
    install(cls, ["auto_batch_size_"], lambda name, old: ragged(_batch_refused(name), old))
    install(cls, [*RESHAPED, "gather"], _fixed_batch)
    return cls


def _ragged_property(name: str, old: property) -> property:
    assert old.fget is not None
    return property(ragged(lambda self: getattr(self._local(), name), old.fget), doc=old.__doc__)


def no_server(instead: str) -> Callable[[Any], Any]:
    """Refuse the constructors that cannot say where a store is to be."""

    def refusing(name: str) -> Any:
        what = instead.format(name=name)

        def method(cls: type, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{cls.__name__}.{name} cannot name a server: {what}")

        method.__name__ = name
        method.__doc__ = f"Refuse: {what}."
        return classmethod(method)

    def decorate(cls: Any) -> Any:
        for name in BUILT:
            setattr(cls, name, refusing(name))
        return cls

    return decorate
