"""Connections over UCX: connect, listen, and adopt an endpoint of ucxx."""

from __future__ import annotations

import asyncio
import ctypes as c
import errno
import itertools
import logging
import socket
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tdio.errors import (
    AddressUnavailable,
    PeerLost,
    PipeClosed,
    PipeTimeout,
    PortInUse,
    ProtocolError,
)
from tdio.transport import ucx_lib as lib
from tdio.transport.tasks import Limit
from tdio.transport.ucx_adopted import adopt
from tdio.transport.ucx_endpoint import UcxEndpoint
from tdio.transport.ucx_handshake import (
    Steps,
    Wait,
    drive,
    drive_async,
    handshake,
    name_by_addresses,
    new_endpoint,
    place,
)
from tdio.transport.ucx_hush import Peer, hush, sockets_at
from tdio.transport.ucx_worker import Worker

__all__ = ["Listener", "adopt", "connect", "connect_async", "listen"]

log = logging.getLogger("tdio")

#: How long a client that has connected may take for its half of the handshake, in seconds.
HANDSHAKE_S = 5.0
#: Waits between two attempts to connect, in seconds; the last one is repeated.
_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)


def connect(host: str, port: int, timeout_s: float) -> UcxEndpoint:
    """Connect to a listener; tries again until one answers.

    Raises:
        PeerLost: the host name is unknown.
        ValueError: there is no such port.
        PipeTimeout: nothing answered there within ``timeout_s`` seconds.
        ProtocolError: what listens does not speak ucxx's handshake.
        TransportUnavailable: ucxx is missing, or this process is a forked child.
    """
    check_port(port, 1)
    with _resolving(host, port):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return drive(_connecting(place(host, port), found, timeout_s))


async def connect_async(host: str, port: int, timeout_s: float) -> UcxEndpoint:
    """The same for a coroutine; may be cancelled.

    Raises:
        PeerLost: the host name is unknown.
        ValueError: there is no such port.
        PipeTimeout: nothing answered there within ``timeout_s`` seconds.
        ProtocolError: what listens does not speak ucxx's handshake.
        TransportUnavailable: ucxx is missing, or this process is a forked child.
    """
    check_port(port, 1)
    with _resolving(host, port):
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return await drive_async(_connecting(place(host, port), found, timeout_s))


def check_port(port: Any, lowest: int) -> None:
    """Raise ValueError where ``port`` is no port; 0 is one to listen on only."""
    if not isinstance(port, int) or isinstance(port, bool) or not lowest <= port <= 65535:
        raise ValueError(f"the port is {port!r}; it must be a number from {lowest} to 65535")


class _resolving:  # noqa: N801
    """A name that no resolver knows is a peer that is not there."""

    def __init__(self, host: str, port: int):
        self._host, self._where = host, place(host, port)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise PeerLost(
                f"the host name {self._host!r} of {self._where} is unknown ({error})"
            ) from error


def _connecting(where: str, found: list[Any], timeout_s: float) -> Steps[UcxEndpoint]:
    """Try every address of the host in turn, again and again."""
    deadline = time.monotonic() + timeout_s
    reason: Exception | None = None
    why = ""
    for count in itertools.count():
        family, _, _, _, address = found[count % len(found)]
        endpoint = _dial(where, family, address)
        if isinstance(endpoint, int):
            why = lib.ucp().text(endpoint)
        else:
            try:
                return (yield from handshake(endpoint, max(0.0, deadline - time.monotonic())))
            except PeerLost as error:
                reason, why = error, str(error)
            except PipeTimeout as error:
                # What ends the last attempt; what became of the ones before it says more.
                reason = reason or error
                why = why or "no answer, and no refusal"
        left = deadline - time.monotonic()
        if left <= 0:
            break
        yield Wait(min(left, _PAUSES_S[min(count // len(found), len(_PAUSES_S) - 1)]))
    raise PipeTimeout(
        f"nothing answered at {where} within {timeout_s:g} s ({why}); is the other side "
        "listening, and are host and port right?"
    ) from reason


def _dial(where: str, family: int, address: Any) -> Any:
    packed = lib.pack_address(family, address)
    raw = c.create_string_buffer(packed, len(packed))
    target = lib.SockAddr(c.addressof(raw), len(packed))
    mask = lib.EP_ADDRESS | lib.EP_FLAGS
    return new_endpoint(
        Worker(family), where, False, mask, flags=lib.CLIENT_SERVER, sockaddr=target
    )


class Listener:
    """A port on which peers are waited for.

    Attributes:
        host: the address that is bound.
        port: its port, also where 0 was asked for.

    Raises:
        PortInUse: something else listens there.
        AddressUnavailable: the address is not one of this machine.
        ValueError: there is no such port.
        PeerLost: the host name is unknown.
        TransportUnavailable: ucxx is missing, or this process is a forked child.
    """

    def __init__(self, host: str, port: int):
        check_port(port, 0)
        self.host, self.port = host, port
        with _resolving(host, port):
            found = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        # One listener has one address: of a name with several, the IPv4 one.
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        self._family = family
        self._gate = threading.RLock()
        self._taking = False
        self._listener: Any = None
        #: The same worker, until ``close`` is called, and until it is destroyed.
        self._worker: Worker | None = Worker(family)
        self._owned: Worker | None = self._worker
        self._requests: OrderedDict[int, None] = OrderedDict()
        #: Who was accepted here.
        self._accepted: weakref.WeakKeyDictionary[UcxEndpoint, Peer] = weakref.WeakKeyDictionary()
        #: The sockets that were at this address before.
        self._others = sockets_at(family, *address[:2]) if port else set()
        # UCX keeps the pointer: the callback lives as long as the listener. It is no Python: UCX
        # holds a lock while it calls it, and Python may hand the interpreter to a thread that then
        # waits for that lock for ever.
        self._callback = lib.ConnCallback(self._requests.setdefault)
        try:
            self._listener = self._bind(self._worker, lib.pack_address(family, address))
        except BaseException:
            self._worker.close()
            raise
        attr = lib.ListenerAttr(mask=lib.LISTENER_ADDRESS)
        self._worker.api.listener_query(self._listener, c.byref(attr))
        self.host, self.port = lib.unpack_address(lib.field_bytes(attr, "sockaddr"))

    def _bind(self, worker: Worker, address: bytes) -> c.c_void_p:
        raw = c.create_string_buffer(address, len(address))
        params = lib.ListenerParams(
            mask=lib.LISTENER_ADDRESS | lib.LISTENER_HANDLER,
            sockaddr=lib.SockAddr(c.addressof(raw), len(address)),
            conn_handler=lib.Handler(c.cast(self._callback, c.c_void_p), None),
        )
        listener = c.c_void_p()
        status = worker.api.listener_create(worker.handle, c.byref(params), c.byref(listener))
        where = place(self.host, self.port)
        if status == lib.ERR_BUSY:
            raise PortInUse(
                f"{where} is in use ({errno.errorcode[errno.EADDRINUSE]}); listen on another port, "
                "or on 0 for a free one"
            )
        if status != lib.OK:
            why = _refusal(address) or worker.api.text(status)
            raise AddressUnavailable(
                f"cannot listen on {where}: {why}; is it an address of this machine?"
            )
        return listener

    @property
    def name(self) -> str:
        """Where it listens, for errors."""
        return f"listening on {place(self.host, self.port)}"

    def accept(self, timeout: float | Limit | None) -> UcxEndpoint:
        """Wait for the next peer. One that fails in the handshake is logged and passed over.

        Args:
            timeout: in seconds, the handshake included; None waits for ever.

        Raises:
            PipeTimeout: none came within ``timeout``.
            PipeClosed: the listener was closed.
        """
        return drive(self._accepting(Limit.of(timeout)))

    async def accept_async(self, timeout: float | Limit | None) -> UcxEndpoint:
        """The same for a coroutine; may be cancelled.

        Raises:
            PipeTimeout: none came within ``timeout``; None waits for ever.
            PipeClosed: the listener was closed.
        """
        return await drive_async(self._accepting(Limit.of(timeout)))

    async def arrive_async(self, timeout_s: float | None) -> UcxEndpoint:
        """Wait for the next peer, with which nothing has been exchanged yet: see ``greet_async``.

        Raises:
            PipeTimeout: none came within ``timeout_s`` seconds; None waits for ever.
            PipeClosed: the listener was closed.
        """
        return await drive_async(self._arriving(Limit(timeout_s)))

    async def greet_async(self, endpoint: UcxEndpoint) -> UcxEndpoint | None:
        """Do the handshake with a peer; None for one that fails in it, which is logged."""
        return await drive_async(self._greeting(endpoint, HANDSHAKE_S))

    def _accepting(self, limit: Limit) -> Steps[UcxEndpoint]:
        while True:
            arrived = yield from self._arriving(limit)
            greeting = self._greeting(arrived, limit.at_most(HANDSHAKE_S))
            if (endpoint := (yield from greeting)) is not None:
                return endpoint
            if limit.over:
                raise self._nobody(limit)

    def _arriving(self, limit: Limit) -> Steps[UcxEndpoint]:
        while True:
            try:
                yield Wait(limit.left(), self, self._called)
            except PipeTimeout:
                raise self._nobody(limit) from None
            # Takes 7 ms, in which other threads run: made before there is a request to lose.
            worker = Worker(self._family)
            made = self._take(worker)
            if made is None:
                continue
            if not isinstance(made, int):
                endpoint: UcxEndpoint = made
                return endpoint
            log.warning("%s: a client was gone before it was accepted", self.name)

    def _nobody(self, limit: Limit) -> PipeTimeout:
        return PipeTimeout(f"{self.name}: no client came within {limit.timeout_s:g} s")

    def _take(self, worker: Worker) -> Any:
        """Make an endpoint of the next request, or UCX's error code; None if there is none.

        UCX's listener owns the request until then, so it is not destroyed meanwhile: ``close``
        waits, or where it interrupts this in the same thread (a signal's handler) leaves it to it.
        """
        with self._gate:
            if self._worker is None or not self._requests:
                worker.close()
                self._open()
                return None
            self._taking = True
            try:
                request, _ = self._requests.popitem(last=False)
                made = new_endpoint(worker, self.name, True, lib.EP_REQUEST, conn_request=request)
                if isinstance(made, UcxEndpoint):
                    self._accepted[made] = name_by_addresses(made)
                return made
            finally:
                self._taking = False
                if self._worker is None:
                    self._free()

    def _greeting(self, endpoint: UcxEndpoint, limit_s: float) -> Steps[UcxEndpoint | None]:
        try:
            return (yield from handshake(endpoint, limit_s))
        except (PeerLost, PipeTimeout, ProtocolError) as error:
            log.warning("%s: a client was refused: %s", self.name, error)
            return None

    def _called(self) -> bool:
        return bool(self._open() and self._requests)

    def _open(self) -> Worker:
        if self._worker is None:
            raise PipeClosed(f"{self.name}: the listener is closed")
        return self._worker

    def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Block until ``ready()`` is true; see ``accept``."""
        self._open().wait(ready, _nothing, timeout_s, self.name)

    async def wait_async(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """The same for a coroutine."""
        await self._open().wait_async(ready, _nothing, timeout_s, self.name)

    def close(self) -> None:
        """Free the port and refuse the clients that wait; accepted connections go on."""
        with self._gate:
            self._worker = None
            if not self._taking:
                self._free()

    def _free(self) -> None:
        worker, self._owned = self._owned, None
        if worker is None or not worker.usable:
            return
        if self._listener is not None:
            at = self._family, self.host, self.port
            spared = {peer for one, peer in list(self._accepted.items()) if peer and not one.closed}
            try:
                quiet = hush(*at, self._others, spared, lambda: self._refuse(worker))
            except OSError:
                # Out of file descriptors: it cannot be looked.
                quiet = False
            if not quiet:
                log.warning("%s: closed while clients were perhaps half way in", self.name)
            worker.api.listener_destroy(self._listener)
        worker.close()

    def _refuse(self, worker: Worker) -> None:
        worker.settle()
        while self._requests:
            worker.api.listener_reject(self._listener, self._requests.popitem(last=False)[0])

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # As the interpreter ends nothing can be called any more; the system closes the sockets.
        if getattr(self, "_worker", None) is not None and not ending():
            self.close()


def _refusal(address: bytes) -> str:
    """Why the system does not let anybody listen on an address: UCX does not tell."""
    family = socket.AF_INET6 if len(address) > 16 else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind(lib.unpack_address(address))
        except OSError as error:
            return str(error.strerror)
    return ""


def _nothing() -> None:
    """A listener cannot be lost."""


def listen(host: str, port: int) -> Listener:
    """Listen on an address; port 0 takes a free one, which ``.port`` tells.

    Raises:
        PortInUse: something else listens there.
        AddressUnavailable: the address is not one of this machine.
        ValueError: there is no such port.
        PeerLost: the host name is unknown.
        TransportUnavailable: ucxx is missing, or this process is a forked child.
    """
    return Listener(host, port)
