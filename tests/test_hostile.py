"""Truncated, corrupted and foreign values under a store's keys: a named error, in bounded memory."""

import contextlib
import sys

import numpy as np
import pytest
import torch
from _hostile import (
    LATER,
    READS,
    ROWS,
    USES,
    cases,
    little_memory,
    plain_store,
    ragged_store,
    refuses,
)
from tensordict import TensorDict

import tdio
from tdio import TensorDictStore, errors
from tdio.errors import TdioError


@pytest.fixture(autouse=True)
def limited():
    with little_memory():
        yield


@pytest.fixture
def plain(conn, prefix):
    with plain_store(prefix, conn) as names:
        yield names


@pytest.fixture
def ragged(conn, prefix):
    with ragged_store(prefix, conn) as names:
        yield names


NOT_SHAPES = {
    "empty": "",
    "text": "abc",
    "cut off": "[6, 4",
    "more": "[6, 4]]",
    "null": "null",
    "number": "6",
    "object": "{}",
    "string": '"[6, 4]"',
    "floats": "[6.0, 4]",
    "bools": "[true, 4]",
    "negative": "[6, -4]",
    "nested": "[[6], 4]",
    "nan": "[6, NaN]",
    "infinite": "[6, 1e400]",
    "deep": "[" * 100_000,
    "endless number": "[" + "6" * 5000 + "]",
    "not UTF-8": b"[6, \xff]",
    "zero bytes": b"[6, 4]\x00",
}
ABSURD_SHAPES = {
    "beyond 64 bits": f"[6, {2**70}]",
    "product beyond 64 bits": f"[6, {2**40}, {2**40}]",
    "hundred dims": str([ROWS] + [1] * 100),
    "petabytes": f"[6, {2**45}]",
    "terabytes": f"[6, {2**39}]",
    "gigabytes": f"[6, {2**28}]",
    "another batch size": "[7, 4]",
    "no batch dim": "[]",
}
NOT_DTYPES = {
    "empty": "",
    "unknown": "torch.float1000",
    "an attribute of torch": "torch.nn",
    "a module": "os.system",
    "not UTF-8": b"torch.\xff",
    "long": "torch." + "x" * 100_000,
}


# ---- metadata of an entry


@pytest.mark.parametrize("text", cases(NOT_SHAPES))
def test_a_shape_that_is_none(conn, raw, plain, text):
    raw.hset(plain.meta("a"), "shape", text)
    refuses(conn, plain)


@pytest.mark.parametrize("text", cases(ABSURD_SHAPES))
def test_an_absurd_shape(conn, raw, plain, text):
    raw.hset(plain.meta("a"), "shape", text)
    refuses(conn, plain, READS)


@pytest.mark.parametrize("text", cases(NOT_DTYPES))
def test_a_dtype_that_is_none(conn, raw, plain, ragged, text):
    raw.hset(plain.meta("a"), "dtype", text)
    refuses(conn, plain)
    raw.hset(ragged.meta("x"), "dtype", text)
    refuses(conn, ragged)


@pytest.mark.parametrize("field", ["shape", "dtype"])
def test_a_missing_field(conn, raw, plain, ragged, field):
    raw.hdel(plain.meta("a"), field)
    refuses(conn, plain)
    raw.hdel(ragged.meta("x"), field)
    refuses(conn, ragged)


def test_no_metadata_at_all(conn, raw, plain, ragged):
    raw.delete(plain.meta("a"), ragged.meta("x"))
    refuses(conn, plain)
    refuses(conn, ragged)


def test_rows_without_bytes_are_not_counted_one_by_one(conn, raw, plain):
    """Ten billion rows of no bytes take nothing on the server."""
    count = 10**10
    raw.set(plain.key("__batch_size__"), f"[{count}]")
    for path in ("a", "deep.b"):
        raw.hset(plain.meta(path), "shape", f"[{count}, 0]")
    for name in ("a slice", "all"):
        with contextlib.suppress(TdioError):
            store = tdio.open_store(td_id=plain.td_id, prefix=plain.prefix, **conn)
            assert len(USES[name](store)) in (count, count - 1)


# ---- data of an entry


@pytest.mark.parametrize("kept", [0, 1, 16, 95], ids=lambda n: f"{n} bytes")
def test_data_that_is_cut_off(conn, raw, plain, kept):
    raw.set(plain.data("a"), raw.get(plain.data("a"))[:kept])
    refuses(conn, plain, READS if kept < 16 else LATER)


def test_data_of_a_larger_dtype(conn, raw, plain):
    raw.hset(plain.meta("a"), "dtype", "torch.float64")
    refuses(conn, plain, LATER)


def test_data_that_is_missing(conn, raw, plain, ragged):
    for names, path in ((plain, "a"), (ragged, "y")):
        raw.delete(names.data(path))
        with pytest.raises(errors.EntryNotFound, match=path):
            tdio.open_store(td_id=names.td_id, prefix=names.prefix, **conn)[[1, 2]]


@pytest.mark.parametrize("kept", [0, 8, 119])
def test_ragged_data_that_is_cut_off(conn, raw, ragged, kept):
    raw.set(ragged.data("x"), raw.get(ragged.data("x"))[:kept])
    refuses(conn, ragged, LATER)


# ---- offset tables and element shapes


def table(*offsets):
    return np.array(offsets, "<i8").tobytes()


GOOD = (0, 0, 8, 24, 48, 80, 120)
TABLES = {
    "missing": None,
    "empty": b"",
    "short": table(*GOOD[:-1]),
    "long": table(*GOOD, 120),
    "half a number": table(*GOOD)[:-3],
    "negative": table(-8, *GOOD[1:]),
    "all negative": table(*(-n for n in GOOD)),
    "decreasing": table(0, 0, 24, 8, 48, 80, 120),
    "beyond the data": table(*GOOD[:-1], 2**62),
    "does not begin at 0": table(*(n + 8 for n in GOOD)),
    "not whole elements": table(0, 0, 7, 24, 48, 80, 120),
    "big-endian": np.array(GOOD, ">i8").tobytes(),
    "text": b"[0, 0, 8, 24, 48, 80, 120]",
}
ELEMENT_SHAPES = {
    "missing": None,
    "empty": "",
    "not JSON": "[[0, 2], [1, 2",
    "too few": "[[0, 2], [1, 2]]",
    "too many": str([[i, 2] for i in range(ROWS + 1)]),
    "others": str([[i + 1, 2] for i in range(ROWS)]),
    "negative": str([[-i, -2] for i in range(ROWS)]),
    "floats": str([[float(i), 2] for i in range(ROWS)]),
    "flat": str([i * 2 for i in range(ROWS)]),
    "deeper": str([[[i, 2]] for i in range(ROWS)]),
    "an object": "{}",
    "strings": '["0", "1", "2", "3", "4", "5"]',
    "absurd": str([[i, 2**61] for i in range(ROWS)]),
    "wraps to the right sizes": str([[i, 2, 2**63, 2] for i in range(ROWS)]),
    "beyond 64 bits": str([[i, 2**70] for i in range(ROWS)]),
    "deep": "[" * 100_000,
    "a thousand dims": str([[i, 2] + [1] * 1000 for i in range(ROWS)]),
}


@pytest.mark.parametrize("content", cases(TABLES))
def test_an_offset_table_that_is_none(conn, raw, ragged, content):
    if content is None:
        raw.delete(ragged.offsets("x"))
    else:
        raw.set(ragged.offsets("x"), content)
    refuses(conn, ragged)


@pytest.mark.parametrize("text", cases(ELEMENT_SHAPES))
def test_element_shapes_that_are_none(conn, raw, ragged, text):
    if text is None:
        raw.hdel(ragged.meta("x"), "shapes")
    else:
        raw.hset(ragged.meta("x"), "shapes", text)
    refuses(conn, ragged)


def test_a_table_and_shapes_that_agree_on_more_than_there_is(conn, raw, ragged):
    rows = 2**26
    raw.hset(ragged.meta("x"), "shapes", str([[rows, 2]] * ROWS))
    raw.set(ragged.offsets("x"), table(*(i * rows * 8 for i in range(ROWS + 1))))
    refuses(conn, ragged, READS)


# ---- keys that describe the whole store

BATCH_SIZES = {
    **NOT_SHAPES,
    "another": "[7]",
    "more dims": "[6, 4, 1]",
    "beyond 64 bits": f"[{2**70}]",
    "hundred dims": str([ROWS] * 100),
}
STACKS = {
    "__type__": ["lazy", b"\xff"],
    "__count__": ["", "-1", "x", "7", "1e3", "6.0", str(2**70), "9" * 5000, b"\xff"],
    "__stack_dim__": ["7", "-9", "x", "1.0", str(2**70), "9" * 5000, b"\xff"],
    "__inner_batch_size__": [*NOT_SHAPES.values(), "[2]", f"[{2**70}]"],
}
STACK_CASES = {
    f"{suffix} is {text[:30]!r}": (suffix, text)
    for suffix, texts in STACKS.items()
    for text in texts
}


@pytest.mark.parametrize("text", cases(BATCH_SIZES))
def test_a_batch_size_that_is_none(conn, raw, plain, text):
    raw.set(plain.key("__batch_size__"), text)
    refuses(conn, plain)


@pytest.mark.parametrize("case", cases(STACK_CASES))
def test_a_stack_that_is_none(conn, raw, ragged, case):
    suffix, text = case
    raw.set(ragged.key(suffix), text)
    refuses(conn, ragged)


@pytest.mark.parametrize("suffix", sorted(STACKS.keys() - {"__stack_dim__"}))
def test_a_stack_that_lacks_a_key(conn, raw, ragged, suffix):
    raw.delete(ragged.key(suffix))
    refuses(conn, ragged)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "cuda:-1", b"\xff", "cpu:0:0"], ids=repr)
def test_a_device_that_is_none(conn, raw, plain, ragged, device):
    """It is refused, or where this machine has no such device the read is."""
    for names in (plain, ragged):
        raw.set(names.key("__device__"), device)
        refuses(conn, names, ["rows", "all"])
        store = tdio.open_store(td_id=names.td_id, prefix=names.prefix, device="cpu", **conn)
        assert len(store[[1, 2]]) == 2


@pytest.mark.parametrize("name", ["os.system", "torch.Tensor", "x", ".", b"\xff.\xff"], ids=repr)
def test_a_class_that_is_none(conn, raw, plain, name):
    raw.set(plain.key("__tensorclass__"), name)
    before = set(sys.modules)
    with pytest.raises(errors.UnsupportedValue, match="tensorclass_cls="):
        TensorDictStore.from_store(td_id=plain.td_id, prefix=plain.prefix, **conn)
    assert set(sys.modules) == before


COMMITS = {
    "newer": {"version": "2"},
    "text": {"version": "x"},
    "a digit that int() refuses": {"version": "²"},
    "more digits than int() takes": {"version": "9" * 5000},
    "unknown state": {"state": "?"},
    "not UTF-8": {"state": b"\xff"},
}


@pytest.mark.parametrize("state", cases(COMMITS))
def test_a_commit_mark_that_is_none(conn, raw, plain, state):
    raw.hset(plain.commit, mapping=state)
    refuses(conn, plain)


@pytest.mark.parametrize(
    "path", [b"\xff", b"", b".", b"a..b", b".a", b"ghost", b"deep.b.c\x00"], ids=repr
)
def test_a_path_of_no_entry(conn, raw, plain, path):
    raw.sadd(plain.registry, path)
    refuses(conn, plain, ["rows", "all"])


def test_an_entry_that_is_also_a_level(conn, raw, plain):
    """The reference can leave both behind, and then sees the level."""
    raw.sadd(plain.registry, "a.c")
    raw.hset(plain.meta("a.c"), mapping={"shape": "[6]", "dtype": "torch.uint8"})
    raw.set(plain.data("a.c"), b"abcdef")
    store = tdio.open_store(td_id=plain.td_id, prefix=plain.prefix, **conn)
    try:
        assert store[2]["a", "c"] == ord("c")
        assert store.to_tensordict()["a", "c"].tolist() == list(b"abcdef")
    except TdioError as error:
        assert "'a" in str(error)


# ---- keys of another type


def other_types(raw, key):
    """Put a value of each type under the key, one after the other."""
    puts = {
        "string": lambda: raw.set(key, b"abc"),
        "list": lambda: raw.rpush(key, b"abc", b"def"),
        "set": lambda: raw.sadd(key, b"abc"),
        "hash": lambda: raw.hset(key, "abc", b"def"),
        "stream": lambda: raw.xadd(key, {"abc": b"def"}),
    }
    was = raw.type(key).decode()
    for kind, put in puts.items():
        if kind != was:
            raw.delete(key)
            put()
            yield kind


@pytest.mark.parametrize("key", ["meta", "data"])
def test_an_entry_of_another_type(conn, raw, plain, ragged, key):
    for names, path in ((plain, "a"), (ragged, "x"), (ragged, "y")):
        for _ in other_types(raw, getattr(names, key)(path)):
            refuses(conn, names, LATER if path != "y" else ["rows", "all"])


def test_a_table_of_another_type(conn, raw, ragged):
    for _ in other_types(raw, ragged.offsets("x")):
        refuses(conn, ragged)


@pytest.mark.parametrize("suffix", ["__keys__", "__batch_size__", "__device__", "__tdio_commit__"])
def test_a_global_key_of_another_type(conn, raw, plain, suffix):
    for _ in other_types(raw, plain.key(suffix)):
        refuses(conn, plain)


@pytest.mark.parametrize("suffix", ["__type__", *sorted(STACKS.keys() - {"__type__"}), "__keys__"])
def test_a_key_of_a_stack_of_another_type(conn, raw, ragged, suffix):
    for _ in other_types(raw, ragged.key(suffix)):
        refuses(conn, ragged)


# ---- writes over damage


def test_writes_over_damage_are_refused(conn, raw, plain, ragged):
    row = TensorDict(a=torch.zeros(4), deep=TensorDict(b=torch.tensor(1)))
    raw.set(plain.data("a"), b"short")
    with pytest.raises(TdioError):
        tdio.open_store(td_id=plain.td_id, prefix=plain.prefix, **conn)[1] = row
    assert raw.get(plain.data("a")) == b"short"
    raw.set(ragged.offsets("x"), TABLES["decreasing"])
    with pytest.raises(TdioError):
        stack = tdio.open_store(td_id=ragged.td_id, prefix=ragged.prefix, **conn)
        stack[2] = TensorDict(x=torch.zeros(9, 2), y=torch.zeros(3))


def test_a_damaged_store_can_be_deleted(conn, raw, plain, ragged):
    raw.set(plain.key("__batch_size__"), "damaged")
    raw.hset(plain.meta("a"), "shape", "damaged")
    raw.delete(ragged.key("__count__"))
    for names in (plain, ragged):
        tdio.delete_store(td_id=names.td_id, prefix=names.prefix, **conn)
    assert not raw.keys(f"{plain.prefix}:*")
