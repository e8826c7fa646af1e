"""torchdata: StatefulDataLoader over a store, and StoreReader in pipelines of nodes."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher, Unbatcher
from torchdata.stateful_dataloader import StatefulDataLoader

from tdio import StoreBatchSampler, StoreDataset, StoreReader, TensorDictStore, errors
from tdio.testing import run_node_resume_test, run_resume_test
from tdio.testing.resume import same

N, BATCH = 103, 10


@pytest.fixture
def dataset(conn):
    data = TensorDict(x=torch.arange(N), y=torch.randn(N, 50), batch_size=[N])
    store = TensorDictStore.from_tensordict(data, **conn)
    yield StoreDataset(td_id=store.td_id, **conn)
    store.clear_redis()


def sampler(**kwargs):
    return StoreBatchSampler(N, BATCH, shuffle=True, seed=5, **kwargs)


def loader(dataset, workers, persistent=False, every=1, batch_size=BATCH):
    sampler = StoreBatchSampler(N, batch_size, shuffle=True, seed=5)
    return StatefulDataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=persistent,
        snapshot_every_n_steps=every,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("batch_size", [BATCH, 40])  # more batches than drawn ahead, and fewer
def test_a_stateful_loader_resumes(dataset, workers, batch_size):
    run_resume_test(
        partial(loader, dataset, workers, batch_size=batch_size), json_state=False, ends_first=True
    )


def test_with_persistent_workers_and_rare_snapshots(dataset):
    run_resume_test(partial(loader, dataset, 2, persistent=True), json_state=False, ends_first=True)
    straight = list(loader(dataset, 0))
    items = iter(first := loader(dataset, 2, every=4))
    for _ in range(6):
        next(items)
    resumed = loader(dataset, 2, every=4)
    resumed.load_state_dict(first.state_dict())
    rest = list(resumed)
    assert len(rest) == len(straight) - 6 and (rest[0]["x"] == straight[6]["x"]).all()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [3, 10, 11])
def test_a_loop_over_epochs_goes_on_exactly(dataset, workers, stop):
    def batches(epoch):
        return list(StoreBatchSampler(N, BATCH, shuffle=True, seed=5, epoch=epoch))

    first = loader(dataset, workers)
    first.batch_sampler.set_epoch(2)
    items = iter(first)
    for _ in range(stop):
        next(items)
    resumed = loader(dataset, workers)
    resumed.load_state_dict(first.state_dict())
    for epoch in (2, 3):
        resumed.batch_sampler.set_epoch(epoch)
        got = [batch["x"].tolist() for batch in resumed]
        assert got == batches(epoch)[stop if epoch == 2 else 0 :]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [BATCH, 40])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("asked", [range(2, 5), range(3, 6), range(5, 7), None])
def test_a_loop_over_epochs_goes_on_after_a_whole_one(dataset, workers, batch_size, ended, asked):
    """Its last batch was the last thing that its user got, or a loop over it came to its end."""

    def batches(epoch):
        return list(StoreBatchSampler(N, batch_size, shuffle=True, seed=5, epoch=epoch))

    first = loader(dataset, workers, batch_size=batch_size)
    first.batch_sampler.set_epoch(2)
    items = iter(first)
    for _ in batches(2):
        next(items)
    assert not ended or next(items, None) is None
    resumed = loader(dataset, workers, batch_size=batch_size)
    resumed.load_state_dict(first.state_dict())
    for epoch in asked or ((3, 4) if ended else (2, 3, 4)):
        if asked:
            resumed.batch_sampler.set_epoch(epoch)
        got = [batch["x"].tolist() for batch in resumed]
        assert got == ([] if epoch == 2 else batches(epoch))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("asked", [0, 2, 4])
def test_an_epoch_that_is_asked_for_once_is_not_the_last(dataset, workers, ended, asked):
    """A state of the end of epoch 2; set_epoch is called for the first pass only."""

    def batches(epoch):
        return list(StoreBatchSampler(N, 40, shuffle=True, seed=5, epoch=epoch))

    first = loader(dataset, workers, batch_size=40)
    first.batch_sampler.set_epoch(2)
    items = iter(first)
    for _ in batches(2):
        next(items)
    assert not ended or next(items, None) is None
    resumed = loader(dataset, workers, batch_size=40)
    resumed.load_state_dict(first.state_dict())
    resumed.batch_sampler.set_epoch(asked)
    got = [[batch["x"].tolist() for batch in resumed] for _ in range(4)]
    if asked == 2:
        assert got[0] == []
        # It does not say whether its user had seen the end.
        assert got[-2:] in ([batches(3), batches(4)], [batches(4), batches(5)])
    else:
        assert got[0] == batches(asked)
        assert got[-2:] in (
            [batches(asked + n) for n in (1, 2)],
            [batches(asked + n) for n in (2, 3)],
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_holds_no_data(dataset, workers):
    assert not hasattr(dataset, "state_dict")
    stateful = loader(dataset, workers)
    next(iter(stateful))

    def tensors(value):
        if isinstance(value, dict):
            return sum(map(tensors, value.values()))
        return isinstance(value, torch.Tensor)

    state = stateful.state_dict()
    assert not tensors(state) and len(repr(state)) < 4000


def test_a_state_of_other_data_is_refused(dataset):
    stateful = loader(dataset, 0)
    next(iter(stateful))
    other = StatefulDataLoader(dataset, batch_sampler=StoreBatchSampler(N, BATCH, seed=5))
    other.load_state_dict(stateful.state_dict())
    with pytest.raises(errors.StateMismatch, match="shuffle="):
        iter(other)


def double(batch):
    return batch * 2


PIPELINES = {
    "bare": lambda node: node,
    "mapper": lambda node: Mapper(node, double),
    "prefetcher": lambda node: Prefetcher(node, prefetch_factor=3),
    "batcher": lambda node: Batcher(node, 2, drop_last=False),
    "rows": lambda node: Unbatcher(node),
    "all": lambda node: Prefetcher(
        Mapper(Batcher(Unbatcher(node), 7, drop_last=False), torch.stack), 2
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_nodes_resume(dataset, name):
    def make():
        return PIPELINES[name](StoreReader(dataset, sampler()))

    run_resume_test(lambda: Loader(make()))
    if name in ("bare", "mapper"):
        run_node_resume_test(make)


def test_a_pipeline_delivers_each_row_once(dataset):
    pipeline = Loader(PIPELINES["all"](StoreReader(dataset, sampler())))
    for _ in range(2):
        rows = torch.cat([batch["x"] for batch in pipeline])
        assert sorted(rows.tolist()) == list(range(N))
    assert len(json.dumps(pipeline.state_dict())) < 1000


def test_a_source_that_does_not_resume_is_caught():
    class Numbers:
        at = 0

        def __iter__(self):
            self.at = 0
            while self.at < 5:
                self.at += 1
                yield self.at

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            pass

    with pytest.raises(AssertionError, match="resumed after 1 items"):
        run_resume_test(Numbers)

    class Hoarder(Numbers):
        def state_dict(self):
            return {"data": torch.zeros(3)}

    with pytest.raises(AssertionError, match="holds a Tensor"):
        run_resume_test(Hoarder)


def test_items_are_the_same_to_the_bit():
    nan = torch.tensor([float("nan"), 1.0])
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]))
    other = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 2, 3]))
    ragged = lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 2)])
    alike = [
        (nan, nan.clone()),
        (jagged, jagged.clone()),
        (ragged, ragged.clone()),
        (TensorDict(x=nan, t="a"), TensorDict(x=nan, t="a")),
        ({"a": [nan, 1]}, {"a": (nan, 1)}),
        (np.array([np.nan]), np.array([np.nan])),
    ]
    assert all(same(a, b) for a, b in alike)
    differ = [
        (nan, nan.double()),
        (jagged, other),
        (jagged, torch.ones(3)),
        (ragged, lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 3)])),
        (TensorDict(x=nan, t="a"), TensorDict(x=nan, t="b")),
        (TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(1, dtype=torch.int64))),
        (TensorDict(x=nan), TensorDict(x=nan, y=nan)),
        (TensorDict(x=nan), {"x": nan}),
        ({"a": nan}, {"b": nan}),
        (np.ones(2), np.ones(2, np.float32)),
        ([nan], [nan, nan]),
    ]
    assert not any(same(a, b) or same(b, a) for a, b in differ)
