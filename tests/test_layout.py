import json
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdio.errors import CorruptEntry, IndexOutOfRange, InvalidIndex, UnsupportedValue
from tdio.layout.buffers import allocate, pack, views
from tdio.layout.dtypes import BY_NAME, as_bytes, dtype_from_name, dtype_name
from tdio.layout.index import Rows, normalise, select
from tdio.layout.paths import check_key, nest
from tdio.layout.plan import COMMAND_BYTES, PIECE_BYTES, in_pieces, plan_elements, plan_rows
from tdio.layout.spec import LeafSpec, decode, encode, ragged_offsets, shapes_array
from tdio.store.placing import plan_leaves

SHAPE = (5, 4, 6)


def basic(size, steps):
    bounds = st.none() | st.integers(-size - 2, size + 2)
    return st.integers(-size, size - 1) | st.builds(slice, bounds, bounds, steps)


def advanced(size):
    return st.one_of(
        basic(size, st.none() | st.integers(1, 3)),
        st.lists(st.integers(-size, size - 1), max_size=6),
        st.lists(st.booleans(), min_size=size, max_size=size),
    )


@st.composite
def indexes(draw, item):
    parts = [draw(item(n)) for n in SHAPE[: draw(st.integers(0, 3))]]
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    if draw(st.booleans()):
        parts.append(Ellipsis)
    return parts[0] if len(parts) == 1 else tuple(parts)


TABLE = torch.arange(math.prod(SHAPE)).view(SHAPE)


def selected(index):
    rows = select(SHAPE, normalise(index, 3))
    below = SHAPE[rows.depth :]
    table = TABLE.reshape(-1, math.prod(below))
    return table[torch.from_numpy(rows.positions)].reshape((*rows.shape, *below))


def tensors(index):
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(
        torch.tensor(p, dtype=torch.bool if p and type(p[0]) is bool else torch.int64)
        if isinstance(p, list)
        else p
        for p in parts
    )


@given(indexes(advanced))
@settings(max_examples=500, deadline=None)
def test_select_is_tensor_indexing(index):
    try:
        want = TABLE[tensors(index)]
    except IndexError:
        with pytest.raises(InvalidIndex):
            selected(index)
        return
    assert torch.equal(selected(index), want)


@given(indexes(lambda size: basic(size, st.none() | st.sampled_from([-3, -2, -1, 1, 2]))))
@settings(max_examples=300, deadline=None)
def test_negative_steps_are_those_of_numpy(index):
    assert np.array_equal(selected(index).numpy(), TABLE.numpy()[index])


@pytest.mark.parametrize(
    "index",
    [
        range(1, 4),
        torch.tensor([[0, 1], [2, -1]]),
        torch.tensor(3),
        TABLE[:, :, 0] > 40,
        (torch.tensor([[0], [1]]), torch.tensor([2, 3])),
        (slice(None), TABLE[0] > 7),
    ],
)
def test_other_kinds_of_index(index):
    want = TABLE[list(index)] if isinstance(index, range) else TABLE[index]
    assert torch.equal(selected(index), want)


@pytest.mark.parametrize("index", [5, -6, [0, 5], (0, 4), torch.tensor([-6]), (slice(None), [9])])
def test_an_index_out_of_range_never_wraps(index):
    with pytest.raises(IndexOutOfRange):
        select(SHAPE, normalise(index, 3))


@pytest.mark.parametrize(
    "index",
    [1.0, [0.5], "x", torch.rand(3), [True, False], (0, 0, 0, 0), (..., ...), object(), slice("a")],
)
def test_what_is_not_an_index_is_refused(index):
    with pytest.raises(InvalidIndex):
        select(SHAPE, normalise(index, 3))


def execute(ranges, blob):
    pieces = in_pieces(ranges)
    parts = [blob[s : s + n] for s, n in zip(pieces.starts, pieces.sizes, strict=True)]
    data = np.concatenate([*parts, np.zeros(0, np.uint8)])
    if ranges.rows is not None:
        data = data.reshape(-1, ranges.row_bytes)[ranges.rows - ranges.first].reshape(-1)
    return data


@given(st.integers(1, 400), st.integers(0, 40), st.data())
@settings(max_examples=300, deadline=None)
def test_planned_rows_are_the_rows(count, row_bytes, data):
    positions = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=60)), np.int64)
    blob = np.random.default_rng(0).integers(0, 256, count * row_bytes).astype(np.uint8)
    for how in ({}, {"gather": False}, {"spare": 1 << 20}):
        got = execute(plan_rows(positions, row_bytes, **how), blob)
        want = blob.reshape(count, row_bytes)[positions].reshape(-1)
        assert np.array_equal(got, want)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.data())
def test_planned_elements_are_the_elements(sizes, data):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    blob = np.random.default_rng(0).integers(0, 256, offsets[-1]).astype(np.uint8)
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=40))
    plan = plan_elements(np.array(chosen, np.int64), offsets)
    want = [blob[offsets[i] : offsets[i + 1]] for i in chosen]
    assert np.array_equal(execute(plan, blob), np.concatenate([*want, np.zeros(0, np.uint8)]))
    assert (plan.sizes > 0).all()


def test_most_rows_are_read_in_long_runs_and_few_rows_move_what_they_return():
    rng = np.random.default_rng(0)
    dense = plan_rows(rng.permutation(10_000)[:8192], 256)
    assert len(dense.starts) < 50
    assert dense.moved_bytes <= 2 * 8192 * 256
    sparse = plan_rows(rng.permutation(100_000)[:256], 256)
    assert sparse.moved_bytes < 2 * 256 * 256
    strided = plan_rows(np.arange(0, 100_000, 100), 4096)
    assert strided.moved_bytes == 1000 * 4096


@pytest.mark.parametrize("row_bytes", [1, 8, 16])
def test_many_tiny_rows_close_together_are_planned_without_a_look_at_each(row_bytes):
    """To plan a command takes more memory than to read over the gap before it."""
    positions = np.random.default_rng(0).permutation(4_000_000)[:1_000_000] + 7
    tracemalloc.start()
    plan = plan_rows(positions, row_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan.starts) == 1
    assert plan.moved_bytes <= 4_000_000 * row_bytes
    assert peak <= 20 * len(positions)


def test_gaps_of_a_small_leaf_are_paid_from_what_the_others_return_and_no_more():
    positions = np.random.default_rng(0).permutation(10_000)[:256]
    own = 256 * 32
    alone = plan_rows(positions, 32)
    assert len(alone.starts) == 256 and alone.moved_bytes == own
    beside = plan_rows(positions, 32, spare=1 << 20)
    assert len(beside.starts) < 30 and own < beside.moved_bytes < own + (1 << 20)
    short = plan_rows(positions, 32, spare=100_000)
    assert short.moved_bytes == own


@given(
    st.lists(st.integers(1, 6000), min_size=1, max_size=5),
    st.lists(st.integers(1, 1200), min_size=2, max_size=300),
)
@settings(deadline=None)
def test_a_batch_moves_at_most_twice_what_it_returns_and_small_gaps(row_bytes, steps):
    positions = np.cumsum(steps)
    count = int(positions[-1]) + 1
    specs = [LeafSpec(f"l{i}", torch.uint8, (count, n)) for i, n in enumerate(row_bytes)]
    plans = plan_leaves(specs, Rows(positions, (len(positions),), 1), (count,), None)
    returned = len(positions) * sum(row_bytes)
    moved = sum(plan.moved_bytes for _, plan in plans)
    assert moved <= 2 * returned + COMMAND_BYTES * len(steps) * len(row_bytes)


def test_many_bytes_far_apart_are_not_read_through_gaps_without_end():
    apart = [np.arange(0, 100 * count, 100) for count in (1_000, 1_000_000)]
    few, many = (plan_rows(positions, 1) for positions in apart)
    assert (len(few.starts), few.moved_bytes) == (1, 99_901)
    assert (len(many.starts), many.moved_bytes) == (1_000_000, 1_000_000)


def test_long_ranges_are_cut_into_pieces():
    pieces = in_pieces(plan_rows(np.arange(10), PIECE_BYTES))
    assert pieces.sizes.max() == PIECE_BYTES
    assert pieces.moved_bytes == 10 * PIECE_BYTES


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_dtypes_round_trip_as_bytes(name):
    dtype = BY_NAME[name]
    assert dtype_from_name(dtype_name(dtype), "") is dtype
    raw = torch.arange(48, dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    tensor = raw.view(dtype)
    assert torch.equal(as_bytes(tensor), raw)
    strided = tensor.reshape(-1, 3 if tensor.numel() % 3 == 0 else 1).t()
    assert torch.equal(
        as_bytes(strided).view(dtype).view(torch.uint8),
        strided.contiguous().reshape(-1).view(torch.uint8),
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    ],
)
def test_what_has_no_byte_view_is_refused(tensor):
    with pytest.raises(UnsupportedValue):
        as_bytes(tensor)


def test_pending_conjugation_is_resolved():
    value = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(as_bytes(value.conj()).view(torch.complex64), value.conj().resolve_conj())


@pytest.mark.parametrize("key", ["a.b", "", ("a", ""), "x:idx", ("a", "b.c")])
def test_keys_that_would_collide_are_refused(key):
    with pytest.raises(UnsupportedValue):
        check_key(key)


def test_nesting():
    assert nest({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_a_complex_leaf_behind_a_short_one_can_be_viewed():
    slots, nbytes = pack([(torch.uint8, (3,)), (torch.complex128, (2,)), (torch.bool, ())])
    storage = torch.zeros(nbytes, dtype=torch.uint8)
    byte, wide, flag = views(storage, slots)
    wide.fill_(1 + 2j)
    assert byte.tolist() == [0] * 3 and not flag and wide.tolist() == [1 + 2j] * 2


def test_leaves_of_a_buffer_are_aligned():
    slots, total = pack([(torch.bool, (3,)), (torch.float64, (2, 2)), (torch.uint8, (0,))])
    assert [slot.start for slot in slots] == [0, 8, 40]
    assert total == 48


def ragged(shapes, dtype=torch.float32):
    table = shapes_array(shapes)
    offsets = ragged_offsets(table, dtype.itemsize)
    return LeafSpec("x", dtype, (len(shapes), *shapes[0]), True, table, offsets)


def again(spec, batch, stack=0, **change):
    fields = {**encode(spec, lazy=stack is not None), **change}
    table = None if spec.offsets is None else spec.offsets.tobytes()
    return decode("x", fields, where="here", batch=batch, stack=stack, offsets=table)


@given(st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=4), min_size=1, max_size=20))
def test_ragged_metadata_round_trips(shapes):
    spec = ragged(shapes)
    got = again(spec, (len(shapes),))
    assert [got.element_shape(i) for i in range(len(shapes))] == [tuple(s) for s in shapes]
    assert np.array_equal(got.offsets, spec.offsets)


@given(
    st.text(max_size=40)
    | st.lists(st.integers() | st.text(max_size=3) | st.lists(st.integers()) | st.none()).map(
        json.dumps
    )
)
def test_hostile_metadata_is_named_or_right(text):
    spec = ragged([[2], [3]])
    for change in ({"shapes": text}, {"shape": text}, {"dtype": text}):
        try:
            got = again(spec, (2,), **change)
        except CorruptEntry as error:
            assert "here" in str(error)
        else:
            assert got.nbytes == spec.nbytes


@pytest.mark.parametrize("table", [None, b"", b"123", b"\0" * 16, b"\xff" * 24])
def test_damaged_offset_tables_are_refused(table):
    fields = encode(ragged([[2], [3]]), lazy=True)
    with pytest.raises(CorruptEntry):
        decode("x", fields, where="here", batch=(2,), stack=0, offsets=table)


def test_absurd_shapes_are_refused():
    for shape in ("[-1]", "[1e9]", "[9999999999999999999]", "[true]", "{}", "null", "[[1]]"):
        with pytest.raises(CorruptEntry):
            again(LeafSpec("x", torch.int8, (2,)), (2,), None, shape=shape)


@pytest.mark.parametrize("nbytes", [0, 100, 5 * 1024 * 1024 + 3])
def test_an_allocation_is_one_aligned_storage_that_can_be_shared(nbytes):
    storage = allocate(nbytes)
    assert storage.untyped_storage().nbytes() == nbytes and not storage.storage_offset()
    assert storage.data_ptr() % 64 == 0
    storage.fill_(7).share_memory_()
    assert storage.is_shared() and (storage == 7).all()
