"""Reads from a coroutine, and sync methods inside a running loop."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdio import StoreDataset, TensorDictPipe, TensorDictStore, errors, open_store
from tdio.server import embedded_server
from tdio.transport.memory import memory_pair


def data():
    return TensorDict(
        x=torch.arange(40.0).view(10, 4),
        deep=TensorDict(y=torch.arange(10), batch_size=[10]),
        text=NonTensorStack(*map(str, range(10))),
        batch_size=[10],
    )


@pytest.fixture
def store(conn):
    with TensorDictStore.from_tensordict(data(), **conn) as made:
        yield made


def test_reads(store):
    async def work():
        got = await store.aread([3, 1])
        assert torch.equal(got["x"], data()["x"][[3, 1]]) and got["text"] == ["3", "1"]
        assert (await store.aread(2))["deep", "y"] == 2
        assert torch.equal((await store.aread())["x"], data()["x"])
        assert torch.equal(await store.aget("x"), data()["x"])
        assert await store.aget("text") == list(map(str, range(10)))
        assert (await store.aget(("deep", "y"))).tolist() == list(range(10))
        assert (await store["deep"].aread(slice(2, 4)))["y"].tolist() == [2, 3]
        assert (await store.aget("deep"))["y"].tolist() == list(range(10))

    asyncio.run(work())
    asyncio.run(work())  # another loop


def test_many_at_once(store):
    async def work():
        reads = [store.aread([i, (i * 7) % 10]) for i in range(10) for _ in range(5)]
        for i, got in zip(
            [i for i in range(10) for _ in range(5)], await asyncio.gather(*reads), strict=True
        ):
            assert torch.equal(got["x"], data()["x"][[i, (i * 7) % 10]])

    asyncio.run(work())


def test_a_large_read_does_not_block_the_loop(conn):
    big = TensorDict(x=torch.arange(4_000_000), batch_size=[4_000_000])
    store = TensorDictStore.from_tensordict(big, **conn)

    async def work():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        got = await store.aread(slice(None, None, 1))
        ticker.cancel()
        assert torch.equal(got["x"], big["x"])
        assert ticks > 10

    asyncio.run(work())
    store.clear_redis()


def test_a_ragged_store(conn):
    stack = lazy_stack([TensorDict(x=torch.full((n,), n)) for n in (3, 1, 2)])
    store = TensorDictStore.from_tensordict(stack, **conn)

    async def work():
        got = await store.aread([2, 0])
        assert [e["x"].tolist() for e in got.tensordicts] == [[2, 2], [3, 3, 3]]
        assert (await store[1].aread())["x"].tolist() == [1]

    asyncio.run(work())


def test_a_cancelled_read_leaves_the_store_usable(store):
    async def work():
        for _ in range(20):
            task = asyncio.create_task(store.aread(list(range(10)) * 50))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await store.aread(3))["deep", "y"] == 3

    asyncio.run(work())


def test_errors(store):
    async def work():
        with pytest.raises(errors.EntryNotFound):
            await store.aget("nothing")
        with pytest.raises(errors.IndexOutOfRange):
            await store.aread(10)

    asyncio.run(work())


def test_a_server_that_is_gone_is_said():
    with embedded_server() as server:
        store = TensorDictStore.from_tensordict(data(), **server.connection_kwargs)
    with pytest.raises(errors.ServerUnavailable):
        asyncio.run(asyncio.wait_for(store.aread(0), 20))


def test_sync_methods_inside_a_loop(conn):
    """As in a notebook: they work, on connections of their own."""

    async def work():
        made = TensorDictStore.from_tensordict(data(), **conn)
        again = open_store(td_id=made.td_id, **conn)
        assert torch.equal(again[[1]]["x"], data()[[1]]["x"])
        again.set_at_("x", 5.0, 3)
        assert StoreDataset(made)[3]["x"].tolist() == [5.0] * 4
        made.clear_redis()

    asyncio.run(work())


def test_an_asyncio_client_handed_in(conn):
    async def work():
        client = redis.asyncio.Redis(**conn)
        store = TensorDictStore.from_tensordict(data(), client=client)
        assert (await store.aread(4))["deep", "y"] == 4
        assert store[5]["deep", "y"] == 5
        store.clear_redis()
        await client.aclose()

    asyncio.run(work())


def test_a_store_goes_through_a_pipe(store, conn):
    async def work():
        a, b = (TensorDictPipe(end) for end in memory_pair())
        await store.asend(a)
        got = await b.arecv()
        assert torch.equal(got["x"], data()["x"]) and got["text"] == list(map(str, range(10)))
        await b.asend(data().apply(lambda x: x + 1))
        assert await store.arecv(a) is store

    asyncio.run(work())
    assert torch.equal(open_store(td_id=store.td_id, **conn)["x"], data()["x"] + 1)
