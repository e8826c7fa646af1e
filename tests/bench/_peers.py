"""Other libraries reading the same rows from this machine's disk. Run in a process of its own.

It imports nothing of tdio, so that it may run under another interpreter, whose packages pin
other versions of torch and tensordict: ``TDIO_PEERS_PYTHON``. Reads its commands from stdin.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Read = Callable[[list[int]], Any]


def columns(folder: Path) -> dict[str, Any]:
    import numpy as np

    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What a DataLoader's collate does with the samples of a batch."""
    import numpy as np
    import torch

    return {k: torch.from_numpy(np.stack([s[k] for s in samples])) for k in samples[0]}


def hf(data: dict[str, Any], folder: Path) -> Read:
    import datasets

    datasets.disable_progress_bars()
    features = {
        k: datasets.Array3D(v.shape[1:], str(v.dtype))
        if v.ndim == 4
        else datasets.Sequence(datasets.Value(str(v.dtype)), length=v.shape[1])
        for k, v in data.items()
    }
    made = datasets.Dataset.from_dict(
        {k: list(v) if v.ndim == 4 else v[:] for k, v in data.items()}, datasets.Features(features)
    )
    made.save_to_disk(str(folder))
    table = datasets.load_from_disk(str(folder)).with_format("torch")
    return lambda rows: table[rows]


def mosaic(data: dict[str, Any], folder: Path) -> Read:
    from streaming import MDSWriter, StreamingDataset

    # It has no arrays of bool.
    data = {k: v[:].view("uint8") if v.dtype == bool else v for k, v in data.items()}
    kinds = {k: f"ndarray:{v.dtype}:{','.join(map(str, v.shape[1:]))}" for k, v in data.items()}
    count = len(next(iter(data.values())))
    with MDSWriter(out=str(folder), columns=kinds, size_limit="256mb") as out:
        for i in range(count):
            out.write({k: v[i] for k, v in data.items()})
    made = StreamingDataset(local=str(folder), batch_size=256, shuffle=False)
    return lambda rows: stacked([made[i] for i in rows])


def lit(data: dict[str, Any], folder: Path) -> Read:
    import torch
    from litdata import StreamingDataset
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes="64MB")
    count = len(next(iter(data.values())))
    for i in range(count):
        cache[i] = {k: torch.from_numpy(v[i].copy()) for k, v in data.items()}
    cache.done()
    cache.merge()
    made = StreamingDataset(str(folder))
    return lambda rows: torch.utils.data.default_collate([made[i] for i in rows])


def lmdb(data: dict[str, Any], folder: Path) -> Read:
    import lmdb
    import numpy as np

    size = sum(v.nbytes for v in data.values())
    env = lmdb.open(str(folder), map_size=3 * size + (1 << 28), sync=False)
    with env.begin(write=True) as txn:
        for i in range(len(next(iter(data.values())))):
            txn.put(i.to_bytes(8, "big"), b"".join(v[i].tobytes() for v in data.values()))

    def sample(blob: Any) -> dict[str, Any]:
        at, out = 0, {}
        for k, v in data.items():
            n = v[0].nbytes
            out[k] = np.frombuffer(blob, v.dtype, v[0].size, at).reshape(v.shape[1:])
            at += n
        return out

    def read(rows: list[int]) -> Any:
        with env.begin(buffers=True) as txn:
            return stacked([sample(txn.get(i.to_bytes(8, "big"))) for i in rows])

    return read


def torchrl(data: dict[str, Any], folder: Path) -> Read:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage

    count = len(next(iter(data.values())))
    made = LazyMemmapStorage(count, scratch_dir=str(folder))
    made.set(
        range(count), TensorDict({k: torch.from_numpy(v[:]) for k, v in data.items()}, [count])
    )
    return lambda rows: made.get(torch.tensor(rows)).contiguous()


PEERS = {"hf": (hf, "datasets"), "lmdb": (lmdb, "lmdb"), "litdata": (lit, "litdata")}
PEERS |= {"mosaicml": (mosaic, "streaming"), "torchrl": (torchrl, "torchrl")}


def main() -> None:
    name, data, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    make, module = PEERS[name]
    answer, sys.stdout = sys.stdout, sys.stderr
    try:
        importlib.import_module(module)
        import torch

        torch.set_num_threads(1)
        work.mkdir(parents=True)
        read = make(columns(data), work)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=answer, flush=True)
        return
    print(json.dumps({"ready": True}), file=answer, flush=True)
    for line in sys.stdin:
        for rows in json.loads(line):
            read(rows)
        print(json.dumps({"done": True}), file=answer, flush=True)


if __name__ == "__main__":
    main()
