"""What UCX is told of a buffer, and the arguments of its calls for one channel of an endpoint."""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
import torch

from tdio.transport import ucx_lib as lib

#: Where a buffer is, how many bytes it has, and whether that is on a CUDA device.
Where = tuple[int, int, bool]


def address(buffer: Any, writable: bool = False) -> Where:
    """Where a buffer is, how many bytes it has, and whether that is on a CUDA device.

    Raises:
        TypeError: it is neither a tensor nor has it the buffer protocol, or it is read-only and
            is to be written.
        ValueError: its elements are not contiguous.
    """
    if isinstance(buffer, torch.Tensor):
        if not buffer.is_contiguous():
            raise ValueError(f"a tensor of strides {buffer.stride()} is not contiguous")
        return buffer.data_ptr(), buffer.nbytes, buffer.is_cuda
    view = memoryview(buffer)
    if writable and view.readonly:
        raise TypeError(f"cannot receive into a read-only {type(buffer).__name__}")
    if not view.contiguous:
        raise ValueError("the buffer is not contiguous")
    if not view.nbytes:
        return 0, 0, False
    place = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return place, view.nbytes, False


def _param(memory_type: int, info: lib.TagInfo | None = None) -> Any:
    param = lib.OpParam(mask=lib.OP_MEMORY_TYPE, memory_type=memory_type)
    if info is not None:
        param.mask |= lib.OP_RECV_INFO
        param.recv_info = c.addressof(info)
    return param


_SEND = (_param(lib.HOST_MEMORY), _param(lib.CUDA_MEMORY))
#: By whether the buffer is on a CUDA device.
SEND_AT = tuple(map(c.addressof, _SEND))


class Lane:
    """One channel: where UCX writes what it found, and the arguments of its calls.

    Two channels have two: threads that use one each run between a call of UCX and the look at what
    it wrote. A stream sends and receives one buffer mostly, so its arguments are kept.

    Args:
        worker: UCX's worker.
        endpoint: UCX's endpoint.
        send_tag: the tag of what is sent.
        recv_tag: the tag of what is received.

    Attributes:
        info: what was found.
        probing: the arguments of a probe.
        sent: the last buffer that was sent, and the arguments for it.
        received: likewise.
    """

    def __init__(self, worker: int, endpoint: int, send_tag: int, recv_tag: int) -> None:
        self.info = lib.TagInfo()
        self._worker, self._endpoint = worker, endpoint
        self._send_tag, self._recv_tag = send_tag, recv_tag
        self._recv = (_param(lib.HOST_MEMORY, self.info), _param(lib.CUDA_MEMORY, self.info))
        at = c.addressof(self.info)
        self.probing = lib.prepare(worker, recv_tag, lib.FULL_MASK, 0, at)
        self.sent: tuple[Where | None, tuple[Any, ...]] = (None, ())
        self.received: tuple[Where | None, tuple[Any, ...]] = (None, ())

    def sending(self, where: Where) -> tuple[Any, ...]:
        """The arguments to send a buffer, which are kept."""
        place, nbytes, cuda = where
        made = lib.prepare(self._endpoint, place, nbytes, self._send_tag, SEND_AT[cuda])
        # Key and arguments in one step, or an interruption between would mix two buffers.
        self.sent = where, made
        return made

    def receiving(self, where: Where) -> tuple[Any, ...]:
        """The arguments to receive into a buffer, which are kept."""
        place, nbytes, cuda = where
        at = c.addressof(self._recv[cuda])
        made = lib.prepare(self._worker, place, nbytes, self._recv_tag, lib.FULL_MASK, at)
        self.received = where, made
        return made
