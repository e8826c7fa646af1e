"""StoreDataset in real DataLoaders with real workers."""

import gc
import os

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader

from tdio import StoreDataset, TensorDictStore, errors, tensordict_collate

N = 200


@pytest.fixture
def dataset(conn):
    local = TensorDict(
        x=torch.arange(N * 3).view(N, 3),
        deep=TensorDict(y=torch.arange(N), batch_size=[N]),
        batch_size=[N],
    )
    store = TensorDictStore.from_tensordict(local, **conn)
    yield StoreDataset(td_id=store.td_id, **conn)
    store.clear_redis()


@pytest.fixture
def ragged(conn):
    stack = lazy_stack([TensorDict(x=torch.full((i % 5,), i), y=torch.tensor(i)) for i in range(N)])
    store = TensorDictStore.from_tensordict(stack, **conn)
    yield StoreDataset(td_id=store.td_id, **conn)
    store.clear_redis()


def test_samples(dataset):
    assert len(dataset) == N
    assert dataset[3]["x"].tolist() == [9, 10, 11]
    assert dataset[-1]["deep", "y"] == N - 1
    assert dataset[2:5]["deep", "y"].tolist() == [2, 3, 4]
    batch = dataset.__getitems__([7, 7, 0])
    assert batch["deep", "y"].tolist() == [7, 7, 0]
    assert batch.is_consolidated()
    for bad in (N, -N - 1):
        with pytest.raises(errors.IndexOutOfRange):
            dataset[bad]
    with pytest.raises(errors.IndexOutOfRange):
        dataset.__getitems__([0, N])
    for bad in (1.5, "x", [0, 1]):
        with pytest.raises(IndexError, match="__getitems__"):
            dataset[bad]
    assert not hasattr(dataset, "state_dict")


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_loaders_deliver_each_row_once(dataset, context, workers, persistent):
    if not workers and (persistent or context != "fork"):
        pytest.skip("no workers: start methods and persistence do not apply")
    dataset[0]  # the parent has used its connection
    loader = DataLoader(
        dataset, batch_size=32, shuffle=True, num_workers=workers, timeout=60 if workers else 0,
        multiprocessing_context=context if workers else None,
        persistent_workers=persistent, collate_fn=dataset.collate_fn,
    )  # fmt: skip
    for batch in loader:
        assert batch.is_consolidated()
        break
    for _ in range(2 if persistent else 1):
        seen = torch.cat([batch["deep", "y"] for batch in loader])
        assert sorted(seen.tolist()) == list(range(N))


@pytest.mark.parametrize("context", [None, "spawn"])
def test_a_loader_without_a_collate_function(dataset, ragged, context):
    workers = {"num_workers": 2, "multiprocessing_context": context} if context else {}
    batches = list(DataLoader(dataset, batch_size=64, **workers))
    assert torch.equal(torch.cat([b["deep", "y"] for b in batches]), torch.arange(N))
    assert all(batch.is_consolidated() for batch in batches)
    (first, *_) = DataLoader(ragged, batch_size=8, **workers)
    assert [element["x"].shape[0] for element in first.unbind(0)] == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_batches(ragged, workers):
    loader = DataLoader(
        ragged, batch_size=16, shuffle=True, num_workers=workers, collate_fn=ragged.collate_fn
    )
    seen = []
    for batch in loader:
        for element in batch.unbind(0):
            i = int(element["y"])
            assert element["x"].tolist() == [i] * (i % 5)
            seen.append(i)
    assert sorted(seen) == list(range(N))


def test_keys_and_transform(dataset, conn):
    one = StoreDataset(td_id=dataset.td_id, keys=[("deep", "y")], **conn)
    assert set(one[0].keys(True, True)) == {("deep", "y")}
    assert set(StoreDataset(td_id=dataset.td_id, keys=["deep"], **conn)[0].keys()) == {"deep"}
    with pytest.raises(errors.EntryNotFound, match="'z'"):
        StoreDataset(td_id=dataset.td_id, keys=["z"], **conn)
    double = StoreDataset(td_id=dataset.td_id, transform=lambda td: td * 2, device="cpu", **conn)
    assert double[4]["deep", "y"] == 8
    assert double[4].device == torch.device("cpu")


def pair(batch):
    return batch["x"], batch["deep", "y"]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_transform_makes_of_a_batch_arrives_unchanged(dataset, conn, workers):
    big = 2**24 + 1  # not a float32
    for transform in (lambda td: td + big, lambda td: td.select("deep")):
        moved = StoreDataset(td_id=dataset.td_id, transform=transform, **conn)
        (batch,) = DataLoader(moved, batch_size=N, num_workers=workers)
        assert (batch == transform(dataset[:])).all() and batch.is_consolidated()
    for transform in (
        pair, lambda td: td["x"], lambda td: td.to_dict(), lambda td: [td], lambda td: None,
    ):  # fmt: skip
        wrong = StoreDataset(td_id=dataset.td_id, transform=transform, **conn)
        with pytest.raises(errors.UnsupportedValue, match="transform="):
            next(iter(DataLoader(wrong, batch_size=4, num_workers=workers)))
        wrong[0]  # of a sample it may make anything
    x, y = next(iter(DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=pair)))
    assert x.shape == (4, 3) and y.tolist() == [0, 1, 2, 3]


def test_construction(dataset, conn):
    with pytest.raises(TypeError):
        StoreDataset(**conn)
    with pytest.raises(TypeError, match="td_id='nope'"):
        StoreDataset("nope", **conn)
    with pytest.raises(errors.StoreNotFound):
        StoreDataset(td_id="nope", **conn)
    flat = TensorDictStore.from_tensordict(TensorDict(a=torch.zeros(3)), **conn)
    with pytest.raises(errors.InvalidIndex):
        StoreDataset(flat)


def test_handles_leak_no_descriptors(dataset, conn):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        again = StoreDataset(td_id=dataset.td_id, **conn)
        again[0]
        again.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_collate():
    samples = [TensorDict(x=torch.full((2,), i)) for i in range(3)]
    batch = tensordict_collate(samples)
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.is_consolidated()
    assert tensordict_collate(batch) is batch
    mixed = tensordict_collate([TensorDict(x=torch.zeros(1)), TensorDict(x=torch.zeros(2))])
    assert [t["x"].shape for t in mixed.tensordicts] == [(1,), (2,)]
    with pytest.raises(TypeError):
        tensordict_collate([1])


def test_arguments_are_checked_before_anything_is_opened():
    nowhere = {"td_id": "x", "host": "localhost", "port": 1}
    for options in ({"cache": "memmap"}, {"cache": True}, {"stride": 2}, {"window": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            StoreDataset(**nowhere, **options)
    with pytest.raises(TypeError, match="a TensorDict is not a store of tdio: upload it"):
        StoreDataset(TensorDict(x=torch.ones(2), batch_size=[2]))


def test_what_is_no_batch(conn):
    data = TensorDict(x=torch.zeros(4), y=torch.zeros(4), batch_size=[4])
    store = TensorDictStore.from_tensordict(data, **conn)
    dataset = StoreDataset(td_id=store.td_id, **conn)
    for wrong in ([1.5], np.array([2**64 - 1], np.uint64), 3, [[1]]):
        with pytest.raises(errors.InvalidIndex, match=f"{store.td_id}.*batch_sampler="):
            dataset.__getitems__(wrong)
    with pytest.raises(errors.IndexOutOfRange, match=store.td_id):
        dataset[10**6]
    with pytest.raises(TypeError, match="keys="):
        StoreDataset(td_id=store.td_id, keys="xy", **conn)
