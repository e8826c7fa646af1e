"""Windows over ragged elements, against slices of the local elements."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader

from tdio import StoreBatchSampler, StoreDataset, TensorDictStore, collate_pad, errors


def episodes(lengths):
    return [
        TensorDict(
            obs=torch.randn(n, 3),
            deep=TensorDict(reward=torch.arange(n, dtype=torch.bfloat16)),
            level=torch.tensor(i),
        )
        for i, n in enumerate(lengths)
    ]


def expected(local, window, stride):
    out = []
    for episode in local:
        for first in range(0, len(episode["obs"]) - window + 1, stride):
            steps = slice(first, first + window)
            out.append((episode["obs"][steps], episode["deep", "reward"][steps], episode["level"]))
    return out


def check(batch, wanted):
    assert batch.batch_size == (len(wanted),) and batch.is_consolidated()
    for i, (obs, reward, level) in enumerate(wanted):
        assert torch.equal(batch["obs"][i], obs)
        assert torch.equal(batch["deep", "reward"][i], reward)
        assert batch["level"][i] == level


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=8),
    st.integers(1, 6),
    st.integers(1, 7),
    st.data(),
)
def test_windows_are_slices(conn, lengths, window, stride, data):
    local = episodes(lengths)
    store = TensorDictStore.from_tensordict(lazy_stack(local), **conn)
    try:
        keys = None if len(set(lengths)) > 1 else ["obs", ("deep", "reward")]
        dataset = StoreDataset(store, window=window, stride=stride, key=keys)
        wanted = expected(local, window, stride)
        assert len(dataset) == len(wanted)
        if not wanted:
            assert dataset.__getitems__([]).batch_size == (0,)
            return
        draw = st.integers(-len(wanted), len(wanted) - 1)
        chosen = data.draw(st.lists(draw, max_size=20))
        check(dataset.__getitems__(chosen), [wanted[i] for i in chosen])
        check(dataset[:], wanted)
        one = dataset[chosen[0]] if chosen else dataset[-1]
        check(one.unsqueeze(0).consolidate(metadata=True), [wanted[chosen[0] if chosen else -1]])
    finally:
        store.clear_redis()


@pytest.fixture
def store(conn):
    made = TensorDictStore.from_tensordict(lazy_stack(episodes([500, 3, 700, 20, 40])), **conn)
    yield made
    made.clear_redis()


def test_a_window_moves_only_its_bytes(store, conn, raw):
    def sent():
        return int(raw.info("stats")["total_net_output_bytes"])

    dataset = StoreDataset(td_id=store.td_id, window=10, **conn)
    assert len(dataset) == 50 + 70 + 2 + 4
    dataset[0]
    asked = sent() - sent()
    before, trips = sent(), dataset._handle.client.round_trips
    dataset.__getitems__([3, 60, 121])
    assert dataset._handle.client.round_trips == trips + 1
    # 3 windows of 10 steps: 12 bytes of obs, 2 of reward; the rest is framing and INFO itself.
    info = len(raw.execute_command("INFO", "stats").__repr__())
    assert sent() - before + asked < 3 * 10 * 14 + 2 * (info + 4000)
    whole = StoreDataset(store)
    before = sent()
    whole.__getitems__([0, 2])
    assert sent() - before > 1200 * 14


@pytest.mark.parametrize("width", [1000, 4_000_000])
def test_windows_follow_what_others_write(conn, width):
    def written(value, width, steps):
        return [torch.full((n, width), value, dtype=torch.uint8) for n in steps]

    def stack(values):
        return lazy_stack([TensorDict(o=o) for o in values])

    store = TensorDictStore.from_tensordict(stack(written(1, width, [4, 5, 6])), **conn)
    dataset = StoreDataset(td_id=store.td_id, window=2, **conn)
    rows = [0, 3, 5]
    assert (dataset.__getitems__(rows)["o"] == 1).all()
    store.update(stack(written(2, width * 3 // 4, [4, 5, 6])))
    assert torch.equal(dataset.__getitems__(rows)["o"], torch.full((3, 2, width * 3 // 4), 2))
    store.update(stack(written(3, width, [2, 2, 2])))
    with pytest.raises(errors.IndexOutOfRange, match="'o' have become shorter"):
        dataset.__getitems__(rows)
    store.update(stack(written(4, width, [5, 5, 5])))
    assert (dataset.__getitems__(rows)["o"] == 4).all()
    store.clear_redis()


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_in_a_loader(store, conn, workers):
    dataset = StoreDataset(td_id=store.td_id, window=16, stride=4, keys=["obs"], **conn)
    sampler = StoreBatchSampler(dataset, 32, shuffle=True, block_rows=8)
    rows = 0
    for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=workers):
        assert batch["obs"].shape[1:] == (16, 3) and batch.is_consolidated()
        rows += len(batch)
    assert rows == len(dataset)


@pytest.mark.parametrize("index", [slice(0, 0), slice(2, 40), 7, [30, 0, 0]], ids=str)
def test_windows_come_with_the_text_of_their_element(conn, index):
    local = episodes([9, 0, 30])
    for i, episode in enumerate(local):
        episode["task"] = f"task {i}"
        episode["deep", "all"] = "same"
    store = TensorDictStore.from_tensordict(lazy_stack(local), **conn)
    dataset = StoreDataset(td_id=store.td_id, window=4, stride=1, **conn)
    wanted = [task for task, n in (("task 0", 6), ("task 2", 27)) for _ in range(n)]
    got = dataset.__getitems__(index) if isinstance(index, list) else dataset[index]
    chosen = [wanted[i] for i in index] if isinstance(index, list) else wanted[index]
    if isinstance(index, int):
        assert got["task"] == chosen and got["deep", "all"] == "same"
        return
    assert list(got["task"]) == chosen and len(got) == len(chosen)
    assert [row["deep", "all"] for row in got] == ["same"] * len(chosen)


def test_what_has_no_windows(store, conn, caplog):
    for kwargs, error in (
        ({"window": 0}, ValueError),
        ({"window": 4, "stride": 0}, ValueError),
        ({"window": 2.5}, ValueError),
        ({"window": "3"}, ValueError),
        ({"window": 4, "stride": 1.5}, ValueError),
        ({"window": 4, "key": "nope"}, errors.EntryNotFound),
        ({"window": 4, "key": "obs"}, errors.EntryMismatch),
        ({"window": 4, "key": "level", "keys": ["level"]}, errors.InvalidIndex),
        ({"window": 4, "keys": ["level"]}, errors.InvalidIndex),
        ({"stride": 4}, TypeError),
        ({"key": "obs"}, TypeError),
    ):
        with pytest.raises(error):
            StoreDataset(td_id=store.td_id, **kwargs, **conn)
    for index in (126, -127):
        with pytest.raises(errors.IndexOutOfRange):
            StoreDataset(store, window=10)[index]
        with pytest.raises(errors.IndexOutOfRange):
            StoreDataset(store, window=10).__getitems__([0, index])
    assert not caplog.records
    assert len(StoreDataset(store, window=701)) == 0
    assert "no windows" in caplog.text and "701 steps" in caplog.text
    uneven = [TensorDict(a=torch.zeros(n), b=torch.zeros(n + 1)) for n in (2, 3)]
    other = TensorDictStore.from_tensordict(lazy_stack(uneven), **conn)
    with pytest.raises(errors.EntryMismatch, match="numbers of steps"):
        StoreDataset(other, window=2)
    assert len(StoreDataset(other, window=2, keys=["a"])) == 1 + 1
    other.clear_redis()
    grids = [TensorDict(a=torch.zeros(n, n)) for n in (2, 3)]
    other = TensorDictStore.from_tensordict(lazy_stack(grids), **conn)
    with pytest.raises(errors.InvalidIndex, match="differ in more"):
        StoreDataset(other, window=2)
    other.clear_redis()


def test_windows_of_a_plain_store(conn):
    data = TensorDict(x=torch.arange(60).view(5, 12), y=torch.arange(5), batch_size=[5])
    store = TensorDictStore.from_tensordict(data, **conn)
    dataset = StoreDataset(store, window=4, stride=2, key="x")
    assert len(dataset) == 5 * 5
    assert torch.equal(dataset[:]["x"], data["x"].unfold(1, 4, 2).reshape(-1, 4))
    assert dataset[:]["y"].tolist() == [i for i in range(5) for _ in range(5)]
    store.clear_redis()


def test_ragged_keys(store):
    dataset = StoreDataset(store)
    assert sorted(map(str, dataset.ragged_keys)) == sorted(["('deep', 'reward')", "obs"])
    batch = collate_pad(dataset.__getitems__([1, 3]), keys=dataset.ragged_keys)
    assert batch["lengths", "obs"].tolist() == [3, 20]
