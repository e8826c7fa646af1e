"""One end of a pipe: what it holds, how it proves its key, and how it comes to its end."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from tdio.errors import (
    AuthenticationFailed,
    EndOfStream,
    PeerLost,
    PipeClosed,
    ProtocolError,
    TdioError,
)
from tdio.pipe.drive import run, run_async
from tdio.pipe.incoming import Incoming
from tdio.pipe.opening import check_on_error, endpoint_of, read_key
from tdio.pipe.outgoing import Packer
from tdio.transport.endpoint import Endpoint
from tdio.transport.tasks import Turn, refuse_in_loop
from tdio.wire.pipe import Protocol
from tdio.wire.pipe_auth import authenticate
from tdio.wire.pipe_reference import ReferenceProtocol
from tdio.wire.pipe_tdio import TdioProtocol

T = TypeVar("T", bound="Channel")

#: More than this is not allocated for one tensordict unless the caller says so.
MAX_MESSAGE_BYTES = 8 << 30
#: How long one wait may take, in seconds.
TIMEOUT_S = 300.0
#: How long a client of a listener may take to prove that it holds the key, in seconds.
AUTH_S = 10.0
#: How long ``close`` waits for a peer to read what was sent, in seconds.
CLOSE_TIMEOUT_S = 30.0
#: How long ``close`` waits for a peer that has read everything to notice the end.
_GRACE_S = 2.0


class Channel:
    """What ``TensorDictPipe`` is without tensordicts: an endpoint, a protocol, turns, an end.

    Arguments and attributes are those of ``TensorDictPipe``.
    """

    error: Exception | None
    #: Also of an object whose arguments were refused.
    _closed = True

    def __init__(
        self,
        endpoint: Any,
        *,
        consolidated: bool = True,
        listener: Any = None,
        on_error: Literal["raise", "stop"] = "raise",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        auth_key: bytes | str | Path | None = None,
        timeout: float | None = TIMEOUT_S,
    ):
        check_on_error(on_error)
        self._key = read_key(auth_key)
        self._endpoint: Endpoint = endpoint_of(endpoint)
        if self._key is not None and self._endpoint.accepted is None:
            raise ValueError("auth_key= needs a pipe of connect() or listen()")
        self._listener = listener
        self._on_error = on_error
        self._timeout_s = timeout
        self.error: Exception | None = None
        self._send_error: TdioError | None = None
        tdio_peer = self._endpoint.tdio_peer
        self._protocol: Protocol = (
            TdioProtocol(self.name) if tdio_peer else ReferenceProtocol(self.name, consolidated)
        )
        self._packer = Packer(tdio_peer, consolidated)
        self._incoming = Incoming(self.name, max_message_bytes)
        self._send_turn, self._recv_turn, self._auth_turn = Turn(), Turn(), Turn()
        self._calls = 0
        self._closed = False

    # ---- authentication

    def _authenticate(self, timeout_s: float | None) -> None:
        self._auth_turn.acquire(timeout_s, "authentication")
        try:
            if self._key is not None:
                run(self._endpoint, self._proof(self._key), timeout_s)
                self._key = None
        except BaseException as error:
            self._drop(error)
            raise
        finally:
            self._auth_turn.release()

    async def _authenticate_async(self, timeout_s: float | None) -> None:
        await self._auth_turn.acquire_async(timeout_s, "authentication")
        try:
            if self._key is not None:
                await run_async(self._endpoint, self._proof(self._key), timeout_s)
                self._key = None
        except BaseException as error:
            self._drop(error)
            raise
        finally:
            self._auth_turn.release()

    def _proof(self, key: bytes) -> Any:
        return authenticate(key, bool(self._endpoint.accepted), self.name)

    # ---- errors

    def _check_send(self) -> None:
        self._check_open()
        if self._send_error is not None:
            raise self._send_error

    def _send_failed(self, error: BaseException) -> None:
        if isinstance(error, PeerLost):
            # What the other end sent before it was lost can still be received.
            self._send_error = error
        elif self._protocol.mid_send or isinstance(error, ProtocolError):
            self._drop(error)

    def _recv_failed(self, error: BaseException) -> None:
        fatal = isinstance(error, (PeerLost, ProtocolError, AuthenticationFailed))
        if (fatal or self._protocol.mid_recv) and not isinstance(error, EndOfStream):
            self._drop(error)

    # ---- closing

    @property
    def name(self) -> str:
        """Both addresses."""
        return self._endpoint.name

    @property
    def closed(self) -> bool:
        """Whether this end is closed, by a call or by an error."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            why = f": {self.error}" if self.error is not None else ""
            raise PipeClosed(f"the pipe {self.name} is closed{why}") from self.error

    def _drop(self, error: BaseException | None = None) -> None:
        """Close the endpoint at once."""
        if self._closed:
            return
        self._closed = True
        if isinstance(error, Exception):
            self.error = error
        elif error is not None:
            self.error = PipeClosed(f"a call was interrupted by {type(error).__name__} half way")
        if self._listener is not None:
            self._listener.close()
        self._endpoint.close()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """End the stream, wait until the other end has read everything, and close.

        Closing a closed pipe does nothing. The end is closed in any case, also by an error.

        Args:
            timeout: for how many seconds to wait for the other end.

        Raises:
            PeerLost: it closed or died before it had read everything.
            PipeTimeout: it did not read everything in time.
        """
        if self._closed:
            return
        try:
            await self._send_turn.acquire_async(timeout, "aclose()")
            try:
                if not self._closed and self._send_error is None and self._key is None:
                    operation = self._protocol.close()
                    await run_async(self._endpoint, operation, self._limit(timeout))
            finally:
                self._send_turn.release()
        finally:
            self._drop()

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """``aclose`` for code without an event loop; same arguments and errors.

        Raises:
            EventLoopRunning: called inside a running event loop; the pipe stays open.
        """
        if self._closed:
            return
        refuse_in_loop("pipe.close()", "await pipe.aclose()")
        try:
            self._send_turn.acquire(timeout, "close()")
            try:
                if not self._closed and self._send_error is None and self._key is None:
                    run(self._endpoint, self._protocol.close(), self._limit(timeout))
            finally:
                self._send_turn.release()
        finally:
            self._drop()

    def _limit(self, timeout_s: float) -> float:
        return timeout_s if self._protocol.unread else min(timeout_s, _GRACE_S)

    async def __aenter__(self: T) -> T:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        # A block that failed has not sent everything: its reader must not see a clean end.
        if error is None:
            await self.aclose()
        else:
            self._drop()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._drop()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # As the interpreter ends nothing can be called any more; the system closes the connection.
        if not self._closed and not ending():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
            self._drop()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"{type(self).__name__}({self.name}, {state})"
