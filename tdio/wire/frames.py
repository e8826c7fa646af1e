"""The bytes of single pipe messages: those of tensordict's pipe, and the frames between tdio peers.

Between two tdio peers the storage of a tensordict travels as one message with nothing around it;
every other message is a frame that begins with a fixed header. The two are told apart by size: a
message as long as the current storage is the storage, and a frame that happens to be that long
carries one more byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tdio.errors import ProtocolError

#: A frame with a higher version is refused; see docs/wire.md for what raises it.
VERSION = 1
MAGIC = b"TDIO"
#: magic, version, kind, flags, count, bytes, length of the body
_HEADER = struct.Struct("<4sBBHQQQ")
HEADER_BYTES = _HEADER.size
#: More metadata than this is never allocated for, whatever the limit on messages.
MAX_METADATA_BYTES = 64 << 20

#: The flag byte of tensordict's pipe.
NEW_SCHEMA, SAME_SCHEMA = b"\x00", b"\x01"
LENGTH = struct.Struct("<Q")

#: A flag of a SCHEMA frame: each name of a nested tensordict has a "/" before it, so that an entry
#: called "leaves" is no field of the metadata.
ESCAPED = 1


class Kind(IntEnum):
    """What a frame is. The first three travel on the data channel, the last four on the other."""

    SCHEMA = 1
    LEAVES = 2
    END = 3
    HELLO = 4
    PROOF = 5
    ACK = 6
    ENDED = 7
    CLOSING = 8
    BYE = 9


@dataclass(frozen=True)
class Frame:
    """A frame that was received.

    Attributes:
        kind: what it is.
        flags: ``ESCAPED`` or 0.
        count: how many tensordicts came before it (data), or were read (acknowledgements).
        nbytes: the size of what follows, or how many bytes were read.
        body: the rest.
    """

    kind: Kind
    flags: int
    count: int
    nbytes: int
    body: bytes


def encode_frame(
    kind: Kind, count: int = 0, nbytes: int = 0, body: bytes = b"", flags: int = 0, avoid: int = -1
) -> bytes:
    """Return a frame that is not ``avoid`` bytes long, so that nobody takes it for a storage."""
    frame = _HEADER.pack(MAGIC, VERSION, kind, flags, count, nbytes, len(body)) + body
    return frame + b"\0" if len(frame) == avoid else frame


def decode_frame(raw: Any, where: str) -> Frame:
    """Return the frame in ``raw``.

    Raises:
        ProtocolError: not a frame, a damaged one, or one of a newer version.
    """
    if len(raw) < HEADER_BYTES or bytes(raw[:4]) != MAGIC:
        raise ProtocolError(
            f"{where} sent a message of {len(raw)} bytes that is neither a frame nor the storage "
            "that was announced: it is not a tdio pipe, or its data was cut short"
        )
    _, version, kind, flags, count, nbytes, length = _HEADER.unpack_from(raw)
    if version > VERSION:
        raise ProtocolError(f"{where} speaks version {version} of the protocol; upgrade tdio here")
    if kind not in Kind._value2member_map_:
        raise ProtocolError(f"{where} sent a frame of the unknown kind {kind}")
    if not 0 <= len(raw) - HEADER_BYTES - length <= 1:
        raise ProtocolError(
            f"{where} sent a {Kind(kind).name} frame of {len(raw)} bytes with a body of {length}"
        )
    body = bytes(raw[HEADER_BYTES : HEADER_BYTES + length])
    return Frame(Kind(kind), flags, count, nbytes, body)


def decode_length(raw: Any, limit: int, where: str) -> int:
    """Return the length that announces metadata.

    Raises:
        ProtocolError: it is above ``limit``, so nothing is allocated for it.
    """
    length: int = LENGTH.unpack(raw)[0]
    if length > limit:
        raise ProtocolError(
            f"{where} announces {length} bytes of metadata, above the limit of {limit}: the two "
            "ends disagree about consolidated=, or it is not a tensordict pipe"
        )
    return length
