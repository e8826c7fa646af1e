"""The stores against plain TensorDicts and local lazy stacks."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel
import torch
from tensordict import TensorDict, lazy_stack, tensorclass

import tdio
from tdio import LazyStackedTensorDictStore, StoreDataset, TensorDictStore, delete_store, errors
from tdio.layout.dtypes import BY_NAME


def same(got, want):
    assert got.batch_size == want.batch_size
    assert set(got.keys(True, True)) == set(want.keys(True, True))
    for key in want.keys(True, True):
        a, b = got.get(key), want.get(key)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.detach().contiguous().reshape(-1).view(torch.uint8),
        ), key


@pytest.fixture
def local():
    torch.manual_seed(0)
    return TensorDict(
        a=torch.randn(50, 4, 3),
        flag=torch.rand(50, 4) > 0.5,
        deep=TensorDict(b=torch.arange(200).view(50, 4), batch_size=[50, 4]),
        empty=torch.zeros(50, 4, 0),
        batch_size=[50, 4],
    )


@pytest.fixture
def store(local, conn):
    with TensorDictStore.from_tensordict(local, **conn) as store:
        yield store
        store.clear_redis()


@pytest.fixture
def episodes():
    torch.manual_seed(0)
    return lazy_stack(
        [
            TensorDict(
                x=torch.randn(i % 4, 2),
                y=torch.tensor(i),
                deep=TensorDict(z=torch.full((i % 3 + 1,), i, dtype=torch.bfloat16)),
            )
            for i in range(30)
        ]
    )


@pytest.fixture
def ragged(episodes, conn):
    with TensorDictStore.from_tensordict(episodes, **conn) as store:
        yield store
        store.clear_redis()


INDEXES = [
    0, -1, slice(3, 40, 7), slice(None), [5, 0, 0, 49], list(range(49)), range(4, 20, 3),
    torch.tensor([[1, 2], [3, -4]]), torch.arange(50) % 3 == 0, (3, 2), (slice(None), 3),
    (..., 1), ([1, 2], [0, 3]), (slice(2, 9), [0, 2]), torch.tensor(7), [], (None, 4),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_a_read_is_the_local_index(store, local, index):
    want = local[list(index)] if isinstance(index, range) else local[index]
    want = (
        local[torch.zeros(0, dtype=torch.int64)] if isinstance(index, list) and not index else want
    )
    same(store[index], want)


def test_negative_steps(store, local):
    same(store[::-3], local[torch.arange(49, -1, -3)])


@pytest.mark.parametrize("index", [50, -51, [0, 50], (0, 4), torch.tensor([99])], ids=str)
def test_out_of_range(store, index):
    with pytest.raises(errors.IndexOutOfRange):
        store[index]


@pytest.mark.parametrize(
    "index", [1.5, torch.ones(49, dtype=torch.bool), [0.5], (0, 0, 0)], ids=str
)
def test_bad_index(store, index):
    with pytest.raises(errors.InvalidIndex):
        store[index]


def test_a_batch_is_one_storage_and_one_round_trip(store):
    before = store._handle.client.round_trips
    store[[1, 2]]
    first = store._handle.client.round_trips - before
    batch = store[[3, 4, 9]]
    assert first == 1, "this handle wrote the entries: it knows their metadata"
    assert store._handle.client.round_trips - before == 2
    again = TensorDictStore.from_store(
        td_id=store.td_id, unix_socket_path=store._handle.location.address.unix_socket_path
    )
    assert again._handle.client.round_trips == 1
    again[[1, 2]]
    again[3]
    assert again._handle.client.round_trips == 4, "metadata once"
    assert batch.is_consolidated()
    assert (
        len(
            {leaf.untyped_storage().data_ptr() for leaf in batch.values(True, True) if leaf.numel()}
        )
        == 1
    )
    assert batch.to_dict().keys() == pickle.loads(pickle.dumps(batch)).to_dict().keys()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype(conn, name):
    raw = torch.randint(0, 2 if name == "torch.bool" else 256, (32, 16), dtype=torch.uint8)
    value = raw.view(BY_NAME[name])
    local = TensorDict(v=value, batch_size=[32])
    store = TensorDictStore.from_tensordict(local, **conn)
    same(store.to_tensordict(), local)
    got = TensorDictStore.from_store(td_id=store.td_id, **conn)[[3, 1]]
    same(
        got,
        TensorDict(
            v=value[[3, 1]]
            if "float8" not in name and "complex32" not in name
            else torch.stack([value[3].view(torch.uint8), value[1].view(torch.uint8)]).view(
                BY_NAME[name]
            ),
            batch_size=[2],
        ),
    )
    store.clear_redis()


def test_inputs_that_are_not_plain(conn):
    grown = torch.randn(6, 4, requires_grad=True)
    local = TensorDict(
        t=torch.randn(4, 6).t(), g=grown, s=torch.randn(12, 4)[::2], scalar=torch.zeros(6),
        e=torch.zeros(1, 4).expand(6, 4), batch_size=[6],
    )  # fmt: skip
    store = TensorDictStore.from_tensordict(local, **conn)
    same(store.to_tensordict(), local)
    assert not store["g"].requires_grad
    store.clear_redis()


def test_a_store_without_batch_dims(conn):
    local = TensorDict(a=torch.tensor(3.0), b=torch.arange(3))
    store = TensorDictStore.from_tensordict(local, **conn)
    same(store.to_tensordict(), local)
    store.clear_redis()


def test_writes(store, local):
    new = local[3:5].clone().apply(lambda x: x.logical_not() if x.dtype == torch.bool else x + 1)
    store[7:9] = new
    store[0] = local[1]
    store.set_at_("a", torch.zeros(4, 3), 2)
    store["deep"].set_at_("b", torch.ones(4, dtype=torch.int64), 2)
    local[7:9], local[0] = new, local[1]
    local["a"][2] = 0
    local["deep", "b"][2] = 1
    same(store.to_tensordict(), local)
    store["extra"] = torch.ones(50, 4)
    assert ("extra" in store.keys()) and store["extra"].sum() == 200
    del store["extra"]
    assert "extra" not in store.keys()
    with pytest.raises(KeyError):
        store["extra"]


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_a_misfit_is_refused_and_nothing_written(store, local, change):
    value = local[3].clone().apply(lambda x: torch.zeros_like(x))
    if change == "missing":
        del value["a"]
    elif change == "extra":
        value["more"] = torch.zeros(4)
    elif change == "shape":
        value["a"] = torch.zeros(4, 5)
    else:
        value["a"] = torch.zeros(4, 3, dtype=torch.float64)
    with pytest.raises(errors.EntryMismatch):
        store[0] = value
    same(store.to_tensordict(), local)


def test_elements_of_a_ragged_store(ragged, episodes):
    assert isinstance(ragged, LazyStackedTensorDictStore)
    for i in (0, 1, 4, 29, -1):
        same(ragged[i].to_tensordict(), episodes[i])
        assert torch.equal(ragged[i]["x"], episodes[i]["x"])
    with pytest.raises(IndexError):
        ragged[30]


@pytest.mark.parametrize(
    "index",
    [[5, 0, 7, 7], slice(2, 20, 5), torch.tensor([1, -1]), torch.arange(30) % 2 == 0, range(3)],
    ids=str,
)
def test_a_ragged_batch_keeps_the_shape_of_each_element(ragged, episodes, index):
    ragged[[0]]
    before = ragged._handle.client.round_trips
    got = ragged[index]
    assert ragged._handle.client.round_trips - before == 1
    numbers = torch.arange(30)[list(index) if isinstance(index, range) else index].tolist()
    assert len(got) == len(numbers)
    for element, i in zip(got.tensordicts, numbers, strict=True):
        same(element, episodes[i])


def test_element_writes(ragged, episodes):
    same_size = TensorDict(
        x=torch.ones(2, 2),
        y=torch.tensor(-1),
        deep=TensorDict(z=torch.ones(3, dtype=torch.bfloat16)),
    )
    ragged[2] = same_size
    longer = TensorDict(
        x=torch.ones(9, 2),
        y=torch.tensor(-2),
        deep=TensorDict(z=torch.ones(7, dtype=torch.bfloat16)),
    )
    ragged[5] = longer
    ragged[0] = longer
    ragged[5]["y"] = torch.tensor(8)
    longer5 = longer.clone()
    longer5["y"] = torch.tensor(8)
    want = {2: same_size, 5: longer5, 0: longer}
    for i in range(30):
        same(ragged[i].to_tensordict(), want.get(i, episodes[i]))
    with pytest.raises(errors.EntryMismatch):
        ragged[1] = TensorDict(x=torch.ones(2, 2))


def test_a_stack_that_is_filled_element_by_element(conn):
    store = LazyStackedTensorDictStore(count=3, inner_batch_size=[], **conn)
    store[1] = TensorDict(x=torch.ones(2), deep=TensorDict(y=torch.tensor(7)))
    assert store["x"].tolist() == [[0, 0], [1, 1], [0, 0]]
    store[2] = TensorDict(x=torch.ones(5), deep=TensorDict(y=torch.tensor(8)))
    store[0]["new"] = torch.ones(1)
    assert [store[i]["x"].shape[0] for i in range(3)] == [2, 2, 5]
    assert [int(store[i]["deep", "y"]) for i in range(3)] == [0, 7, 8]
    assert [store[i]["new"].tolist() for i in range(3)] == [[1], [0], [0]]
    with pytest.raises(errors.EntryMismatch):
        store[0] = TensorDict(other=torch.ones(2))
    store.clear_redis()


def test_a_negative_batch_size_is_refused(conn):
    with pytest.raises(ValueError, match="-1"):
        TensorDictStore(batch_size=[-1], **conn)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_stack_dims(conn, dim):
    torch.manual_seed(0)
    elements = [TensorDict(a=torch.randn(3, 2, 5), batch_size=[3, 2]) for _ in range(7)]
    local = lazy_stack(elements, dim)
    ours = TensorDictStore.from_tensordict(local, **conn)
    dense = local.to_tensordict()
    for index in [0, [1, 2], slice(0, 2), (slice(None), 1), (..., 1), (0, 1, 1)]:
        assert torch.equal(ours[index]["a"], dense[index]["a"])
    ours[..., 1] = dense[..., 0]
    dense[..., 1] = dense[..., 0]
    same(ours.to_tensordict(), dense)
    ours.clear_redis()


def test_ragged_with_another_stack_dim(conn):
    elements = [TensorDict(a=torch.full((3, i + 1), i), batch_size=[3]) for i in range(4)]
    store = TensorDictStore.from_tensordict(lazy_stack(elements, 1), **conn)
    got = store[:, 2]
    assert torch.equal(got["a"], elements[2]["a"])
    assert [t["a"].shape for t in store[:, [3, 0]].tensordicts] == [(3, 4), (3, 1)]
    store.clear_redis()


@tensorclass
class Point:
    x: torch.Tensor


def test_tensorclass(conn):
    made = TensorDictStore.from_tensordict(Point(x=torch.arange(4.0), batch_size=[4]), **conn)
    again = TensorDictStore.from_store(td_id=made._tensordict.td_id, **conn)
    assert isinstance(again, Point)
    assert again[1].x == 1


@pytest.mark.parametrize("kind", [redis.Redis, redis.asyncio.Redis])
def test_a_client_may_be_handed_in(store, local, conn, kind):
    opened = TensorDictStore.from_store(td_id=store.td_id, client=kind(**conn))
    same(opened[3], local[3])


# ---- what goes wrong


def test_a_client_of_a_sentinel_is_refused():
    for module in (redis, redis.asyncio):
        sentinel = module.sentinel.Sentinel([("127.0.0.1", 1)])
        with pytest.raises(TypeError, match="discover_master"):
            tdio.open_store(td_id="x", client=sentinel.master_for("m"))


def test_no_server_is_said_within_a_second():
    began = time.monotonic()
    with pytest.raises(errors.ServerUnavailable, match="127.0.0.1:1"):
        TensorDictStore(host="127.0.0.1", port=1)
    assert time.monotonic() - began < 3, "redis-py's own retries take four seconds"


def test_an_unknown_id_says_where_it_was_looked_for(tcp):
    with pytest.raises(KeyError, match=rf"'nope'.*{tcp['port']} db=0.*prefix='p'"):
        tdio.open_store(td_id="nope", prefix="p", **tcp)


def test_the_other_kind(store, ragged, conn):
    with pytest.raises(errors.WrongStoreKind, match="LazyStacked"):
        TensorDictStore.from_store(td_id=ragged.td_id, **conn)
    with pytest.raises(errors.WrongStoreKind, match="TensorDictStore"):
        LazyStackedTensorDictStore.from_store(td_id=store.td_id, **conn)


def test_an_existing_id_is_not_overwritten(store, local, conn):
    for make in (
        lambda: TensorDictStore(td_id=store.td_id, batch_size=[2], **conn),
        lambda: TensorDictStore.from_tensordict(local, td_id=store.td_id, **conn),
        lambda: LazyStackedTensorDictStore(td_id=store.td_id, count=1, inner_batch_size=[], **conn),
    ):
        with pytest.raises(errors.StoreExists, match="from_store"):
            make()
    same(TensorDictStore.from_store(td_id=store.td_id, **conn).to_tensordict(), local)


def test_reading_writes_nothing(store, conn, raw):
    raw.acl_setuser(
        "reader", enabled=True, nopass=True, keys="*", categories=["+@read", "+@connection"]
    )
    for key in raw.scan_iter(f"tensordict:{{{store.td_id}}}:*"):
        raw.expire(key, 1000)
    opened = tdio.open_store(td_id=store.td_id, username="reader", password="any", **conn)
    opened[[1, 2]]
    assert len(StoreDataset(opened)) == 50
    with pytest.raises(errors.AccessDenied):
        opened["a"] = torch.zeros(50, 4, 3)
    assert all(raw.ttl(key) > 900 for key in raw.scan_iter(f"tensordict:{{{store.td_id}}}:*"))
    raw.acl_deluser("reader")


def test_a_wrong_password_is_said_at_once_and_kept_secret():
    with tdio.server.embedded_server(password="right") as server:
        kwargs = {**server.connection_kwargs, "password": "wr0ng-pass"}
        began = time.monotonic()
        with pytest.raises(errors.AuthenticationFailed) as caught:
            TensorDictStore(**kwargs)
        assert time.monotonic() - began < 3, "redis-py's own retries take four seconds"
        assert "wr0ng-pass" not in str(caught.value)
        store = TensorDictStore(batch_size=[1], **server.connection_kwargs)
        assert b"right" not in pickle.dumps(store)
        assert "right" not in repr(store)


def test_a_lost_entry_is_named(store, raw):
    store[0]
    raw.delete(f"tensordict:{{{store.td_id}}}:d:a")
    with pytest.raises(errors.EntryNotFound, match="'a'"):
        store[[1, 2]]
    with pytest.raises(errors.EntryNotFound, match="d:a"):
        store.set_at_("a", torch.zeros(4, 3), 1)
    raw.set(f"tensordict:{{{store.td_id}}}:d:a", b"short")
    with pytest.raises(errors.CorruptEntry, match="'a'"):
        store[[40, 41]]
    with pytest.raises(errors.CorruptEntry, match="'a'"):
        store[0]


@pytest.mark.parametrize("more", [1, 300 * 1024 * 1024])
def test_an_entry_that_is_longer_than_it_says_is_not_read(store, raw, more):
    """However much there is: the whole of an entry is asked for without an end."""
    data = f"tensordict:{{{store.td_id}}}:d:a"
    size = raw.strlen(data)
    sound, before = store.to_tensordict(), usage()
    raw.setrange(data, size + more - 1, b"x")
    for read in (store.to_tensordict, lambda: store["a"]):
        with pytest.raises(errors.CorruptEntry, match=f"{size} bytes .* {size + more} .*longer"):
            read()
    assert usage() - before < 64 * 1024 * 1024
    assert (store[[1, 2]] == sound[[1, 2]]).all()
    raw.set(data, raw.getrange(data, 0, size - 1))
    assert (store.to_tensordict() == sound).all()


def usage():
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


WRITER = """
import os, sys, torch
from tensordict import TensorDict
import tdio, tdio.store.writer as writer
from tdio import TensorDictStore
def die(n):
    os.kill(os.getpid(), 9)
td = TensorDict(a=torch.zeros(10), b=torch.zeros(10), batch_size=[10])
original = tdio.wire.uploading.put_data
def half(names, upload):
    if upload.spec.path == "b":
        os.kill(os.getpid(), 9)
    return original(names, upload)
tdio.wire.uploading.put_data = half
TensorDictStore.from_tensordict(td, td_id="half", unix_socket_path=sys.argv[1])
"""


def test_a_dead_writer_leaves_no_store(conn, raw):
    done = subprocess.run([sys.executable, "-c", WRITER, conn["unix_socket_path"]], timeout=60)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(errors.IncompleteStore, match="delete_store"):
        tdio.open_store(td_id="half", **conn)
    with pytest.raises(errors.StoreExists):
        TensorDictStore(td_id="half", **conn)
    delete_store(td_id="half", **conn)
    assert not list(raw.scan_iter("tensordict:{half}:*"))
    with pytest.raises(errors.StoreNotFound):
        delete_store(td_id="half", **conn)


@pytest.mark.parametrize("limit", [2**20, 70 * 2**20])
def test_a_leaf_above_the_limit_is_refused_before_it_is_sent(conn, raw, store, limit):
    before = raw.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
    raw.config_set("proto-max-bulk-len", limit)
    try:
        leaf = torch.zeros(1, limit + 1, dtype=torch.int8)
        big = TensorDict(small=torch.zeros(1), big=leaf, batch_size=[1])
        with pytest.raises(errors.EntryTooLarge, match=f"proto-max-bulk-len, {limit} bytes"):
            TensorDictStore.from_tensordict(big, td_id="big", **conn)
        assert not list(raw.scan_iter("tensordict:{big}:*"))
        keys = set(store.keys())
        with pytest.raises(errors.EntryTooLarge, match="'big'"):
            store["big"] = leaf[0, 0].expand(*store.batch_size, limit // 200 + 1)
        with pytest.raises(errors.EntryTooLarge, match="'big'"):
            store.set_non_tensor("big", "x" * (limit + 1))
        assert set(store.keys()) == keys
        store["small"] = leaf[0, 0].expand(*store.batch_size, limit // 200)
    finally:
        raw.config_set("proto-max-bulk-len", before)


def test_a_server_that_stops_answering_and_one_that_restarts():
    with tdio.server.embedded_server() as server:
        store = TensorDictStore.from_tensordict(
            TensorDict(a=torch.arange(5), batch_size=[5]),
            socket_timeout=0.5,
            **server.connection_kwargs,
        )
        store[0]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(errors.ServerTimeout, match=r"0\.5 s"):
                store[1]
            assert time.monotonic() - began < 8, "far from the default of 10 s"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert store[2]["a"] == 2
        with redis.Redis(**server.connection_kwargs) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert store[3]["a"] == 3, "the next read reconnects"


def test_a_forked_child_reads_on_its_own_connection(store, local):
    store[0]
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ok = torch.equal(store[5]["a"], local[5]["a"])
        os._exit(0 if ok and os.getpid() != parent else 1)
    for i in range(20):
        same(store[i], local[i])
    assert os.waitpid(child, 0)[1] == 0


def test_a_million_ragged_elements_open_fast(conn):
    from tdio.layout.spec import _decode_shapes

    text = "[" + ", ".join(f"[{i % 90 + 1}, 3]" for i in range(1_000_000)) + "]"
    began = time.process_time()
    shapes = _decode_shapes(text, "")
    assert shapes.shape == (1_000_000, 2)
    assert shapes[89].tolist() == [90, 3]
    assert time.process_time() - began < 5  # no timed test: this bounds a Python loop only


def test_a_store_pickles_as_its_address(store, ragged, local, episodes):
    same(pickle.loads(pickle.dumps(store))[[3, 1]], local[[3, 1]])
    again = pickle.loads(pickle.dumps(ragged))
    assert isinstance(again, LazyStackedTensorDictStore)
    same(again[5].to_tensordict(), episodes[5])
    assert len(pickle.dumps(store)) < 10_000
