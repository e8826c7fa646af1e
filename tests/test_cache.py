"""The local cache: right values, no round trips, many processes, kills."""

import multiprocessing
import pickle
import signal
import time

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader

from tdio import StoreDataset, TensorDictStore, errors
from tdio.data import cache
from tdio.store import open_store

N = 300


def plain():
    return TensorDict(
        x=torch.randn(N, 7),
        b=torch.randn(N, 3).to(torch.bfloat16),
        f=torch.randn(N, 3).to(torch.float8_e4m3fn),
        n=TensorDict(flag=torch.rand(N) > 0.5, empty=torch.zeros(N, 0), batch_size=[N]),
        batch_size=[N],
    )


def ragged():
    return lazy_stack(
        [TensorDict(x=torch.randn(i % 9, 2), n=TensorDict(y=torch.tensor(i))) for i in range(N)]
    )


@pytest.fixture(params=["plain", "ragged"])
def local(request):
    return {"plain": plain, "ragged": ragged}[request.param]()


@pytest.fixture
def store(conn, local):
    made = TensorDictStore.from_tensordict(local, **conn)
    yield made
    made.clear_redis()


def cached(store, path, conn, **kwargs):
    return StoreDataset(td_id=store.td_id, cache="memmap", cache_dir=path, **kwargs, **conn)


def trips(dataset):
    return dataset._handle.client.round_trips


def check(batch, local, rows):
    assert len(batch) == len(rows)
    for got, row in zip(batch.unbind(0), rows, strict=True):
        for key, value in local[row].items(True, True):
            assert got[key].dtype == value.dtype
            assert torch.equal(
                got[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
            )


@pytest.mark.parametrize("limit", [None, 0, 3000])
def test_values_and_round_trips(store, local, conn, tmp_path, limit):
    dataset = cached(store, tmp_path, conn, cache_bytes=limit)
    plain_dataset = StoreDataset(store)
    rows = torch.randperm(N).tolist()
    for _ in range(2):
        for start in range(0, N, 50):
            chosen = [*rows[start : start + 50], rows[start], -1]
            batch = dataset.__getitems__(chosen)
            check(batch, local, chosen)
            like = plain_dataset.__getitems__(chosen)
            assert type(batch) is type(like) and batch.batch_size == like.batch_size
    assert dataset.__getitems__([]).batch_size[0] == 0
    before = trips(dataset)
    check(dataset.__getitems__(rows), local, rows)
    check(dataset[3:20:2], local, list(range(3, 20, 2)))
    check(dataset[7].unsqueeze(0), local, [7])
    assert (trips(dataset) == before) == (limit is None)
    size = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
    if limit is not None:
        assert size <= limit + N + 4096 * 10
    for bad in ([N], [0, -N - 1]):
        with pytest.raises(errors.IndexOutOfRange):
            dataset.__getitems__(bad)
    # Another process, or a later one, finds what is there.
    again = cached(store, tmp_path, conn)
    again._handle.client.close()
    if limit is None:
        check(again.__getitems__(rows), local, rows)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_share_a_cache(store, local, conn, raw, tmp_path, context):
    dataset = cached(store, tmp_path, conn)
    loader = DataLoader(
        dataset, batch_size=16, shuffle=True, num_workers=3 if context == "fork" else 1,
        multiprocessing_context=context, persistent_workers=True, timeout=60,
    )  # fmt: skip
    for _ in range(2):
        before = raw.info("commandstats").get("cmdstat_getrange", {}).get("calls", 0)
        assert sum(len(batch) for batch in loader) == N
        after = raw.info("commandstats").get("cmdstat_getrange", {}).get("calls", 0)
    assert after == before
    check(dataset.__getitems__(range(N)), local, list(range(N)))


def test_a_written_store_is_read_anew(conn, tmp_path):
    local = plain()
    store = TensorDictStore.from_tensordict(local, **conn)
    dataset = cached(store, tmp_path, conn)
    check(dataset.__getitems__(range(100)), local, list(range(100)))
    store[50] = local[51].clone()
    local[50] = local[51].clone()
    # A read of the server notices, and what was kept of the old version is not used again.
    dataset.__getitems__([200])
    check(dataset.__getitems__(range(100)), local, list(range(100)))
    check(cached(store, tmp_path, conn).__getitems__(range(N)), local, list(range(N)))
    homes = [path for path in tmp_path.glob("*/*") if path.is_dir()]
    assert len(homes) == 1  # the old version's files are gone
    store.clear_redis()


def hammer(dataset):
    """Forget and read the same elements over and over."""
    while True:
        dataset._cache._flags[:] = 0
        for _ in range(20):
            dataset.__getitems__(torch.randint(0, N, (40,)).tolist())


def test_kills(store, local, conn, tmp_path):
    dataset = cached(store, tmp_path, conn)
    context = multiprocessing.get_context("fork")
    for round_ in range(6):
        children = [context.Process(target=hammer, args=(dataset,)) for _ in range(2)]
        for child in children:
            child.start()
        time.sleep(0.05 * (round_ + 1))
        for child in children:
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
        again = cached(store, tmp_path, conn)
        check(again.__getitems__(range(N)), local, list(range(N)))


@pytest.mark.parametrize("limit", [None, 4000])
def test_a_write_between_kept_and_missing_rows(conn, tmp_path, limit):
    local = plain()
    store = TensorDictStore.from_tensordict(local, **conn)
    dataset = cached(store, tmp_path, conn, cache_bytes=limit)
    dataset.__getitems__(range(10))
    for row in (50, 3):
        store[row] = local[row] = local[row + 1].clone()
        rows = [0, 1, 2, 50, 60, row, row]
        check(dataset.__getitems__(rows), local, rows)
        check(dataset.__getitems__(rows), local, rows)
    store.clear_redis()


def test_a_write_to_a_ragged_store(conn, tmp_path):
    local = [TensorDict(x=torch.full((i % 4 + 1,), i + 1)) for i in range(20)]
    store = TensorDictStore.from_tensordict(lazy_stack(local), **conn)
    writer = open_store(td_id=store.td_id, **conn)
    dataset = cached(store, tmp_path, conn)
    dataset.__getitems__(range(5))
    local[5] = TensorDict(x=torch.full((2,), 77))
    writer[5] = local[5]
    rows = [0, 1, 5, 6]
    check(dataset.__getitems__(rows), local, rows)
    store.clear_redis()


def test_a_store_that_is_written_all_the_time(conn, tmp_path, monkeypatch):
    local = plain()
    store = TensorDictStore.from_tensordict(local, **conn)
    dataset = cached(store, tmp_path, conn)
    versions = iter(range(100))
    monkeypatch.setattr(cache, "current_version", lambda handle: bytes([next(versions)]))
    rows = [0, 5, 5, -1]
    check(dataset.__getitems__(rows), local, rows)
    store.clear_redis()


def test_a_store_that_became_smaller(conn, tmp_path):
    local = plain()
    store = TensorDictStore.from_tensordict(local, **conn)
    dataset = cached(store, tmp_path, conn)
    dataset.__getitems__([1])
    store.clear_redis()
    TensorDictStore.from_tensordict(local[:10], td_id=store.td_id, **conn)
    with pytest.raises(errors.StoreNotFound, match="open it again"):
        dataset.__getitems__([1, 5])
    store.clear_redis()


def test_a_writer_beside_workers(conn, tmp_path):
    rows = 400
    store = TensorDictStore.from_tensordict(
        TensorDict(x=torch.arange(rows).expand(4, rows).t().contiguous() + 1, batch_size=[rows]),
        **conn,
    )
    dataset = cached(store, tmp_path, conn)
    order = torch.randint(0, rows, (2000,)).tolist()
    loader = DataLoader(dataset, batch_size=32, sampler=order, num_workers=2, timeout=60)
    for number, batch in enumerate(loader):
        wanted = torch.tensor(order[number * 32 :][: len(batch)]) + 1
        # Each row is as it was, or as it was written.
        odd = batch["x"] % 1000 != wanted[:, None]
        assert not odd.any() and (batch["x"] == batch["x"][:, :1]).all()
        if number % 5 == 1:
            store[number] = TensorDict(x=torch.full((4,), 1000 + number + 1))
    store.clear_redis()


def test_one_directory_with_several_limits(store, local, conn, tmp_path):
    for limit in (None, 800, 0, 3000, None):
        dataset = cached(store, tmp_path, conn, cache_bytes=limit)
        for rows in ([0, 5, 20, 150, 299], [299, 0, 0], list(range(N))):
            check(dataset.__getitems__(rows), local, rows)


def test_a_damaged_directory_is_made_anew(store, local, conn, tmp_path):
    before = cached(store, tmp_path, conn)
    before.__getitems__(range(N))
    for damage in ("remove", "truncate", "flags"):
        tables = [file for file in tmp_path.glob("*/*/*") if file.name != "elements"]
        if damage == "flags":
            next(tmp_path.glob("*/*/elements")).unlink()
        elif damage == "remove":
            tables[0].unlink()
        else:
            tables[0].rename(tmp_path / "old")  # who has it mapped keeps it
            tables[0].write_bytes(b"x")
        check(cached(store, tmp_path, conn).__getitems__(range(N)), local, list(range(N)))
        check(before.__getitems__(range(N)), local, list(range(N)))


def test_the_order_of_keys_is_no_other_cache(conn, tmp_path):
    local = TensorDict(x=torch.arange(N), y=torch.randn(N), batch_size=[N])
    store = TensorDictStore.from_tensordict(local, **conn)
    first = cached(store, tmp_path, conn, keys=["x", "y"])
    first.__getitems__(range(N))
    for keys in (["y", "x"], ["x", "y"]):
        again = cached(store, tmp_path, conn, keys=keys)
        before = trips(again)
        batch = again.__getitems__(range(N))
        assert trips(again) == before and list(batch.keys()) == keys
        check(batch, local, range(N))
    store.clear_redis()


def test_a_relative_directory(conn, tmp_path, monkeypatch):
    local = plain()
    store = TensorDictStore.from_tensordict(local, **conn)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    dataset = cached(store, "kept", conn)
    monkeypatch.chdir(tmp_path / "elsewhere")
    check(pickle.loads(pickle.dumps(dataset)).__getitems__([1]), local, [1])
    assert not list((tmp_path / "elsewhere").iterdir())
    store.clear_redis()


def test_what_is_refused(conn, store, tmp_path):
    for kwargs, error, match in (
        ({"cache": "disk", "cache_dir": tmp_path}, ValueError, "cache='disk'"),
        ({"cache": "memmap"}, TypeError, "needs cache_dir="),
        ({"cache_dir": tmp_path}, TypeError, "come with"),
        ({"cache_bytes": 5}, TypeError, "come with"),
        (
            {"cache": "memmap", "cache_dir": tmp_path, "cache_bytes": -5},
            ValueError,
            "cache_bytes=-5",
        ),
    ):
        with pytest.raises(error, match=match):
            StoreDataset(store, **kwargs)
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CacheUnavailable, match="cache_dir"):
        cached(store, tmp_path / "file", conn)
    with pytest.raises(TypeError, match="window"):
        StoreDataset(store, window=3, cache="memmap", cache_dir=tmp_path)
