"""Non-tensor entries: a value as JSON text, one for the batch or one for each row.

The encodings are those of tensordict 0.15 (``docs/format.md``): ``json`` is one value for the
whole batch, ``json_array`` a list with one value for each row of dim 0 (in a lazy stack: for each
element), ``pickle`` is what JSON cannot hold. JSON has no tuples, and a value for each place of
several batch dims looks like one nested list: both are noted in a field beside it.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tdio.errors import CorruptEntry, UnsupportedValue

JSON, JSON_ARRAY, PICKLE = "json", "json_array", "pickle"
#: Field of tdio's own, JSON ``[checksum, dims, tuples]``: for the text with this CRC-32, how many
#: batch dims the nested list spells out, and the places of its tuples.
FORM = "tdio_form"


@dataclass(frozen=True)
class ValueSpec:
    """One non-tensor entry on the server.

    Attributes:
        path: the key path.
        encoding: ``json``, ``json_array`` or ``pickle``.
        form: the field of tdio's own, or "".
    """

    path: str
    encoding: str
    form: str = ""


def encode_value(
    path: str, value: Any, dims: int, *, allow_pickle: bool, where: str
) -> tuple[ValueSpec, bytes]:
    """Return the spec and the bytes of a value.

    Args:
        path: the key path.
        value: one value, or for ``dims`` above 0 lists nested so deep: one value for each place
            of the leading batch dims.
        dims: how many batch dims ``value`` spells out.
        allow_pickle: fall back to pickle.
        where: names the store in errors.

    Raises:
        UnsupportedValue: JSON cannot hold the value, and pickles are not allowed.
    """
    odd = next(_unfaithful(value), None)
    if odd is None:
        blob = json.dumps(value).encode()
        tuples = list(_tuples(value, ()))
        form = json.dumps([zlib.crc32(blob), dims, tuples]) if tuples or dims > 1 else ""
        return ValueSpec(path, JSON_ARRAY if dims == 1 else JSON, form), blob
    if not allow_pickle:
        raise UnsupportedValue(
            f"{where}: the value of {path!r} holds a {odd}, which JSON cannot hold; nothing was "
            "written. Store tensors, text, numbers, None, lists, tuples and dicts with text keys, "
            "or open the store with allow_pickle=True"
        )
    blob = pickle.dumps(value, protocol=4)
    return ValueSpec(path, PICKLE, json.dumps([zlib.crc32(blob), dims, []])), blob


def decode_value(
    spec: ValueSpec, blob: bytes, *, allow_pickle: bool, where: str
) -> tuple[Any, int]:
    """Return the value of an entry, and how many batch dims it spells out.

    Raises:
        UnsupportedValue: a pickle, and pickles are not allowed.
        CorruptEntry: text that is not JSON, or a pickle that does not load.
    """
    if spec.encoding == PICKLE and not allow_pickle:
        raise UnsupportedValue(
            f"{where}: the entry {spec.path!r} is a pickle, which could run any code when it "
            "is read; open the store with allow_pickle=True if you trust who wrote it, or "
            "leave the entry out with keys="
        )
    try:
        value = pickle.loads(blob) if spec.encoding == PICKLE else json.loads(blob)
        checksum, dims, tuples = json.loads(spec.form) if spec.form else (None, 0, [])
        # An older writer may have replaced the text and left the field.
        if checksum != zlib.crc32(blob):
            dims, tuples = 0, []
        for place in sorted(tuples, key=len, reverse=True):
            value = _retuple(value, place)
        if spec.encoding == JSON_ARRAY:
            dims = 1
        _check_dims(value, int(dims))
    except (*_DAMAGED, pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
        raise CorruptEntry(
            f"{where}: the value of {spec.path!r} is not the {spec.encoding} that its metadata says"
        ) from error
    return value, dims


_DAMAGED = (ValueError, RecursionError, TypeError, KeyError, IndexError)


def _check_dims(value: Any, dims: int) -> None:
    if dims and not isinstance(value, list):
        raise ValueError("not a list")
    if dims > 1:
        for item in value:
            _check_dims(item, dims - 1)


def value_fields(spec: ValueSpec) -> dict[str, str]:
    """Return the fields of the metadata hash of a non-tensor entry."""
    fields = {"is_non_tensor": "1", "encoding": spec.encoding}
    return fields | {FORM: spec.form} if spec.form else fields


def decode_fields(path: str, fields: Mapping[str, str], where: str) -> ValueSpec:
    """Return the spec that the metadata hash of a non-tensor entry states.

    Raises:
        CorruptEntry: an unknown encoding.
    """
    encoding = fields.get("encoding", JSON)
    if encoding not in (JSON, JSON_ARRAY, PICKLE):
        raise CorruptEntry(f"{where}: unknown encoding {encoding[:80]!r} of the entry {path!r}")
    return ValueSpec(path, encoding, fields.get(FORM, ""))


def _unfaithful(value: Any) -> Iterator[str]:
    """Yield the names of types in ``value`` that would not come back from JSON as they are."""
    if value is None or type(value) in (str, int, float, bool):
        return
    if type(value) in (list, tuple):
        for item in value:
            yield from _unfaithful(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                yield f"dict with a {type(key).__name__} key"
            yield from _unfaithful(item)
    else:
        yield type(value).__name__


def _tuples(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if type(value) is tuple:
        yield place
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tuples(item, (*place, i))
    elif type(value) is dict:
        for key, item in value.items():
            yield from _tuples(item, (*place, key))


def _retuple(value: Any, place: list[Any]) -> Any:
    """Turn the list at ``place`` into a tuple; deeper places have been done before."""
    if not place:
        return tuple(value)
    value[place[0]] = _retuple(value[place[0]], place[1:])
    return value
