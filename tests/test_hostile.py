"""Truncated, corrupted and foreign values under a store's keys: a named error, in bounded memory."""

import contextlib
import resource
import socket
import sys
import threading
import uuid

import hiredis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

import tdio
from tdio import LazyStackedTensorDictStore, TensorDictStore, errors
from tdio.errors import TdioError
from tdio.layout import spec as specs
from tdio.layout.dtypes import BY_NAME
from tdio.wire import reading
from tdio.wire.names import Names
from tdio.wire.requests import Commands

ROWS = 6
MARGIN_BYTES = 512 * 1024 * 1024


@pytest.fixture(autouse=True)
def little_memory():
    """Let the process grow by half a gigabyte of address space: a huge allocation fails."""
    if sys.platform != "linux":
        yield
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MARGIN_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def prefix(raw):
    prefix = f"hostile-{uuid.uuid4().hex}"
    yield prefix
    left = raw.keys(f"{prefix}:*")
    if left:
        raw.delete(*left)


@pytest.fixture
def plain(conn, prefix):
    local = TensorDict(
        a=torch.arange(24.0).view(ROWS, 4),
        deep=TensorDict(b=torch.arange(ROWS), batch_size=[ROWS]),
        batch_size=[ROWS],
    )
    with TensorDictStore.from_tensordict(local, prefix=prefix, **conn) as store:
        yield Names(prefix, store.td_id)


@pytest.fixture
def ragged(conn, prefix):
    """Element i of x has i rows of 8 bytes; all elements of y have one shape."""
    local = lazy_stack([TensorDict(x=torch.ones(i, 2), y=torch.ones(3)) for i in range(ROWS)])
    with TensorDictStore.from_tensordict(local, prefix=prefix, **conn) as store:
        yield Names(prefix, store.td_id)


USES = {
    "repr": repr,
    "a row": lambda s: s[0].to_tensordict(),
    "rows": lambda s: s[[1, 5]],
    "a slice": lambda s: s[1:],
    "all": lambda s: s.to_tensordict(),
    "an entry": lambda s: s["a" if isinstance(s, TensorDictStore) else "x"],
}


def refuses(conn, names, uses=USES):
    """Each use of the store, by a handle that knows nothing yet, raises an error of ours."""
    for name in uses:
        with pytest.raises(TdioError) as caught:
            store = tdio.open_store(td_id=names.td_id, prefix=names.prefix, **conn)
            with contextlib.closing(store):
                USES[name](store)
        # Where the connection broke, the server is named, else the store.
        named = names.td_id in str(caught.value) or names.prefix in str(caught.value)
        assert named or isinstance(caught.value, ConnectionError), name


def cases(table, not_yet=()):
    """Return the parameters of a table; those in ``not_yet`` fail so far, for the reason there."""
    not_yet = dict(not_yet)
    assert not_yet.keys() <= table.keys()
    return [
        pytest.param(
            value,
            id=name,
            marks=[pytest.mark.xfail(strict=True, reason=not_yet[name])] if name in not_yet else [],
        )
        for name, value in table.items()
    ]


READS = {name: use for name, use in USES.items() if name != "repr"}
LATER = {name: use for name, use in READS.items() if name != "a row"}

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


ALLOCATES = "memory is taken before the server is asked whether it holds so much"

# ---- metadata of an entry


@pytest.mark.parametrize("text", cases(NOT_SHAPES))
def test_a_shape_that_is_none(conn, raw, plain, text):
    raw.hset(plain.meta("a"), "shape", text)
    refuses(conn, plain)


@pytest.mark.parametrize(
    "text", cases(ABSURD_SHAPES, dict.fromkeys(["petabytes", "terabytes", "gigabytes"], ALLOCATES))
)
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


@pytest.mark.xfail(strict=True, reason="a slice is turned into the number of each row")
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


@pytest.mark.parametrize(
    "text", cases(ELEMENT_SHAPES, {"a thousand dims": "the parser in bulk has no limit of dims"})
)
def test_element_shapes_that_are_none(conn, raw, ragged, text):
    if text is None:
        raw.hdel(ragged.meta("x"), "shapes")
    else:
        raw.hset(ragged.meta("x"), "shapes", text)
    refuses(conn, ragged)


@pytest.mark.xfail(strict=True, reason=ALLOCATES)
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
UNCHECKED = "the shapes of ragged elements are not compared with their batch size"


@pytest.mark.parametrize("text", cases(BATCH_SIZES))
def test_a_batch_size_that_is_none(conn, raw, plain, text):
    raw.set(plain.key("__batch_size__"), text)
    refuses(conn, plain)


@pytest.mark.parametrize(
    "case",
    cases(
        STACK_CASES,
        {
            "__inner_batch_size__ is '[2]'": UNCHECKED,
            "__inner_batch_size__ is '[1180591620717411303424]'": UNCHECKED,
        },
    ),
)
def test_a_stack_that_is_none(conn, raw, ragged, case):
    suffix, text = case
    raw.set(ragged.key(suffix), text)
    refuses(conn, ragged)


@pytest.mark.parametrize("suffix", sorted(STACKS.keys() - {"__stack_dim__"}))
def test_a_stack_that_lacks_a_key(conn, raw, ragged, suffix):
    raw.delete(ragged.key(suffix))
    refuses(conn, ragged)


@pytest.mark.xfail(strict=True, reason="torch reads the text, and its errors are not ours")
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
DIGITS = dict.fromkeys(
    ["a digit that int() refuses", "more digits than int() takes"],
    "isdigit() is not what int() takes",
)


@pytest.mark.parametrize("state", cases(COMMITS, DIGITS))
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


# ---- a server that does not speak the protocol

REPLIES = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "nothing at all": b"",
    "half a reply": b"$100\r\nabc",
    "an absurd length": b"$99999999999999\r\nabc",
    "a negative length": b"$-5\r\n",
    "an absurd count": b"*2147483647\r\n",
    "an absurd map": b"%2147483647\r\n",
    "absurd nesting": b"*1\r\n" * 10_000,
    "binary": bytes(range(256)) * 4,
    "numbers": b":1\r\n" * 100,
    "errors": b"-ERR no\r\n" * 100,
    "nothing of each": b"$-1\r\n" * 100,
    "empty lists": b"*0\r\n" * 100,
    "texts": b"$3\r\nabc\r\n" * 100,
    "lists": b"*3\r\n:1\r\n$-1\r\n$3\r\nabc\r\n" * 100,
}


UNPARSED = dict.fromkeys(
    ["another protocol", "a negative length", "an absurd count", "absurd nesting", "binary"],
    "errors of hiredis, and its lack of memory for a list of 2**31, are not turned into ours",
)
UNTYPED = dict.fromkeys(
    ["numbers", "nothing of each", "empty lists", "texts", "lists"],
    "the type of a reply is taken for granted",
)


def reply_of(peer, command):
    """Have the server behind answer a command; return the bytes of its reply."""
    peer.sendall(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in command)
    )
    parser, reply = hiredis.Reader(), b""
    while True:
        data = peer.recv(1 << 20)
        assert data, "the server behind has gone"
        reply += data
        parser.feed(data)
        if parser.gets() is not False:
            return reply


@contextlib.contextmanager
def a_server_that_answers(reply, hit, port):
    """Relays to a server, but answers a command that ``hit`` names with ``reply`` and hangs up."""

    def serve(peer):
        with peer, socket.create_connection(("127.0.0.1", port), timeout=20) as behind:
            parser = hiredis.Reader()
            while data := peer.recv(65536):
                parser.feed(data)
                while command := parser.gets():
                    if hit(command):
                        peer.sendall(reply)
                        return
                    peer.sendall(reply_of(behind, command))

    def accept():
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listening.accept()
                peer.settimeout(20)
                with contextlib.suppress(OSError):
                    serve(peer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield {"host": "127.0.0.1", "port": listening.getsockname()[1], "socket_timeout": 2}
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("reply", cases(REPLIES, UNPARSED | UNTYPED))
def test_a_server_that_does_not_speak_the_protocol(server, reply):
    def hit(command):
        return command[0] not in (b"CLIENT", b"SELECT", b"PING", b"HELLO")

    with a_server_that_answers(reply, hit, server.port) as kwargs:
        for open_it in (tdio.open_store, LazyStackedTensorDictStore.from_store):
            with pytest.raises(TdioError):
                open_it(td_id="any", **kwargs)


@pytest.mark.parametrize("reply", cases(REPLIES, UNPARSED | {"numbers": UNTYPED["numbers"]}))
def test_a_server_that_goes_mad_later(server, plain, ragged, reply):
    def hit(command):
        return any(b":d:" in part for part in command[1:2])

    with a_server_that_answers(reply, hit, server.port) as kwargs:
        refuses(kwargs, plain, ["rows", "all"])
        refuses(kwargs, ragged, ["rows", "all"])


# ---- decoders, whatever they are given

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


@settings(max_examples=150, deadline=None)
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
    """Drive an operation with a server that answers anything of the right type."""
    try:
        request = next(operation)
        while True:
            assert isinstance(request, Commands)
            replies = [data.draw(ANSWERS[item[0]], label=str(item)) for item in request.items]
            request = operation.send(replies)
    except StopIteration as stop:
        return stop.value


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_store_is_found_or_refused(data):
    try:
        info = run(reading.find(Names("p", "id"), "here"), data)
    except TdioError as error:
        assert "here" in str(error)
        return
    assert all(type(n) is int and n >= 0 for n in info.batch)
    assert torch.Size(info.batch) == info.batch
    assert info.stack is None or info.batch[info.stack] == info.count


@settings(max_examples=150, deadline=None)
@given(data=st.data(), stack=st.sampled_from([None, 0, 1]))
def test_entries_are_described_or_refused(data, stack):
    info = reading.StoreInfo((6, 6), stack)
    try:
        got = run(reading.load_specs(Names("p", "id"), info, ["a", "b"], "here"), data)
    except TdioError as error:
        assert "here" in str(error)
        return
    assert set(got) == {"a", "b"}
