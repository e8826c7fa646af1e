"""Corners of the stores where a wrong row, a lost value or a stale one could hide."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass

from tdio import LazyStackedTensorDictStore, TensorDictStore, delete_store, errors, open_store


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


def point(n):
    return Point(x=torch.ones(n), y=torch.zeros(n), batch_size=[n])


def stored(local, conn):
    """Return a store and a second handle on it."""
    one = TensorDictStore.from_tensordict(local, **conn)
    return one, open_store(td_id=one.td_id, **conn)


def stack(lengths=(2, 1, 3), inner=2):
    return lazy_stack(
        [
            TensorDict(x=torch.arange(inner * n).view(inner, n) + 10 * i, batch_size=[inner])
            for i, n in enumerate(lengths)
        ]
    )


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 2), [0, 1]),
        (slice(None, None, 2), torch.tensor([1])),
        (slice(0, 2), torch.tensor([True, False])),
        ([0, 2], [1, 0]),
        ([], 0),
        (slice(0, 0), [1, 0]),
        (None, slice(0, 0)),
        (slice(1, None), None),
    ],
    ids=repr,
)
def test_a_ragged_stack_indexed_on_several_dims(conn, index):
    equal = stack((2, 2, 2))
    _, two = stored(stack(), conn)
    want = equal[index].batch_size
    assert two[index].batch_size == want
    local = stack()
    if want.numel():
        got, expected = two[index], local[index]
        flat = [t["x"].tolist() for t in got.reshape(-1).unbind(0)] if want else None
        assert flat == [t["x"].tolist() for t in expected.reshape(-1).unbind(0)]


@pytest.mark.parametrize(
    "index",
    [(..., 0), (0, 1), (slice(None), 2), ([0, 1], [1, 2]), (..., slice(0, 2)), np.array(1), -1],
    ids=repr,
)
def test_an_entry_is_indexed_below_the_batch_dims(conn, index):
    local = TensorDict(x=torch.arange(15).view(3, 5), batch_size=[3])
    one, two = stored(local, conn)
    assert torch.equal(two.get_at("x", index), local["x"][index])
    one.set_at_("x", -7, index)
    local["x"][index] = -7
    assert torch.equal(two["x"], local["x"])


def test_text_in_elements_with_a_batch_size(conn):
    local = lazy_stack(
        [TensorDict(x=torch.zeros(2, 1), t=f"v{i}", batch_size=[2]) for i in range(3)]
    )
    one, two = stored(local, conn)
    for write in (lambda: one.update(two.to_tensordict()), lambda: one.__setitem__("t", one["t"])):
        write()
        assert two["t"] == local["t"]
        assert two[1]["t"] == "v1"
    several = lazy_stack([TensorDict(t=NonTensorStack("a", "b"), batch_size=[2])])
    with pytest.raises(errors.UnsupportedValue, match="several below it"):
        TensorDictStore.from_tensordict(several, **conn)


def test_text_written_by_an_index_that_adds_dims(conn):
    one, two = stored(TensorDict(t=NonTensorStack("a", "b"), batch_size=[2]), conn)
    one[:, None] = TensorDict(
        t=NonTensorStack(NonTensorStack("c"), NonTensorStack("d")), batch_size=[2, 1]
    )
    assert two["t"] == ["c", "d"]


def test_a_tensorclass_that_is_set_keeps_its_class(conn):
    one, two = stored(TensorDict(a=torch.zeros(3), batch_size=[3]), conn)
    one["p"] = point(3)
    one["n", "q"] = point(3)
    one.update({"r": point(3)})
    two.refresh()
    assert all(isinstance(two[key], Point) for key in ("p", ("n", "q"), "r"))
    assert isinstance(two[[0, 1]]["p"], Point)


def test_a_deeper_level_passes_its_batch_size_on(conn):
    local = TensorDict(n=TensorDict(x=torch.zeros(2, 3), batch_size=[2, 3]), batch_size=[2])
    one, two = stored(local, conn)
    with pytest.raises(errors.EntryMismatch):
        one["n", "m", "d"] = torch.ones(2, 5)
    one["n", "m", "d"] = torch.ones(2, 3, 5)
    two.refresh()
    assert two["n", "m"].batch_size == (2, 3)
    assert two.to_tensordict()["n", "m"].batch_size == (2, 3)
    assert two["n"][:, 1]["m", "d"].shape == (2, 5)
    one["n"] = TensorDict(x=torch.zeros(2), batch_size=[2])
    two.refresh()
    assert two["n"].batch_size == (2,) and set(two.keys(True, True)) == {("n", "x")}


def test_the_name_of_the_stack_dim_alone(conn):
    local = stack()
    local.names = ["time", None]
    _, two = stored(local, conn)
    assert two.names == ["time", None] and two[:].names == ["time", None]


@pytest.mark.parametrize("i", [np.int64(1), torch.tensor(1), np.array(1), True], ids=repr)
def test_what_selects_like_an_int_gives_a_view(conn, i):
    one, two = stored(stack(), conn)
    if i is True:
        assert two[i].batch_size == stack((2, 2, 2))[i].batch_size
        return
    one[i]["x"] = torch.full((2, 4), 5)
    assert two[1]["x"].tolist() == [[5] * 4] * 2


# ---- two handles


def test_an_entry_without_bytes_is_looked_at_too(conn):
    one, two = stored(TensorDict(x=torch.zeros(3, 0), batch_size=[3]), conn)
    assert two["x"].shape == (3, 0)
    one["x"] = torch.ones(3, 5)
    assert two["x"].shape == (3, 5) and two[[0]]["x"].shape == (1, 5)


def test_a_stale_handle_writes_by_what_is_there(conn):
    one, two = stored(
        TensorDict(a=torch.zeros(2, dtype=torch.int32), b=torch.zeros(2), batch_size=[2]), conn
    )
    two.to_tensordict()
    one["a"] = torch.zeros(2)
    two.set_("a", torch.full((2,), 2.5))
    assert one["a"].tolist() == [2.5, 2.5]
    del one["b"]
    with pytest.raises(KeyError):
        two.set_("b", torch.ones(2))
    one["n"] = TensorDict(y=torch.zeros(2), batch_size=[2])
    two["n"] = TensorDict(z=torch.zeros(2), batch_size=[2])
    one.refresh()
    assert set(one.keys(True, True)) == {"a", ("n", "z")}
    one["m"] = TensorDict(y=torch.zeros(2), batch_size=[2])
    two.clear()
    one.refresh()
    assert not set(one.keys(True, True))


def test_a_store_that_is_gone_is_not_written_to(conn, raw):
    one, two = stored(TensorDict(a=torch.zeros(2), batch_size=[2]), conn)
    two["a"]
    delete_store(td_id=one.td_id, **conn)
    for write in (
        lambda: two.set("a", torch.ones(2)),
        lambda: two.set("new", torch.ones(2)),
        lambda: two.set_at_("a", 1.0, 0),
        lambda: two.set_non_tensor("t", "text"),
    ):
        with pytest.raises(KeyError):
            write()
    assert not raw.keys(f"*{one.td_id}*")


def test_an_id_that_another_store_has_taken(conn):
    one, two = stored(TensorDict(a=torch.zeros(2), batch_size=[2]), conn)
    two["a"]
    delete_store(td_id=one.td_id, **conn)
    TensorDictStore.from_tensordict(
        TensorDict(a=torch.zeros(5), batch_size=[5]), td_id=one.td_id, **conn
    )
    with pytest.raises(errors.StoreNotFound, match="open it again"):
        two["a"]
    with pytest.raises(errors.StoreNotFound, match="open it again"):
        two.set_at_("a", 1.0, 0)


def test_a_view_of_a_level_that_is_gone(conn):
    local = TensorDict(n=TensorDict(x=torch.zeros(2), batch_size=[2]), batch_size=[2])
    one, two = stored(local, conn)
    view = two["n"]
    del one["n"]
    with pytest.raises(KeyError):
        view.to_tensordict()


def test_threads_that_keep_no_metadata(conn):
    one = TensorDictStore.from_tensordict(TensorDict(x=torch.zeros(4), batch_size=[4]), **conn)
    loose = open_store(td_id=one.td_id, cache_metadata=False, **conn)
    until, wrong = time.time() + 2, []

    def read():
        while time.time() < until:
            value = loose["x"]
            if value.tolist() not in ([0.0] * 4, [1] * 4):
                wrong.append(value)

    def write():
        while time.time() < until:
            one["x"] = torch.ones(4, dtype=torch.int64)
            one["x"] = torch.zeros(4)

    threads = [threading.Thread(target=work) for work in (read, read, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- processes


def test_a_store_pickles_after_a_read_of_a_coroutine(conn):
    one, _ = stored(TensorDict(x=torch.arange(3), batch_size=[3]), conn)
    asyncio.run(one.aread(0))
    assert pickle.loads(pickle.dumps(one))["x"].tolist() == [0, 1, 2]


def test_children_forked_while_threads_read(conn):
    one, two = stored(TensorDict(x=torch.arange(1000), batch_size=[1000]), conn)
    done = threading.Event()

    def read():
        while not done.is_set():
            two[[5, 900, 7]]

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(0 if one[[3, 1]]["x"].tolist() == [3, 1] else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_lazy_store_of_values_alone(conn):
    local = lazy_stack([TensorDict(t=f"{i}", n=i) for i in range(3)])
    store = LazyStackedTensorDictStore.from_lazy_stack(local, **conn)
    assert open_store(td_id=store.td_id, **conn)[[2, 0]]["t"] == ["2", "0"]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_number_that_the_dtype_cannot_hold_is_refused(conn, ragged):
    local = stack((2, 1, 3) if ragged else (2, 2, 2)).to(torch.uint8)
    one, _ = stored(local, conn)
    for write in (lambda: one.set_at_("x", 10**30, 0), lambda: one[0].set_at_("x", 10**30, 0)):
        with pytest.raises(errors.EntryMismatch, match="uint8"):
            write()
    assert (one[0]["x"] == local[0]["x"]).all()


def test_a_with_block_over_a_view_leaves_the_store_open(conn):
    local = lazy_stack([TensorDict(n=TensorDict(x=torch.ones(i + 1))) for i in range(2)])
    store = TensorDictStore.from_tensordict(local, **conn)
    for view in (store[0], store[0]["n"]):
        with view as inside:
            assert inside is view
        assert store[1]["n", "x"].shape == (2,)
    with store:
        pass
    with pytest.raises(errors.ServerUnavailable):
        store[1]["n", "x"]


@pytest.mark.parametrize("before", [[3], [3, 4], [3, 4, 2]], ids=str)
@pytest.mark.parametrize("after", [[3], [3, 4], [3, 4, 2]], ids=str)
def test_an_index_of_a_level_whose_batch_size_another_handle_changed(conn, before, after):
    x = torch.arange(24.0).view(3, 4, 2)
    one = TensorDictStore.from_tensordict(
        TensorDict(n=TensorDict(x=x, batch_size=before), batch_size=[3]), **conn
    )
    local = TensorDict(n=TensorDict(x=x.clone(), batch_size=after), batch_size=[3])
    for index in ((..., 1), (slice(None), 1), (0, 1), (None, 0), (..., None), ([2, 0],)):
        one["n"] = TensorDict(x=x.clone(), batch_size=before)
        reader, writer = (open_store(td_id=one.td_id, **conn)["n"] for _ in range(2))
        one["n"] = local["n"]
        if sum(part is not None and part is not ... for part in index) > len(after):
            with pytest.raises(errors.InvalidIndex):
                reader[index]
            continue
        want, got = local["n"][index], reader[index]
        assert got.batch_size == want.batch_size and torch.equal(got["x"], want["x"])
        assert reader.batch_size == torch.Size(after)
        if None not in index:
            changed = local["n"].clone()
            changed[index] = 7.0
            writer[index] = 7.0
            assert torch.equal(one["n", "x"], changed["x"])


def test_an_index_of_a_level_of_a_ragged_stack_that_changed(conn):
    def stack(batch):
        return lazy_stack(
            [
                TensorDict(n=TensorDict(x=torch.full((3, 2, i + 1), i), batch_size=batch))
                for i in range(4)
            ]
        )

    one = TensorDictStore.from_tensordict(stack([3]), **conn)
    view = open_store(td_id=one.td_id, **conn)["n"]
    one["n"] = stack([3, 2])["n"]
    assert view[..., 1].batch_size == (4, 3)


@pytest.mark.parametrize("read", ["batch", "whole", "leaf", "write", "number"])
def test_a_handle_that_has_read_nothing_sees_what_another_made(conn, read):
    local = TensorDict(a=torch.arange(4), b=torch.arange(4.0), batch_size=[4])
    work = {
        "batch": lambda s: s[[0, 1]],
        "whole": lambda s: s.to_tensordict(),
        "leaf": lambda s: s["b"],
        "write": lambda s: s.update(TensorDict(b=torch.ones(4), batch_size=[4])),
        "number": lambda s: s.__setitem__(3, 7),
    }[read]
    one = TensorDictStore.from_tensordict(local, **conn)
    stale = open_store(td_id=one.td_id, **conn)
    one.del_("a")
    out = work(stale)
    if read in ("batch", "whole"):
        assert set(out.keys()) == {"b"}
    assert one["b"].tolist() == {"write": [1.0] * 4, "number": [0.0, 1.0, 2.0, 7.0]}.get(
        read, [0.0, 1.0, 2.0, 3.0]
    )
    late = open_store(td_id=one.td_id, **conn)
    one.clear_redis()
    with pytest.raises(errors.StoreNotFound):
        work(late)
    # The handle that cleared it too.
    with pytest.raises(errors.StoreNotFound if read != "leaf" else KeyError):
        work(one)
    wider = TensorDict(b=torch.arange(9.0), batch_size=[9])
    TensorDictStore.from_tensordict(wider, td_id=one.td_id, **conn)
    with pytest.raises(errors.StoreNotFound, match="another store"):
        work(open_again := late)
    assert open_again is late


@pytest.mark.parametrize(
    "index", [(slice(None), slice(None, None, -1)), (1, slice(None, None, -1))]
)
def test_a_slice_that_runs_backwards_inside_elements(conn, index):
    local = lazy_stack([TensorDict(x=torch.rand(3, i + 1), batch_size=[3]) for i in range(3)])
    store = TensorDictStore.from_tensordict(local, **conn)
    got = store[index]
    for i, element in enumerate(got.unbind(0) if index[0] == slice(None) else [got]):
        at = i if index[0] == slice(None) else 1
        assert torch.equal(element["x"], local[at]["x"].flip(0))
    assert torch.equal(store[2][::-1]["x"], local[2]["x"].flip(0))


def test_small_integers_and_empty_ranges_index(conn):
    local = TensorDict(x=torch.arange(20).view(5, 4), batch_size=[5, 4])
    store = TensorDictStore.from_tensordict(local, **conn)
    for dtype in (torch.int8, torch.int16, torch.int32):
        at = torch.tensor([3, 1], dtype=dtype)
        assert torch.equal(store[at, None]["x"], local["x"][at.long(), None])
        assert torch.equal(store[:, at]["x"], local["x"][:, at.long()])
    assert store[range(5, 2)].batch_size == (0, 4)
    assert store[range(4, 0, -2)]["x"].tolist() == local["x"][[4, 2]].tolist()


def test_no_element_of_a_ragged_stack_keeps_the_dims_that_all_share(conn):
    local = lazy_stack([TensorDict(x=torch.zeros(i, 84, 3)) for i in (1, 2)])
    store = TensorDictStore.from_tensordict(local, **conn)
    assert store[[]]["x"].shape == (0, 0, 84, 3)


def test_elements_of_another_stack_dim_say_how_they_are_written(conn):
    elements = [TensorDict(x=torch.zeros(2, i + 1), batch_size=[2]) for i in range(3)]
    store = TensorDictStore.from_tensordict(lazy_stack(elements, 1), **conn)
    with pytest.raises(errors.InvalidIndex, match=r"written whole: store.update"):
        store[:, 1] = TensorDict(x=torch.zeros(2, 9), batch_size=[2])


@pytest.mark.parametrize("odd", [torch.eye(3).to_sparse(), torch.ones(3, 3, device="meta")])
def test_a_leaf_without_plain_bytes_is_refused_before_anything_is_sent(conn, odd):
    for local in (
        TensorDict(a=torch.ones(3), x=odd, batch_size=[3]),
        lazy_stack([TensorDict(x=odd)]),
    ):
        with pytest.raises(errors.UnsupportedValue, match="'x'"):
            TensorDictStore.from_tensordict(local, td_id="odd", **conn)
        with pytest.raises(errors.StoreNotFound):
            open_store(td_id="odd", **conn)


@pytest.mark.parametrize("odd", [5, None, [1], {"a": torch.ones(3)}, torch.ones(3)], ids=str)
def test_what_is_no_tensordict_is_refused(conn, odd):
    with pytest.raises(errors.UnsupportedValue, match="from_dict"):
        TensorDictStore.from_tensordict(odd, **conn)


def test_the_empty_key_is_no_entry(conn):
    store = TensorDictStore.from_tensordict(TensorDict(a=torch.ones(3), batch_size=[3]), **conn)
    with pytest.raises(KeyError):
        store[""]
    assert store.get("", None) is None


def test_elements_of_batch_sizes_of_their_own(conn):
    """Rollouts of shape [T]: the dims in which they differ are no batch dims of the store."""
    local = lazy_stack(
        [
            TensorDict(
                obs=torch.randn(n, 4),
                deep=TensorDict(z=torch.randn(n, 2), batch_size=[n]),
                word=f"{n}",
                batch_size=[n],
            )
            for n in (3, 4, 0)
        ]
    )
    for store in stored(local, conn):
        assert store.batch_size == (3,)
        whole = store[:]
        for i, want in enumerate(local.tensordicts):
            for got in (store[i].to_tensordict(), whole[i]):
                assert got.batch_size == () and got["deep"].batch_size == want.batch_size
                assert torch.equal(got["obs"], want["obs"]) and got["word"] == want["word"]
                assert torch.equal(got["deep", "z"], want["deep", "z"])
    store[1] = local.tensordicts[0]
    assert torch.equal(store[1]["obs"], local.tensordicts[0]["obs"])


def test_elements_whose_batch_sizes_agree_in_part(conn):
    local = lazy_stack([TensorDict(a=torch.randn(2, n, 3), batch_size=[2, n]) for n in (3, 4)], 1)
    local.names = ["a", "b", "c"]
    for store in stored(local, conn):
        assert store.batch_size == (2, 2) and store.names == ["a", "b"]
        for i in range(2):
            assert torch.equal(store[:, i]["a"], local.tensordicts[i]["a"])
    differ = lazy_stack([TensorDict(a=torch.randn(n), batch_size=[n]) for n in (3, 4)], 1)
    with pytest.raises(
        errors.EntryMismatch, match=r"\[3\] and \[4\], which differ before stack_dim=1"
    ):
        stored(differ, conn)


@pytest.mark.parametrize("start", [0, 70_001])
@pytest.mark.parametrize("shape", [(), (3,), (2,)], ids=str)
def test_tiny_rows_all_over_a_long_entry(conn, shape, start):
    """A long span is read in pieces; rows are looked for in each, a block at a time."""
    data = TensorDict(x=torch.randint(0, 99, (3_000_000, *shape), dtype=torch.int32))
    data.batch_size = [3_000_000]
    with TensorDictStore.from_tensordict(data, **conn) as store:
        span = 3_000_000 - start
        for index in (
            torch.randperm(span)[:300_000] + start,
            torch.randint(span, (300_000,)) + start,
            slice(start, None, 7),
            torch.rand(3_000_000) > 0.9,
        ):
            assert torch.equal(store[index]["x"], data["x"][index])
