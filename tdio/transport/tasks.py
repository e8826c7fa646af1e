"""Where pipes meet threads and event loops: turns, kept tasks, and no blocking inside a loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from tdio.errors import EventLoopRunning, PipeTimeout

log = logging.getLogger("tdio")


def refuse_in_loop(call: str, instead: str) -> None:
    """Raise at once where a call that blocks would stop a running event loop.

    Raises:
        EventLoopRunning: a loop runs in this thread.
    """
    if asyncio._get_running_loop() is not None:
        raise EventLoopRunning(
            f"{call} blocks, and an event loop is running in this thread; use {instead}"
        )


class Limit:
    """A timeout that several waits share: each gets what the ones before it have left.

    Args:
        timeout_s: for all of them together, in seconds; None waits for ever.
    """

    def __init__(self, timeout_s: float | None):
        self.timeout_s = timeout_s
        self._until = None if timeout_s is None else time.monotonic() + timeout_s

    @classmethod
    def of(cls, timeout: float | Limit | None) -> Limit:
        """Return a limit that begins now, or the one that runs already."""
        return timeout if isinstance(timeout, Limit) else cls(timeout)

    def left(self) -> float | None:
        """Return the seconds that are left, at least 0; None without a limit."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def at_most(self, seconds: float) -> float:
        """Return what is left, and not more than ``seconds``."""
        left = self.left()
        return seconds if left is None else min(seconds, left)

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left() == 0


class Turn:
    """One at a time, for threads and coroutines alike.

    In order of arrival, as far as that can be told of threads.
    """

    def __init__(self) -> None:
        #: Taken while somebody has the turn; handed on locked.
        self._turn = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    def _line_up(self, future: Future[None]) -> None:
        self._waiting.append(future)
        # In the line first: who has the turn looks there once more after it has let it go.
        self._pass_on()

    def acquire(self, timeout_s: float | None, what: str) -> None:
        """Wait for the turn.

        Raises:
            PipeTimeout: not within ``timeout_s`` seconds.
        """
        if not self._waiting and self._turn.acquire(False):
            return
        future: Future[None] = Future()
        try:
            self._line_up(future)
            future.result(timeout_s)
        except BaseException as error:
            self._leave(future)
            # Python 3.10 has classes of its own for both.
            if isinstance(error, (TimeoutError, concurrent.futures.TimeoutError)):
                raise PipeTimeout(_busy(what, timeout_s)) from None
            raise

    async def acquire_async(self, timeout_s: float | None, what: str) -> None:
        """The same for a coroutine; may be cancelled."""
        if not self._waiting and self._turn.acquire(False):
            return
        future: Future[None] = Future()
        try:
            self._line_up(future)
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except BaseException as error:
            self._leave(future)
            if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
                raise PipeTimeout(_busy(what, timeout_s)) from None
            raise

    def _leave(self, future: Future[None]) -> None:
        """Give up a place in the line, or the turn if it came meanwhile."""
        if not future.cancel() and not future.cancelled():
            self.release()

    def release(self) -> None:
        """Let the next one have its turn."""
        self._turn.release()
        if self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn, where nobody has it, to the first who still waits for it."""
        while self._waiting and self._turn.acquire(False):
            # Who takes somebody out of the line has the turn: nobody else does meanwhile.
            while self._waiting:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
                    return
            self._turn.release()


def _busy(what: str, timeout_s: float | None) -> str:
    return f"{what} waited {timeout_s:g} s for another call on the same pipe to end"


class Tasks:
    """Tasks that are kept until they end; an error of one is logged and hurts no other."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run ``work`` beside the others."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s failed: %s", what, error, exc_info=error)

        task.add_done_callback(ended)

    def cancel(self) -> None:
        """Ask all of them to stop."""
        for task in list(self._tasks):
            task.cancel()

    async def finish(self, timeout_s: float | None) -> None:
        """Wait for all of them; cancel those that take longer than ``timeout_s`` seconds."""
        own = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not own}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=timeout_s)


async def let_others_run() -> None:
    """Give the loop a turn: a coroutine that never has to wait would keep it to itself."""
    await asyncio.sleep(0)
