"""The local cache: right values, no round trips, many processes, kills."""

import multiprocessing
import signal
import time

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader

from tdio import StoreDataset, TensorDictStore, errors

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


def test_what_is_refused(conn, store, tmp_path):
    for kwargs in (
        {"cache": "disk", "cache_dir": tmp_path},
        {"cache": "memmap"},
        {"cache_dir": tmp_path},
        {"cache_bytes": 5},
    ):
        with pytest.raises(TypeError):
            StoreDataset(store, **kwargs)
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CacheUnavailable, match="cache_dir"):
        cached(store, tmp_path / "file", conn)
    with pytest.raises(TypeError, match="window"):
        StoreDataset(store, window=3, cache="memmap", cache_dir=tmp_path)
