"""The order of an epoch, and how it is cut into the batches of all ranks. Pure."""

from __future__ import annotations

import numpy as np

from tdio.layout.spec import Int64Array

#: Blocks whose rows are shuffled together.
WINDOW_BLOCKS = 4


def epoch_order(rows: int, seed: int, epoch: int, block_rows: int | None) -> Int64Array:
    """Return a permutation of ``range(rows)``, int64 ``[rows]``, decided by the arguments alone.

    Drawn by sorting the raw output of Philox 4x64 (Salmon et al., 2011), which numpy keeps the
    same in every version and on every platform, as it does not for ``Generator.permutation``.

    Args:
        rows: number of rows.
        seed: any whole number >= 0.
        epoch: number of the epoch, >= 0.
        block_rows: None for a uniform permutation. Else blocks of so many neighbours are
            shuffled, and then the rows within each ``WINDOW_BLOCKS`` successive blocks: a batch
            comes from a few runs of neighbours.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    if block_rows is None:
        return _shuffled(bits.random_raw(rows))
    count = -(-rows // block_rows)
    blocks = _shuffled(bits.random_raw(count))
    order = (blocks[:, None] * block_rows + np.arange(block_rows)).reshape(-1)
    order = order[order < rows]
    # One sort for all windows: the window's number first, the random draw second.
    window = np.arange(rows) // (block_rows * WINDOW_BLOCKS)
    return order[np.lexsort((bits.random_raw(rows), window))]


def _shuffled(draws: object) -> Int64Array:
    keys = np.atleast_1d(np.asarray(draws, np.uint64))
    order = np.argsort(keys)
    # Equal draws are all but unheard of; only then does the kind of sort decide.
    if (np.diff(keys[order]) == 0).any():
        order = np.argsort(keys, kind="stable")
    return order


def step_sizes(
    rows: int, batch_size: int, ranks: int, *, drop_last: bool, pad: bool
) -> Int64Array | None:
    """Return how many rows each step of all ranks takes, int64 ``[steps]``.

    Every step but the last one or two is ``batch_size * ranks``. Rows that do not fill one are
    left out, filled up, or else dealt out with at least one for each rank; None where that cannot
    be (fewer rows than ranks, or batches of one row that do not come out even).
    """
    whole = batch_size * ranks
    steps, rest = divmod(rows, whole)
    sizes = np.full(steps, whole, np.int64)
    if not rest or drop_last:
        return sizes
    sizes = np.append(sizes, whole if pad else rest)
    if not pad and rest < ranks:
        if not steps or batch_size < 2:
            return None
        sizes[-2:] = whole - (ranks - rest), ranks
    return sizes


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the begin and end of a rank's rows within a step of ``size`` rows, cut evenly."""
    return size * rank // ranks, size * (rank + 1) // ranks
