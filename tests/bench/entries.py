"""Single entries, elements and whole stores, read and written, against ``tensordict.store``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensordict.store as reference
import torch
from tensordict import TensorDict

import tdio
from tests.bench._measure import Row, compare

LEAVES = (1, 4, 20)
#: Rows and floats for each row: 80 kB and 8 MB in each leaf.
SIZES = {"small": (100, 200), "large": (100, 20_000)}


def made(leaves: int, size: str) -> TensorDict:
    rows, width = SIZES[size]
    values = {f"k{i}": torch.randn(rows, width) for i in range(leaves)}
    return TensorDict(values, batch_size=[rows])


def names() -> tuple[str, ...]:
    work = ("key", "index", "whole", "update_", "setitem")
    return tuple(
        f"{name}_{leaves}_{size}_vs_reference"
        for size in SIZES
        for leaves in LEAVES
        for name in work
    )


def run(conn: dict[str, Any], runs: int, only: str) -> list[Row]:
    rows: list[Row] = []
    for size in SIZES:
        for leaves in LEAVES:
            rows += _one(conn, leaves, size, runs, only)
    return rows


def _one(conn: dict[str, Any], leaves: int, size: str, runs: int, only: str) -> list[Row]:
    data = made(leaves, size)
    element, other = data[7].clone(), data.clone().apply(lambda x: x + 1)
    ours = tdio.TensorDictStore.from_tensordict(data, **conn)
    theirs = reference.TensorDictStore.from_store(td_id=ours.td_id, **conn)

    def setitem(store: Any) -> None:
        store[7] = element

    work: dict[str, Callable[[Any], Any]] = {
        "key": lambda store: store["k0"],
        "index": lambda store: store[7],
        "whole": lambda store: store.to_tensordict(),
        "update_": lambda store: store.update_(other),
        "setitem": setitem,
    }
    rows = []
    for name, call in work.items():
        times = 100 if size == "small" else 1 if name in ("whole", "update_") else 20
        row = f"{name}_{leaves}_{size}_vs_reference"
        if only not in row:
            continue
        rows.append(
            compare(
                row,
                _repeat(call, ours, times),
                _repeat(call, theirs, times),
                amount=(times, times),
                unit="calls/s",
                # Runs of small ones are short: more of them differ less.
                runs=3 * runs if size == "small" else runs,
            )
        )
    theirs.close()
    ours.clear_redis()
    ours.close()
    return rows


def _repeat(call: Callable[[Any], Any], store: Any, times: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            call(store)

    return work
