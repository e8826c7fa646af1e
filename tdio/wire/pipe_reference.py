"""The messages of tensordict's own pipe, in both of its modes, and of its send and recv."""

from __future__ import annotations

from typing import Any

from tdio.errors import ProtocolError
from tdio.wire.frames import LENGTH, MAX_METADATA_BYTES, NEW_SCHEMA, SAME_SCHEMA, decode_length
from tdio.wire.pipe import (
    DATA,
    FLUSH,
    PROBE,
    SEND,
    Parcel,
    PipeOperation,
    Protocol,
    Sink,
    receive_exactly,
)


def send_announced(text: bytes, parcel: Parcel) -> PipeOperation[None]:
    """Send a length, the metadata of that length, and the buffers of ``parcel``."""
    yield SEND, LENGTH.pack(len(text)), DATA
    yield SEND, text, DATA
    for buffer in parcel.buffers:
        yield SEND, buffer, DATA


def receive_text(where: str) -> PipeOperation[bytes]:
    """Receive a length and the metadata of that length."""
    raw = bytearray(LENGTH.size)
    yield from receive_exactly(raw, len(raw), where, "a length")
    text = bytearray(decode_length(raw, MAX_METADATA_BYTES, where))
    yield from receive_exactly(text, len(text), where, "metadata")
    return bytes(text)


def receive_storage(sink: Sink, where: str) -> PipeOperation[Any]:
    """Receive the storage of the current schema."""
    yield from receive_exactly(sink.target(), sink.nbytes, where, "a storage")
    return sink.finish()


def receive_leaves(sink: Sink, where: str) -> PipeOperation[Any]:
    """Receive a header and the leaves that it announces."""
    text = yield from receive_text(where)
    for buffer in sink.announce_leaves(text):
        yield from receive_exactly(buffer, buffer.numel(), where, "a leaf")
    return sink.finish_leaves()


class ReferenceProtocol(Protocol):
    """A pipe whose other end is tensordict's: no end of stream, no acknowledgements."""

    def __init__(self, name: str, consolidated: bool):
        super().__init__(name)
        self._consolidated = consolidated
        self._identity: str | None = None

    @property
    def unread(self) -> int:
        """0: this peer does not say what it has read."""
        return 0

    def send(self, parcel: Parcel) -> PipeOperation[None]:
        """Send the flag, the metadata where it is new, and the storage."""
        self.mid_send = True
        schema = parcel.schema
        if schema is None:
            yield from send_announced(parcel.header, parcel)
        elif schema.identity == self._identity:
            yield SEND, SAME_SCHEMA, DATA
            yield SEND, parcel.buffers[0], DATA
        else:
            yield SEND, NEW_SCHEMA, DATA
            yield from send_announced(schema.text, parcel)
            self._identity = schema.identity
        self.mid_send = False

    def receive(self, sink: Sink) -> PipeOperation[Any]:
        """Receive the flag and what follows it."""
        size = yield PROBE, None, DATA
        self.mid_recv = True
        if not self._consolidated:
            result = yield from receive_leaves(sink, self.name)
        else:
            if size != 1:
                raise ProtocolError(
                    f"{self.name} sent {size} bytes where a flag of one byte was due: the two ends "
                    "disagree about consolidated=, or it is not a tensordict pipe"
                )
            flag = bytearray(1)
            yield from receive_exactly(flag, 1, self.name, "a flag", size)
            if flag == NEW_SCHEMA:
                text = yield from receive_text(self.name)
                sink.announce(text, 0)
            elif flag != SAME_SCHEMA:
                raise ProtocolError(f"{self.name} sent the unknown flag {bytes(flag)!r}")
            elif sink.nbytes < 0:
                raise ProtocolError(f"{self.name} speaks of an earlier schema, and sent none")
            result = yield from receive_storage(sink, self.name)
        self.mid_recv = False
        return result

    def close(self) -> PipeOperation[None]:
        """Let what was sent reach the other end: tensordict's pipe has no end of stream."""
        yield FLUSH, None, DATA
