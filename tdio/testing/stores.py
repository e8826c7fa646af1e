"""``StoreTests``: what a backend of the stores must do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdio import LazyStackedTensorDictStore, TensorDictStore, errors
from tdio.testing._samples import (
    ELEMENTS,
    ROWS,
    assert_same,
    assert_same_elements,
    element,
    in_threads,
    plain,
    ragged,
)
from tdio.testing.reads import StoreReadTests, keys_below
from tdio.wire.names import Names

#: Elements of one leaf in the test of atomic writes: more than is read ahead, so that a reader who
#: does not look twice sees the leaves at different times.
_WIDE = 300_000
_REWRITES = 25


class StoreTests(StoreReadTests):
    """The conformance suite of store backends: a backend is right when a subclass passes.

    A backend is whatever the keyword arguments of ``TensorDictStore`` reach: a server, a way to
    connect to it, or a client object. A subclass defines two fixtures: ``connection``, those
    arguments, and ``raw``, an object that looks at the server around what is tested, with
    ``get``, ``set``, ``hgetall``, ``keys`` and ``delete`` as ``redis.Redis`` has them. Where
    ``raw`` has no ``client_kill_filter``, override ``drop_connections``. All tests share the
    server and keep to key prefixes of their own, which they delete.

    Name the subclass ``Test...`` and run it with pytest.

    Example:
        >>> import pytest, redis
        >>> from tdio.server import embedded_server
        >>> from tdio.testing import StoreTests
        >>> @pytest.fixture(scope="module")
        ... def server():
        ...     with embedded_server() as running:
        ...         yield running
        >>> class TestEmbedded(StoreTests):
        ...     @pytest.fixture
        ...     def connection(self, server):
        ...         return server.tcp_kwargs
        ...
        ...     @pytest.fixture
        ...     def raw(self, connection):
        ...         with redis.Redis(**connection) as client:
        ...             yield client
    """

    # ---- what the tests share: the same stores, opened by their writer

    @pytest.fixture
    def mine(self, connection: dict[str, Any], prefix: str) -> Any:
        """Return the store of ``plain()``, as its writer holds it."""
        return TensorDictStore.from_tensordict(plain(), prefix=prefix, **connection)

    @pytest.fixture
    def episodes(self, connection: dict[str, Any], prefix: str) -> Any:
        """Return the store of ``ragged()``, as its writer holds it."""
        return TensorDictStore.from_tensordict(ragged(), prefix=prefix, **connection)

    # ---- partial writes

    @pytest.mark.parametrize(
        "index",
        [
            0,
            -1,
            slice(2, 5),
            slice(1, 11, 3),
            [7, 2],
            torch.arange(ROWS) % 4 == 0,
            (3, 2),
            (..., 1),
        ],
        ids=str,
    )
    def test_a_write_changes_what_the_index_names(self, mine, store, index, again):
        local = plain()
        value = local[index].apply(lambda t: torch.ones_like(t))
        mine[index] = value
        local[index] = value
        assert_same(mine.to_tensordict(), local)
        # A handle of its own sees the bytes, not what the writer remembers.
        again = again(mine)
        assert_same(again.to_tensordict(), local)
        assert_same(store.to_tensordict(), plain())

    def test_writes_to_single_entries(self, mine, again):
        local = plain()
        mine.set_at_("a", torch.zeros(3, 2), 2)
        local["a"][2] = 0
        mine["deep"].set_at_("b", torch.ones(3, dtype=torch.int64), 4)
        local["deep", "b"][4] = 1
        mine["a"] = local["a"] = local["a"] + 1
        mine["more"] = local["more"] = torch.ones(ROWS, 3, dtype=torch.float16)
        mine["deep", "c"] = torch.zeros(ROWS, 3)
        local["deep", "c"] = torch.zeros(ROWS, 3)
        mine.update_({"a": torch.full((ROWS, 3, 2), 7.0)})
        local["a"].fill_(7)
        assert_same(mine.to_tensordict(), local)
        assert_same(again(mine).to_tensordict(), local)

    @pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
    def test_a_misfit_writes_nothing(self, mine, change):
        value: Any = plain()[3].clone().zero_()
        if change == "missing":
            del value["a"]
        elif change == "extra":
            value["more"] = torch.zeros(3)
        elif change == "shape":
            value["a"] = torch.zeros(3, 5)
        else:
            value["a"] = torch.zeros(3, 2, dtype=torch.float64)
        with pytest.raises(errors.EntryMismatch):
            mine[0] = value
        assert_same(mine.to_tensordict(), plain())

    def test_values_are_written_whole_and_by_the_element(self, connection, prefix, again):
        texts = [f"text {i}" for i in range(6)]
        local = TensorDict(x=torch.arange(6), v=NonTensorStack(*texts), batch_size=[6])
        store = TensorDictStore.from_tensordict(local, prefix=prefix, **connection)
        store[[2, 0]] = local[[0, 2]]
        store.set_non_tensor("w", {"a": [1, None]})
        got = again(store)
        assert got.get("v").tolist() == [texts[i] for i in (2, 1, 0, 3, 4, 5)]
        assert got["x"].tolist() == [2, 1, 0, 3, 4, 5]
        assert got["w"] == {"a": [1, None]}

    def test_ragged_elements_change_and_resize(self, episodes, again):
        want = list(ragged().tensordicts)
        for position, length in ((2, 2), (5, 9), (0, 4), (5, 0), (ELEMENTS - 1, 1)):
            want[position] = element(length, -position)
            episodes[position] = want[position]
        want[5]["y"] = torch.tensor(8)
        episodes[5]["y"] = torch.tensor(8)
        assert_same_elements(episodes.to_tensordict(), want)
        assert_same_elements(again(episodes).to_tensordict(), want)

    def test_a_schema_is_zeros_until_it_is_filled(self, connection, prefix, again):
        store = TensorDictStore.from_schema(
            {"a": ([2], torch.float32), ("deep", "b"): ([], torch.bool)},
            batch_size=[5], prefix=prefix, **connection,
        )  # fmt: skip
        assert store["a"].tolist() == [[0, 0]] * 5
        store[4] = TensorDict({"a": torch.ones(2), ("deep", "b"): torch.tensor(True)})
        again = again(store)
        assert again["a"].sum() == 2 and again["deep", "b"].tolist() == [False] * 4 + [True]

    def test_a_stack_filled_element_by_element(self, connection, prefix):
        stack = LazyStackedTensorDictStore(
            count=3, inner_batch_size=[], prefix=prefix, **connection
        )
        for i in (1, 2, 0):
            stack[i] = element(i + 1, i)
        assert_same_elements(stack.to_tensordict(), [element(i + 1, i) for i in range(3)])

    def test_large_writes(self, connection, prefix, again):
        rows = torch.arange(2 << 20, dtype=torch.int32).view(16, -1)
        store = TensorDictStore(batch_size=[16], prefix=prefix, **connection)
        store["v"] = rows
        store[[3, 9]] = TensorDict(v=-rows[[3, 9]], batch_size=[2])
        rows[[3, 9]] *= -1
        assert torch.equal(again(store)["v"], rows)

    # ---- entries and stores that come and go

    def test_deleted_entries_and_stores_leave_nothing(self, mine, episodes, raw, prefix, again):
        del mine["a"], mine["deep"]
        assert set(mine.keys(True, True)) == {"flag", "empty"}
        names = Names(prefix, mine.td_id)
        for path in ("a", "deep.b"):
            assert raw.get(names.data(path)) is None
            assert not raw.hgetall(names.meta(path))
        mine.clear_redis()
        episodes.clear_redis()
        assert not keys_below(raw, prefix)
        with pytest.raises(errors.StoreNotFound):
            again(mine)

    def test_an_entry_that_is_replaced_by_another_kind(self, mine, again):
        other = again(mine)
        other[0]
        for value in (torch.ones(ROWS, 3, dtype=torch.int16), torch.rand(ROWS, 3, 40)):
            mine["a"] = value
            other.refresh()
            assert other["a"].dtype == value.dtype
            assert torch.equal(other["a"], value)
            assert torch.equal(other[[4, 2]]["a"], value[[4, 2]])

    def test_an_id_that_is_taken(self, mine, again, connection, prefix):
        where = {"td_id": mine.td_id, "prefix": prefix, **connection}
        for make in (
            lambda: TensorDictStore(batch_size=[2], **where),
            lambda: TensorDictStore.from_tensordict(plain()[:2], **where),
            lambda: LazyStackedTensorDictStore(count=1, inner_batch_size=[], **where),
        ):
            with pytest.raises(errors.StoreExists, match="from_store"):
                make()
        assert_same(again(mine).to_tensordict(), plain())

    # ---- several at once

    def test_a_write_of_several_leaves_is_seen_whole(self, connection, prefix, again):
        local = TensorDict(a=torch.zeros(2, _WIDE), b=torch.zeros(2, _WIDE), batch_size=[2])
        store = TensorDictStore.from_tensordict(local, prefix=prefix, **connection)
        reader = again(store)

        def write(value: int) -> None:
            store[1] = TensorDict(
                a=torch.full((_WIDE,), value), b=torch.full((_WIDE,), value)
            ).float()

        def seen() -> Any:
            got = reader[1]
            return torch.cat([got["a"], got["b"]]).unique().tolist()

        _never_torn(write, seen)

    def test_an_element_that_changes_its_size_is_seen_whole(self, connection, prefix, again):
        local = lazy_stack([element(3, 0), element(1, 0), element(2, 0)])
        store = TensorDictStore.from_tensordict(local, prefix=prefix, **connection)
        reader = again(store)

        def write(value: int) -> None:
            store[1] = element(1 + value % 7, value)

        def seen() -> Any:
            got = reader[[1]][0]
            flat = torch.cat([got["x"].flatten(), got["y"].view(1), got["deep", "z"].float()])
            value = int(got["y"])
            assert value == 0 or got["x"].shape == (1 + value % 7, 2)
            return flat.unique().tolist()

        _never_torn(write, seen)

    def test_writers_on_disjoint_rows_lose_nothing(self, mine, episodes, again):
        def write(first: int) -> None:
            handle, stack = again(mine), again(episodes)
            for row in range(first, ROWS, 3):
                handle.set_at_("a", torch.full((3, 2), float(row)), row)
            for i in range(first, ELEMENTS, 3):
                stack[i] = element(i + 1, i)

        in_threads([partial(write, first) for first in range(3)])
        got = again(mine)["a"]
        assert got[:, 0, 0].tolist() == list(range(ROWS))
        stack = again(episodes)
        assert_same_elements(stack.to_tensordict(), [element(i + 1, i) for i in range(ELEMENTS)])


def _never_torn(write: Callable[[int], None], seen: Callable[[], Any]) -> None:
    """Write 1, 2, ... while a reader looks: each look shows one value, and never an older one."""
    done = threading.Event()
    looks: list[float] = []

    def writing() -> None:
        try:
            for value in range(1, _REWRITES + 1):
                write(value)
        finally:
            done.set()

    def reading() -> None:
        while not done.is_set() or not looks:
            values = seen()
            assert len(values) == 1, f"one read shows values of several writes: {values}"
            looks.append(values[0])

    in_threads([writing, reading])
    assert looks == sorted(looks), "a read shows an older write than the read before it"
    assert seen() == [_REWRITES]
