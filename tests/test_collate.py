"""Collate functions: values against plain torch, one storage always, also across processes."""

import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack, tensorclass
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
    with pytest.raises(errors.EntryMismatch, match="mask"):
        collate_pad([TensorDict(mask=torch.zeros(2))])


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
import gc, os, resource, torch
from torch.utils.data import DataLoader
from tdio import StoreDataset
limit = {limit}
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
dataset = StoreDataset(td_id={td_id!r}, **{conn!r})
loader = DataLoader(dataset, batch_size={batch}, num_workers=4, timeout=60)
before = len(os.listdir("/proc/self/fd"))
kept = []
for batch in loader:
    kept.append(batch)
rows = torch.cat([batch["l7"].reshape(len(batch), -1)[:, 0] for batch in kept]) if {dense} else None
assert rows is None or torch.equal(rows, torch.arange(float(len(dataset)))), rows
gc.collect()
print(len(kept), len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.parametrize("kind", ["plain", "ragged"])
def test_a_kept_batch_costs_one_descriptor(conn, kind):
    rows, batch = 400, 8
    if kind == "plain":
        data = TensorDict(
            {f"l{i}": torch.arange(float(rows)) for i in range(60)}, batch_size=[rows]
        )
    else:
        data = lazy_stack(
            [TensorDict({f"l{i}": torch.zeros(n % 4 + 1) for i in range(60)}) for n in range(rows)]
        )
    store = TensorDictStore.from_tensordict(data, **conn)
    code = LOAD.format(limit=256, td_id=store.td_id, conn=conn, batch=batch, dense=kind == "plain")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    store.clear_redis()
    assert done.returncode == 0, done.stderr[-3000:]
    kept, more = map(int, done.stdout.split())
    assert kept == 50 and more <= kept + 20


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
    assert len(storages(TensorDict(a=torch.zeros(1), b=torch.zeros(1)).pin_memory())) == 2


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
