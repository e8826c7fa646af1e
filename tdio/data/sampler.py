"""``StoreBatchSampler``: batches of row numbers that shard over ranks and resume exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TypeVar

import numpy as np
from torch.utils.data import Sampler

from tdio.data.arguments import END, placement, whole
from tdio.data.order import epoch_order, share, step_sizes
from tdio.errors import StateMismatch
from tdio.layout.spec import Int64Array

T = TypeVar("T")
#: Version of the state that ``state_dict`` returns.
STATE_VERSION = 1


class StoreBatchSampler(Sampler[list[int]]):
    """Batches of row numbers for ``DataLoader(batch_sampler=...)``, sharded over ranks.

    The order of an epoch is a function of (seed, epoch, number of rows, ``block_rows``) alone.
    In each step all ranks together take the next rows of it, so a state is one position, and a
    run may go on with another number of ranks or workers: no row is left out or seen twice.

    Each pass is an epoch: the next pass takes the next one, also after one that was left early
    (how far a ``DataLoader`` had drawn ahead by then depends on its workers). To begin an epoch
    again, call ``set_epoch``. A pass begins when its first batch is drawn.

    Args:
        dataset: anything with a length, or that length. Numbers may be numpy's.
        batch_size: rows of a batch of one rank.
        shuffle: False takes the rows in order.
        seed: whole number >= 0, the same on every rank.
        epoch: the epoch to begin with.
        num_replicas: number of ranks; None takes it from ``torch.distributed`` where that is
            initialised, else from the environment variable ``WORLD_SIZE``, else 1.
        rank: rank of this process, found in the same way (``RANK``, else 0).
        drop_last: leave the rows out that do not fill a step of all ranks. Without this and
            ``pad`` the last batches are smaller and each row comes exactly once. Every rank has
            the same number of batches in any case.
        pad: fill the last step with rows from the beginning of the order, which come again.
        block_rows: how to shuffle. None shuffles single rows. Else blocks of so many neighbours are
            shuffled, and the rows within each 4 successive blocks: reads become runs of neighbours,
            which one range read serves. The rows of a batch come in ascending order.
            ``docs/data.md`` says what blocks cost in randomness.

    Raises:
        ValueError: each row exactly once is impossible (fewer rows than ranks, or batches of one
            row that do not come out even), or an argument out of range.

    Example:
        >>> from tdio import StoreBatchSampler
        >>> sampler = StoreBatchSampler(10, 4, num_replicas=2, rank=1)
        >>> list(sampler), sampler.epoch
        ([[4, 5, 6, 7], [9]], 1)
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        pad: bool = False,
        block_rows: int | None = None,
    ) -> None:
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        self.rows = whole("dataset", length, 0, END)
        self.num_replicas, self.rank = placement(num_replicas, rank)
        self.batch_size = whole("batch_size", batch_size, 1, END)
        self.block_rows = None if block_rows is None else whole("block_rows", block_rows, 1, END)
        if self.block_rows is not None and not shuffle:
            raise ValueError("block_rows= is a way to shuffle: pass shuffle=True with it")
        self.shuffle, self.seed = bool(shuffle), whole("seed", seed, 0, END)
        self.drop_last, self.pad = bool(drop_last), bool(pad)
        if self.drop_last and self.pad:
            raise ValueError("drop_last=True leaves out what pad=True would fill up; take one")
        if self._sizes(0) is None:
            raise ValueError(self._impossible(self.rows))
        # What has been drawn: rows of the order of ``_epoch`` that all ranks have taken. Without a
        # pass under way the next one goes on there.
        self._epoch, self._position = whole("epoch", epoch, 0, END), 0
        # The pass that was begun last: it took ``_epoch``, so the next one takes another.
        self._under_way: _Pass | None = None
        # The epoch that set_epoch asked for since then.
        self._asked: int | None = None
        # What the last loop of ``counting`` was given, unless it came to its end.
        self._counted: _Count | None = None

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank.

        Also where the next pass goes on in the middle of an epoch, and has fewer.
        """
        sizes = self._sizes(0)
        assert sizes is not None
        return len(sizes)

    def __iter__(self) -> _Pass:
        self._counted = None
        return _Pass(self)

    @property
    def epoch(self) -> int:
        """The epoch that the next pass takes; within a loop of ``counting``, that of the loop."""
        count = self._counted
        return count.epoch if count is not None and count.running else self._next()[0]

    def set_epoch(self, epoch: int) -> None:
        """Take this epoch in the next pass, from its beginning.

        One that was resumed is gone on with where its state was taken; if that was its end, the
        pass is empty. So a loop ``for epoch in range(first, last): sampler.set_epoch(epoch)``
        that begins with the epoch of a checkpoint is exact. The sampler lives in the trainer's
        process, so persistent workers follow as well.

        Args:
            epoch: from 0 to 2**63 - 1.

        Raises:
            ValueError: it is none of these.
        """
        epoch = whole("epoch", epoch, 0, END)
        if epoch != self._epoch or self._under_way is not None:
            self._go(epoch, 0)
        self._asked = epoch

    def _go(self, epoch: int, position: int) -> None:
        """Let the next pass begin there; one that is under way moves nothing any more."""
        self._epoch, self._position = epoch, position
        self._under_way = self._counted = None

    def _next(self) -> tuple[int, int]:
        """Return the epoch that the next pass takes, and the position that it begins at."""
        begun = self._under_way
        if begun is not None:
            return begun.start if begun.tentative else (self._epoch + 1, 0)
        if self._position and self._at_end() and self._asked != self._epoch:
            return self._epoch + 1, 0
        return self._epoch, self._position

    # ---- state

    def counting(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a ``DataLoader`` of this sampler, counting the batches that come out.

        A ``DataLoader`` with workers draws ahead of what it yields. Within this loop, and after
        it, ``state_dict`` counts what was yielded. A ``StatefulDataLoader`` does not need it.

        Args:
            loader: a ``DataLoader`` with ``batch_sampler=`` this sampler.

        Raises:
            ValueError: it yields another number of batches than this sampler.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from tdio import StoreBatchSampler
            >>> sampler = StoreBatchSampler(8, 4)
            >>> loader = DataLoader(range(8), batch_sampler=sampler, num_workers=2)
            >>> for batch in sampler.counting(loader):
            ...     print(batch.tolist(), sampler.state_dict()["position"])
            [0, 1, 2, 3] 4
            [4, 5, 6, 7] 8
        """
        epoch, start = self._next()
        ends = [after for _, _, after in self._steps(start)]
        iterator = iter(loader)
        count = self._counted = _Count(epoch, start)
        try:
            for number, batch in enumerate(iterator):
                if number == len(ends):
                    raise _uneven("more", len(ends))
                count.position = ends[number]
                yield batch
            if count.position != (ends or [start])[-1]:
                raise _uneven("fewer", len(ends))
            if self._counted is count:
                self._counted = None
        finally:
            count.running = False

    def state_dict(self) -> dict[str, int]:
        """Return where the epoch stands: whole numbers, under 1 kB, the same on every rank.

        What counts is what was yielded: to a ``StatefulDataLoader``'s user, to the loop of
        ``counting``, or else by this sampler.
        """
        count = self._counted
        at = (self._epoch, self._position) if count is None else (count.epoch, count.position)
        return {
            "version": STATE_VERSION,
            "rows": self.rows,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "block_rows": self.block_rows or 0,
            "epoch": at[0],
            "position": at[1],
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a state was taken, also with another number of ranks or batch size.

        A state of the end of an epoch leads to the whole next one, unless ``set_epoch`` asks for
        the one that it is of: then nothing is left of that.

        Raises:
            StateMismatch: the state is of other data or another order; the message names the
                field. Also where the remaining rows cannot be dealt out exactly once.
        """
        if not isinstance(state, Mapping):
            raise StateMismatch(f"{state!r:.80} is no state of a StoreBatchSampler")
        mine = self.state_dict()
        for field, value in mine.items():
            given = state.get(field)
            if type(given) is not int or given < 0:
                raise StateMismatch(f"the state has no whole number {field!r}: {given!r}")
            if field not in ("epoch", "position") and given != value:
                raise StateMismatch(
                    f"the state is of {field}={given}, this sampler has {field}={value}; resume "
                    "with the dataset and the arguments that it was taken with"
                )
        epoch, position = state["epoch"], state["position"]
        for field, end in (("epoch", END - 1), ("position", self.rows)):
            if state[field] > end:
                raise StateMismatch(f"the state has {field}={state[field]}, which is beyond {end}")
        if self._sizes(position) is None:
            raise StateMismatch(self._impossible(self.rows - position))
        self._go(epoch, position)

    def _go_on(self, loaded: _Pass, state: Mapping[str, int]) -> None:
        """Let a pass go on where the state of another was taken, for a ``StatefulDataLoader``.

        That loads when it is iterated, after set_epoch was called for it. Where its user had come
        to the end of the epoch, it may draw ahead from this pass, drops it, and iterates anew; it
        does not say which.
        """
        self.load_state_dict(state)
        asked = self._asked
        if asked is not None and (self._epoch, self._position) == (asked + 1, 0):
            # The same place, by the name of the epoch that was asked for.
            self._go(asked, self.rows)
        over = self._position > 0 and self._at_end()
        if asked is None:
            if over:
                loaded.end()
        elif asked == self._epoch:
            loaded.tentative = over
        else:
            self._go(asked, 0)
            loaded.tentative = True

    def _at_end(self) -> bool:
        sizes = self._sizes(self._position)
        return sizes is not None and not len(sizes)

    def _sizes(self, start: int) -> Int64Array | None:
        return step_sizes(
            self.rows - start,
            self.batch_size,
            self.num_replicas,
            drop_last=self.drop_last,
            pad=self.pad,
        )

    def _steps(self, start: int) -> list[tuple[int, int, int]]:
        """Return each step of all ranks: its first position, its rows, the position after it.

        The last step ends the epoch, also where it leaves rows out or takes some again.
        """
        sizes = self._sizes(start)
        assert sizes is not None
        begins = start + np.cumsum(sizes) - sizes
        after = np.append(begins[1:], self.rows)
        return list(zip(begins.tolist(), sizes.tolist(), after.tolist(), strict=False))

    def _impossible(self, rows: int) -> str:
        return (
            f"{rows} rows cannot be dealt to num_replicas={self.num_replicas} in the same number "
            f"of batches of at most {self.batch_size} with each row exactly once; use "
            "pad=True or drop_last=True"
        )

    # ---- drawing

    def _begin(self, begun: _Pass) -> tuple[int, int]:
        """Begin a pass; return its epoch, and the position that it begins at."""
        begun.start = self._epoch, self._position = self._next()
        self._asked, self._under_way = None, begun
        return begun.start

    def _order(self, epoch: int) -> Int64Array:
        if not self.shuffle:
            return np.arange(self.rows)
        return epoch_order(self.rows, self.seed, epoch, self.block_rows)

    def _advance(self, by: _Pass, position: int | None) -> None:
        """Note what a pass has drawn, None for its end, unless the sampler has left it."""
        if by is not self._under_way:
            return
        if position is not None:
            self._position = position
        elif not by.tentative:
            self._epoch, self._position, self._under_way = self._epoch + 1, 0, None


class _Pass(Iterator[list[int]]):
    """One pass over an epoch. Reads the sampler's state when the first batch is drawn."""

    def __init__(self, sampler: StoreBatchSampler):
        self._sampler = sampler
        self._batches: Iterator[tuple[list[int], int]] | None = None
        #: Epoch and position that it began at.
        self.start = (0, 0)
        #: Whether the next pass begins there again, unless set_epoch asks for another epoch.
        self.tentative = False

    def __next__(self) -> list[int]:
        if self._batches is None:
            self._batches = self._draw(*self._sampler._begin(self))
        drawn = next(self._batches, None)
        self._sampler._advance(self, None if drawn is None else drawn[1])
        if drawn is None:
            raise StopIteration
        return drawn[0]

    def _draw(self, epoch: int, start: int) -> Iterator[tuple[list[int], int]]:
        sampler = self._sampler
        order = sampler._order(epoch)
        for position, size, after in sampler._steps(start):
            begin, end = share(size, sampler.rank, sampler.num_replicas)
            # Only ``pad`` reaches beyond the end.
            rows = np.arange(position + begin, position + end) % max(1, sampler.rows)
            batch = order[rows]
            if sampler.shuffle and sampler.block_rows is not None:
                # Within a batch the order means nothing to a gradient, but runs in ascending
                # order are received straight into their places.
                batch.sort()
            yield batch.tolist(), after

    # A StatefulDataLoader looks for these on the iterator of a sampler.

    def state_dict(self) -> dict[str, int]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._sampler._go_on(self, state)

    def end(self) -> None:
        """Yield nothing, and move nothing."""
        self._batches = iter(())


class _Count:
    """How far a loop of ``counting`` has come."""

    def __init__(self, epoch: int, position: int):
        self.epoch, self.position, self.running = epoch, position, True


def _uneven(which: str, batches: int) -> ValueError:
    return ValueError(
        f"the loader yields {which} batches than the {batches} of this pass: is it one with "
        "batch_sampler= this sampler?"
    )
