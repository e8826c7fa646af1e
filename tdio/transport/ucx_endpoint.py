"""An endpoint of UCX as pipes see it: messages by tag, sizes before buffers."""

from __future__ import annotations

import ctypes as c
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tdio.errors import PeerLost, PipeClosed, ProtocolError
from tdio.transport import ucx_lib as lib
from tdio.transport.endpoint import Endpoint, Transfer
from tdio.transport.ucx_lane import SEND_AT, Lane, address
from tdio.transport.ucx_worker import Worker, check_fork, lost

T = TypeVar("T")
#: How long ``close`` drives UCX to get the word out that it closes, in seconds.
CLOSE_S = 0.2


class _Done(Transfer):
    """A message that was through at once, as most short ones are."""

    done = True

    def __init__(self, nbytes: int):
        self.nbytes = nbytes

    def result(self) -> int:
        """Return the size of the message in bytes."""
        return self.nbytes


class UcxTransfer(Transfer):
    """One message, with its buffer, which lives until UCX is done with it."""

    __slots__ = ("_buffer", "_endpoint", "error", "nbytes", "request")

    def __init__(self, endpoint: UcxEndpoint, buffer: Any, nbytes: int):
        self._endpoint = endpoint
        self._buffer = buffer
        self.error: Exception | None = None
        self.request: int | None = None
        self.nbytes = nbytes

    def start(self, request: int) -> None:
        """Take what UCX returned: a request under way, or an error."""
        if request >= lib.FIRST_ERROR:
            self._fail(request - (1 << 64))
        else:
            self.request = request
            self._endpoint.pending.add(self)

    def _fail(self, status: int) -> None:
        self._buffer = None
        endpoint = self._endpoint
        if status == lib.ERR_MESSAGE_TRUNCATED:
            self.error = ProtocolError(
                f"{endpoint.name}: a message is longer than the buffer for it, {self.nbytes} bytes"
            )
        else:
            self.error = lost(endpoint.api, endpoint.name, status)

    @property
    def done(self) -> bool:
        """Whether the buffer is free again: the message arrived, left, or failed."""
        if self.request is None:
            return True
        return self._check()

    def _check(self) -> bool:
        # Another thread may close the endpoint after any call, hence what looks like one test
        # too many: between a test and the call that follows at once no other thread runs.
        endpoint = self._endpoint
        api, request = endpoint.api, self.request
        if request is None:
            return True
        status = api.request_check_status(request)
        if status == lib.IN_PROGRESS:
            return False
        if status == lib.OK:
            self._received()
        elif self.request is not None:
            self._fail(status)
        if self.request is not None:
            api.request_free(request)
            self._release()
        return True

    def _received(self) -> None:
        """Note the size of what came, where it was a receive."""

    def _release(self) -> None:
        self.request = self._buffer = None
        self._endpoint.pending.discard(self)

    def abandon(self, error: Exception) -> None:
        """End the transfer of an endpoint that is closed and no longer touches the buffer."""
        self.error = error
        self._release()

    def result(self) -> int:
        """Return the size of the message in bytes.

        Raises:
            PeerLost: the connection was lost before the message had passed.
            ProtocolError: the message was longer than the buffer.
            PipeClosed: the endpoint was closed meanwhile.
        """
        if not self.done:
            raise RuntimeError(f"{self._endpoint.name}: the transfer is still under way")
        if self.error is not None:
            raise self.error
        return self.nbytes


class _Receive(UcxTransfer):
    __slots__ = ()

    def _received(self) -> None:
        info = lib.TagInfo()
        test, request, info_at = (
            self._endpoint.api.tag_recv_request_test,
            self.request,
            c.addressof(info),
        )
        if request is not None:
            test(request, info_at)
            self.nbytes = info.length


class UcxEndpoint(Endpoint):
    """A connection over UCX.

    Args:
        worker: what drives it; the endpoint owns it.
        handle: UCX's endpoint.
        mark: what UCX sets when it gives the connection up.
    """

    def __init__(
        self, worker: Worker, handle: int, mark: lib.Mark, name: str, accepted: bool | None
    ):
        self._worker: Worker | None = worker
        self._handle = handle
        self._mark = mark
        self.name = name
        self.accepted = accepted
        self.api = api = worker.api
        self.pending: set[UcxTransfer] = set()
        self._kept: list[Any] = []
        self._last = _Done(0)
        self._lanes: tuple[Lane, ...] = ()
        self._tag_send, self._tag_recv, self._tag_probe = (
            api.tag_send_nbx,
            api.tag_recv_nbx,
            api.tag_probe_nb,
        )

    def agree(self, send_tag: int, recv_tag: int, tdio_peer: bool) -> None:
        """Set what the two ends agreed on. Nothing is sent, received or probed before."""
        self.tdio_peer = tdio_peer
        ends = self._open().handle, self._handle
        # The second channel has the tags that follow.
        self._lanes = tuple(Lane(*ends, send_tag + i, recv_tag + i) for i in range(2))

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._worker is None

    @property
    def handle(self) -> int:
        """UCX's endpoint."""
        self._open()
        return self._handle

    def _open(self) -> Worker:
        worker = self._worker
        if worker is None:
            raise PipeClosed(f"{self.name}: this end is closed")
        if not worker.usable:
            check_fork()
        return worker

    def failure(self) -> int | None:
        """The error code under which UCX gave the connection up, if it has."""
        return lib.ERR_CONNECTION_RESET if self._mark.value else None

    def keep(self, thing: T) -> T:
        """Keep alive what UCX holds a pointer to, as long as the endpoint."""
        self._kept.append(thing)
        return thing

    def _lost(self) -> PeerLost | None:
        status = self.failure()
        return None if status is None else lost(self.api, self.name, status)

    def send(self, buffer: Any, channel: int = 0) -> Transfer:
        """Start to send a message. ``buffer`` must not change before the transfer is done.

        Raises:
            PeerLost: the connection is lost.
            PipeClosed: this end is closed.
        """
        if self._worker is None or not self._worker.usable:
            self._open()
        if self.failure() is not None and (error := self._lost()):
            raise error
        where, lane = address(buffer), self._lanes[channel]
        last, arguments = lane.sent
        if where != last:
            arguments = lane.sending(where)
        if self._worker is None:
            # Closed by another thread meanwhile; after this test none runs before the call below.
            self._open()
        request = self._tag_send(*arguments)
        if request is None:
            return self._done(where[1])
        transfer = UcxTransfer(self, buffer, where[1])
        transfer.start(request)
        return transfer

    def probe(self, channel: int = 0) -> int | None:
        """Return the size of the next message that has begun to arrive, or None.

        Raises:
            PeerLost: no message is left and the connection is lost.
            PipeClosed: this end is closed.
        """
        worker = self._worker
        if worker is None or not worker.usable:
            worker = self._open()
        lane = self._lanes[channel]
        # Another thread may close this end after any call, but not between a test and a call.
        if self._worker is not None and self._tag_probe(*lane.probing):
            return int(lane.info.length)
        worker.step()
        if self._worker is not None and self._tag_probe(*lane.probing):
            return int(lane.info.length)
        if self._worker is None:
            self._open()
        if error := self._lost():
            raise error
        return None

    def recv(self, buffer: Any, channel: int = 0) -> Transfer:
        """Start to receive the next message into ``buffer``, which is at least as large.

        Raises:
            PipeClosed: this end is closed.
            TypeError: the buffer cannot be written to.
        """
        worker = self._worker
        if worker is None or not worker.usable:
            worker = self._open()
        where, lane = address(buffer, writable=True), self._lanes[channel]
        last, arguments = lane.received
        if where != last:
            arguments = lane.receiving(where)
        if self._worker is None:
            self._open()
        request = self._tag_recv(*arguments)
        if request is None:
            return self._done(lane.info.length)
        transfer = _Receive(self, buffer, where[1])
        transfer.start(request)
        return transfer

    def _unless_lost(self, ready: Callable[[], bool]) -> Callable[[], None]:
        """Raise once the connection is lost and all that came is taken in."""

        def idle() -> None:
            error = self._lost()
            if error is not None:
                self._open().settle()
                if not ready():
                    raise error

        return idle

    def _under_way(self) -> int:
        # A copy, in one step: another thread may start or end a transfer meanwhile.
        return sum(transfer.nbytes for transfer in list(self.pending))

    def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Block until ``ready()`` is true.

        Raises:
            PeerLost: the connection was lost first.
            PipeTimeout: not within ``timeout_s`` seconds; None waits for ever.
            PipeClosed: this end is closed.
        """
        worker, idle = self._open(), self._unless_lost(ready)
        worker.wait(ready, idle, timeout_s, self.name, self._under_way())

    async def wait_async(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """The same for a coroutine; may be cancelled, which leaves the transfers under way.

        Raises:
            PeerLost: the connection was lost first.
            PipeTimeout: not within ``timeout_s`` seconds; None waits for ever.
            PipeClosed: this end is closed.
        """
        worker, idle = self._open(), self._unless_lost(ready)
        await worker.wait_async(ready, idle, timeout_s, self.name, self._under_way())

    def _done(self, nbytes: int) -> Transfer:
        # Messages of a stream have one size mostly.
        last = self._last
        if last.nbytes != nbytes:
            last = self._last = _Done(nbytes)
        return last

    def flush(self) -> Transfer:
        """Start to wait until everything that was sent has reached the peer's UCX."""
        self._open()
        request = self.api.ep_flush_nbx(self._handle, SEND_AT[False])
        if request is None:
            return self._done(0)
        transfer = UcxTransfer(self, None, 0)
        transfer.start(request)
        return transfer

    def close(self) -> None:
        """Drop the connection at once. Buffers under way are free when this returns."""
        worker, self._worker = self._worker, None
        if worker is None or not worker.usable:
            return
        param = lib.OpParam(mask=lib.OP_FLAGS, flags=lib.FORCE_CLOSE)
        closing = self.api.ep_close_nbx(self._handle, c.byref(param))
        worker.run(closing, CLOSE_S)
        for transfer in list(self.pending):
            if not transfer.done:
                self.api.request_cancel(worker.handle, transfer.request)
        worker.settle()
        worker.close()
        for transfer in list(self.pending):
            transfer.abandon(PipeClosed(f"{self.name}: this end was closed during the transfer"))

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # As the interpreter ends nothing can be called any more; the system closes the sockets.
        if getattr(self, "_worker", None) is not None and not ending():
            self.close()
