"""One of two ranks that walk the names of TensorDictBase which talk to another process.

Rank 0 has a store, rank 1 a local tensordict. Each exchange is made twice: between two local
tensordicts, which says what is right, and with the store on rank 0.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _surface import KINDS, LAZY, RAGGED, Raised, Side, local, outcome, same, stored

from tdio import open_store

#: An exchange that a rank leaves alone ends after this long.
LIMIT = timedelta(seconds=6)

Exchange = Callable[[int, Any, Any], Any]


def _pair(sender: str, receiver: str, source: int) -> Exchange:
    """Return the exchange in which ``source`` sends and the other receives in place."""

    def exchange(rank: int, t: Any, group: Any) -> Any:
        if rank == source:
            return getattr(t, sender)(1 - rank, group=group)
        return getattr(t, receiver)(source, group=group)

    return exchange


def _remote_init(source: int) -> Exchange:
    def exchange(rank: int, t: Any, group: Any) -> Any:
        if rank == source:
            return t.init_remote(1 - rank, group=group)
        return t.from_remote_init(source, group=group)

    return exchange


def _scatter(rank: int, t: Any, group: Any) -> Any:
    parts = [t.clone().zero_(), t.clone()] if rank == 1 else None
    return t.scatter(1, parts, group=group)


def _gather(rank: int, t: Any, group: Any) -> Any:
    """Gather on rank 1, into a tensordict with a dim for the senders."""
    if rank == 0:
        return t.gather_and_stack(1, group=group)
    return t.unsqueeze(0).clone().gather_and_stack(1, group=group)


EXCHANGES: dict[str, Exchange] = {
    "send": _pair("send", "recv", 0),
    "recv": _pair("send", "recv", 1),
    "isend": _pair("isend", "irecv", 0),
    "irecv": _pair("isend", "irecv", 1),
    "init_remote": _remote_init(0),
    "from_remote_init": _remote_init(1),
    "broadcast": lambda rank, t, group: t.broadcast(0, group=group),
    "broadcast/into": lambda rank, t, group: t.broadcast(1, group=group),
    "all_reduce": lambda rank, t, group: t.all_reduce(group=group),
    "reduce": lambda rank, t, group: t.reduce(0, group=group),
    "reduce/away": lambda rank, t, group: t.reduce(1, group=group),
    "all_gather": lambda rank, t, group: t.all_gather(group=group),
    "scatter": _scatter,
    "gather_and_stack": lambda rank, t, group: t.gather_and_stack(0, group=group),
    "gather_and_stack/away": _gather,
}

#: What is walked. A class method does not look at what a ragged stack holds.
PAIRS = [
    (kind, name)
    for name in EXCHANGES
    for kind in KINDS
    if (kind, name) != (RAGGED, "from_remote_init")
]


def _make(exchange: Exchange, rank: int, target: Any) -> Any:
    dist.barrier()  # a rank that was left alone in the last exchange comes late
    group = dist.new_group([0, 1], timeout=LIMIT)
    return outcome(
        lambda t, x: exchange(rank, t, group), target, Side(RAGGED, "floats", Path(), {})
    )


def _local(kind: str, rank: int) -> tuple[Any, Any]:
    """Return what a rank has. The entries of a lazy store travel whole, as those of a dense one."""
    root, target = local(kind, "floats", seed=rank)
    if kind == LAZY:
        root = target = root.contiguous()
    return root, target


def compare(name: str, kind: str, rank: int, conn: dict[str, Any]) -> str:
    """Make one exchange both ways; return what differs, or nothing."""
    exchange = EXCHANGES[name]
    root, target = _local(kind, rank)
    want = _make(exchange, rank, target)
    _, other = _local(kind, rank)
    store = None
    if rank == 0:
        store, other = stored(kind, local(kind, "floats", seed=rank)[0], conn)
    got = _make(exchange, rank, other)
    try:
        if isinstance(want, Raised):
            # The destination lacks the dim of the senders: an error on both sides.
            expected = name == "gather_and_stack" and isinstance(got, Raised)
            return "" if expected else f"tensordict itself: {want.error!r}"
        if isinstance(got, Raised):
            return f"{type(got.error).__name__}: {got.error}"
        same(got, want, (other, target), False, "result")
        if store is None:
            same(other, target, (None, None), False, "left")
        else:
            with open_store(td_id=store.td_id, **conn) as again:
                same(again, root, (None, None), True, "reread", lock=False)
    except AssertionError as difference:
        return f"differs: {difference}"
    finally:
        dist.barrier()  # what the other rank got may still be read
        if store is not None:
            store.clear_redis()
            store.close()
    return ""


def refusal(name: str, rank: int, conn: dict[str, Any]) -> str:
    """Ask a ragged store for an exchange; return what is said instead of what to call."""
    dist.barrier()
    group = dist.new_group([0, 1], timeout=LIMIT)
    if rank:
        return ""
    store, target = stored(RAGGED, local(RAGGED, "floats")[0], conn)
    got = outcome(
        lambda t, x: EXCHANGES[name](rank, t, group), target, Side(RAGGED, "floats", Path(), {})
    )
    store.clear_redis()
    store.close()
    named = isinstance(got, Raised) and "to_tensordict()" in str(got.error)
    return "" if named else f"no refusal that names to_tensordict(): {got!r}"


def main() -> None:
    rank, rendezvous, out, conn = (
        int(sys.argv[1]),
        sys.argv[2],
        sys.argv[3],
        json.loads(sys.argv[4]),
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    results = {}
    for kind, name in PAIRS:
        found = refusal(name, rank, conn) if kind == RAGGED else compare(name, kind, rank, conn)
        results[f"{name}-{kind}"] = found
    with open(out, "w") as file:
        json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
