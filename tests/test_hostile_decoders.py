"""The decoders of what a server says, given anything: an answer that makes sense, or our error."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdio import errors
from tdio.errors import TdioError
from tdio.layout import spec as specs
from tdio.layout.dtypes import BY_NAME
from tdio.wire import reading
from tdio.wire.names import Names
from tdio.wire.requests import Commands

TEXT = st.text(max_size=40)
SIZES = st.one_of(st.integers(-2, 8), st.integers(-(2**80), 2**80))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), TEXT),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=20,
)
SHAPE = st.one_of(TEXT, JSON.map(str), st.lists(SIZES, max_size=5).map(str))
ELEMENTS = st.one_of(
    TEXT, JSON.map(str), st.lists(st.lists(SIZES, max_size=4), max_size=8).map(str)
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "shape": SHAPE,
        "dtype": st.one_of(TEXT, st.sampled_from(sorted(BY_NAME))),
        "homogeneous": st.one_of(TEXT, st.sampled_from(["0", "1"])),
        "layout": st.one_of(TEXT, st.sampled_from(["stack", "batch"])),
        "shapes": ELEMENTS,
        "is_non_tensor": st.one_of(TEXT, st.sampled_from(["0", "1"])),
        "encoding": st.one_of(TEXT, st.sampled_from(["json", "json_array", "pickle"])),
    },
)
TABLE = st.one_of(
    st.none(),
    st.binary(max_size=80),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8).map(
        lambda n: np.array(n, "<i8").tobytes()
    ),
)


@settings(max_examples=100, deadline=None)
@given(
    fields=FIELDS,
    batch=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    lazy=st.booleans(),
    offsets=TABLE,
)
def test_a_spec_is_decoded_or_refused(fields, batch, lazy, offsets):
    stack = 0 if lazy else None
    try:
        spec = specs.decode("p", fields, where="here", batch=batch, stack=stack, offsets=offsets)
    except errors.CorruptEntry as error:
        assert "here" in str(error)
        return
    assert 0 <= spec.nbytes < 2**60
    assert spec.dtype in BY_NAME.values()
    if spec.ragged:
        assert len(spec.shapes) == batch[0] == len(spec.offsets) - 1
        assert (np.diff(spec.offsets) >= 0).all()
    else:
        assert sorted(spec.shape[: len(batch)]) == sorted(batch)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6))
def test_what_is_encoded_is_decoded(rows):
    shapes = specs.shapes_array(rows)
    offsets = specs.ragged_offsets(shapes, 4)
    whole = specs.LeafSpec("p", torch.float32, (len(rows), *rows[0]), True, shapes, offsets)
    again = specs.decode(
        "p", specs.encode(whole, lazy=True), where="here", batch=(len(rows),), stack=0,
        offsets=offsets.astype("<i8").tobytes(),
    )  # fmt: skip
    assert [again.element_shape(i) for i in range(len(rows))] == [tuple(row) for row in rows]
    assert again.nbytes == whole.nbytes


BYTES = st.one_of(
    SHAPE.map(str.encode), st.binary(max_size=40), st.integers(-9, 9).map(lambda n: b"%d" % n)
)
STRING = st.one_of(st.none(), st.sampled_from([b"lazy_stack", b"[6]", b"cpu", b"0"]), BYTES)
HASH = st.one_of(
    st.dictionaries(BYTES, BYTES, max_size=4),
    FIELDS.map(lambda fields: {k.encode(): v.encode() for k, v in fields.items()}),
    st.sampled_from([{b"state": b"complete", b"version": b"1"}, {}]),
)
SET = st.lists(st.one_of(BYTES, st.sampled_from([b"a", b"a.b"])), max_size=3)
ANSWERS = {
    "GET": STRING,
    "GETRANGE": STRING.map(lambda value: value or b""),
    "HGETALL": st.one_of(HASH, HASH.map(lambda h: [part for pair in h.items() for part in pair])),
    "SMEMBERS": st.one_of(SET, SET.map(set)),
}


def run(operation, data):
    """Drive an operation with a server that says anything of the right type, and stays with it."""
    said = {}
    try:
        request = next(operation)
        while True:
            assert isinstance(request, Commands)
            for item in request.items:
                if item not in said:
                    said[item] = data.draw(ANSWERS[item[0]], label=str(item))
            request = operation.send([said[item] for item in request.items])
    except StopIteration as stop:
        return stop.value


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_store_is_found_or_refused(data):
    try:
        info, specs = run(reading.find(Names("p", "id"), "here"), data)
    except TdioError as error:
        assert "here" in str(error)
        return
    assert not specs
    assert all(type(n) is int and n >= 0 for n in info.batch)
    assert torch.Size(info.batch) == info.batch
    assert info.stack is None or info.batch[info.stack] == info.count


@settings(max_examples=100, deadline=None)
@given(data=st.data(), stack=st.sampled_from([None, 0, 1]))
def test_entries_are_described_or_refused(data, stack):
    info = reading.StoreInfo((6, 6), stack)
    try:
        got = run(reading.load_specs(Names("p", "id"), info, ["a", "b"], "here"), data)
    except TdioError as error:
        assert "here" in str(error)
        return
    assert set(got) == {"a", "b"}
