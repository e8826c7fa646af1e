"""``send_tensordict`` and ``recv_tensordict``: one tensordict with its metadata, no state."""

from __future__ import annotations

from typing import Any

import torch

from tdio._td import TensorDictBase
from tdio.pipe.channel import MAX_MESSAGE_BYTES, TIMEOUT_S
from tdio.pipe.drive import run_async
from tdio.pipe.incoming import Incoming
from tdio.pipe.opening import endpoint_of
from tdio.pipe.outgoing import Packer
from tdio.pipe.pipe import _device
from tdio.pipe.tree import plain
from tdio.wire.pipe_reference import receive_leaves, receive_storage, receive_text, send_announced


async def send_tensordict(endpoint: Any, td: TensorDictBase, *, consolidated: bool = True) -> None:
    """Send one tensordict with its metadata, in the format of tensordict's ``send_tensordict``.

    Args:
        endpoint: a ``tdio.transport.endpoint.Endpoint`` or a connected ``ucxx.Endpoint``.
        td: what to send.
        consolidated: one storage, or leaf by leaf; the receiver must say the same.

    Raises:
        UnsupportedValue: an entry that this format cannot hold; nothing was sent.
        PeerLost: the other end died or closed.
        PipeTimeout: it did not read for 300 s.

    Example:
        >>> import asyncio, torch
        >>> from tensordict import TensorDict
        >>> from tdio import recv_tensordict, send_tensordict
        >>> from tdio.transport.memory import memory_pair
        >>> async def main():
        ...     a, b = memory_pair()
        ...     await send_tensordict(a, TensorDict(x=torch.arange(3)))
        ...     return await recv_tensordict(b)
        >>> asyncio.run(main())["x"]
        tensor([0, 1, 2])
    """
    end = endpoint_of(endpoint)
    parcel = Packer(False, consolidated).pack(td)
    schema = parcel.schema
    # The metadata alone says how large the storage is.
    text = parcel.header if schema is None else schema.identity.encode()
    await run_async(end, send_announced(text, parcel), TIMEOUT_S)


async def recv_tensordict(
    endpoint: Any,
    td: TensorDictBase | None = None,
    *,
    device: torch.device | str | None = None,
    consolidated: bool = True,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Any:
    """Receive what ``send_tensordict`` sends, tdio's or tensordict's.

    Args:
        endpoint: a ``tdio.transport.endpoint.Endpoint`` or a connected ``ucxx.Endpoint``.
        td: a consolidated tensordict to receive into, if its layout, size and device match.
        device: where to allocate; by default where ``td`` is, else the host.
        consolidated: as at the sender.
        max_message_bytes: more is refused before memory is taken.

    Returns:
        ``td`` if it matched, else a new tensordict; its leaves are views of one storage (of one
        each with ``consolidated=False``).

    Raises:
        ProtocolError: the other end sent something else.
        PeerLost: it died or closed.
        PipeTimeout: nothing came for 300 s.
    """
    end = endpoint_of(endpoint)
    incoming = Incoming(end.name, max_message_bytes)
    if device is None and td is not None:
        state = plain(td).__dict__.get("_consolidated")
        device = None if state is None else state["storage"].device
    incoming.want(td, _device(device or "cpu"))
    if not consolidated:
        return await run_async(end, receive_leaves(incoming, end.name), TIMEOUT_S)
    text = await run_async(end, receive_text(end.name), TIMEOUT_S)
    incoming.announce(text, 0)
    return await run_async(end, receive_storage(incoming, end.name), TIMEOUT_S)
