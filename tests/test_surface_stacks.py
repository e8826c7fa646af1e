"""Beside the walk: writes to stacks whose elements differ in shape, locks of views, handles."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from tdio import TensorDictStore, open_store


def episodes(*sizes: int, seed: int = 0) -> LazyStackedTensorDict:
    generator = torch.Generator().manual_seed(seed)
    return lazy_stack(
        [
            TensorDict(
                a=torch.rand(3, n, generator=generator),
                b=torch.rand(3, generator=generator),
                batch_size=[3],
            )
            for n in sizes
        ]
    )


def assert_equal(store: Any, local: Any) -> None:
    for got, want in zip(store.to_tensordict().unbind(0), local.unbind(0), strict=True):
        for key in want.keys():
            assert torch.equal(got[key], want[key]), key


@pytest.fixture
def pair(conn: dict[str, Any]) -> Any:
    local = episodes(3, 2, 1, 3)
    with TensorDictStore.from_tensordict(local.clone(), **conn) as store:
        yield local, store
        with open_store(td_id=store.td_id, **conn) as again:
            assert_equal(again, local)
        store.clear_redis()


@pytest.mark.parametrize(
    "index",
    [slice(1, 3), [0, 2], torch.tensor([True, False, False, True]), (1, 0), (slice(0, 2), 1)],
    ids=str,
)
def test_elements_of_different_shapes_are_written_by_index(pair: Any, index: Any) -> None:
    local, store = pair
    other = episodes(3, 2, 1, 3, seed=1)
    for target in (local, store):
        target[index] = other[index]


@pytest.mark.parametrize("index", [slice(1, 3), (slice(0, 2), 1), 2], ids=str)
def test_a_number_is_written_to_elements_of_different_shapes(pair: Any, index: Any) -> None:
    for target in pair:
        target[index] = 0.5


def test_elements_may_change_their_shapes_together(pair: Any) -> None:
    local, store = pair
    other = episodes(7, 5, seed=1)
    store[1:3] = other
    local.tensordicts[1:3] = other.tensordicts


def test_a_stack_of_another_length_is_refused_before_anything_is_written(pair: Any) -> None:
    _, store = pair
    with pytest.raises(ValueError, match="2 elements"):
        store[1:3] = episodes(3, 2, 1)
    with pytest.raises(ValueError, match="4 elements"):
        store.update(episodes(3, 2, 1))


def test_a_stack_is_updated_from_a_stored_one(pair: Any, conn: dict[str, Any]) -> None:
    local, store = pair
    other = episodes(4, 4, 2, 1, seed=1)
    with TensorDictStore.from_tensordict(other, **conn) as source:
        store.update(source)
        local.update(other)
        source.clear_redis()


def test_writers_of_disjoint_slices_lose_nothing(pair: Any, conn: dict[str, Any]) -> None:
    local, store = pair

    def write(rows: slice, size: int) -> None:
        with open_store(td_id=store.td_id, **conn) as mine:
            for n in range(1, 20):
                mine[rows] = episodes(n, n, seed=n)
            mine[rows] = episodes(size, size, seed=size)

    threads = [
        threading.Thread(target=write, args=arguments)
        for arguments in ((slice(0, 2), 30), (slice(2, 4), 40))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    local.tensordicts[:] = [
        *episodes(30, 30, seed=30).tensordicts,
        *episodes(40, 40, seed=40).tensordicts,
    ]


def test_an_element_does_not_take_entries_from_the_others(conn: dict[str, Any]) -> None:
    tree = TensorDict(n=TensorDict(c=torch.ones(2), d=torch.ones(2)))
    with TensorDictStore.from_tensordict(lazy_stack([tree, tree.clone()]), **conn) as store:
        with pytest.raises(RuntimeError, match="delete it from the store"):
            store[0]["n"] = TensorDict(c=torch.zeros(2))
        with pytest.raises(ValueError, match="whole store first"):
            store[0]["n"] = torch.zeros(2)
        assert torch.equal(store[1]["n", "d"], torch.ones(2))
        assert torch.equal(store[0]["n", "c"], torch.ones(2))
        store.clear_redis()


def test_keys_are_flattened_in_place_by_a_positional_flag(conn: dict[str, Any]) -> None:
    tree = TensorDict(n=TensorDict(c=torch.ones(2), batch_size=[2]), batch_size=[2])
    with TensorDictStore.from_tensordict(tree, **conn) as store:
        assert store.flatten_keys("_", True) is store
        assert set(store.keys()) == {"n_c"}
        store.clear_redis()


# ---- locks and handles


def test_a_view_has_the_lock_of_its_store(pair: Any) -> None:
    _, store = pair
    view = store[0]
    store.lock_()
    assert view.is_locked
    with pytest.raises(RuntimeError, match="locked"):
        view.set("fresh", torch.zeros(3))
    with pytest.raises(RuntimeError, match="unlock the store"):
        view.unlock_()
    store.unlock_()
    assert not view.is_locked


def test_a_block_with_a_lock_leaves_the_connection_open(pair: Any) -> None:
    _, store = pair
    with store.unlock_():
        pass
    with store.lock_():
        assert store.is_locked
    assert not store.is_locked
    assert store["b"].shape == (4, 3)


def test_a_handle_that_nobody_holds_closes_its_connections(pair: Any, conn: dict[str, Any]) -> None:
    _, store = pair
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        open_store(td_id=store.td_id, **conn).to_tensordict()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
