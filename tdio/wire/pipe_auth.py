"""Two ends prove to each other that they hold the same key, before any tensordict.

Each sends 32 random bytes, then an HMAC-SHA256 over its role and both random values. The role keeps
a proof from being played back by whoever asked for it.
"""

from __future__ import annotations

import hmac
import os

from tdio.errors import AuthenticationFailed, ProtocolError
from tdio.wire.frames import HEADER_BYTES, Kind, decode_frame, encode_frame
from tdio.wire.pipe import DATA, PROBE, RECV, SEND, PipeOperation

_NONCE_BYTES = 32
_SIZE = HEADER_BYTES + _NONCE_BYTES


def authenticate(key: bytes, accepted: bool, where: str) -> PipeOperation[None]:
    """Prove to the other end that this one holds ``key``, and have it prove the same.

    Args:
        key: the shared key.
        accepted: whether a listener accepted this end.
        where: names the other end in errors.

    Raises:
        AuthenticationFailed: it holds another key, or none.
    """
    mine = os.urandom(_NONCE_BYTES)
    yield SEND, encode_frame(Kind.HELLO, body=mine), DATA
    theirs = yield from _receive(Kind.HELLO, where)
    nonces = theirs + mine if accepted else mine + theirs
    yield SEND, encode_frame(Kind.PROOF, body=_proof(key, accepted, nonces)), DATA
    proof = yield from _receive(Kind.PROOF, where)
    if not hmac.compare_digest(proof, _proof(key, not accepted, nonces)):
        raise AuthenticationFailed(f"{where} holds another auth_key")


def _proof(key: bytes, accepted: bool, nonces: bytes) -> bytes:
    role = b"accepted" if accepted else b"connected"
    return hmac.digest(key, b"tdio pipe 1 " + role + nonces, "sha256")


def _receive(kind: Kind, where: str) -> PipeOperation[bytes]:
    size = yield PROBE, None, DATA
    raw = bytearray(_SIZE)
    if size == _SIZE:
        yield RECV, raw, DATA
        try:
            frame = decode_frame(raw, where)
        except ProtocolError:
            frame = None
        if frame is not None and frame.kind is kind and len(frame.body) == _NONCE_BYTES:
            return frame.body
    raise AuthenticationFailed(f"{where} does not authenticate itself; it has no auth_key=")
