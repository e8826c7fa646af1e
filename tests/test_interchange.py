"""Stores written by tensordict 0.15 open in tdio and the reverse, for every kind of entry."""

import pytest
import tensordict.store as reference
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

import tdio
from tdio import LazyStackedTensorDictStore, TensorDictStore
from tdio.layout.dtypes import BY_NAME
from tdio.testing._samples import assert_same, assert_same_elements
from tdio.wire.names import Names

#: The dtypes that the reference can write; it takes the way through numpy.
WRITABLE = sorted(
    name
    for name in BY_NAME
    if "float8" not in name and name.split(".")[1] not in ("bfloat16", "complex32")
)
ROWS = 6
OURS = (TensorDictStore, LazyStackedTensorDictStore)


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


@pytest.fixture
def where(conn, prefix):
    """Where the stores of this test lie."""
    return {"prefix": prefix, **conn}


class Ours:
    """This package's side."""

    def __init__(self, where):
        self.where, self.opened = where, []

    def _keep(self, store):
        self.opened.append(store)
        return store

    def write(self, td, **kwargs):
        return self._keep(TensorDictStore.from_tensordict(td, **kwargs, **self.where))

    def open(self, store, **kwargs):
        return self._keep(tdio.open_store(td_id=id_of(store), **kwargs, **self.where))


class Theirs(Ours):
    """The reference's side, with the same calls."""

    def write(self, td, **kwargs):
        return self._keep(reference.TensorDictStore.from_tensordict(td, **kwargs, **self.where))

    def open(self, store, **kwargs):
        lazy = "LazyStacked" in type(unwrapped(store)).__name__
        kind = reference.LazyStackedTensorDictStore if lazy else reference.TensorDictStore
        return self._keep(kind.from_store(td_id=id_of(store), **kwargs, **self.where))


def unwrapped(store):
    """The store below a tensorclass."""
    return getattr(store, "_tensordict", store)


def id_of(store):
    store = unwrapped(store)
    return store.td_id if isinstance(store, OURS) else store._td_id


@pytest.fixture
def ours(where):
    side = Ours(where)
    yield side
    for store in side.opened:
        unwrapped(store).close()


@pytest.fixture
def theirs(where):
    side = Theirs(where)
    yield side
    # Each handle of the reference has a thread with an event loop.
    for store in side.opened:
        unwrapped(store).close()


@pytest.fixture(params=["theirs to ours", "ours to theirs"])
def ways(request, ours, theirs):
    """The side that writes, and the one that reads."""
    return (theirs, ours) if request.param == "theirs to ours" else (ours, theirs)


def plain():
    torch.manual_seed(0)
    return TensorDict(
        a=torch.randn(ROWS, 4, 3),
        flag=torch.rand(ROWS, 4) > 0.5,
        deep=TensorDict(
            b=torch.arange(ROWS * 4).view(ROWS, 4),
            deeper=TensorDict(c=torch.rand(ROWS, 4, 1).half(), batch_size=[ROWS, 4]),
            batch_size=[ROWS, 4],
        ),
        batch_size=[ROWS, 4],
    )


def episodes(first=1):
    """A ragged stack; the reference cannot read elements of length 0, so ``first`` is 1."""
    return lazy_stack(
        [
            TensorDict(
                x=torch.arange(2.0 * i).view(i, 2),
                y=torch.tensor(i),
                deep=TensorDict(z=torch.full((i % 3 + 1,), i, dtype=torch.int16)),
            )
            for i in range(first, first + 5)
        ]
    )


# ---- plain stores


def test_a_plain_store(ways):
    writes, reads = ways
    got = reads.open(writes.write(plain()))
    assert_same(got.to_tensordict(), plain())
    assert set(got.keys(True, True)) == set(plain().keys(True, True))
    for index in (2, slice(1, 4), [3, 0, 0], torch.arange(ROWS) % 2 == 0):
        assert_same(got[index].to_tensordict(), plain()[index])
    for key in plain().keys(True, True):
        assert torch.equal(got.get(key), plain().get(key))


def test_a_store_without_batch_dims(ways):
    writes, reads = ways
    local = TensorDict(a=torch.tensor(3.0), b=torch.arange(3))
    assert_same(reads.open(writes.write(local)).to_tensordict(), local)


def bits(name):
    """Rows with every byte value, seen as a dtype."""
    top = 2 if name == "torch.bool" else 256
    return torch.arange(512).remainder(top).to(torch.uint8).view(8, 64).view(BY_NAME[name])


@pytest.mark.parametrize("name", WRITABLE)
def test_each_dtype_that_the_reference_writes(ours, theirs, name):
    local = TensorDict(v=bits(name), batch_size=[8])
    for writes, reads in ((theirs, ours), (ours, theirs)):
        got = reads.open(writes.write(local))
        assert_same(got.to_tensordict(), local)
        assert_same(got[[5, 2]].to_tensordict(), local[[5, 2]])


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - set(WRITABLE)))
def test_each_dtype_that_the_reference_only_reads(ours, theirs, name):
    local = TensorDict(v=bits(name), batch_size=[8])
    assert_same(theirs.open(ours.write(local)).to_tensordict(), local)
    kind = reference.TensorDictStore
    made = kind.from_schema({"v": ([64], BY_NAME[name])}, batch_size=[8], **theirs.where)
    theirs.opened.append(made)
    assert_same(
        ours.open(made).to_tensordict(),
        TensorDict(v=torch.zeros(8, 64, dtype=BY_NAME[name]), batch_size=[8]),
    )


@pytest.mark.parametrize("ours_writes", [True, False])
def test_a_schema(ours, theirs, ours_writes):
    schema = {"a": ([2], torch.float32), "none": ([0], torch.float32)}
    kind, side, reads = (
        (TensorDictStore, ours, theirs)
        if ours_writes
        else (reference.TensorDictStore, theirs, ours)
    )
    made = kind.from_schema(schema, batch_size=[4], **side.where)
    side.opened.append(made)
    made[2] = (
        {"a": torch.ones(2), "none": torch.zeros(0)} if ours_writes else TensorDict(a=torch.ones(2))
    )
    got = reads.open(made)
    assert got["a"].tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
    if not ours_writes:
        assert got["none"].shape == (4, 0)
        assert got[[1, 3]]["none"].shape == (2, 0)


def test_entries_of_no_bytes(ours, theirs):
    local = TensorDict(a=torch.zeros(4, 0), b=torch.ones(4), batch_size=[4])
    assert_same(ours.open(theirs.write(local)).to_tensordict(), local)
    # Their reader of an empty string: only single entries, and whole.
    assert theirs.open(ours.write(local)).get("b").sum() == 4


def test_rows_that_the_other_side_writes(ways):
    writes, reads = ways
    made = writes.write(plain())
    seen = reads.open(made)
    local = plain()
    for index, value in ((2, plain()[3]), (slice(4, 6), plain()[0:2])):
        made[index] = value
        local[index] = value
    made.set_at_("a", torch.zeros(4, 3), 0)
    local["a"][0] = 0
    assert_same(seen.to_tensordict(), local)
    # And back: the side that read writes into what the other has made.
    seen[1] = plain()[5]
    local[1] = plain()[5]
    assert_same(made.to_tensordict(), local)


def test_entries_that_the_other_side_adds_replaces_and_deletes(ways):
    writes, reads = ways
    made = writes.write(plain())
    made["more"] = torch.ones(ROWS, 4, 2)
    made["a"] = torch.zeros(ROWS, 4, 7, dtype=torch.float64)
    made["deep", "more"] = torch.ones(ROWS, 4)
    del made["flag"]
    local = plain()
    local["more"] = torch.ones(ROWS, 4, 2)
    local["a"] = torch.zeros(ROWS, 4, 7, dtype=torch.float64)
    local["deep", "more"] = torch.ones(ROWS, 4)
    del local["flag"]
    assert_same(reads.open(made).to_tensordict(), local)


def test_nested_views_write_through(ways):
    writes, reads = ways
    made = writes.write(plain())
    view = made["deep"]
    view["b"] = torch.zeros(ROWS, 4, dtype=torch.int64)
    view["deeper"]["c"] = torch.ones(ROWS, 4, 1, dtype=torch.float16)
    view["new"] = torch.ones(ROWS, 4)
    got = reads.open(made)
    assert got["deep", "b"].sum() == 0
    assert got["deep", "deeper", "c"].sum() == ROWS * 4
    seen = got["deep"]
    assert set(seen.keys()) == {"b", "deeper", "new"}
    seen["new"] = torch.zeros(ROWS, 4)
    assert made["deep", "new"].sum() == 0
    assert_same(seen[2].to_tensordict(), got.to_tensordict()["deep"][2])


def test_shallow_copies_are_the_same_store(ways):
    writes, reads = ways
    made = writes.write(plain())
    copy = made.clone(recurse=False)
    assert id_of(copy) == id_of(made)
    copy["a"] = torch.zeros(ROWS, 4, 3)
    got = reads.open(copy)
    assert got["a"].sum() == 0
    again = got.clone(recurse=False)
    again["a"] = torch.ones(ROWS, 4, 3)
    assert made["a"].sum() == ROWS * 12


def test_tensorclasses(ways):
    writes, reads = ways
    local = Point(x=torch.arange(4.0), y=torch.ones(4, 2), batch_size=[4])
    got = reads.open(writes.write(local))
    assert_same(unwrapped(got).to_tensordict(), local.to_tensordict())


def test_a_tensorclass_opens_as_its_class(ours, theirs, where):
    local = Point(x=torch.arange(4.0), y=torch.ones(4, 2), batch_size=[4])
    for kind, made in (
        (TensorDictStore, theirs.write(local)),
        (reference.TensorDictStore, ours.write(local)),
    ):
        got = kind.from_store(td_id=id_of(made), **where)
        assert isinstance(got, Point)
        assert torch.equal(got[1].y, torch.ones(2))
        got._tensordict.close()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_devices(ways, device):
    writes, reads = ways
    got = reads.open(writes.write(plain().to(device) if device else plain()))
    assert got.device == (torch.device(device) if device else None)


@pytest.mark.parametrize("name", ["日本", "with space", "e{f}", "a}b{c"])
def test_names(ways, name):
    writes, reads = ways
    local = TensorDict({name: torch.arange(3), ("deep", name): torch.ones(3)}, batch_size=[3])
    assert_same(reads.open(writes.write(local, td_id=f"id-{name}")).to_tensordict(), local)


# ---- lazy stacks


def dense_stack(dim, count=5, inner=(3, 2)):
    torch.manual_seed(0)
    return lazy_stack(
        [TensorDict(a=torch.randn(*inner, 4), batch_size=inner) for _ in range(count)], dim
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_stacks_of_one_shape(ways, dim):
    """An entry of ``from_lazy_stack`` (stack layout) and one of ``set`` (batch layout)."""
    writes, reads = ways
    local = dense_stack(dim)
    made = writes.write(local)
    whole = local.to_tensordict()
    made["b"] = whole["a"] * 2
    got = reads.open(made)
    assert got.batch_size == local.batch_size
    want = TensorDict(a=whole["a"], b=whole["a"] * 2, batch_size=whole.batch_size)
    for index in (0, [1, 2], slice(0, 2), (slice(None), 1), (..., 1)):
        for key in ("a", "b"):
            assert torch.equal(got[index][key], want[index][key]), (index, key)
    assert torch.equal(got["a"], want["a"])
    assert torch.equal(got["b"], want["b"])


@pytest.mark.parametrize("dim", [1, 2])
def test_a_layout_that_only_the_field_tells(ways, dim):
    """Batch size 3 x 3: the shape fits both layouts."""
    writes, reads = ways
    local = dense_stack(dim, count=3, inner=(3,) * 2)
    made = writes.write(local)
    made["b"] = local["a"] + 1
    got = reads.open(made)
    assert torch.equal(got["a"], local["a"])
    assert torch.equal(got["b"], local["a"] + 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_entries_without_the_layout_field(ours, theirs, where, raw, dim):
    """Data of tensordict 0.14 has none: the shape tells, where it can."""
    local = dense_stack(dim)
    made = theirs.write(local)
    made["b"] = local["a"] + 1
    names = Names(where["prefix"], id_of(made))
    for key in ("a", "b"):
        assert raw.hdel(names.meta(key), "layout") == 1
    got = ours.open(made)
    assert torch.equal(got["a"], local["a"])
    assert torch.equal(got["b"], local["a"] + 1)


def test_ragged_stacks(ways):
    writes, reads = ways
    got = reads.open(writes.write(episodes()))
    assert set(got.keys(True, True)) == {"x", "y", ("deep", "z")}
    assert_same_elements([got[i].to_tensordict() for i in range(5)], episodes())
    assert torch.equal(got[2]["x"], episodes()[2]["x"])


def test_ragged_batches_of_their_stores(ours, theirs):
    got = ours.open(theirs.write(episodes(first=0)))
    for index in ([3, 0, 3], slice(1, 5, 2), torch.tensor([-1, 2])):
        want = [episodes(first=0)[i] for i in torch.arange(5)[index].tolist()]
        assert_same_elements(got[index], want)


def test_ragged_stacks_with_another_stack_dim(ours, theirs):
    """The reference writes these, and cannot read them."""
    parts = [TensorDict(a=torch.full((3, i + 1), i), batch_size=[3]) for i in range(4)]
    got = ours.open(theirs.write(lazy_stack(parts, 1)))
    for i, part in enumerate(parts):
        assert torch.equal(got[:, i]["a"], part["a"])


def test_elements_that_the_other_side_writes(ways):
    writes, reads = ways
    made = writes.write(episodes())
    changed = TensorDict(
        x=torch.ones(3, 2), y=torch.tensor(-1), deep=TensorDict(z=torch.zeros(1, dtype=torch.int16))
    )
    made[2] = changed
    made[4]["y"] = torch.tensor(9)
    want = list(episodes().tensordicts)
    want[2] = changed
    want[4]["y"] = torch.tensor(9)
    got = reads.open(made)
    assert_same_elements([got[i].to_tensordict() for i in range(5)], want)


def test_elements_of_ours_that_change_their_size(ours, theirs):
    made = ours.write(episodes())
    want = list(episodes().tensordicts)
    for i, length in ((1, 9), (4, 1)):
        want[i] = TensorDict(
            x=torch.ones(length, 2),
            y=torch.tensor(-i),
            deep=TensorDict(z=torch.ones(length, dtype=torch.int16)),
        )
        made[i] = want[i]
    got = theirs.open(made)
    assert_same_elements([got[i].to_tensordict() for i in range(5)], want)


def test_a_ragged_entry_that_becomes_one_shape(ours, theirs, where, raw):
    """Their overwrite leaves the old shapes and the old offset table behind."""
    made = theirs.write(episodes())
    made["x"] = torch.ones(5, 3)
    names = Names(where["prefix"], id_of(made))
    assert raw.hexists(names.meta("x"), "shapes")
    assert raw.exists(names.offsets("x"))
    got = ours.open(made)
    assert got[2]["x"].tolist() == [1, 1, 1]
    assert torch.equal(got[[4, 0]][1]["x"], torch.ones(3))
    got["x"] = torch.zeros(5, 2)
    assert not raw.exists(names.offsets("x"))
    assert theirs.open(made)[3]["x"].tolist() == [0, 0]


def test_leaves_of_no_bytes_in_a_stack(ours, theirs):
    """Their upload leaves the data out."""
    local = lazy_stack([TensorDict(z=torch.zeros(0, 2), y=torch.tensor(i)) for i in range(3)])
    got = ours.open(theirs.write(local))
    assert got[1]["z"].shape == (0, 2)
    assert got[[0, 2]]["z"].shape == (2, 0, 2)


# ---- what tdio adds


@pytest.mark.parametrize("local", [plain, episodes])
def test_what_is_added_lies_in_keys_of_its_own(ours, theirs, raw, where, local):
    made = ours.write(local())
    theirs.open(made).clear_redis()
    left = {key.decode().split("}:", 1)[1] for key in raw.keys(f"{where['prefix']}:*")}
    assert all(key.startswith("__tdio_") for key in left), left


def test_a_store_that_they_have_cleared_is_not_there(ours, theirs, where):
    made = ours.write(plain())
    theirs.open(made).clear_redis()
    with pytest.raises(KeyError):
        ours.open(made)
    tdio.delete_store(td_id=made.td_id, **where)


# ---- entries that are not tensors
JSON_VALUES = [
    "text",
    "héllo \r\n",
    "",
    5,
    -1.5,
    True,
    False,
    [1, "x", None],
    {"k": [1, {"l": 2}]},
    2**70,
]
ROW_VALUES = [["a", "b", "c"], [1, 2, 3], [{"k": 1}, {"k": 2}, {}], [[1], [], [2, 3]]]


def of_rows(values):
    return TensorDict(a=torch.arange(3), v=NonTensorStack(*values), batch_size=[3])


def of_batch(value):
    return TensorDict(a=torch.arange(3), v=NonTensorData(value, batch_size=[3]), batch_size=[3])


def value_of(got):
    """The plain Python value of what a read returns."""
    return got.tolist() if hasattr(got, "tolist") else got


@pytest.mark.parametrize("value", JSON_VALUES, ids=repr)
def test_one_value_for_the_batch(ways, value):
    writes, reads = ways
    got = reads.open(writes.write(of_batch(value)))
    assert value_of(got["v"]) == value
    assert type(value_of(got["v"])) is type(value)
    # The reference returns a dict at an index as a tensordict, and refuses to read numbers and
    # dicts with the whole store.
    if isinstance(got, OURS) or not isinstance(value, dict):
        assert value_of(got[1]["v"]) == value
    if isinstance(got, OURS) or isinstance(value, (str, list)):
        assert value_of(got.to_tensordict()["v"]) == value


@pytest.mark.parametrize("values", ROW_VALUES, ids=repr)
def test_one_value_for_each_row(ways, values):
    writes, reads = ways
    got = reads.open(writes.write(of_rows(values)))
    assert list(value_of(got["v"])) == values
    for i in range(3):
        assert value_of(got[i]["v"]) == values[i]
    assert list(value_of(got[1:]["v"])) == values[1:]
    assert list(value_of(got[[2, 0]]["v"])) == [values[2], values[0]]


def test_values_of_rows_that_the_other_side_writes(ways):
    writes, reads = ways
    made = writes.write(of_rows(["a", "b", "c"]))
    made[1] = TensorDict(a=torch.tensor(7), v="B")
    assert list(value_of(reads.open(made)["v"])) == ["a", "B", "c"]
    # A write at an index turns one value for the batch into one for each row.
    made = writes.write(of_batch("one"))
    made[2] = TensorDict(a=torch.tensor(7), v="two")
    got = reads.open(made)
    assert list(value_of(got["v"])) == ["one", "one", "two"]
    assert value_of(got[2]["v"]) == "two"


def test_values_under_a_nested_key(ways):
    writes, reads = ways
    local = TensorDict(
        deep=TensorDict(v=NonTensorData("x", batch_size=[3]), batch_size=[3]), batch_size=[3]
    )
    got = reads.open(writes.write(local))
    assert value_of(got["deep", "v"]) == "x"
    assert ("deep", "v") in got.keys(True)


def test_none(ours, theirs):
    """Stored as null by both; the reference cannot read it back."""
    assert value_of(ours.open(theirs.write(of_batch(None)))["v"]) is None
    assert value_of(ours.open(ours.write(of_batch(None)))["v"]) is None


def test_values_in_a_stack_of_two_dims(ours, theirs):
    rows = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    local = TensorDict(v=rows, batch_size=[2, 2])
    for writes, reads in ((theirs, ours), (ours, theirs)):
        assert value_of(reads.open(writes.write(local))["v"]) == [["a", "b"], ["c", "d"]]


def test_an_entry_without_the_encoding_field_is_json(ours, theirs, raw, where):
    made = theirs.write(of_batch("text"))
    raw.hdel(Names(where["prefix"], id_of(made)).meta("v"), "encoding")
    assert value_of(ours.open(made)["v"]) == "text"


@pytest.mark.parametrize("value", [{1, 2}, b"\x00\xff", 1 + 2j], ids=repr)
def test_pickles(ours, theirs, value):
    made = theirs.write(of_batch(value))
    refusing = ours.open(made)
    with pytest.raises(TypeError, match="allow_pickle=True"):
        refusing["v"]
    assert refusing["a"].tolist() == [0, 1, 2]
    assert value_of(ours.open(made, allow_pickle=True)["v"]) == value
    with pytest.raises(TypeError, match="allow_pickle=True"):
        ours.write(of_batch(value))
    assert value_of(theirs.open(ours.write(of_batch(value), allow_pickle=True))["v"]) == value


def test_tensors_over_text_and_back(ours, theirs):
    """The reference leaves ``is_non_tensor`` behind and cannot read its own store after this."""
    made = ours.write(of_batch("text"))
    made["v"] = torch.ones(3, 2)
    assert theirs.open(made)["v"].sum() == 6
    made["v"] = NonTensorData("again", batch_size=[3])
    assert value_of(theirs.open(made)["v"]) == "again"
    assert value_of(ours.open(made)["v"]) == "again"
