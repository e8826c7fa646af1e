"""The two drivers of a pipe's operations: plain code, and a coroutine."""

from __future__ import annotations

from typing import TypeVar

from tdio.errors import TdioError
from tdio.transport.endpoint import Endpoint, Transfer
from tdio.wire.pipe import PEEK, PROBE, RECV, SEND, PipeOperation, Request

T = TypeVar("T")
_LOOKS = (PROBE, PEEK)


def _start(endpoint: Endpoint, request: Request) -> Transfer:
    what, buffer, channel = request
    if what == SEND:
        return endpoint.send(buffer, channel)
    return endpoint.recv(buffer, channel) if what == RECV else endpoint.flush()


def run(endpoint: Endpoint, operation: PipeOperation[T], timeout_s: float | None) -> T:
    """Run an operation in plain code; each of its waits may take ``timeout_s`` seconds."""
    try:
        request = next(operation)
        while True:
            try:
                what, _, channel = request
                if what in _LOOKS:
                    reply = endpoint.probe(channel)
                    if reply is None and what == PROBE:
                        endpoint.wait(lambda c=channel: endpoint.probe(c) is not None, timeout_s)
                        reply = endpoint.probe(channel)
                else:
                    transfer = _start(endpoint, request)
                    if not transfer.done:
                        endpoint.wait(lambda one=transfer: one.done, timeout_s)
                    reply = transfer.result()
            except TdioError as error:
                request = operation.throw(error)
            else:
                request = operation.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def run_async(endpoint: Endpoint, operation: PipeOperation[T], timeout_s: float | None) -> T:
    """The same in a coroutine. It may be cancelled, which leaves transfers under way."""
    try:
        request = next(operation)
        while True:
            try:
                what, _, channel = request
                if what in _LOOKS:
                    reply = endpoint.probe(channel)
                    if reply is None and what == PROBE:
                        await endpoint.wait_async(
                            lambda c=channel: endpoint.probe(c) is not None, timeout_s
                        )
                        reply = endpoint.probe(channel)
                else:
                    transfer = _start(endpoint, request)
                    if not transfer.done:
                        await endpoint.wait_async(lambda one=transfer: one.done, timeout_s)
                    reply = transfer.result()
            except TdioError as error:
                request = operation.throw(error)
            else:
                request = operation.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
