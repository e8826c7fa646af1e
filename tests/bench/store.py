"""The stores against ``tensordict.store`` and against the bare server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensordict.store as reference
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader, Dataset

import tdio
from tdio.server import embedded_server
from tests.bench import entries
from tests.bench._bare import Bare, encode
from tests.bench._measure import Row, compare, peak_extra_bytes

BATCH = 256
SMALL_ROWS, IMAGE_ROWS, RAGGED_ROWS = 100_000, 10_000, 100_000


def small(rows: int = SMALL_ROWS) -> TensorDict:
    return TensorDict(
        obs=torch.randn(rows, 64),
        action=torch.randn(rows, 8),
        reward=torch.randn(rows, 1),
        done=torch.rand(rows, 1) > 0.5,
        batch_size=[rows],
    )


def image(rows: int = IMAGE_ROWS) -> TensorDict:
    pixels = torch.randint(0, 256, (rows, 84, 84, 3), dtype=torch.uint8)
    return small(rows).set("pixels", pixels)


def indexes(rows: int, size: int = BATCH) -> Iterator[list[int]]:
    """Random distinct rows: the same sequence for whoever starts with this function."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randperm(rows, generator=generator)[:size].tolist()


def repeat(read: Callable[[Any], Any], rows: int, times: int, runs: int) -> Callable[[], None]:
    """``times`` reads of fresh rows for each call; the rows are drawn before the clock starts."""
    draw = indexes(rows)
    queue = iter([next(draw) for _ in range(times * (runs + 1))])

    def work() -> None:
        for _ in range(times):
            read(next(queue))

    return work


class PerElement(Dataset[Any]):
    """The dataset that people write by hand."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __len__(self) -> int:
        return int(self.store.batch_size[0])

    def __getitem__(self, index: int) -> Any:
        return self.store[index]


def epoch(dataset: Any, collate: Any, batches: int) -> Callable[[], None]:
    """The first ``batches`` batches of a shuffled epoch, in this process (``num_workers=0``).

    Rates are per row, so sides of different length compare; both see the same order.
    """

    def work() -> None:
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(
            dataset, batch_size=BATCH, shuffle=True, collate_fn=collate, generator=order
        )
        for i, _ in enumerate(loader):
            if i + 1 >= batches:
                break

    return work


def batches(conn: dict[str, Any], kind: str, data: TensorDict, times: int, runs: int) -> list[Row]:
    rows = data.batch_size[0]
    store = tdio.TensorDictStore.from_tensordict(data, **conn)
    theirs = reference.TensorDictStore.from_store(td_id=store.td_id, **conn)
    dataset = tdio.StoreDataset(td_id=store.td_id, **conn)
    amount = (times * BATCH, times * BATCH)
    # A run takes a tenth of a second: medians of more of them differ by 5 % instead of 20 %.
    runs *= 3
    out = [
        compare(
            f"random_{kind}_vs_reference",
            repeat(dataset.__getitems__, rows, times, runs),
            repeat(lambda i: theirs[i], rows, times, runs),
            amount=amount,
            unit="rows/s",
            runs=runs,
        )
    ]
    bare = Bare(conn["unix_socket_path"])
    draw, made = indexes(rows), []
    sizes = {
        path: data.get(path)[0].numel() * data.get(path).element_size() for path in data.keys()
    }
    for _ in range((runs + 1) * times):
        chosen = np.array(next(draw))
        parts = [encode(store._handle.names.data(p), chosen, n) for p, n in sizes.items()]
        made.append((b"".join(c for c, _ in parts), sum(n for _, n in parts)))
    queue = iter(made)

    def limit() -> None:
        for _ in range(times):
            bare.run(*next(queue))

    out.append(
        compare(
            f"random_{kind}_vs_limit",
            repeat(dataset.__getitems__, rows, times, runs),
            limit,
            amount=amount,
            unit="rows/s",
            runs=runs,
        )
    )
    bare.close()
    if kind == "small":
        loader = epoch(dataset, dataset.collate_fn, 100)
        limit_rows = 100 * BATCH
        out.append(
            compare(
                "loader_vs_reference",
                loader,
                epoch(theirs, lambda batch: batch, 100),
                amount=(limit_rows, limit_rows),
                unit="rows/s",
                runs=min(runs, 3),
            )
        )
        out.append(
            compare(
                "loader_vs_per_element",
                loader,
                epoch(PerElement(theirs), torch.stack, 2),
                amount=(limit_rows, 2 * BATCH),
                unit="rows/s",
                runs=min(runs, 3),
            )
        )
    theirs.close()
    store.clear_redis()
    return out


def ragged(conn: dict[str, Any], runs: int) -> list[Row]:
    lengths = np.random.default_rng(0).integers(1, 60, RAGGED_ROWS).tolist()
    pool = torch.randn(64, 4)
    stack = lazy_stack([TensorDict(x=pool[:n]) for n in lengths])
    store = tdio.TensorDictStore.from_tensordict(stack, **conn)
    theirs = reference.LazyStackedTensorDictStore.from_store(td_id=store.td_id, **conn)
    ours = tdio.LazyStackedTensorDictStore.from_store(td_id=store.td_id, **conn)
    draw = np.random.default_rng(1)

    def read(side: Any, times: int) -> Callable[[], None]:
        def work() -> None:
            for i in draw.integers(0, RAGGED_ROWS, times).tolist():
                side[i].to_tensordict()

        return work

    row = compare(
        "ragged_element_vs_reference",
        read(ours, 200),
        read(theirs, 3),
        amount=(200, 3),
        unit="elem/s",
        runs=min(runs, 5),
    )
    theirs.close()
    store.clear_redis()
    return [row]


def uploads(conn: dict[str, Any], kind: str, data: TensorDict, runs: int) -> list[Row]:
    def put(cls: Any) -> Callable[[], Any]:
        return lambda: cls.from_tensordict(data, **conn)

    def tidy(store: Any) -> None:
        store.clear_redis()
        store.close()

    rows = data.batch_size[0]
    return [
        compare(
            f"upload_{kind}_vs_reference",
            put(tdio.TensorDictStore),
            put(reference.TensorDictStore),
            amount=(rows, rows),
            unit="rows/s",
            runs=runs,
            after=tidy,
        )
    ]


def whole(conn: dict[str, Any], runs: int) -> list[Row]:
    value = torch.randn(100, 1_000_000)
    store = tdio.TensorDictStore(batch_size=[100], **conn)
    store["x"] = value
    theirs = reference.TensorDictStore.from_store(td_id=store.td_id, **conn)
    size = value.nbytes / 1e6
    for name, work in {
        "ours, read": lambda: store["x"],
        "theirs, read": lambda: theirs["x"],
        "ours, write": lambda: store.set("x", value),
        "theirs, write": lambda: theirs.set("x", value),
    }.items():
        extra = peak_extra_bytes(work) / 1e6
        print(f"400 MB, {name}: {extra:,.0f} MB at the peak above what was there before")
    rows = [
        compare(
            "read_400MB_vs_reference",
            lambda: store["x"],
            lambda: theirs["x"],
            amount=(size, size),
            unit="MB/s",
            runs=runs,
        ),
        compare(
            "write_400MB_vs_reference",
            lambda: store.set("x", value),
            lambda: theirs.set("x", value),
            amount=(size, size),
            unit="MB/s",
            runs=runs,
        ),
    ]
    theirs.close()
    store.clear_redis()
    return rows


#: The rows that each part of the bench brings.
PARTS: dict[str, tuple[str, ...]] = {
    "small": (
        "random_small_vs_reference",
        "random_small_vs_limit",
        "loader_vs_reference",
        "loader_vs_per_element",
    ),
    "image": ("random_image_vs_reference", "random_image_vs_limit"),
    "ragged": ("ragged_element_vs_reference",),
    "upload": ("upload_small_vs_reference", "upload_image_vs_reference"),
    "entries": entries.names(),
    "whole": ("read_400MB_vs_reference", "write_400MB_vs_reference"),
}


def run(only: str = "", runs: int = 7) -> list[Row]:
    """Run the parts that bring rows whose name contains ``only``; return these rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out: list[Row] = []
    with embedded_server() as server:
        conn = server.connection_kwargs
        work: dict[str, Callable[[], list[Row]]] = {
            "small": lambda: batches(conn, "small", small(), 20, runs),
            "image": lambda: batches(conn, "image", image(), 10, runs),
            "ragged": lambda: ragged(conn, runs),
            "upload": lambda: (
                uploads(conn, "small", small(), min(runs, 5))
                + uploads(conn, "image", image(), min(runs, 5))
            ),
            "whole": lambda: whole(conn, min(runs, 5)),
            "entries": lambda: entries.run(conn, min(runs, 5), only),
        }
        for part, names in PARTS.items():
            if any(only in name for name in names):
                out += work[part]()
    return [row for row in out if only in row.name]
