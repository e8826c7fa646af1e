"""A coroutine that runs ahead in a thread of its own, and plain code that takes what it puts."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tdio.errors import EndOfStream, PipeTimeout

T = TypeVar("T")

log = logging.getLogger("tdio")

#: Of small items more are held than were asked for, up to this: to hand over one at a time costs
#: two switches of threads, 20-50 us each.
SMALL_BYTES = 1 << 20
MAX_COUNT = 1024
#: Of smaller items the taker is told when the coroutine next waits: two threads that wake each
#: other for every item spend their time on the interpreter's lock.
_AT_ONCE_BYTES = 1 << 16
#: How long ``close`` waits for the coroutine to tidy up, in seconds.
_CLOSE_S = 10.0
#: How long a task that was cancelled may go on before it is cancelled again, in seconds.
_AGAIN_S = 0.2


class Ahead(Generic[T]):
    """Runs ``work`` in a thread with an event loop of its own, until it ends or ``close``.

    The caller's thread may run an event loop, as a notebook's does. Nothing of this crosses a
    fork: in a child ``close`` does nothing.

    Args:
        work: is handed this object, to ``put`` into.
        prefetch: how many items are held, at least 1; small ones up to 1 MiB together.
    """

    def __init__(self, work: Callable[[Ahead[T]], Coroutine[Any, Any, None]], prefetch: int):
        self._prefetch = prefetch
        self._items: deque[tuple[T, int]] = deque()
        self._nbytes = 0
        self._changed = threading.Condition()
        self._closing = self._ended = self._putter_waits = self._telling = False
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._room: asyncio.Event | None = None
        self._pid = os.getpid()
        # A daemon, so that an interpreter that ends does not wait for a silent peer; closed at
        # exit, because UCX must not be torn down under it.
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="tdio-ahead", daemon=True
        )
        atexit.register(self.close)
        self._thread.start()

    # ---- in the thread

    def _run(self, work: Callable[[Ahead[T]], Coroutine[Any, Any, None]]) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._main(work))
        except BaseException as problem:
            error = problem
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    async def _main(self, work: Callable[[Ahead[T]], Coroutine[Any, Any, None]]) -> None:
        with self._changed:
            if self._closing:
                return
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._room = asyncio.Event()
        await work(self)

    async def put(self, item: T, nbytes: int) -> None:
        """Hand over an item; return when there is room for the next.

        Args:
            item: what ``get`` returns.
            nbytes: its size in memory.
        """
        assert self._room is not None
        with self._changed:
            self._items.append((item, nbytes))
            self._nbytes += nbytes
            if nbytes >= _AT_ONCE_BYTES:
                self._changed.notify()
        if nbytes < _AT_ONCE_BYTES and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)
        while not self._has_room():
            await self._room.wait()

    def _tell(self) -> None:
        self._telling = False
        with self._changed:
            self._changed.notify()

    def _has_room(self) -> bool:
        assert self._room is not None
        with self._changed:
            count = len(self._items)
            if count >= self._prefetch and (self._nbytes >= SMALL_BYTES or count >= MAX_COUNT):
                self._room.clear()
                self._putter_waits = True
                return False
            return True

    # ---- in the caller's thread

    def get(self, timeout_s: float | None, who: Callable[[], str]) -> T:
        """Return the next item.

        Args:
            timeout_s: how long to wait for it; None waits for ever.
            who: says whom it waited for, for the error.

        Raises:
            EndOfStream: the coroutine has ended, and everything that it put was returned.
            PipeTimeout: nothing came in time.
            BaseException: what the coroutine raised, after everything that it put before.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise EndOfStream("everything was received")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise PipeTimeout(f"no tensordict within {timeout_s:g} s: {who()}")
                self._changed.wait(left)
            item, nbytes = self._items.popleft()
            self._nbytes -= nbytes
            wake = self._putter_waits and self._is_half_empty()
            if wake:
                self._putter_waits = False
            room = self._room if wake else None
        if room is not None:
            self._in_loop(room.set)
        return item

    def _is_half_empty(self) -> bool:
        count = len(self._items)
        small = self._nbytes <= SMALL_BYTES // 2 and count <= MAX_COUNT // 2
        return small or count <= self._prefetch // 2

    def _in_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop has ended meanwhile, and nobody waits in it.
            pass

    def close(self) -> None:
        """Cancel the coroutine, wait until it has tidied up, and forget what was not taken."""
        if self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            task = self._task
        if task is not None:
            self._in_loop(task.cancel)
        # The garbage collector may call this in the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.warning("a stream was closed and still tidies up after %g s", _CLOSE_S)
        self._items.clear()


class Crew:
    """Tasks that belong together: the first error cancels the others, and is raised."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._error: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the others."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self._error is None:
            self._error = task.exception()
        if self._error is not None or not self._tasks:
            self._over.set()

    async def finish(self) -> None:
        """Wait until all have ended, those too that they start."""
        try:
            await self._over.wait()
        finally:
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                # Before Python 3.12 asyncio.wait_for loses a cancellation that comes together with
                # what it waited for.
                await asyncio.wait(self._tasks, timeout=_AGAIN_S)
        if self._error is not None:
            raise self._error
