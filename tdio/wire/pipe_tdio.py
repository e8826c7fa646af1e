"""The messages between two tdio pipes: one for each tensordict, acknowledged in bulk.

The data channel carries storages, and frames for new schemas, for tensordicts that are sent leaf
by leaf, and for the end. The control channel carries what the reader has read, so that a sender
waits for a slow reader, and what the two ends agree on when they close.
"""

from __future__ import annotations

from typing import Any

from tdio.errors import AuthenticationFailed, EndOfStream, PeerLost, PipeTimeout, ProtocolError
from tdio.wire.frames import HEADER_BYTES, MAX_METADATA_BYTES, Frame, Kind, decode_frame
from tdio.wire.frames import encode_frame as encode
from tdio.wire.pipe import (
    CONTROL,
    DATA,
    PEEK,
    PROBE,
    RECV,
    SEND,
    Outgoing,
    Parcel,
    PipeOperation,
    Protocol,
    Sink,
    receive_exactly,
)

#: A sender that has this much unread at the other end waits; but for bytes not before
#: ``WINDOW_LEAST`` are unread: of large ones the next is on its way while one is acknowledged.
WINDOW_COUNT, WINDOW_BYTES, WINDOW_LEAST = 1024, 32 << 20, 2
#: A reader tells what it has read at least this often: often enough that nobody waits for it,
#: seldom enough to cost nothing (1 KiB tensordicts: one message in 256).
ACK_COUNT, ACK_BYTES = 256, 8 << 20


class TdioProtocol(Protocol):
    """A pipe whose other end is tdio too."""

    def __init__(self, name: str):
        super().__init__(name)
        self._schema: Outgoing | None = None
        self.sent = self.sent_bytes = self._acked = self._acked_bytes = 0
        self.got = self.got_bytes = self._told = self._told_bytes = 0
        self.ended = False
        self._end_read = self._peer_closing = self._peer_done = False

    @property
    def unread(self) -> int:
        """How many tensordicts were sent that the other end has not said to have read."""
        return self.sent - self._acked

    # ---- sending

    def send(self, parcel: Parcel) -> PipeOperation[None]:
        """Send one tensordict; wait first while too much is unread.

        Raises:
            PeerLost: the other end closed the pipe.
        """
        if (
            self.sent - self._acked >= WINDOW_COUNT // 2
            or self.sent_bytes - self._acked_bytes >= WINDOW_BYTES // 2
        ):
            yield from self._wait_for_window()
        self.mid_send = True
        schema, before = parcel.schema, self._schema
        avoid = -1 if before is None else before.nbytes
        if schema is None:
            yield SEND, encode(Kind.LEAVES, self.sent, 0, parcel.header, 0, avoid), DATA
            for buffer in parcel.buffers:
                yield SEND, buffer, DATA
        else:
            if schema is not before and (before is None or schema.identity != before.identity):
                text, flags = schema.text, schema.flags
                frame = encode(Kind.SCHEMA, self.sent, schema.nbytes, text, flags, avoid)
                yield SEND, frame, DATA
                self._schema = schema
            yield SEND, parcel.buffers[0], DATA
        self.sent += 1
        self.sent_bytes += parcel.nbytes
        self.mid_send = False

    def _wait_for_window(self) -> PipeOperation[None]:
        while (yield PEEK, None, CONTROL) is not None:
            yield from self._control()
        while not self._peer_closing and self._window_is_full():
            yield from self._control()
        if self._peer_closing:
            raise self._closed_by_peer()

    def _window_is_full(self) -> bool:
        unread = self.sent - self._acked
        return unread >= WINDOW_COUNT or (
            unread >= WINDOW_LEAST and self.sent_bytes - self._acked_bytes >= WINDOW_BYTES
        )

    def _control(self) -> PipeOperation[None]:
        """Take the next message of the control channel."""
        size = yield PROBE, None, CONTROL
        raw = bytearray(HEADER_BYTES)
        if size == len(raw):
            size = yield RECV, raw, CONTROL
        if size != len(raw):
            raise ProtocolError(f"{self.name} sent an acknowledgement of {size} bytes")
        frame = decode_frame(raw, self.name)
        if frame.kind < Kind.ACK or not self._acked <= frame.count <= self.sent:
            raise ProtocolError(
                f"{self.name} acknowledged {frame.count} tensordicts with a {frame.kind.name} "
                f"frame; {self.sent} were sent"
            )
        if not self._acked_bytes <= frame.nbytes <= self.sent_bytes:
            raise ProtocolError(
                f"{self.name} acknowledged {frame.nbytes} of {self.sent_bytes} bytes"
            )
        self._acked, self._acked_bytes = frame.count, frame.nbytes
        self._end_read |= frame.kind is Kind.ENDED
        self._peer_closing |= frame.kind in (Kind.CLOSING, Kind.BYE)
        self._peer_done |= frame.kind is Kind.BYE

    def _closed_by_peer(self) -> PeerLost:
        return PeerLost(
            f"{self.name} closed the pipe; it has not said that it read {self.unread} of the "
            f"{self.sent} tensordicts that were sent"
        )

    # ---- receiving

    def receive(self, sink: Sink) -> PipeOperation[Any]:
        """Receive one tensordict.

        Raises:
            EndOfStream: the other end said so.
            ProtocolError: it sent anything that is not due.
        """
        if self.ended:
            raise self._end()
        size = yield PROBE, None, DATA
        self.mid_recv = True
        if size == sink.nbytes:
            got = yield RECV, sink.target(), DATA
            if got != size:
                raise ProtocolError(f"{self.name} announced {size} bytes and sent {got}")
            result = sink.finish()
        else:
            frame = yield from self._frame(size)
            if frame.count != self.got:
                raise ProtocolError(
                    f"{self.name} is at tensordict {frame.count}, {self.got} have arrived"
                )
            size = 0
            if frame.kind is Kind.END:
                yield from self._tell(Kind.ENDED)
                self.ended, self.mid_recv = True, False
                raise self._end()
            if frame.kind is Kind.LEAVES:
                for buffer in sink.announce_leaves(frame.body):
                    size += buffer.numel()
                    yield from receive_exactly(buffer, buffer.numel(), self.name, "a leaf")
                result = sink.finish_leaves()
            else:
                sink.announce(frame.body, frame.flags)
                size = sink.nbytes
                yield from receive_exactly(sink.target(), size, self.name, "a storage")
                result = sink.finish()
        self.got += 1
        self.got_bytes += size
        if self.got - self._told >= ACK_COUNT or self.got_bytes - self._told_bytes >= ACK_BYTES:
            yield from self._tell(Kind.ACK)
            self._told, self._told_bytes = self.got, self.got_bytes
        self.mid_recv = False
        return result

    def _tell(self, kind: Kind) -> PipeOperation[None]:
        try:
            yield SEND, encode(kind, self.got, self.got_bytes), CONTROL
        except PeerLost:
            # What has arrived can still be received; after that the loss is seen.
            pass

    def _frame(self, size: int) -> PipeOperation[Frame]:
        if size > MAX_METADATA_BYTES + HEADER_BYTES + 1:
            raise ProtocolError(f"{self.name} sent {size} bytes that were not announced")
        raw = bytearray(size)
        yield from receive_exactly(raw, size, self.name, "a frame", size)
        frame = decode_frame(raw, self.name)
        if frame.kind in (Kind.HELLO, Kind.PROOF):
            raise AuthenticationFailed(f"{self.name} asks for authentication; pass auth_key=")
        if frame.kind > Kind.END:
            raise ProtocolError(f"{self.name} sent a {frame.kind.name} frame among the data")
        return frame

    def _end(self) -> EndOfStream:
        return EndOfStream(f"{self.name} sent its {self.got} tensordicts and closed the pipe")

    # ---- closing

    def close(self) -> PipeOperation[None]:
        """End the stream; return when the other end has read everything, or is closing too.

        Raises:
            PeerLost: it closed, or died, before it had read everything.
            PipeTimeout: it did not read everything within the limit of the driver.
        """
        self.mid_send = True
        try:
            while (yield PEEK, None, CONTROL) is not None:
                yield from self._control()
            if not self._peer_closing:
                avoid = -1 if self._schema is None else self._schema.nbytes
                yield SEND, encode(Kind.END, self.sent, avoid=avoid), DATA
            yield SEND, encode(Kind.CLOSING, self.got, self.got_bytes), CONTROL
            while not self._end_read and not self._peer_closing:
                yield from self._control()
            if not self.unread:
                yield SEND, encode(Kind.BYE, self.got, self.got_bytes), CONTROL
                # The other end may still wait for what was just sent: a connection that is
                # dropped now could lose it.
                while self._peer_closing and not self._peer_done:
                    yield from self._control()
        except (PeerLost, PipeTimeout) as error:
            if self.unread:
                raise type(error)(
                    f"{self.name} has said to have read {self._acked} of the {self.sent} "
                    f"tensordicts that were sent; the rest may be lost: {error}"
                ) from error
        if self.unread:
            raise self._closed_by_peer()
