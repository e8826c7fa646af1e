"""Endpoints that the user made with ucxx: driven beside ucxx, on its worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from tdio.errors import PipeClosed
from tdio.transport import ucx_lib as lib
from tdio.transport.ucx_endpoint import UcxEndpoint, UcxTransfer
from tdio.transport.ucx_handshake import MAGIC
from tdio.transport.ucx_worker import SPIN_S, check_fork, timed_out

#: The longest sleep between two looks: ucxx may take the events of its worker for itself.
_SLEEP_S = 4e-3
#: Transfers that UCX had not given up when their endpoint was closed: their buffers stay.
_kept: list[UcxTransfer] = []


class _UcxxWorker:
    """The worker of a ucxx endpoint, which ucxx drives too, perhaps from a thread of its own."""

    def __init__(self, handle: int):
        self.handle = handle
        self._prepared = lib.prepare(handle)
        self._pid = os.getpid()
        self.api = lib.ucp_unlocked()

    @property
    def usable(self) -> bool:
        return self._pid == os.getpid()

    def step(self) -> None:
        self.api.worker_progress(*self._prepared)

    settle = step

    def wait(
        self,
        ready: Callable[[], bool],
        idle: Callable[[], None],
        timeout_s: float | None,
        what: str,
        nbytes: int,
    ) -> None:
        began = time.monotonic()
        while not self._look(ready):
            idle()
            time.sleep(self._pause(began, timeout_s, what))

    async def wait_async(
        self,
        ready: Callable[[], bool],
        idle: Callable[[], None],
        timeout_s: float | None,
        what: str,
        nbytes: int,
    ) -> None:
        began = time.monotonic()
        while not self._look(ready):
            idle()
            await asyncio.sleep(self._pause(began, timeout_s, what))

    def _look(self, ready: Callable[[], bool]) -> bool:
        self.step()
        return ready()

    def _pause(self, began: float, timeout_s: float | None, what: str) -> float:
        """No pause at first, then a tenth of what has passed."""
        waited = time.monotonic() - began
        if timeout_s is not None and waited >= timeout_s:
            raise timed_out(what, timeout_s)
        return 0.0 if waited < SPIN_S else min(_SLEEP_S, waited / 10)


class AdoptedEndpoint(UcxEndpoint):
    """A ``ucxx.Endpoint`` that the user made."""

    def __init__(self, endpoint: Any):
        worker: Any = _UcxxWorker(endpoint.ucp_worker)
        name = f"ucxx endpoint {endpoint.uid:#x}"
        super().__init__(worker, endpoint.ucp_endpoint, lib.Mark(0), name, None)
        self._ucxx = endpoint
        mine, theirs = endpoint._tags["msg_recv"], endpoint._tags["msg_send"]
        # ucxx drew a random tag for this end, so the peer takes it for ucxx, and rightly so.
        self.agree(theirs, mine, mine >> 32 == MAGIC and theirs >> 32 == MAGIC)

    def failure(self) -> int | None:
        """The error code of a connection that ucxx knows to be closed."""
        return lib.ERR_CONNECTION_RESET if self._ucxx.closed else None

    def close(self) -> None:
        """Close ucxx's endpoint; buffers of receives that UCX does not give up are kept."""
        worker, self._worker = self._worker, None
        if worker is None or not worker.usable:
            return
        for transfer in list(self.pending):
            if not transfer.done:
                self.api.request_cancel(worker.handle, transfer.request)
        self._ucxx.abort()
        worker.settle()
        _kept.extend(transfer for transfer in list(self.pending) if not transfer.done)
        for transfer in list(self.pending):
            transfer.error = PipeClosed(f"{self.name}: this end was closed during the transfer")


def adopt(endpoint: Any) -> UcxEndpoint:
    """Use an endpoint that ``ucxx.create_endpoint`` or a ``ucxx`` listener made.

    Raises:
        TypeError: it is no ``ucxx.Endpoint``, or one without tags.
        TransportUnavailable: this process is a forked child of one that used UCX.
    """
    if isinstance(endpoint, UcxEndpoint):
        return endpoint
    check_fork()
    if not getattr(endpoint, "_tags", None):
        raise TypeError(
            f"a pipe takes a ucxx.Endpoint of ucxx.create_endpoint or create_listener, not "
            f"{type(endpoint).__name__}"
        )
    return AdoptedEndpoint(endpoint)
