"""One UCX context and worker for each connection, how it waits, and what holds across a fork.

A worker of its own costs 7 ms, 4.5 MB and 11 file descriptors, and buys: no lock shared between
threads, back-pressure (a pipe that nobody reads is not driven, so its sender waits, where a shared
worker would take everything in), and buffers that are free for certain once it is destroyed.
"""

from __future__ import annotations

import asyncio
import ctypes as c
import os
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from tdio.errors import PeerLost, PipeClosed, PipeTimeout, TransportUnavailable
from tdio.transport import ucx_lib as lib

#: Our defaults where the user has set no ``UCX_`` variable of that name (nor ucxx, on import,
#: anything else than its own default).
CONFIG = {
    # Without it UCX refuses shared memory to a connection that wants to hear of lost peers, and
    # two processes on one host talk over TCP.
    "MM_ERROR_HANDLING": "y",
    # A killed peer is seen at once because its socket closes; where another process holds that
    # socket (a forked child of the peer), the process is looked for at this interval.
    # With the default, 20 s, that takes as long. The look costs a stat of /proc.
    "KEEPALIVE_INTERVAL": "2s",
    # A look takes in so many pieces of 8 KiB at most. With UCX's 16 a message of 1 MiB takes a
    # dozen looks, each with its price in Python: 1 MiB at 0.67 of bare ucxx, with 128 at 0.88.
    "MM_FIFO_MAX_POLL": "128",
    # A port is free again when its listener closes, though connections it made are still open.
    "TCP_CM_REUSEADDR": "y",
}
#: Two processes on one host without a GPU: a message is copied in and out of shared memory while
#: it is sent, which for 1 MiB takes 140 us, where the sender's waiting for the receiver to fetch it
#: takes 200 us, and as long for 64 MiB; a peer that is lost is noticed the same. Not where there is
#: a GPU, whose buffers would be staged through the host, and not to another host, where fetching
#: is what RDMA is for: there it stays as ucxx sets it.
_NO_GPU = {"RNDV_THRESH": "intra:inf,inter:8192"}
#: UCX 1.21 reserves room for the address family of its own device and writes the peer's into it,
#: past the end where that is IPv6 and its own IPv4; so both ends of an IPv6 connection say IPv6.
_IPV6 = {"TCP_AF_PRIO": "inet6,inet"}
_DEFAULTS_OF_UCXX = {"UCX_RNDV_THRESH": "8192"}
#: How long a wait polls before it blocks, in seconds; and for each byte under way: to be woken
#: costs 50-100 us, the copy of 1 MiB as much.
SPIN_S = 100e-6
SPIN_S_PER_BYTE = 1e-9
_SETTLE_STEPS = 10_000
#: Sleeps of a blocked wait, in seconds: UCX's event descriptor may miss an event, so each is
#: twice as long as the last.
SLICES_S = (1e-3, 0.1)
#: A coroutine that never has to wait lets others run this often, in seconds.
YIELD_S = 2e-3

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_used = _forked = False


def _after_fork_in_child() -> None:
    global _forked
    _forked = _forked or _used or _used_by_ucxx()
    for worker in _workers:
        worker.disown()


def _used_by_ucxx() -> bool:
    """Whether ucxx's own asyncio layer has a context."""
    return getattr(sys.modules.get("ucxx.core"), "_ctx", None) is not None


os.register_at_fork(after_in_child=_after_fork_in_child)


def check_fork() -> None:
    """Raise where UCX cannot work: in a forked child of a process that has used it.

    Raises:
        TransportUnavailable: this process was forked from one that had used UCX.
    """
    if _forked:
        raise TransportUnavailable(
            f"process {os.getpid()} was forked from one that had already used a pipe, and UCX "
            "does not work in such a child: start it with multiprocessing's 'spawn' "
            "(DataLoader(multiprocessing_context='spawn')), or open the first pipe after the fork"
        )


def _has_gpu() -> bool:
    """Without asking CUDA, which must not be started before a fork."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def config(family: int) -> dict[str, str]:
    """The settings for a context: ours, less those for which the user set a variable."""
    ours = CONFIG | ({} if _has_gpu() else _NO_GPU)
    ours |= _IPV6 if family == socket.AF_INET6 else {}
    return {
        name: value
        for name, value in ours.items()
        if os.environ.get(f"UCX_{name}") in (None, _DEFAULTS_OF_UCXX.get(f"UCX_{name}"))
    }


class _Nap:
    """When a wait stops polling, and for how long it then sleeps."""

    def __init__(self, timeout_s: float | None, what: str, nbytes: int):
        self._what, self._timeout_s = what, timeout_s
        self._spin_s = SPIN_S + nbytes * SPIN_S_PER_BYTE
        self._began = now = time.monotonic()
        self._slice_s = SLICES_S[0]
        self._spin_until = now + self._spin_s

    def polls(self, moved: int) -> bool:
        """Whether to look again at once: something moves, or may within a moment."""
        now = time.monotonic()
        if moved:
            self._spin_until = now + self._spin_s
            return self._timeout_s is None or now - self._began < self._timeout_s
        return now < self._spin_until

    def seconds(self) -> float:
        """How long to sleep now.

        Raises:
            PipeTimeout: no time is left.
        """
        slice_s, self._slice_s = self._slice_s, min(2 * self._slice_s, SLICES_S[1])
        if self._timeout_s is None:
            return slice_s
        left = self._began + self._timeout_s - time.monotonic()
        if left <= 0:
            raise timed_out(self._what, self._timeout_s)
        return min(left, slice_s)

    def woke(self) -> None:
        """Poll again for a moment."""
        self._spin_until = time.monotonic() + self._spin_s


class Worker:
    """A context and a worker, and the two ways to wait for it.

    Args:
        family: the address family of the connections.

    Raises:
        TransportUnavailable: ucxx is missing, or this process is a forked child.
    """

    def __init__(self, family: int = socket.AF_INET) -> None:
        global _used
        check_fork()
        core = lib.core()
        self.api = api = lib.ucp()
        features = (core.Feature.TAG, core.Feature.STREAM, core.Feature.WAKEUP)
        _used = True
        context = core.UCXContext(config(family), feature_flags=features)
        self._worker = core.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self.handle: int = self._worker.handle
        self._prepared = lib.prepare(self.handle)
        self._fd: int = self._worker.epoll_file_descriptor
        #: The sleeping coroutines of each loop: a loop has one reader for a descriptor.
        self._asleep: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}
        self._progress = api.worker_progress
        self._yielded = 0.0
        #: Whether this process made it and has not destroyed it.
        self.usable = True
        _workers.add(self)

    def step(self) -> None:
        """Move things on a little: what comes in is taken in, so no more than is looked for."""
        if self.usable:
            self._progress(*self._prepared)

    def settle(self) -> None:
        """Move on what has arrived, though not for as long as a busy peer sends."""
        for _ in range(_SETTLE_STEPS):
            if not (self.usable and self._progress(*self._prepared)):
                return

    def _arm(self) -> bool:
        """Whether nothing is left to do, so that an event will end a sleep."""
        arm = self.api.worker_arm
        return self.usable and bool(arm(self.handle) == lib.OK)

    def wait(
        self,
        ready: Callable[[], bool],
        idle: Callable[[], None],
        timeout_s: float | None,
        what: str,
        nbytes: int = 0,
    ) -> None:
        """Block until ``ready()``: poll for a moment, then sleep until UCX has something.

        Args:
            ready: what is waited for.
            idle: called when nothing moved; may raise, which ends the wait.
            timeout_s: for how long; None waits for ever.
            what: is waited for, for errors.
            nbytes: how much is under way.

        Raises:
            PipeTimeout: not within ``timeout_s`` seconds.
            PipeClosed: the worker was closed meanwhile.
        """
        progress, prepared = self._progress, self._prepared
        nap = _Nap(timeout_s, what, nbytes)
        while True:
            if not self.usable:
                # Closed by another task or thread meanwhile: the handle is no more. Between this
                # test and the call below no other thread runs.
                raise PipeClosed(f"{what}: closed while it was waited for")
            moved = progress(*prepared)
            if ready():
                return
            if not moved:
                idle()
            if nap.polls(moved):
                continue
            seconds = nap.seconds()
            if self.usable and progress(*prepared):
                continue
            if not self._arm():
                # UCX holds what the peer has no room for: no event tells when it has.
                time.sleep(SLICES_S[0])
            elif not ready():
                self._sleep(seconds)
                nap.woke()

    def _sleep(self, limit_s: float) -> None:
        # One for each sleep: threads that sleep at the same time cannot share one.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(limit_s * 1000)

    async def wait_async(
        self,
        ready: Callable[[], bool],
        idle: Callable[[], None],
        timeout_s: float | None,
        what: str,
        nbytes: int = 0,
    ) -> None:
        """The same for a coroutine, whose loop then watches UCX's event descriptor.

        Raises:
            PipeTimeout: not within ``timeout_s`` seconds.
            PipeClosed: the worker was closed meanwhile.
        """
        progress, prepared, clock = self._progress, self._prepared, time.monotonic
        nap = _Nap(timeout_s, what, nbytes)
        while True:
            if clock() - self._yielded > YIELD_S:
                await self._yield()
            if not self.usable:
                # Closed by another task or thread meanwhile: the handle is no more. Between this
                # test and the call below no other thread runs.
                raise PipeClosed(f"{what}: closed while it was waited for")
            moved = progress(*prepared)
            if ready():
                # At once: a cancellation must not meet what is complete.
                return
            if not moved:
                idle()
            if nap.polls(moved):
                # Others on this loop may be what the peer waits for.
                if not moved:
                    await self._yield()
                continue
            seconds = nap.seconds()
            if self.usable and progress(*prepared):
                continue
            if not self._arm():
                # UCX holds what the peer has no room for: no event tells when it has.
                await asyncio.sleep(SLICES_S[0])
                self._yielded = clock()
            elif not ready():
                await self._event(seconds)
                self._yielded = clock()
                nap.woke()

    async def _yield(self) -> None:
        self._yielded = time.monotonic()
        await asyncio.sleep(0)

    async def _event(self, limit_s: float) -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        asleep = self._asleep.setdefault(loop, set())
        if not asleep:
            loop.add_reader(self._fd, _wake, asleep)
        asleep.add(event)
        timer = loop.call_later(limit_s, event.set)
        try:
            await event.wait()
        finally:
            timer.cancel()
            asleep.discard(event)
            # After ``close`` the descriptor may be another worker's.
            if not asleep and self._asleep.get(loop) is asleep:
                del self._asleep[loop]
                loop.remove_reader(self._fd)

    def _wake_all(self) -> None:
        """Let the sleeping coroutines see that this is closed, while the descriptor is open."""
        while self._asleep:
            loop, asleep = self._asleep.popitem()
            if loop is asyncio._get_running_loop():
                loop.remove_reader(self._fd)
                _wake(asleep)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_wake, asleep)

    def run(self, request: int | None, limit_s: float) -> bool:
        """Drive UCX until a request is done, at most ``limit_s``; frees it. Whether it was."""
        if request is None or request >= lib.FIRST_ERROR:
            return True
        until = time.monotonic() + limit_s
        while self.api.request_check_status(request) == lib.IN_PROGRESS:
            self._progress(*self._prepared)
            if time.monotonic() > until:
                return False
        self.api.request_free(request)
        return True

    def close(self) -> None:
        """Destroy the worker: UCX touches no buffer any more. Its endpoints are closed before."""
        if self.usable:
            self.usable = False
            self._wake_all()
            self._worker = None

    def disown(self) -> None:
        """Give the worker up in a forked child, where destroying it would talk to the peers."""
        if self.usable:
            self.usable = False
            # Never freed: not when it is collected, nor when the interpreter ends.
            c.pythonapi.Py_IncRef(c.py_object(self._worker))


def _wake(asleep: set[asyncio.Event]) -> None:
    for event in list(asleep):
        event.set()


def timed_out(what: str, timeout_s: float) -> PipeTimeout:
    """The error for a wait that took too long."""
    return PipeTimeout(f"{what}: nothing within {timeout_s:g} s; raise the timeout if it is slow")


def lost(api: Any, what: str, status: int) -> PeerLost:
    """The error for a connection that UCX has given up."""
    return PeerLost(
        f"{what}: the connection is lost ({api.text(status)}): the peer died, closed it, or is "
        "unreachable"
    )
