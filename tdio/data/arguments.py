"""Numbers that users pass: whole, of any kind, and within bounds; and those of a job's ranks."""

from __future__ import annotations

import os
from operator import index
from typing import Any

import torch.distributed as dist

#: Seeds and epochs are words of the generator's key, and of a JSON file's signed numbers.
END = 2**63


def whole(name: str, value: Any, first: int, end: int = END) -> int:
    """Return a whole number of any kind as an int. Raises ValueError outside ``[first, end)``."""
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: it must be a whole number") from None
    if not first <= number < end:
        to = "2**63 - 1" if end == END else end - 1
        raise ValueError(f"{name}={number}: at least {first}, at most {to}")
    return number


def placement(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this one's: as given, or as the job says.

    Raises:
        ValueError: the job says nothing that makes sense, or no rank where there are several.
    """
    if dist.is_available() and dist.is_initialized():
        found: tuple[Any, Any] = dist.get_world_size(), dist.get_rank()
        source = "torch.distributed"
    else:
        found = os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK") or None
        source = "the environment variables WORLD_SIZE and RANK"
    if num_replicas == 1 and rank is None:
        return 1, 0  # every process reads all of it
    try:
        ranks = int(found[0]) if num_replicas is None else num_replicas
        own = (0 if found[1] is None else int(found[1])) if rank is None else rank
    except ValueError:
        raise ValueError(f"{source} say {found[0]!r} and {found[1]!r}: whole numbers") from None
    ranks = whole("num_replicas", ranks, 1)
    if rank is None and found[1] is None and ranks > 1:
        raise ValueError(
            f"num_replicas={ranks} and no rank: pass rank=, or set RANK, or every process would "
            "read the rows of rank 0"
        )
    if rank is None and own >= ranks:
        raise ValueError(f"{source} say rank={own}, and there are num_replicas={ranks}")
    return ranks, whole("rank", own, 0, ranks)
