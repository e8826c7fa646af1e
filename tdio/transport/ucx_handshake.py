"""How two ends get to know each other: ucxx's handshake, written once for both faces.

Each step is a generator: it yields what is to be waited for, and one of two drivers, plain or
coroutine, waits. Over UCX's stream each side tells the tag under which it receives, and a checksum
of it; the listening side speaks first. ucxx draws a random tag; ours has 32 fixed bits, by which
two ends that are both tdio know each other without a message.
"""

from __future__ import annotations

import asyncio
import ctypes as c
import hashlib
import secrets
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from tdio.errors import PeerLost, ProtocolError
from tdio.transport import ucx_lib as lib
from tdio.transport.ucx_endpoint import UcxEndpoint
from tdio.transport.ucx_worker import Worker

T = TypeVar("T")
#: The upper half of tdio's tags; the lowest bit is left for the channel.
MAGIC = 0x7464696F
_INFO_BYTES = 16


@dataclass(frozen=True)
class Wait:
    """Something to wait for: ``on`` (an endpoint or a listener) until ``ready()``, or a pause."""

    timeout_s: float | None
    on: Any = None
    ready: Callable[[], bool] | None = None


Steps = Generator[Wait, None, T]


def drive(steps: Steps[T]) -> T:
    """Run the steps in plain code."""
    try:
        step = next(steps)
        while True:
            try:
                if step.on is None:
                    time.sleep(step.timeout_s or 0)
                else:
                    step.on.wait(step.ready, step.timeout_s)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = next(steps)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(steps: Steps[T]) -> T:
    """Run the steps in a coroutine; may be cancelled."""
    try:
        step = next(steps)
        while True:
            try:
                if step.on is None:
                    await asyncio.sleep(step.timeout_s or 0)
                else:
                    await step.on.wait_async(step.ready, step.timeout_s)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = next(steps)
    except StopIteration as stop:
        result: T = stop.value
        return result


def new_endpoint(worker: Worker, name: str, accepted: bool, mask: int, **fields: Any) -> Any:
    """An endpoint on a worker that it then owns, or UCX's error code."""
    mark = lib.Mark(0)
    params = lib.EpParams(
        mask=mask | lib.EP_ERROR_MODE | lib.EP_ERROR_HANDLER,
        error_mode=lib.ERRORS_OF_PEER,
        error_handler=lib.marking(mark),
        **fields,
    )
    handle = c.c_void_p()
    status = worker.api.ep_create(worker.handle, c.byref(params), c.byref(handle))
    if status != lib.OK:
        worker.close()
        return status
    return UcxEndpoint(worker, handle.value or 0, mark, name, accepted)


def handshake(endpoint: UcxEndpoint, timeout_s: float) -> Steps[UcxEndpoint]:
    """Exchange the tags. Closes the endpoint where that fails.

    Raises:
        PeerLost: the peer went away.
        PipeTimeout: it did not say its half within ``timeout_s`` seconds.
        ProtocolError: what it said is not ucxx's handshake.
    """
    try:
        tag = MAGIC << 32 | secrets.randbits(31) << 1
        theirs = c.create_string_buffer(_INFO_BYTES)
        speak, listen = _speak(endpoint, _info(tag)), _listen(endpoint, theirs)
        deadline = time.monotonic() + timeout_s
        for step in (speak, listen) if endpoint.accepted else (listen, speak):
            request = step()
            if request is not None and request >= lib.FIRST_ERROR:
                raise _gone(endpoint, request - (1 << 64))
            if request is not None:
                left = max(0.0, deadline - time.monotonic())
                yield Wait(left, endpoint, _finished(endpoint, request))
        (peer_tag,) = struct.unpack_from("<Q", theirs.raw)
        if theirs.raw != _info(peer_tag):
            raise ProtocolError(
                f"{endpoint.name}: the peer's handshake is wrong; is it tdio or ucxx?"
            )
    except BaseException:
        endpoint.close()
        raise
    endpoint.agree(peer_tag, tag, peer_tag >> 32 == MAGIC)
    name_by_addresses(endpoint)
    return endpoint


def _speak(endpoint: UcxEndpoint, info: bytes) -> Callable[[], Any]:
    mine = endpoint.keep(c.create_string_buffer(info, _INFO_BYTES))
    send = endpoint.api.stream_send_nbx
    return lambda: send(endpoint.handle, mine, _INFO_BYTES, c.byref(lib.OpParam()))


def _listen(endpoint: UcxEndpoint, theirs: Any) -> Callable[[], Any]:
    endpoint.keep(theirs)
    length = endpoint.keep(c.c_size_t())
    param = lib.OpParam(mask=lib.OP_FLAGS, flags=lib.STREAM_WAIT_ALL)
    recv = endpoint.api.stream_recv_nbx
    return lambda: recv(endpoint.handle, theirs, _INFO_BYTES, c.byref(length), c.byref(param))


def _finished(endpoint: UcxEndpoint, request: int) -> Callable[[], bool]:
    def ready() -> bool:
        status = endpoint.api.request_check_status(request)
        if status == lib.IN_PROGRESS:
            return False
        endpoint.api.request_free(request)
        if status != lib.OK:
            raise _gone(endpoint, status)
        return True

    return ready


def _gone(endpoint: UcxEndpoint, status: int) -> PeerLost:
    why = endpoint.api.text(status)
    return PeerLost(f"{endpoint.name}: the peer went away during the handshake ({why})")


def _info(tag: int) -> bytes:
    """A tag and ucxx's checksum of it: the first 8 bytes of SHA-1 over the text ``(tag,)``."""
    digest = hashlib.sha1(f"({tag},)".encode()).digest()
    return struct.pack("<QQ", tag, int.from_bytes(digest[:8], "big"))


def name_by_addresses(endpoint: UcxEndpoint) -> tuple[str, int] | None:
    """Put both addresses into the name; return the other end's, None where it is gone already."""
    attr = lib.EpAttr(mask=lib.EP_LOCAL_ADDRESS | lib.EP_REMOTE_ADDRESS)
    if endpoint.api.ep_query(endpoint.handle, c.byref(attr)) != lib.OK:
        return None
    local, remote = (lib.unpack_address(lib.field_bytes(attr, one)) for one in ("local", "remote"))
    arrow = "<-" if endpoint.accepted else "->"
    endpoint.name = f"{place(*local)} {arrow} {place(*remote)}"
    return remote


def place(host: str, port: int) -> str:
    """An address as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
