"""StoreBatchSampler: what it deals out, and that it resumes exactly."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from tdio import StoreBatchSampler, errors
from tdio.data.order import WINDOW_BLOCKS, epoch_order


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return index


def ranks(rows, batch_size, world, **kwargs):
    return [
        StoreBatchSampler(rows, batch_size, num_replicas=world, rank=rank, **kwargs)
        for rank in range(world)
    ]


sizes = st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(1, 7))
blocks = st.none() | st.integers(1, 50)


@given(sizes, st.booleans(), blocks, st.integers(0, 5), st.integers(0, 2**40))
def test_exact_gives_each_row_once(size, shuffle, block_rows, epoch, seed):
    rows, batch_size, world = size
    block_rows = block_rows if shuffle else None
    settings = {"shuffle": shuffle, "block_rows": block_rows, "epoch": epoch, "seed": seed}
    try:
        samplers = ranks(rows, batch_size, world, **settings)
    except ValueError:
        # Only where it cannot be done.
        assert 0 < rows < world or (batch_size == 1 and rows % world)
        return
    dealt = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in dealt} == {len(samplers[0])}
    assert all(1 <= len(batch) <= batch_size for batches in dealt for batch in batches)
    assert sorted(row for batches in dealt for batch in batches for row in batch) == list(
        range(rows)
    )
    steps = [sorted(row for batch in step for row in batch) for step in zip(*dealt, strict=True)]
    assert all(len(step) == batch_size * world for step in steps[:-2])


@given(sizes, st.sampled_from(["drop_last", "pad"]), st.booleans())
def test_full_batches(size, tail, shuffle):
    rows, batch_size, world = size
    dealt = [
        list(sampler) for sampler in ranks(rows, batch_size, world, **{tail: True}, shuffle=shuffle)
    ]
    assert all(len(batch) == batch_size for batches in dealt for batch in batches)
    assert len({len(batches) for batches in dealt}) == 1
    seen = Counter(row for batches in dealt for batch in batches for row in batch)
    whole = batch_size * world
    if tail == "drop_last":
        assert set(seen.values()) <= {1} and len(seen) == rows - rows % whole
    else:
        assert set(seen) == set(range(rows)) and seen.total() == -(-rows // whole) * whole


@given(st.integers(0, 2000), st.integers(0, 9), st.integers(0, 9), blocks)
def test_an_order_is_a_permutation_that_its_arguments_decide(rows, seed, epoch, block_rows):
    order = epoch_order(rows, seed, epoch, block_rows)
    assert sorted(order.tolist()) == list(range(rows))
    assert np.array_equal(order, epoch_order(rows, seed, epoch, block_rows))
    if rows > 50 and (block_rows or 1) * WINDOW_BLOCKS * 2 < rows:
        assert not np.array_equal(order, epoch_order(rows, seed, epoch + 1, block_rows))
        assert not np.array_equal(order, epoch_order(rows, seed + 1, epoch, block_rows))


def test_an_order_is_the_same_everywhere():
    # Fixed values: a checkpoint must mean the same in every version.
    assert epoch_order(8, 0, 0, None).tolist() == ORDER_8
    assert epoch_order(12, 3, 1, 2).tolist() == ORDER_12


ORDER_8 = [0, 2, 1, 5, 4, 3, 6, 7]
ORDER_12 = [11, 7, 10, 6, 0, 1, 8, 9, 4, 5, 3, 2]


def test_blocks_are_runs_of_neighbours():
    order = epoch_order(64 * 100, 0, 0, 64)
    for start in range(0, len(order), 64 * WINDOW_BLOCKS):
        window = order[start : start + 64 * WINDOW_BLOCKS]
        assert len(set(window // 64)) == -(-len(window) // 64)


@settings(max_examples=60)
@given(
    st.integers(1, 300), st.integers(1, 20), st.integers(1, 5), st.integers(1, 20),
    st.integers(1, 5), st.data(), blocks,
)  # fmt: skip
def test_resuming_with_another_world_is_exact(
    rows, batch_a, world_a, batch_b, world_b, data, block_rows
):
    kwargs = {"shuffle": True, "block_rows": block_rows, "seed": 7, "epoch": 3}
    try:
        before = ranks(rows, batch_a, world_a, **kwargs)
        after = ranks(rows, batch_b, world_b, **{**kwargs, "epoch": 0})
    except ValueError:
        return
    steps = data.draw(st.integers(0, len(before[0])))
    seen = [row for sampler in before for batch in islice(sampler, steps) for row in batch]
    states = [json.dumps(sampler.state_dict()) for sampler in before]
    assert len(set(states)) == 1 and len(states[0]) < 1000
    state = json.loads(states[0])
    assert all(type(value) is int for value in state.values())
    try:
        for sampler in after:
            sampler.load_state_dict(state)
    except errors.StateMismatch:
        left = rows - len(seen)
        assert left < world_b or batch_b == 1
        return
    rest = [row for sampler in after for batch in sampler for row in batch]
    if steps == len(before[0]):
        assert sorted(rest) == list(range(rows)) and after[0].epoch == 5
    else:
        assert sorted(seen + rest) == list(range(rows)) and after[0].epoch == 4


def test_twice_in_one_epoch():
    straight = list(StoreBatchSampler(100, 7, shuffle=True))
    got, state = [], None
    for _ in range(5):
        sampler = StoreBatchSampler(100, 7, shuffle=True)
        if state is not None:
            sampler.load_state_dict(state)
        got += list(islice(sampler, 3))
        state = sampler.state_dict()
    assert got == straight
    sampler.load_state_dict(state)
    assert list(sampler) == list(StoreBatchSampler(100, 7, shuffle=True, epoch=1))


def test_epochs_follow_each_other():
    sampler = StoreBatchSampler(40, 8, shuffle=True)
    first, second = list(sampler), list(sampler)
    assert first != second and sampler.epoch == 2
    sampler.set_epoch(0)
    assert list(sampler) == first and sampler.epoch == 1
    next(iter(sampler))  # a pass that is left early is an epoch too
    assert sampler.epoch == 2 and list(sampler) != second
    sampler.set_epoch(0)
    next(iter(sampler))
    state = sampler.state_dict()
    resumed = StoreBatchSampler(40, 8, shuffle=True)
    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)  # the usual loop sets the epoch that it is in
    assert list(resumed) == first[1:]


@pytest.mark.parametrize("field", ["version", "rows", "seed", "shuffle", "block_rows"])
def test_a_state_of_something_else_is_refused(field):
    sampler = StoreBatchSampler(100, 10, shuffle=True, block_rows=5)
    state = sampler.state_dict()
    with pytest.raises(errors.StateMismatch, match=f"{field}="):
        sampler.load_state_dict({**state, field: state[field] + 1})
    for bad in (None, "1", -1, 1.5, True):
        with pytest.raises(errors.StateMismatch, match=field):
            sampler.load_state_dict({**state, field: bad})
    with pytest.raises(errors.StateMismatch):
        sampler.load_state_dict({})


def test_a_rank_is_not_guessed(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="pass rank=, or set RANK"):
        StoreBatchSampler(10, 2, num_replicas=3)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE and RANK say 'many'"):
        StoreBatchSampler(10, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ValueError, match="WORLD_SIZE and RANK say rank=5"):
        StoreBatchSampler(10, 2)
    monkeypatch.setenv("RANK", "1")
    assert StoreBatchSampler(10, 2).rank == 1
    assert StoreBatchSampler(10, 2, num_replicas=1).rank == 0
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("RANK", "")
    assert StoreBatchSampler(10, 2).num_replicas == 1
    with pytest.raises(errors.StateMismatch, match="None is no state"):
        StoreBatchSampler(10, 2).load_state_dict(None)


def test_bad_arguments():
    for kwargs in (
        {"drop_last": True, "pad": True}, {"seed": -1}, {"epoch": -1}, {"block_rows": 0}, {"rank": 2, "num_replicas": 2},
        {"num_replicas": 11, "rank": 0}, {"seed": 1.5}, {"seed": 2**63}, {"epoch": "1"},
        {"block_rows": 2.0}, {"num_replicas": 0, "rank": 0}, {"num_replicas": 1.5, "rank": 0},
        {"rank": 0.5}, {"block_rows": 8},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            StoreBatchSampler(10, 4, **kwargs)
    for batch_size in (0, 2.5, "3"):
        with pytest.raises(ValueError, match="batch_size="):
            StoreBatchSampler(10, batch_size)
    sampler = StoreBatchSampler(10, 4)
    for epoch in (-1, 2**63, 2**64, 1.0):
        with pytest.raises(ValueError, match="epoch="):
            sampler.set_epoch(epoch)
    state = sampler.state_dict()
    for field, value in (("epoch", 2**63), ("position", 11)):
        with pytest.raises(errors.StateMismatch, match=f"{field}={value}"):
            sampler.load_state_dict({**state, field: value})


def test_whole_numbers_of_numpy():
    number = np.int64
    sampler = StoreBatchSampler(
        number(40), number(4), shuffle=True, seed=number(3), epoch=number(1),
        block_rows=number(2), num_replicas=number(2), rank=number(1),
    )  # fmt: skip
    plain = StoreBatchSampler(
        40, 4, shuffle=True, seed=3, epoch=1, block_rows=2, num_replicas=2, rank=1
    )
    assert list(sampler) == list(plain)
    sampler.set_epoch(number(7))
    state = sampler.state_dict()
    assert {type(value) for value in state.values()} == {int} and state["epoch"] == 7
    plain.load_state_dict(json.loads(json.dumps(state)))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_a_loader_with_workers(workers, persistent):
    if persistent and not workers:
        pytest.skip("no workers to persist")
    sampler = StoreBatchSampler(Rows(100), 7, shuffle=True)
    loader = DataLoader(
        Rows(100), batch_sampler=sampler, num_workers=workers, persistent_workers=persistent
    )
    expected = {
        epoch: list(StoreBatchSampler(100, 7, shuffle=True, epoch=epoch)) for epoch in range(3)
    }
    state, got = {}, []
    for batch in sampler.counting(loader):
        got.append(batch.tolist())
        assert sampler.epoch == 0 and sampler.state_dict()["position"] == min(100, 7 * len(got))
        if len(got) == 4:
            state = sampler.state_dict()
    assert got == expected[0]
    # The next epoch reaches workers that persist, by itself and by set_epoch.
    assert [b.tolist() for b in loader] == expected[1]
    sampler.set_epoch(0)
    assert [b.tolist() for b in loader] == expected[0]
    sampler.load_state_dict(state)
    assert [b.tolist() for b in sampler.counting(loader)] == expected[0][4:]
    for number, _ in enumerate(sampler.counting(loader), 1):
        if number == 2:
            break
    state = sampler.state_dict()
    other = StoreBatchSampler(100, 7, shuffle=True)
    other.load_state_dict(state)
    assert list(other) == expected[1][2:]


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_a_pass_that_is_left_early_is_an_epoch(workers, counting):
    """How far the loader has drawn ahead by then does not matter."""
    sampler = StoreBatchSampler(40, 10, shuffle=True)
    loader = DataLoader(Rows(40), batch_sampler=sampler, num_workers=workers)

    def batches():
        return sampler.counting(loader) if counting else loader

    expected = [list(StoreBatchSampler(40, 10, shuffle=True, epoch=e)) for e in range(4)]
    for epoch in range(2):
        for batch in batches():
            assert batch.tolist() == expected[epoch][0]
            assert sampler.epoch == epoch + (not counting)
            break
        assert sampler.epoch == epoch + 1
        if counting:
            assert sampler.state_dict()["epoch"] == epoch
    assert [batch.tolist() for batch in batches()] == expected[2]
    assert sampler.epoch == 3
    next(iter(loader))
    sampler.set_epoch(3)
    assert [batch.tolist() for batch in batches()] == expected[3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", ["load", "set_epoch"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_loop_over_epochs_goes_on_exactly(workers, first, stop):
    """A checkpoint after ``stop`` of the 4 batches of epoch 2, loaded before the loop or in it."""

    def make():
        sampler = StoreBatchSampler(40, 10, shuffle=True)
        return sampler, DataLoader(Rows(40), batch_sampler=sampler, num_workers=workers)

    expected = [list(StoreBatchSampler(40, 10, shuffle=True, epoch=e)) for e in range(5)]
    sampler, loader = make()
    sampler.set_epoch(2)
    for number, _ in enumerate(sampler.counting(loader), 1):
        if number == stop:
            break
    state = sampler.state_dict()
    sampler, loader = make()
    if first == "load":
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        assert sampler.epoch == (3 if stop == 4 else 2)
    got = []
    for epoch in range(2, 5):
        sampler.set_epoch(epoch)
        if first == "set_epoch" and epoch == 2:
            sampler.load_state_dict(state)
        got.append([batch.tolist() for batch in sampler.counting(loader)])
    assert got == [expected[2][stop:], *expected[3:]]
    # Nobody asks for an epoch: the next one comes whole.
    sampler, loader = make()
    sampler.load_state_dict(state)
    rest = [batch.tolist() for batch in sampler.counting(loader)]
    assert rest == (expected[2][stop:] or expected[3])


@pytest.mark.parametrize("first", ["load", "set_epoch"])
def test_an_epoch_that_is_over_is_empty_once(first):
    sampler = StoreBatchSampler(40, 10)
    state = {**sampler.state_dict(), "epoch": 3, "position": 40}
    if first == "load":
        sampler.load_state_dict(state)
    sampler.set_epoch(3)
    if first == "set_epoch":
        sampler.load_state_dict(state)
    assert [(sampler.epoch, len(list(sampler))) for _ in range(3)] == [(3, 0), (4, 4), (5, 4)]


def test_a_loop_that_counts_another_loader_is_refused():
    sampler = StoreBatchSampler(40, 10)
    for rows, which in ((30, "fewer"), (50, "more")):
        with pytest.raises(ValueError, match=f"yields {which} batches than the 4.*batch_sampler="):
            list(sampler.counting(DataLoader(Rows(rows), batch_size=10)))


def test_an_epoch_that_is_set_within_a_loop_is_the_next():
    sampler = StoreBatchSampler(40, 10)
    loop = sampler.counting(DataLoader(Rows(40), batch_sampler=sampler))
    next(loop)
    sampler.set_epoch(7)
    assert len(list(loop)) == 3
    state = sampler.state_dict()
    assert (sampler.epoch, state["epoch"], state["position"]) == (7, 7, 0)


def test_a_pass_that_was_left_moves_nothing():
    sampler = StoreBatchSampler(40, 10)
    left = iter(sampler)
    next(left)
    sampler.set_epoch(5)
    assert len(list(left)) == 3
    assert sampler.epoch == 5 and sampler.state_dict()["position"] == 0
    left = iter(sampler)
    next(left)
    assert len(list(sampler)) == 4 and sampler.epoch == 7
    list(left)
    assert sampler.epoch == 7


def test_the_length_is_that_of_a_whole_epoch():
    sampler = StoreBatchSampler(40, 10)
    sampler.load_state_dict({**sampler.state_dict(), "position": 20})
    assert len(sampler) == 4 and len(list(sampler)) == 2


RANK = """
import torch.distributed as dist
from tdio import StoreBatchSampler
sampler = StoreBatchSampler(20, 3)
assert (sampler.rank, sampler.num_replicas) == (1, 2)
dist.init_process_group("gloo", init_method="file://{path}", rank=0, world_size=1)
sampler = StoreBatchSampler(20, 3)
assert (sampler.rank, sampler.num_replicas) == (0, 1)
dist.destroy_process_group()
"""


def test_where_rank_and_world_size_come_from(tmp_path):
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    code = RANK.format(path=tmp_path / "rendezvous")
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    assert torch.distributed.is_available()
