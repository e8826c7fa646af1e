"""What the suites store, and how they compare."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable
from multiprocessing import context
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

#: Rows of ``plain()``.
ROWS = 12
#: Elements of ``ragged()``.
ELEMENTS = 9


def plain() -> TensorDict:
    """Return a tensordict of batch size ``[12, 3]``: several dtypes, nested, one leaf empty."""
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        a=torch.randn(ROWS, 3, 2, generator=generator),
        flag=torch.rand(ROWS, 3, generator=generator) > 0.5,
        deep=TensorDict(b=torch.arange(ROWS * 3).view(ROWS, 3), batch_size=[ROWS, 3]),
        empty=torch.zeros(ROWS, 3, 0),
        batch_size=[ROWS, 3],
    )


def ragged() -> LazyStackedTensorDict:
    """Return a stack of 9 elements; one entry differs in length (0 to 3), one does not."""
    return lazy_stack(
        [
            TensorDict(
                x=torch.arange(i % 4 * 2, dtype=torch.float32).view(i % 4, 2) + i,
                y=torch.tensor(i),
                deep=TensorDict(z=torch.full((i % 3 + 1,), i, dtype=torch.bfloat16)),
            )
            for i in range(ELEMENTS)
        ]
    )


def element(length: int, value: int) -> TensorDict:
    """Return an element for ``ragged()`` whose entries have ``length`` rows of ``value``."""
    return TensorDict(
        x=torch.full((length, 2), float(value)),
        y=torch.tensor(value),
        deep=TensorDict(z=torch.full((length,), value, dtype=torch.bfloat16)),
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: NaNs and dtypes without ``==`` compare by them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: Any, want: Any) -> None:
    """Fail unless two tensordicts agree in batch size, keys, dtypes, shapes and bytes."""
    assert got.batch_size == want.batch_size
    assert set(got.keys(True, True)) == set(want.keys(True, True))
    for key in want.keys(True, True):
        ours, theirs = got.get(key), want.get(key)
        assert (key, ours.dtype, ours.shape) == (key, theirs.dtype, theirs.shape)
        assert torch.equal(as_bytes(ours), as_bytes(theirs)), key


def assert_same_elements(got: Any, want: Any) -> None:
    """Fail unless two stacks have the same elements along dim 0."""
    assert len(got) == len(want)
    for i in range(len(want)):
        assert_same(got[i], want[i])


def as_in_a_worker(store: Any) -> Any:
    """Return the store as a worker process gets it that is being started: pickled with secrets."""
    context.set_spawning_popen(cast(Any, object()))
    try:
        blob = pickle.dumps(store)
    finally:
        context.set_spawning_popen(None)
    return pickle.loads(blob)


def in_threads(tasks: Iterable[Callable[[], None]], limit_s: float = 60) -> None:
    """Run the tasks at once, each in a thread; raise the first of their errors."""
    failures: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), f"a thread has not ended within {limit_s} s"
    if failures:
        raise failures[0]
