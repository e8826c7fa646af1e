"""Collate functions: values against plain torch, one storage always, also across processes."""

import pickle
import subprocess
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack, tensorclass
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from tdio import (
    StoreDataset,
    TensorDictStore,
    collate_lazy,
    collate_nested,
    collate_pad,
    collate_stack,
    errors,
    tensordict_collate,
)

LENGTHS = [2, 5, 1, 3]


@tensorclass
class Step:
    a: torch.Tensor
    word: str


def even(i):
    return TensorDict(
        x=torch.full((2,), i),
        n=TensorDict(z=torch.tensor(float(i)), step=Step(a=torch.full((3,), i), word=f"w{i}")),
        word=f"word {i}",
    )


def episode(n):
    return TensorDict(
        x=torch.arange(n * 2.0).view(n, 2),
        deep=TensorDict(r=torch.arange(n)),
        goal=torch.tensor([n]),
    )


def storages(td):
    return {leaf.untyped_storage().data_ptr() for leaf in td.values(True, True)}


def all_storages(td):
    if isinstance(td, LazyStackedTensorDict):
        return set.union(*(storages(element) for element in td.tensordicts))
    return storages(td)


def test_stack_keeps_non_tensors_and_classes():
    for collate in (collate_stack, tensordict_collate):
        batch = collate([even(i) for i in range(4)])
        assert batch.batch_size == (4,)
        assert batch["x"].tolist() == [[i, i] for i in range(4)]
        assert isinstance(batch["n", "step"], Step)
        assert list(batch["n", "step"].word) == [f"w{i}" for i in range(4)]
        assert list(batch["word"]) == [f"word {i}" for i in range(4)]
        assert batch.is_consolidated() and len(storages(batch)) == 1
        again = pickle.loads(pickle.dumps(batch))
        assert again.is_consolidated() and list(again["word"]) == list(batch["word"])
        batch["new"] = torch.zeros(4)  # a user may add to a batch
        assert not batch.is_consolidated()


def test_stack_of_tensorclasses():
    batch = collate_stack([Step(a=torch.full((3,), i), word="w") for i in range(2)])
    assert isinstance(batch, Step) and batch.batch_size == (2,) and batch.is_consolidated()
    assert batch.a.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
def test_stack_of_any_dtype(dtype):
    samples = [TensorDict(a=torch.full((3,), i).to(dtype), b=torch.zeros(0)) for i in range(3)]
    batch = collate_stack(samples)
    assert batch["a"].dtype == dtype and batch["b"].shape == (3, 0)
    expected = torch.stack([s["a"] for s in samples])
    assert torch.equal(batch["a"].view(torch.uint8), expected.view(torch.uint8))


def test_a_ready_batch_is_returned_as_it_is():
    batch = collate_stack([episode(2), episode(2)])
    assert collate_stack(batch) is batch and tensordict_collate(batch) is batch
    ragged = lazy_stack([episode(2), episode(3)])
    assert collate_lazy(ragged) is ragged and tensordict_collate(ragged) is ragged
    scattered = batch + 1  # a transform loses the one storage
    mended = tensordict_collate(scattered)
    assert mended.is_consolidated() and torch.equal(mended["x"], scattered["x"])


def test_what_cannot_be_stacked():
    with pytest.raises(errors.EntryMismatch, match="'x'"):
        collate_stack([episode(2), episode(3)])
    with pytest.raises(errors.EntryMismatch, match="goal"):
        collate_stack([episode(2), episode(2).exclude("goal")])
    for bad in ([1], [], "x", 3, {"a": 1}):
        with pytest.raises(TypeError):
            collate_stack(bad)


def deep(i, steps=3):
    nested = TensorDict(
        y=torch.full((steps, 2), i), w=NonTensorData(f"w{i}", batch_size=[steps]),
        batch_size=[steps], names=["time"],
    )  # fmt: skip
    step = Step(a=torch.full((4, 1), i), word=f"s{i}", batch_size=[4])
    return TensorDict(x=torch.arange(2.0) + i, n=nested, step=step, empty=TensorDict())


def check_deep(batch):
    assert batch.batch_size == (2,) and batch["n"].batch_size == (2, 3)
    assert batch["n"].names == [None, "time"] and batch["step"].batch_size == (2, 4)
    assert isinstance(batch["step"], Step) and set(batch["empty"].keys()) == set()
    for i in range(2):
        assert (batch[i]["n"] == deep(i)["n"]).all()
        assert [list(row) for row in batch["n", "w"]] == [["w0"] * 3, ["w1"] * 3]
        assert (batch[i]["step"].a == i).all()


def test_nested_batch_sizes_and_names():
    batch = collate_stack([deep(0), deep(1)])
    check_deep(batch)
    assert batch.is_consolidated() and len(storages(batch)) == 1
    check_deep(pickle.loads(pickle.dumps(batch)))
    check_deep(tensordict_collate([deep(0), deep(1)]))
    # Also beside entries that are padded; where one of its own is, its first dim is none.
    check_deep(collate_pad([deep(0), deep(1)], keys=["x"]))
    check_deep(collate_nested([deep(0), deep(1)], keys=["x"]))
    padded = collate_pad([deep(0), deep(1, 2)], keys=["x", ("n", "y")])
    assert padded["n"].batch_size == (2,) and padded["n", "y"].shape == (2, 3, 2)
    assert padded["step"].batch_size == (2, 4)
    named = TensorDict(x=torch.zeros(2), batch_size=[2], names=["time"])
    assert collate_stack([named, named]).names == [None, "time"]
    flat = deep(0)
    flat["n"] = TensorDict(y=flat["n", "y"], w=NonTensorData("w0"))
    with pytest.raises(errors.EntryMismatch, match="batch size of 'n'"):
        collate_stack([deep(0), flat])


@pytest.mark.parametrize(
    "collate", [collate_stack, tensordict_collate, collate_pad, collate_nested]
)
def test_samples_that_are_not_alike(collate):
    full = TensorDict(x=torch.zeros(2), word="a", n=TensorDict(y=torch.zeros(2)), e=TensorDict())
    for key in ("x", "word", "n", "e"):
        for samples, lacks in (([full.exclude(key), full], 0), ([full, full.exclude(key)], 1)):
            with pytest.raises(errors.EntryMismatch, match=f"'{key}.*sample {lacks} has not"):
                collate(samples)
    other = full.clone().set("x", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(errors.EntryMismatch, match="'x' is torch.float32 in sample 0"):
        collate([full, full, other])
    with pytest.raises(errors.EntryMismatch, match="'x' is a value in sample 0"):
        collate([full.clone().set("x", NonTensorData("text")), full])


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad(side):
    samples = [episode(n) for n in LENGTHS]
    batch = collate_pad(
        samples, keys=["x", ("deep", "r")],
        padding_value={("deep", "r"): -1}, padding_side={"x": side},
    )  # fmt: skip
    assert batch.is_consolidated() and batch.batch_size == (4,)
    assert batch["lengths", "x"].tolist() == LENGTHS
    assert batch["goal"].tolist() == [[n] for n in LENGTHS]
    assert set(batch["mask"].keys(True, True)) == {"x", ("deep", "r")}
    for i, n in enumerate(LENGTHS):
        mask = batch["mask", "x"][i]
        assert mask.tolist() == sorted([True] * n + [False] * (5 - n), reverse=side == "right")
        assert torch.equal(batch["x"][i][mask], samples[i]["x"])
        assert not batch["x"][i][~mask].any()
        assert batch["deep", "r"][i].tolist() == [*range(n), *[-1] * (5 - n)]


def test_the_entries_of_a_padded_batch_do_not_depend_on_the_data():
    one, some = collate_pad([episode(3)]), collate_pad([episode(2), episode(3)])
    assert set(one.keys(True, True)) == set(some.keys(True, True))
    bare = collate_pad([episode(2), episode(3)], mask=None, lengths=None)
    assert set(bare.keys()) == {"x", "deep", "goal"}
    inner = [TensorDict(x=torch.ones(2, n), batch_size=[2]) for n in (1, 3)]
    batch = collate_pad(inner)
    assert batch.batch_size == (2, 2) and batch["x"].sum(-1).tolist() == [[1, 1], [3, 3]]
    assert batch["mask", "x"].shape == (2, 2, 3)
    assert batch["lengths", "x"].tolist() == [[1, 1], [3, 3]]


def test_pad_refuses():
    with pytest.raises(errors.EntryNotFound, match="'nope'"):
        collate_pad([episode(2)], keys=["nope"])
    with pytest.raises(errors.EntryMismatch, match="deep.r"):
        collate_pad([episode(2), episode(3)], keys=["x"])
    with pytest.raises(errors.EntryMismatch, match="'x'"):
        collate_pad([TensorDict(x=torch.zeros(2, 3)), TensorDict(x=torch.zeros(2, 4))])
    for taken in (torch.zeros(2), torch.tensor(0), TensorDict(x=torch.zeros(1)), "text"):
        with pytest.raises(errors.EntryMismatch, match=r"'mask'\]: give other names by mask="):
            collate_pad([TensorDict(mask=taken, x=torch.zeros(2))])
    with pytest.raises(ValueError, match="both 'm'"):
        collate_pad([episode(2)], mask="m", lengths="m")
    for settings in (
        {"padding_value": {"nope": 1}}, {"padding_side": {("deep", "nope"): "left"}},
        {"padding_value": {"goal": 1}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(settings))}= names .*but padded are"):
            collate_pad([episode(2)], keys=["x", ("deep", "r")], **settings)
    for side in ("up", {"x": "Left"}, None):
        with pytest.raises(ValueError, match="padding_side is"):
            collate_pad([episode(2)], padding_side=side)


@pytest.mark.parametrize("collate", [collate_pad, collate_nested])
def test_an_empty_batch(collate):
    for batch in (TensorDict(x=torch.zeros(0, 3), batch_size=[0]), TensorDict(x=torch.zeros(3))):
        with pytest.raises(ValueError, match="no samples"):
            collate(batch)


def test_nested():
    samples = [episode(n) for n in LENGTHS]
    batch = collate_nested(lazy_stack(samples), keys=["x", ("deep", "r")])
    assert batch["x"].layout is torch.jagged and batch.is_consolidated()
    for got in (batch, pickle.loads(pickle.dumps(batch))):
        for sample, x, r in zip(samples, got["x"].unbind(), got["deep", "r"].unbind(), strict=True):
            assert torch.equal(x, sample["x"]) and torch.equal(r, sample["deep", "r"])
    assert batch["goal"].tolist() == [[n] for n in LENGTHS]
    with pytest.raises(errors.EntryMismatch):
        collate_nested([TensorDict(x=torch.zeros(2, 1), batch_size=[2])])


class Episodes(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return episode(1 + index % 5)


@pytest.mark.parametrize(
    "collate", [collate_pad, collate_nested, collate_lazy, tensordict_collate, None]
)
def test_batches_cross_processes_as_one_storage(collate):
    keys = {"keys": ["x", ("deep", "r")]} if collate in (collate_pad, collate_nested) else {}
    loader = DataLoader(
        Episodes(),
        batch_size=8,
        num_workers=2,
        collate_fn=partial(collate, **keys) if collate else None,
    )
    for number, batch in enumerate(loader):
        assert batch["goal"].flatten().tolist() == [
            1 + i % 5 for i in range(number * 8, number * 8 + 8)
        ]
        if collate is collate_nested:
            assert batch.is_consolidated()
            values = batch["x"].values().untyped_storage().data_ptr()
            assert values == batch["goal"].untyped_storage().data_ptr()
        else:
            assert len(all_storages(batch)) == 1
            assert batch[0]["goal"].is_shared()


LOAD = """
import gc, os, resource, sys, torch
sys.path[:0] = {path!r}
from torch.utils.data import DataLoader
from tests import test_collate
from tdio import StoreDataset
limit = {limit}
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
dataset = StoreDataset(td_id={td_id!r}, **{conn!r}) if {td_id!r} else test_collate.Samples({kind!r})
collate = None if {td_id!r} else test_collate.collate_lazy
loader = DataLoader(
    dataset, batch_size={batch}, num_workers=4, timeout=60, collate_fn=collate
)
before = len(os.listdir("/proc/self/fd"))
kept = []
for batch in loader:
    kept.append(batch)
for number, batch in enumerate(kept):
    test_collate.check_samples({kind!r}, batch, number * {batch})
gc.collect()
print(len(kept), len(os.listdir("/proc/self/fd")) - before)
"""
ROWS = 200


def text(i):
    return f"word {i}" * (i % 3)


def sample(kind, i):
    """Return a sample with 60 leaves of lengths of their own, and what else ``kind`` says."""
    leaves = {f"l{k}": torch.full(((i + k) % 4 + 1,), float(i)) for k in range(60)}
    if kind == "plain":
        return TensorDict({f"l{k}": torch.tensor(float(i)) for k in range(60)})
    if kind in ("text", "ragged text"):
        return TensorDict({**leaves, "word": text(i)})
    if kind == "nested":
        nested = TensorDict(y=torch.full((3, 2), i), batch_size=[3], names=["time"])
        return TensorDict({**leaves, "n": nested})
    if kind == "tensorclass":
        return TensorDict({**leaves, "step": Step(a=torch.full((i % 3,), i), word=text(i))})
    if kind == "plain float8":
        value = torch.tensor(float(i)).to(torch.float8_e4m3fn)
        return TensorDict({f"l{k}": value for k in range(60)})
    if kind == "float8":
        return TensorDict({key: leaf.to(torch.float8_e4m3fn) for key, leaf in leaves.items()})
    return TensorDict(leaves)


class Samples(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return sample(self.kind, i)


def check_samples(kind, batch, start):
    for i, got in enumerate(batch.unbind(0), start):
        want = sample(kind, i)
        assert set(got.keys(True)) == set(want.keys(True))
        assert got.batch_size == want.batch_size
        for key, leaf in want.items(True, True):
            assert got[key].dtype == leaf.dtype
            assert torch.equal(got[key].float(), leaf.float())
        if "text" in kind:
            assert got["word"] == text(i)
        if kind == "nested":
            assert got["n"].batch_size == (3,) and got["n"].names == ["time"]
        if kind == "tensorclass":
            assert type(got["step"]) is Step and got["step"].word == text(i)


@pytest.mark.parametrize(
    "kind",
    ["plain", "plain float8", "ragged", "text", "ragged text", "nested", "tensorclass", "float8"],
)
def test_a_kept_batch_costs_one_descriptor(conn, kind):
    batch, td_id = 8, None
    if kind in ("plain", "plain float8", "ragged", "ragged text"):
        samples = [sample(kind, i) for i in range(ROWS)]
        if kind == "plain float8":
            columns = {
                k: torch.stack([one[k].float() for one in samples]) for k in samples[0].keys()
            }
            columns = {k: column.to(torch.float8_e4m3fn) for k, column in columns.items()}
            data = TensorDict(columns, batch_size=[ROWS])
        else:
            data = (torch.stack if kind == "plain" else lazy_stack)(samples)
        store = TensorDictStore.from_tensordict(data, **conn)
        td_id = store.td_id
    code = LOAD.format(
        limit=256, td_id=td_id, conn=conn, batch=batch, kind=kind, path=[str(Path.cwd())]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    if td_id:
        store.clear_redis()
    assert done.returncode == 0, done.stderr[-3000:]
    kept, more = map(int, done.stdout.split())
    assert kept == 25 and more <= kept + 20


def test_leaves_in_shared_memory_stay_shared():
    elements = [TensorDict(x=torch.zeros(i + 1)).share_memory_() for i in range(2)]
    again = pickle.loads(ForkingPickler.dumps(lazy_stack(elements)))
    again[1]["x"].fill_(7)
    assert elements[1]["x"].tolist() == [7, 7]


def test_a_lazy_batch_keeps_what_is_no_plain_tensor():
    def element(i):
        return TensorDict(
            conjugate=torch.full((2,), 1j).conj(),
            wide=torch.full((i,), 1j, dtype=torch.complex128),
            inner=lazy_stack([TensorDict(q=torch.zeros(k)) for k in range(2)]),
            grad=torch.ones(2, requires_grad=True),
            jagged=torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(1 + i)], layout=torch.jagged
            ),
            empty=TensorDict(),
        )

    stack = LazyStackedTensorDict(*map(element, (0, 1)), stack_dim=0, stack_dim_name="time")
    stack.lock_()
    again = pickle.loads(ForkingPickler.dumps(stack))
    assert again.names == ["time"] and again.is_locked
    for got, want in zip(again.tensordicts, stack.tensordicts, strict=True):
        assert torch.equal(got["conjugate"], want["conjugate"])
        assert torch.equal(got["wide"], want["wide"]) and got["grad"].requires_grad
        assert [td["q"].shape for td in got["inner"].tensordicts] == [(0,), (1,)]
        assert torch.equal(got["jagged"].offsets(), want["jagged"].offsets())
        assert "empty" in got.keys()
        places = {got[key].untyped_storage().data_ptr() for key in ("conjugate", "wide")}
        assert len(places) == 1


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, -1), (torch.uint8, 256), (torch.int64, 2.5), (torch.int16, float("nan")),
        (torch.int32, float("inf")), (torch.bool, 2), (torch.float32, 1j), (torch.float32, "0"),
    ],
)  # fmt: skip
def test_a_padding_value_that_an_entry_cannot_hold_is_refused(dtype, value):
    samples = [TensorDict(x=torch.zeros(n).to(dtype)) for n in (1, 2)]
    with pytest.raises(errors.EntryMismatch, match="padding_value=.*'x', which is torch"):
        collate_pad(samples, padding_value=value)


@pytest.mark.parametrize("collate", [collate_pad, collate_nested])
def test_an_entry_without_a_dim_to_pad_is_refused(collate):
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for entry, why in ((torch.tensor(1.0), "has only 0 dims"), (jagged, "is a nested tensor")):
        samples = [TensorDict(x=entry, y=torch.ones(n)) for n in (1, 2)]
        with pytest.raises(errors.EntryMismatch, match=f"'x' {why}.*collate_lazy"):
            collate(samples, keys=["x", "y"])
    nested = TensorDict({"b": torch.ones(1)})
    samples = [TensorDict({"a.b": torch.ones(n), "a": nested}) for n in (1, 2)]
    with pytest.raises(errors.EntryMismatch, match="'a.b' of the samples holds a '.'"):
        collate(samples)


# ---- pinning


@pytest.fixture
def pins(monkeypatch):
    """Without an accelerator there is no pinned memory: count what would be pinned."""
    pinned = []

    def pin_memory(self):
        pinned.append(self)
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return pinned


def test_pinning_pins_one_storage(pins):
    batch = collate_stack([even(i) for i in range(3)])
    pinned = batch.pin_memory()
    assert type(pinned) is TensorDict and pinned.batch_size == (3,) and len(pins) == 1
    assert pinned.is_consolidated() and storages(pinned) != storages(batch)
    assert pinned["x"].tolist() == batch["x"].tolist() and list(pinned["word"]) == list(
        batch["word"]
    )
    ragged = lazy_stack([episode(n) for n in LENGTHS]).pin_memory()
    assert len(pins) == 2 and len(all_storages(ragged)) == 1
    assert [e["x"].shape[0] for e in ragged.unbind(0)] == LENGTHS
    mixed = lazy_stack([sample("tensorclass", i) for i in range(4)])
    mixed = mixed.set("value", lazy_stack([TensorDict(v=NonTensorData(print))] * 4))
    del pins[:]
    moved = mixed.pin_memory()
    assert len(pins) == 1 and len(all_storages(moved)) == 1
    check_samples("tensorclass", moved.exclude("value"), 0)
    assert moved[0]["value", "v"] is print
    assert len(storages(TensorDict(a=torch.zeros(1), b=torch.zeros(1)).pin_memory())) == 2
    values = torch.arange(6.0).view(3, 2)
    eighths = collate_stack(
        [TensorDict(e=row.to(torch.float8_e4m3fn), f=row, word="one") for row in values]
    )
    del pins[:]
    moved = eighths.pin_memory()
    assert len(pins) == 1 and len(storages(moved)) == 1 and moved.batch_size == (3,)
    assert torch.equal(moved["e"].float(), values) and torch.equal(moved["f"], values)
    assert list(moved["word"]) == ["one"] * 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pins_one_storage(conn, workers):
    data = TensorDict(a=torch.arange(64), b=torch.zeros(64, 3), batch_size=[64])
    store = TensorDictStore.from_tensordict(data, **conn)
    loader = DataLoader(StoreDataset(store), batch_size=16, num_workers=workers, pin_memory=True)
    for batch in loader:
        assert type(batch) is TensorDict and batch.is_consolidated() and batch.batch_size == (16,)
        assert batch["a"].is_pinned() and len(storages(batch)) == 1
        moved = batch.to("cuda")
        assert moved.is_consolidated() and len(storages(moved)) == 1
    store.clear_redis()


def test_padding_values_are_exact_or_refused():
    def padded(dtype, value, side="right"):
        samples = [TensorDict(x=torch.ones(n).to(dtype)) for n in (1, 3)]
        return collate_pad(samples, padding_value=value, padding_side=side)["x"][0].tolist()

    for dtype, value in (
        (torch.int64, 2**63 - 1),
        (torch.int64, -(2**63)),
        (torch.int64, 2**53 + 1),
        (torch.uint64, 2**64 - 1),
    ):
        assert padded(dtype, value) == [1, value, value]
        assert padded(dtype, value, "left") == [value, value, 1]
    assert padded(torch.float32, float("-inf"))[1:] == [float("-inf")] * 2
    assert (
        padded(torch.float32, np.float32(2)) == padded(torch.float32, torch.tensor(2)) == [1, 2, 2]
    )
    for dtype, value in (
        (torch.float16, 1e9),
        (torch.bfloat16, 1e39),
        (torch.float32, 10**400),
        (torch.float8_e4m3fn, 1e9),
        (torch.uint8, 256),
        (torch.float32, "0"),
    ):
        with pytest.raises(errors.EntryMismatch, match="cannot be held by 'x'"):
            padded(dtype, value)


class _Copies(TorchDispatchMode):
    """Counts copies to another device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_to_copy" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("how", [collate_lazy, collate_pad, collate_nested])
@pytest.mark.parametrize("sent", [False, True])
def test_to_another_device_is_one_copy(how, dtype, sent):
    samples = [
        TensorDict(a=torch.ones(n, 2), b=torch.ones(n).to(dtype), c=torch.tensor(n), d=f"{n}")
        for n in (2, 1, 3)
    ]
    batch = how(samples)
    if sent:
        batch = pickle.loads(bytes(ForkingPickler.dumps(batch)))
    with _Copies() as copies:
        moved = batch.to("meta", non_blocking=True)
    assert copies.count == 1 and moved.device == torch.device("meta") and batch.device is None
    assert type(moved) is type(batch) and moved.batch_size == batch.batch_size
    if how is collate_nested:
        assert moved["a"].is_nested and moved["a"].values().shape == (6, 2)
        assert moved["b"].dtype == dtype and moved["d"] == batch["d"]
        return
    for got, want in zip(moved.unbind(0), batch.unbind(0), strict=True):
        assert got["a"].shape == want["a"].shape and got["b"].dtype == dtype
        assert got["d"] == want["d"]


def test_a_view_of_much_else_is_not_moved_with_it():
    large = torch.zeros(1000, 8)
    stack = collate_lazy(lazy_stack([TensorDict(x=large[i, : i + 1]) for i in range(4)]))
    moved = stack.to("meta")
    assert [td["x"].untyped_storage().nbytes() for td in moved.unbind(0)] == [4, 8, 12, 16]


def test_samples_of_a_tensorclass_that_differ_are_a_lazy_stack_of_it():
    samples = [Step(a=torch.ones(n), word=f"{n}", batch_size=[]) for n in (2, 4)]
    for how in (tensordict_collate, collate_lazy):
        batch = how(samples)
        assert isinstance(batch, Step)
        assert [(len(one.a), one.word) for one in batch.unbind(0)] == [(2, "2"), (4, "4")]
        assert isinstance(how(batch), Step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_lock_goes_with_the_batch(dtype):
    batch = collate_lazy([TensorDict(x=torch.ones(n).to(dtype)) for n in (1, 2)]).lock_()
    assert batch.to("meta").is_locked
    dense = collate_stack([TensorDict(x=torch.ones(2).to(dtype))] * 2).lock_()
    assert dense.to("meta").is_locked


def test_an_expanded_leaf_takes_no_more_than_it_holds():
    stack = lazy_stack([TensorDict(x=torch.ones(1).expand(10_000_000 + i)) for i in range(2)])
    sent = bytes(ForkingPickler.dumps(stack))
    got = pickle.loads(sent)
    assert [td["x"].untyped_storage().nbytes() for td in got.unbind(0)] == [4, 4]
