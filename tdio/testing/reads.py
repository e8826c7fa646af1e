"""``StoreReadTests``: what a backend must do for readers of a store."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

import tdio
from tdio import LazyStackedTensorDictStore, TensorDictStore, errors
from tdio.layout.dtypes import BY_NAME
from tdio.testing._samples import (
    ELEMENTS,
    ROWS,
    as_bytes,
    as_in_a_worker,
    assert_same,
    assert_same_elements,
    in_threads,
    plain,
    ragged,
)
from tdio.wire.names import Names

INDEXES = [
    0, -1, slice(3, 11, 4), slice(None), [5, 0, 0, 11], torch.tensor([[1, 2], [3, -4]]),
    torch.arange(ROWS) % 3 == 0, (3, 2), (slice(None), 1), (..., 1), ([1, 2], [0, 2]),
    (slice(2, 9), [0, 2]), torch.tensor(7), torch.zeros(0, dtype=torch.int64), (None, 4),
]  # fmt: skip
ELEMENT_INDEXES = [[5, 0, 7, 7], slice(2, 8, 3), torch.tensor([1, -1]), torch.arange(9) % 2 == 0]
#: Text that a careless reader of the protocol would take for framing.
FRAMING = b"\r\n$3\r\nabc\r\n-ERR no\r\n*2\r\n:1\r\n+OK\r\n$-1\r\n_\r\n%1\r\n\x00\xff"


def keys_below(raw: Any, prefix: str) -> list[str]:
    """Return the keys of a namespace, sorted."""
    return sorted(key.decode() for key in raw.keys(f"{prefix}:*"))


class StoreReadTests:
    """Tests of a backend that need the right to read only; ``StoreTests`` has the others.

    Stores are written with the fixture ``writer`` and opened with ``connection``; unless a
    subclass says otherwise the two are the same. Run it by itself for a user who may only read.

    Example:
        >>> import pytest
        >>> from tdio.testing import StoreReadTests
        >>> class TestReader(StoreReadTests):
        ...     @pytest.fixture
        ...     def connection(self):
        ...         return {"port": 7000, "username": "reader", "password": "secret"}
        ...
        ...     @pytest.fixture
        ...     def writer(self):
        ...         return {"port": 7000, "username": "writer", "password": "secret"}
        ...
        ...     @pytest.fixture
        ...     def raw(self):
        ...         return redis.Redis(port=7000, username="writer", password="secret")
    """

    # ---- what a subclass says

    @pytest.fixture
    def connection(self) -> dict[str, Any]:
        """Return the arguments of ``from_store`` that reach the backend."""
        raise NotImplementedError("a subclass of the suite defines the fixture `connection`")

    @pytest.fixture
    def writer(self, connection: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with which stores are written."""
        return connection

    @pytest.fixture
    def raw(self) -> Any:
        """Return an object that looks at the server around what is tested.

        It has ``get(key)``, ``set(key, value)``, ``hgetall(key)``, ``keys(pattern)`` and
        ``delete(*keys)`` as ``redis.Redis`` has them: it takes keys as text, returns them as
        bytes, and its values are bytes.
        """
        raise NotImplementedError("a subclass of the suite defines the fixture `raw`")

    def drop_connections(self, raw: Any) -> None:
        """Make the server close all connections; call ``pytest.skip`` where there are none."""
        raw.client_kill_filter(_type="normal", skipme=True)

    # ---- what the tests share

    @pytest.fixture
    def prefix(self, raw: Any) -> Iterator[str]:
        """Return a namespace of this test alone; what is left in it is deleted."""
        prefix = f"suite-{uuid.uuid4().hex}"
        yield prefix
        left = keys_below(raw, prefix)
        if left:
            raw.delete(*left)

    @pytest.fixture
    def again(self, connection: dict[str, Any], prefix: str) -> Iterator[Callable[[Any], Any]]:
        """Return a function that opens another handle on a store: it knows what the server says."""
        with ExitStack() as handles:
            yield lambda store: handles.enter_context(
                tdio.open_store(td_id=store.td_id, prefix=prefix, **connection)
            )

    @pytest.fixture
    def reopen(
        self, writer: dict[str, Any], prefix: str, again: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Return a function that stores a tensordict and returns the store, opened for reading."""

        def reopen(td: Any, **kwargs: Any) -> Any:
            with TensorDictStore.from_tensordict(td, prefix=prefix, **kwargs, **writer) as made:
                return again(made)

        return reopen

    @pytest.fixture
    def store(self, reopen: Callable[[Any], Any]) -> Any:
        """Return the store of ``plain()``, opened for reading."""
        return reopen(plain())

    @pytest.fixture
    def stack(self, reopen: Callable[[Any], Any]) -> Any:
        """Return the store of ``ragged()``, opened for reading."""
        return reopen(ragged())

    # ---- round trips

    @pytest.mark.parametrize("name", sorted(BY_NAME))
    def test_every_dtype_comes_back_bit_by_bit(self, reopen, name):
        top = 2 if name == "torch.bool" else 256
        raw = torch.arange(32 * 16).remainder(top).to(torch.uint8).view(32, 16)
        store = reopen(TensorDict(v=raw.view(BY_NAME[name]), batch_size=[32]))
        assert store["v"].dtype == BY_NAME[name]
        assert torch.equal(store["v"].view(torch.uint8), raw)
        assert torch.equal(store[[3, 1]]["v"].view(torch.uint8), raw[[3, 1]])

    @pytest.mark.parametrize("index", INDEXES, ids=str)
    def test_a_read_is_the_local_index(self, store, index):
        assert_same(store[index], plain()[index])

    @pytest.mark.parametrize("index", ELEMENT_INDEXES, ids=str)
    def test_a_ragged_batch_keeps_the_shape_of_each_element(self, stack, index):
        numbers = torch.arange(ELEMENTS)[index].tolist()
        assert_same_elements(stack[index], [ragged()[i] for i in numbers])

    def test_each_ragged_element(self, stack):
        assert isinstance(stack, LazyStackedTensorDictStore)
        for i in (*range(ELEMENTS), -1):
            assert_same(stack[i].to_tensordict(), ragged()[i])

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_stack_dims(self, reopen, dim):
        parts = [TensorDict(a=torch.full((3, 2, 5), i), batch_size=[3, 2]) for i in range(4)]
        local = lazy_stack(parts, dim)
        store = reopen(local)
        for index in (0, [1, 2], (slice(None), 1), (..., 1), (0, 1, 1)):
            assert torch.equal(store[index]["a"], local.to_tensordict()[index]["a"])

    def test_a_whole_store(self, store, stack):
        assert_same(store.to_tensordict(), plain())
        assert_same_elements(stack.to_tensordict(), ragged())

    @pytest.mark.parametrize(
        "value", ["text", 7, 1.5, True, None, [1, "a"], {"k": [1, None]}], ids=repr
    )
    def test_a_value_of_the_whole_batch(self, reopen, value):
        store = reopen(TensorDict(x=torch.arange(4), v=NonTensorData(value), batch_size=[4]))
        for got in (store, store.to_tensordict(), store[1:3], store[[3, 0]], store[2]):
            assert got["v"] == value and type(got["v"]) is type(value)

    def test_a_value_of_each_element(self, reopen):
        texts = [f"text {i} \N{SNOWMAN}" for i in range(6)]
        flat = TensorDict(x=torch.arange(6), v=NonTensorStack(*texts), batch_size=[6])
        elements = lazy_stack([TensorDict(x=torch.ones(i), v=text) for i, text in enumerate(texts)])
        for store in (reopen(flat), reopen(elements)):
            assert store.get("v").tolist() == texts
            assert [store[i]["v"] for i in (0, 5, -2)] == [texts[i] for i in (0, 5, -2)]
            assert store[[4, 1, 1]].get("v").tolist() == [texts[4], texts[1], texts[1]]

    def test_reads_of_a_coroutine(self, store, stack):
        async def read():
            assert_same(await store.aread([5, 0]), plain()[[5, 0]])
            assert_same(await store.aread(), plain())
            assert torch.equal(await store.aget("a"), plain()["a"])
            assert_same_elements(await stack.aread([5, 0]), [ragged()[5], ragged()[0]])
            both = await asyncio.gather(*(store.aread(i) for i in range(5)))
            for i, got in enumerate(both):
                assert_same(got, plain()[i])
            with pytest.raises(errors.EntryNotFound):
                await store.aget("nowhere")

        try:
            asyncio.run(read())
        except errors.UnsupportedValue as error:
            pytest.skip(f"this backend is read from plain code only: {error}")

    def test_keys_are_listed(self, store, stack):
        assert set(store.keys()) == {"a", "flag", "deep", "empty"}
        assert set(store.keys(True, True)) == {"a", "flag", ("deep", "b"), "empty"}
        assert set(stack.keys(True, True)) == {"x", "y", ("deep", "z")}
        assert ("deep", "b") in store.keys(True) and ("deep", "c") not in store.keys(True)

    def test_nothing_to_read(self, reopen):
        empty = reopen(TensorDict(a=torch.zeros(0, 3), batch_size=[0]))
        assert empty.to_tensordict()["a"].shape == (0, 3)
        assert reopen(TensorDict(batch_size=[4])).to_tensordict().batch_size == (4,)
        scalar = reopen(TensorDict(a=torch.tensor(3.0)))
        assert scalar["a"] == 3
        hollow = reopen(lazy_stack([TensorDict(x=torch.zeros(0, i)) for i in (1, 2, 3)]))
        assert [hollow[i]["x"].shape for i in range(3)] == [(0, 1), (0, 2), (0, 3)]

    # ---- bytes

    def test_bytes_that_look_like_the_protocol(self, reopen):
        line = torch.frombuffer(bytearray(FRAMING), dtype=torch.uint8)
        rows = torch.stack([line.roll(i) for i in range(len(line))])
        store = reopen(TensorDict(v=rows, batch_size=[len(line)]))
        assert torch.equal(store["v"], rows)
        assert torch.equal(store[[5, 3, 3]]["v"], rows[[5, 3, 3]])
        parts = [TensorDict(v=line[:i]) for i in range(len(line))]
        stack = reopen(lazy_stack(parts))
        assert_same_elements(stack[list(range(len(parts)))], parts)

    @pytest.mark.parametrize("name", ["日本", "with space", "a\r\nb", "{x}", "c:d", "a*?[b]\\"])
    def test_names_of_any_characters(self, reopen, name):
        local = TensorDict({name: torch.arange(4), ("deep", name): torch.ones(4)}, batch_size=[4])
        store = reopen(local, td_id=f"{name}-1")
        assert store.td_id == f"{name}-1"
        assert_same(store.to_tensordict(), local)
        assert store[2][name] == 2

    def test_values_larger_than_any_buffer(self, reopen):
        big = torch.arange(3 << 20, dtype=torch.int32).view(32, -1)
        small = torch.arange(20_000).view(20_000, 1)
        local = TensorDict(big=big, small=small[:32], batch_size=[32])
        store, many = reopen(local), reopen(TensorDict(v=small, batch_size=[20_000]))
        assert_same(store.to_tensordict(), local)
        assert_same(store[[31, 0, 7]], local[[31, 0, 7]])
        assert_same(store[::5], local[::5])
        spread = torch.arange(20_000).flip(0)[::3]
        assert torch.equal(many[spread]["v"], small[spread])

    def test_ragged_values_larger_than_any_buffer(self, reopen):
        sizes = (1 << 20, 1, 70_000, 0, 600_000)
        parts = [TensorDict(v=torch.arange(n, dtype=torch.int32)) for n in sizes]
        stack = reopen(lazy_stack(parts))
        order = [4, 0, 3, 1, 2]
        assert_same_elements(stack[order], [parts[i] for i in order])

    # ---- errors

    def test_what_is_not_there(self, store, stack, connection, prefix):
        with pytest.raises(errors.EntryNotFound, match="'nope'"):
            store["nope"]
        with pytest.raises(errors.StoreNotFound, match="'nope'"):
            TensorDictStore.from_store(td_id="nope", prefix=prefix, **connection)
        with pytest.raises(errors.WrongStoreKind):
            TensorDictStore.from_store(td_id=stack.td_id, prefix=prefix, **connection)
        with pytest.raises(errors.WrongStoreKind):
            LazyStackedTensorDictStore.from_store(td_id=store.td_id, prefix=prefix, **connection)

    @pytest.mark.parametrize("index", [ROWS, -ROWS - 1, [0, ROWS], (0, 3)], ids=str)
    def test_an_index_out_of_range(self, store, index):
        with pytest.raises(errors.IndexOutOfRange):
            store[index]

    @pytest.mark.parametrize("index", [1.5, torch.ones(5, dtype=torch.bool), (0, 0, 0)], ids=str)
    def test_an_index_that_selects_nothing(self, store, index):
        with pytest.raises(errors.InvalidIndex):
            store[index]

    @pytest.mark.parametrize("index", [0, [1, 2], slice(None)], ids=str)
    def test_lost_and_short_data_are_told_apart(self, store, raw, prefix, index):
        key = Names(prefix, store.td_id).data("a")
        raw.delete(key)
        with pytest.raises(errors.EntryNotFound, match="'a'"):
            store[index]
        raw.set(key, b"short")
        with pytest.raises(errors.CorruptEntry, match="'a'"):
            store[index]

    def test_an_error_leaves_the_connection_usable(self, store, raw, prefix):
        key = Names(prefix, store.td_id).data("a")
        whole = raw.get(key)
        raw.set(key, whole[:40])
        for _ in range(3):
            with pytest.raises(errors.CorruptEntry):
                store[[0, 11, 5]]
            assert torch.equal(store["deep", "b"], plain()["deep", "b"])
        raw.set(key, whole)
        assert_same(store[[0, 11, 5]], plain()[[0, 11, 5]])

    def test_a_closed_handle_says_so(self, store):
        store.close()
        with pytest.raises(errors.ServerUnavailable, match="closed"):
            store[0]

    # ---- connections

    def test_a_read_after_the_server_closed_the_connection(self, store, stack, raw):
        store[0]
        stack[[0]]
        self.drop_connections(raw)
        assert_same(store[3], plain()[3])
        assert_same(stack[[5]][0], ragged()[5])
        self.drop_connections(raw)
        assert_same(store.to_tensordict(), plain())

    def test_readers_in_threads_get_their_own_replies(self, store):
        def read(row: int) -> None:
            for i in range(40):
                index = [row, (row + i) % ROWS]
                assert_same(store[index], plain()[index])

        in_threads([partial(read, row) for row in range(4)])

    def test_a_pickled_handle_reads(self, store, stack):
        assert_same(as_in_a_worker(store)[[3, 1]], plain()[[3, 1]])
        assert_same(as_in_a_worker(stack)[5].to_tensordict(), ragged()[5])

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_a_forked_child_leaves_the_parents_connection_alone(self, store):
        store[0]
        want = as_bytes(plain()[5]["a"]).tolist()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if as_bytes(store[5]["a"]).tolist() == want else 2
            finally:
                os._exit(code)
        for i in range(ROWS):
            assert_same(store[i], plain()[i])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_reading_writes_nothing(self, store, stack, raw, prefix):
        def snapshot() -> dict[str, Any]:
            ways = {"}:d:": raw.get, "}:m:": raw.hgetall}
            keys = keys_below(raw, prefix)
            found = {k: read(k) for k in keys for kind, read in ways.items() if kind in k}
            return dict.fromkeys(keys) | found

        before = snapshot()
        store.to_tensordict()
        stack[[1, 2]]
        repr(store), repr(stack), list(store.keys(True))
        assert snapshot() == before
        assert any("}:d:a" in key for key in before)
