"""The data layer: its own cost, and other libraries on the same rows.

The peers read from the page cache of a local disk, tdio from a server. A peer that is not
installed is left out with a note; ``TDIO_PEERS_PYTHON`` names an interpreter that has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import tdio
from tdio.server import embedded_server
from tests.bench._measure import Row, compare
from tests.bench._peers import PEERS
from tests.bench.store import BATCH, image, indexes, repeat, small

#: Batches of one call.
TIMES = {"small": 20, "image": 8}


class Peer:
    """A library in a process of its own, fed with row numbers."""

    def __init__(self, name: str, data: Path, work: Path) -> None:
        python = os.environ.get("TDIO_PEERS_PYTHON", sys.executable)
        script = str(Path(__file__).with_name("_peers.py"))
        self.process = subprocess.Popen(
            [python, "-W", "ignore", script, name, str(data), str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        self.state = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            tail = self.process.stderr.read().strip().splitlines()[-1:]
            return {"missing": tail[0] if tail else "it ended"}
        out: dict[str, Any] = json.loads(line)
        return out

    def run(self, batches: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(batches + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        if "missing" in answer:
            raise RuntimeError(answer["missing"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def peers(
    kind: str, data: TensorDict, read: Callable[[Any], Any], only: str, runs: int
) -> list[Row]:
    out: list[Row] = []
    rows, times = data.batch_size[0], TIMES[kind]
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder, "arrays")
        arrays.mkdir()
        for key, value in data.items():
            np.save(arrays / f"{key}.npy", value.numpy())
        for name in PEERS:
            if only not in f"{kind}_vs_{name}":
                continue
            peer = Peer(name, arrays, Path(folder, name))
            try:
                if "missing" in peer.state:
                    print(f"{kind}_vs_{name}: left out: {peer.state['missing']}")
                    continue
                draw = indexes(rows)
                asked = [json.dumps([next(draw) for _ in range(times)]) for _ in range(runs + 1)]
                queue = iter(asked)
                out.append(
                    compare(
                        f"{kind}_vs_{name}",
                        repeat(read, rows, times, runs),
                        lambda peer=peer, queue=queue: peer.run(next(queue)),
                        amount=(times * BATCH, times * BATCH),
                        unit="rows/s",
                        runs=runs,
                    )
                )
            except RuntimeError as error:
                print(f"{kind}_vs_{name}: left out: {error}")
            finally:
                peer.close()
    return out


def memmapped(
    kind: str, data: TensorDict, conn: dict[str, Any], store: Any, only: str, runs: int
) -> list[Row]:
    """A memory-mapped TensorDict beside a read of the server, and beside the local cache."""
    names = {"small": "cached_vs_memmap", "image": "cached_image_vs_memmap"}
    rows, times = data.batch_size[0], TIMES[kind]
    out = []
    with tempfile.TemporaryDirectory() as folder:
        local = data.memmap(str(Path(folder, "memmap")))
        sides = {
            f"{kind}_vs_memmap": tdio.StoreDataset(td_id=store.td_id, **conn),
            names[kind]: tdio.StoreDataset(
                td_id=store.td_id, cache="memmap", cache_dir=Path(folder, "cache"), **conn
            ),
        }
        for name, dataset in sides.items():
            if only not in name:
                continue
            if "cached" in name:
                for start in range(0, rows, BATCH):  # the first epoch
                    dataset.__getitems__(range(start, min(rows, start + BATCH)))
            out.append(
                compare(
                    name,
                    repeat(dataset.__getitems__, rows, times, runs),
                    repeat(lambda chosen: local[chosen].contiguous(), rows, times, runs),
                    amount=(times * BATCH, times * BATCH),
                    unit="rows/s",
                    runs=runs,
                )
            )
    return out


def sampled(dataset: Any, block_rows: int | None, times: int) -> Callable[[], None]:
    """The next batches of an epoch; an epoch lasts for all runs."""

    def endless() -> Iterator[list[int]]:
        sampler = tdio.StoreBatchSampler(dataset, BATCH, shuffle=True, block_rows=block_rows)
        while True:
            yield from sampler

    batches = endless()

    def work() -> None:
        for _ in range(times):
            dataset.__getitems__(next(batches))

    return work


def own(conn: dict[str, Any], store: Any, only: str, runs: int) -> list[Row]:
    dataset = tdio.StoreDataset(td_id=store.td_id, **conn)
    times, out = 100, []
    if only in "loader_vs_direct":

        def loader() -> None:
            sampler = tdio.StoreBatchSampler(dataset, BATCH, shuffle=True, drop_last=True)
            for number, _ in enumerate(DataLoader(dataset, batch_sampler=sampler), 1):
                if number == times:
                    break

        out.append(
            compare(
                "loader_vs_direct",
                loader,
                repeat(dataset.__getitems__, len(dataset), times, runs),
                amount=(times * BATCH, times * BATCH),
                unit="rows/s",
                runs=runs,
            )
        )
    if only in "block_vs_random":
        out.append(
            compare(
                "block_vs_random",
                sampled(dataset, 64, times),
                sampled(dataset, None, times),
                amount=(times * BATCH, times * BATCH),
                unit="rows/s",
                runs=runs,
            )
        )
    return out


def run(only: str = "", runs: int = 7) -> list[Row]:
    torch.set_num_threads(1)
    out: list[Row] = []
    with embedded_server() as server:
        conn = server.connection_kwargs
        for kind, data in (("small", small()), ("image", image())):
            store = tdio.TensorDictStore.from_tensordict(data, **conn)
            read = tdio.StoreDataset(td_id=store.td_id, **conn).__getitems__
            if kind == "small":
                out += own(conn, store, only, runs)
            out += memmapped(kind, data, conn, store, only, runs)
            out += peers(kind, data, read, only, runs)
            store.clear_redis()
    return out
