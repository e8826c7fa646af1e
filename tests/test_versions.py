"""Readers and writers at the same time: nothing torn, nothing lost, nothing stale."""

from __future__ import annotations

import multiprocessing
import os
import time
import tracemalloc
from functools import partial

import pytest
import redis
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdio import LazyStackedTensorDictStore, TensorDictStore, errors, open_store
from tdio.store import elements, fetching, reader
from tdio.store.handle import Contended
from tdio.store.reader import reading
from tdio.wire.reading import Tokens
from tdio.wire.requests import Fetch, Reads

WIDE = 4_000
#: Each second is some thousand reads; `TDIO_TEST_SECONDS=30` looks longer.
SECONDS = float(os.environ.get("TDIO_TEST_SECONDS", "3"))
# Forked: a process that imports torch anew takes longer to start than the test lasts.
forked = multiprocessing.get_context("fork")


def rewrite(td_id, conn, deadline, value):
    """Write batches, elements and updates that hold one value each."""
    store = TensorDictStore.from_store(td_id=td_id, **conn)
    while time.time() < deadline:
        value += 2
        rows = TensorDict(a=torch.full((4, WIDE), value), b=torch.full((4, 3), value)).float()
        rows.batch_size = [4]
        if value % 3 == 0:
            store.update(rows)
        elif value % 3 == 1:
            store[:] = rows
        else:
            store[[0, 1, 2, 3]] = rows


def resize(td_id, conn, deadline, value):
    """Write ragged elements whose length and content tell the same number."""
    stack = LazyStackedTensorDictStore.from_store(td_id=td_id, **conn)
    while time.time() < deadline:
        value += 1
        n = value % 50
        stack[1] = TensorDict(x=torch.full((n, 8), n), y=torch.full((n,), n), z=torch.tensor(n))


def readers(target, td_id, conn, look):
    """Run two writers beside ``look`` for a while; returns how often it looked."""
    deadline = time.time() + SECONDS
    writers = [forked.Process(target=target, args=(td_id, conn, deadline, i)) for i in range(2)]
    for writer in writers:
        writer.start()
    looks = 0
    try:
        while time.time() < deadline:
            look()
            looks += 1
    finally:
        for writer in writers:
            writer.join(30)
    assert [writer.exitcode for writer in writers] == [0, 0]
    return looks


@pytest.fixture
def flat(conn):
    local = TensorDict(a=torch.zeros(4, WIDE), b=torch.zeros(4, 3), batch_size=[4])
    with TensorDictStore.from_tensordict(local, **conn) as store:
        yield store.td_id


@pytest.fixture
def read_only(conn, raw):
    """Arguments of a user who may read, and use no transaction."""
    raw.acl_setuser(
        "looker", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@read"], reset=True
    )
    yield conn | {"username": "looker", "password": "pw"}
    raw.acl_deluser("looker")


@pytest.mark.parametrize("user", ["all", "read"])
def test_batches_are_never_torn(conn, flat, user, request):
    kwargs = conn if user == "all" else request.getfixturevalue("read_only")
    store = open_store(td_id=flat, **kwargs)

    def look():
        for row in store[[3, 1]].unbind(0):
            assert len(torch.cat([row["a"], row["b"]]).unique()) == 1

    assert readers(rewrite, flat, conn, look) > 20


def test_ragged_elements_are_never_torn(conn):
    local = lazy_stack([TensorDict(x=torch.zeros(0, 8), y=torch.zeros(0), z=0) for _ in range(3)])
    local = lazy_stack(
        [TensorDict(x=t["x"].long(), y=t["y"].long(), z=torch.tensor(0)) for t in local]
    )
    store = TensorDictStore.from_tensordict(local, **conn)
    other = open_store(td_id=store.td_id, **conn)

    def look():
        got = other[[1]][0]
        n = int(got["z"])
        assert got["x"].shape == (n, 8) and got["y"].shape == (n,)
        assert (got["x"] == n).all() and (got["y"] == n).all()

    assert readers(resize, store.td_id, conn, look) > 20


def fill(td_id, conn, part, parts):
    store = TensorDictStore.from_store(td_id=td_id, **conn)
    for row in range(part, 40, parts):
        store.set_at_("text", f"row {row}", row)
        store.set_at_("x", torch.full((5,), float(row)), row)
    store.set_at_("strided", float(part), slice(part, None, parts))


def test_writers_on_disjoint_rows_lose_nothing(conn):
    data = TensorDict(
        text=NonTensorStack(*[""] * 40),
        x=torch.zeros(40, 5),
        strided=torch.full((40,), -1.0),
        batch_size=[40],
    )
    store = TensorDictStore.from_tensordict(data, **conn)
    writers = [forked.Process(target=fill, args=(store.td_id, conn, i, 4)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert list(store["text"]) == [f"row {row}" for row in range(40)]
    assert store["x"][:, 0].tolist() == list(map(float, range(40)))
    assert store["strided"].tolist() == [float(row % 4) for row in range(40)]


# ---- another handle's changes


def pair(local, conn):
    one = TensorDictStore.from_tensordict(local, **conn)
    return one, open_store(td_id=one.td_id, **conn)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3, dtype=torch.int64),
        torch.ones(3, 7),
        torch.ones(3, dtype=torch.bfloat16),
        TensorDict(deep=torch.ones(3), batch_size=[3]),
        NonTensorStack("a", "b", "c"),
    ],
    ids=["dtype", "shape", "half", "nested", "text"],
)
def test_an_entry_that_changes_its_kind_is_seen_new(conn, value):
    one, two = pair(TensorDict(x=torch.zeros(3), y=torch.ones(3), batch_size=[3]), conn)
    two.to_tensordict()
    one["x"] = value
    want = TensorDict(x=value, y=torch.ones(3), batch_size=[3])
    try:
        got = two.to_tensordict()
    except KeyError:
        two.refresh()
        got = two.to_tensordict()
    assert set(got.keys(True)) == set(want.keys(True))
    if isinstance(value, torch.Tensor):
        assert got["x"].dtype == value.dtype and torch.equal(got["x"], value)
    one["x"] = torch.zeros(3)
    two.refresh()
    assert torch.equal(two["x"], torch.zeros(3))
    assert "deep" not in str(sorted(map(str, two.keys(True))))


def test_offsets_that_another_handle_moved_are_not_used(conn):
    local = lazy_stack([TensorDict(x=torch.full((n, 2), float(n))) for n in (3, 1, 2)])
    one, two = pair(local, conn)
    two[[0, 1, 2]]
    one[0] = TensorDict(x=torch.full((9, 2), 9.0))
    for index in (1, 2):
        assert torch.equal(two[index]["x"], one[index]["x"])
    two[2] = TensorDict(x=torch.full((2, 2), 7.0))  # in place, behind what has moved
    assert one[0]["x"].unique().tolist() == [9.0] and one[2]["x"].unique().tolist() == [7.0]


def test_a_store_that_tdio_never_wrote_gets_a_version_with_its_first_write(conn, raw):
    store = TensorDictStore.from_tensordict(TensorDict(x=torch.zeros(3), batch_size=[3]), **conn)
    names = store._handle.names
    raw.delete(names.version, names.schema)
    one, two = open_store(td_id=store.td_id, **conn), open_store(td_id=store.td_id, **conn)
    assert two["x"].tolist() == [0.0] * 3
    one["x"] = torch.ones(3, dtype=torch.int32)
    assert two["x"].tolist() == [1, 1, 1] and two["x"].dtype == torch.int32


@pytest.mark.parametrize("lost", ["version", "schema"])
def test_a_store_that_lost_one_of_its_tokens_is_read_and_written_on(conn, raw, lost):
    store = TensorDictStore.from_tensordict(TensorDict(x=torch.zeros(3), batch_size=[3]), **conn)
    names = store._handle.names
    raw.delete(getattr(names, lost))
    for handle in (store, open_store(td_id=store.td_id, **conn)):
        for step in range(3):
            assert handle["x"].tolist() == [0.0] * 3
            handle["x"] = torch.full((3,), float(step))
            handle[1] = TensorDict(x=torch.tensor(9.0))
            assert store["x"].tolist() == [step, 9, step]
            handle["x"] = torch.zeros(3)
        # Another kind: the schema changes, and every handle sees it.
        handle["x"] = torch.ones(3, dtype=torch.int64)
        assert store["x"].dtype == torch.int64
        handle["x"] = torch.zeros(3)
        assert raw.get(names.version)[8:] == raw.get(names.schema)


def test_a_half_written_update_writes_nothing(conn):
    store = TensorDictStore.from_tensordict(
        TensorDict(x=torch.zeros(3), y=torch.zeros(3), batch_size=[3]), **conn
    )
    with pytest.raises((ValueError, RuntimeError)):
        store.update({"x": torch.ones(3), "y": torch.ones(2)})
    assert store["x"].tolist() == [0.0] * 3


# ---- what it costs


def trips(store, work):
    before = store._handle.client.round_trips
    work()
    return store._handle.client.round_trips - before


def test_round_trips(conn):
    data = TensorDict({f"k{i}": torch.zeros(10, i + 1) for i in range(20)}, batch_size=[10])
    data["text"] = NonTensorStack(*map(str, range(10)))
    store = open_store(td_id=TensorDictStore.from_tensordict(data, **conn).td_id, **conn)
    store[0]  # metadata
    for read in (
        lambda: store[[3, 1]],
        lambda: store[2:5],
        lambda: store["k3"],
        lambda: store["text"],
        lambda: store.to_tensordict(),
        lambda: store.get_at("k5", 3),
    ):
        assert trips(store, read) == 1
    assert trips(store, lambda: store.set("k1", torch.ones(10, 2))) == 2
    assert (
        trips(store, lambda: store.update({f"k{i}": torch.ones(10, i + 1) for i in range(20)})) == 2
    )
    assert trips(store, lambda: store.set_at_("k1", 3.0, 4)) == 1
    ragged = lazy_stack([TensorDict(x=torch.zeros(n), y=torch.zeros(n, 2)) for n in range(1, 9)])
    lazy = open_store(td_id=TensorDictStore.from_tensordict(ragged, **conn).td_id, **conn)
    assert trips(lazy, lambda: lazy[3].to_tensordict()) == 2  # with the metadata
    assert trips(lazy, lambda: lazy[5].to_tensordict()) == 1
    assert trips(lazy, lambda: lazy[[5, 1, 2]]) == 1


def test_a_read_beside_writers_takes_a_second_round_trip_at_the_first_only(conn):
    """The version is asked for at both ends while others write, and at the end when they do not."""
    tds = [TensorDict(x=torch.zeros(3), y=torch.zeros(())) for _ in range(4)]
    store = TensorDictStore.from_tensordict(lazy_stack(tds), **conn)
    other = open_store(td_id=store.td_id, **conn)
    reads = [
        lambda: store[[3, 1]]["x"][0],
        lambda: store[3].to_tensordict()["x"],
        lambda: store.to_tensordict()[3]["x"],
    ]
    got = []
    for n in range(40):
        other[3] = TensorDict(x=torch.full((3,), float(n)), y=torch.tensor(float(n)))
        counted = trips(store, lambda n=n: got.append(reads[n % 3]().tolist()))
        assert got[-1] == [n] * 3
        assert counted == (2 if n == 0 else 1)
    assert store._handle.wary > 0
    # What this handle writes is not what somebody else wrote.
    for n in range(100):
        store[3] = TensorDict(x=torch.full((3,), float(n)), y=torch.tensor(float(n)))
        assert trips(store, lambda n=n: got.append(reads[n % 3]().tolist())) == 1
        assert got[-1] == [n] * 3
    assert store._handle.wary == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_write_between_the_ranges_of_a_calm_read_is_seen(conn, threads):
    """Nobody has written for long, and then somebody does in the middle of a read.

    Of two threads the other one may see the new version first, and remember it in the handle.
    """
    tds = [TensorDict(x=torch.zeros(3), y=torch.zeros(3)) for _ in range(4)]
    store = TensorDictStore.from_tensordict(lazy_stack(tds), **conn)
    other = open_store(td_id=store.td_id, **conn)
    store[0:4]
    client, times = store._handle.client, []
    make = partial(reading, store._handle, None, slice(0, 4))

    def between():
        """Run each round trip as two: after the first leaf another handle writes all of it."""
        operation = make()
        request = next(operation)
        while True:
            if isinstance(request, Fetch) and not request.atomic and len(times) < 3:
                times.append(request.stamp)
                taken = list(request.reads)
                halves = [*([request.stamp] if request.stamp else []), taken[0]], taken[1:]
                yield Fetch(Reads(halves[0]))
                other[0:4] = TensorDict(x=torch.ones(4, 3), y=torch.ones(4, 3)) * len(times)
                if threads == 2:
                    client.read(make)
                replies = yield Fetch(Reads(halves[1]), request.after)
            else:
                replies = yield request
            try:
                request = operation.send(replies)
            except StopIteration as stop:
                return stop.value

    whole = client.read(between)
    assert len(times) == 2 and times[0] is None and times[1] is not None
    assert (whole["x"] == 2).all() and (whole["y"] == 2).all()


def test_keys_and_repr_read_no_data(conn, raw):
    store = TensorDictStore.from_tensordict(TensorDict(x=torch.zeros(8), batch_size=[8]), **conn)
    raw.delete(store._handle.names.data("x"))
    other = open_store(td_id=store.td_id, **conn)
    assert list(other.keys(True, True)) == ["x"] and store.td_id in repr(other)
    with pytest.raises(errors.EntryNotFound):
        other["x"]


def test_the_reference_reads_what_the_tokens_stand_beside(conn, raw):
    reference = pytest.importorskip("tensordict.store")
    store = TensorDictStore.from_tensordict(TensorDict(x=torch.arange(3), batch_size=[3]), **conn)
    store["x"] = torch.arange(3) + 1
    theirs = reference.TensorDictStore.from_store(td_id=store.td_id, **conn)
    assert theirs["x"].tolist() == [1, 2, 3]
    theirs.close()
    with redis.Redis(**conn) as client:
        assert client.strlen(store._handle.names.version) == 16


INDEXES = [
    slice(None),
    torch.arange(20).flip(0),
    (torch.arange(10).repeat(2), torch.tensor([0, 1] * 10)),
    (slice(2, 15, 2), [1, 0, 1]),
    (torch.arange(12).view(3, 4), 1),
    torch.arange(40).reshape(20, 2) % 3 > 0,
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_a_read_in_parts_is_the_read(conn, monkeypatch, index):
    """A read that is torn again and again is done a few rows at a time."""
    local = TensorDict(
        x=torch.arange(120.0).view(20, 2, 3),
        deep=TensorDict(y=torch.arange(40).view(20, 2), batch_size=[20, 2]),
        all="one",
        place=NonTensorStack(*(NonTensorStack(f"{i}a", f"{i}b") for i in range(20))),
        batch_size=[20, 2],
        names=["row", "place"],
    )
    torn = []

    def torn_once(handle, make):
        if not torn:
            torn.append(1)
            raise Contended("torn")
        return (yield from fetching.fetch(handle, make))

    with TensorDictStore.from_tensordict(local, **conn) as store:
        whole = store[index]
        for module in (reader, elements):
            monkeypatch.setattr(module, "fetch", torn_once)
        parts, want = store[index], local[index]
        assert torn
        for got in (whole, parts):
            assert got.batch_size == want.batch_size
            assert got.names == want.names
            assert (got["x"] == want["x"]).all() and (got["deep", "y"] == want["deep", "y"]).all()
            assert got["deep"].names == want["deep"].names
            for key in ("all", "place"):
                assert got.get(key).tolist() == want.get(key).tolist()
        torn.clear()
        assert torch.equal(store.get_at("x", index), want["x"])
        assert torn


@pytest.mark.parametrize("ragged", [False, True])
def test_a_read_in_parts_is_of_one_schema(conn, monkeypatch, ragged):
    """Another writer changes the dtype between two parts: no rows of both in one batch."""
    sizes = [1 + i % 3 for i in range(20)] if ragged else [2] * 20
    tds = [TensorDict(x=torch.full((n,), float(n))) for n in sizes]
    store = TensorDictStore.from_tensordict(lazy_stack(tds), **conn)
    other = open_store(td_id=store.td_id, **conn)
    calls = []

    def changed_between(handle, make):
        calls.append(1)
        if handle is store._handle and len(calls) == 1:
            raise Contended("torn")
        if handle is store._handle and len(calls) == 3:
            for at, td in enumerate(tds):
                other[at] = TensorDict(x=td["x"][:1])
            other["x"] = torch.ones(20, 1, dtype=torch.int64)
        return (yield from fetching.fetch(handle, make))

    for module in (reader, elements):
        monkeypatch.setattr(module, "fetch", changed_between)
    with pytest.raises(Contended, match="changed during this read"):
        store[0:20]
    monkeypatch.undo()
    assert all(element["x"].dtype == torch.int64 for element in store[0:20].unbind(0))


def test_which_versions_tell_that_a_schema_is_still_the_same():
    known = Tokens(b"v" * 8 + b"s" * 8, b"s" * 8)
    assert known.describes(b"w" * 8 + b"s" * 8)
    for other in (None, 1, [], "v" * 16, b"", b"v" * 8, b"v" * 8 + b"t" * 8):
        assert not known.describes(other)
    # Of a store that only the reference wrote; of a writer that does not tell the schema.
    assert Tokens().describes(b"") and not Tokens().describes(b"v" * 16)
    assert Tokens(b"v" * 8).describes(b"v" * 8) and not Tokens(b"v" * 8).describes(b"w" * 8)


@pytest.mark.parametrize("ragged", [False, True])
def test_what_was_read_before_is_not_what_another_handle_made_of_it(conn, ragged):
    local = TensorDict(
        x=torch.arange(6.0), deep=TensorDict(y=torch.arange(6), batch_size=[6]), batch_size=[6]
    )
    sizes = [1, 2, 3, 1, 2, 3] if ragged else [2] * 6
    stack = lazy_stack([TensorDict(z=torch.full((n,), n), w=torch.tensor(n)) for n in sizes])
    source = stack if ragged else local
    one = TensorDictStore.from_tensordict(source, **conn)
    two = open_store(td_id=one.td_id, **conn)

    def reads():
        if ragged:
            return [two[2]["z"].tolist(), two[[2, 0]][0]["z"].tolist(), two.get("w").tolist()]
        return [
            two["x"].tolist(),
            two[4]["x"].tolist(),
            two[[4, 1]]["x"].tolist(),
            two.to_tensordict()["x"].tolist(),
            two["deep"].to_tensordict()["y"].tolist(),
            sorted(map(str, two[:2].keys(True, True))),
        ]

    before = reads()
    if ragged:
        one[2] = TensorDict(z=torch.full((5,), 9), w=torch.tensor(9))
        assert reads() == [[9] * 5, [9] * 5, [1, 2, 9, 1, 2, 3]]
    else:
        one["x"] = torch.arange(12, dtype=torch.int16).view(6, 2)
        one["deep", "y"] = torch.ones(6, 1, dtype=torch.bool)
        one["new"] = torch.zeros(6)
        x = torch.arange(12).view(6, 2)
        want = [x.tolist(), x[4].tolist(), x[[4, 1]].tolist(), x.tolist(), [[True]] * 6]
        assert reads()[:5] == want != before[:5]
        assert "new" in reads()[5]
        del one["new"]
        assert "new" not in reads()[5]
    one.close()
    two.close()


def test_a_read_that_is_done_again_lets_go_of_the_first_attempt(conn):
    """Somebody else's write costs a round trip, and not the memory of another batch."""
    data = TensorDict(x=torch.zeros(3000, 1000), y=torch.zeros(3000), batch_size=[3000])
    store = TensorDictStore.from_tensordict(data, **conn)
    other = open_store(td_id=store.td_id, **conn)
    index = torch.randperm(3000)[:1500]

    def peak():
        tracemalloc.start()
        store[index]
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak()
    calm = peak()
    other[0] = data[0]
    assert peak() < 1.2 * calm


def test_a_read_of_many_tiny_leaves_takes_little_memory(conn):
    """Rows lie close together, so that what is between them is read, piece by piece."""
    count = 6_000_000
    leaves = {f"k{i}": torch.zeros(count, dtype=torch.uint8) for i in range(12)}
    with TensorDictStore.from_tensordict(TensorDict(leaves, batch_size=[count]), **conn) as store:
        store[:2]
        tracemalloc.start()
        got = store[::60]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(got) == 100_000 and peak < 3 * count


@pytest.mark.parametrize("cache", [True, False])
def test_a_key_that_another_handle_deleted_is_one_that_is_not_there(conn, cache):
    data = TensorDict(a=torch.zeros(4), extra=torch.ones(4), batch_size=[4])
    one = TensorDictStore.from_tensordict(data, **conn)
    stores = [open_store(td_id=one.td_id, cache_metadata=cache, **conn) for _ in range(3)]
    for store in stores:
        store["extra"]
    one.del_("extra")
    assert stores[0].get("extra", None) is None
    assert stores[1].get_at("extra", 1, None) is None
    stores[2].update(TensorDict(a=torch.ones(4), extra=torch.full((4,), 2.0), batch_size=[4]))
    assert stores[2]["extra"].tolist() == [2.0] * 4 and one["a"].tolist() == [1.0] * 4
    with pytest.raises(KeyError):
        one["gone"]


def test_an_entry_that_is_deleted_while_a_read_plans_is_left_out(conn):
    """Without a cache a read looks at the keys, then at each entry: one may go between."""
    data = TensorDict(a=torch.zeros(4), b=torch.ones(4), batch_size=[4])
    one = TensorDictStore.from_tensordict(data, **conn)
    store = open_store(td_id=one.td_id, cache_metadata=False, **conn)
    operation, number = reading(store._handle, None, slice(None)), 0
    client = store._handle.client
    request = next(operation)
    with pytest.raises(StopIteration) as ended:
        while True:
            number += 1
            if number == 2:
                one.del_("b")

            def once(request=request):
                return (yield request)

            request = operation.send(client.read(once))
    assert set(ended.value.value.keys()) == {"a"}


@pytest.mark.parametrize("harm", ["cut", "delete"])
def test_a_damaged_entry_is_named_also_beside_a_writer(conn, raw, harm):
    """Others change keys all the time: that is no reason to read what is damaged for ever."""
    data = TensorDict(a=torch.zeros(4, 100), b=torch.ones(4), batch_size=[4])
    one = TensorDictStore.from_tensordict(data, **conn)
    key = one._handle.names.data("a")
    raw.delete(key) if harm == "delete" else raw.set(key, b"short")
    store = open_store(td_id=one.td_id, **conn)
    client, number = store._handle.client, 0

    def busy():
        operation = reading(store._handle, ["a"], slice(None))
        request = next(operation)
        while True:
            nonlocal number
            number += 1
            if number % 3 == 0:
                one.set(f"u{number % 2}", torch.ones(4, 1 + number % 5))
            try:
                replies = yield request
            except errors.TdioError as error:
                request = operation.throw(error)
            else:
                request = operation.send(replies)

    with pytest.raises(errors.TdioError, match="entry 'a'"):
        client.read(busy)
    assert number < 400
