"""The closed vocabulary of errors.

Every class is also a subclass of the builtin that a caller would already catch, so
``except KeyError`` around a lookup keeps working. A message names what was asked, where
(store, key, server) and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "AddressUnavailable",
    "AuthenticationFailed",
    "CacheUnavailable",
    "CorruptEntry",
    "EmbeddedServerError",
    "EndOfStream",
    "EntryMismatch",
    "EntryNotFound",
    "EntryTooLarge",
    "EventLoopRunning",
    "IncompleteStore",
    "IndexOutOfRange",
    "InvalidIndex",
    "PeerLost",
    "PipeClosed",
    "PipeTimeout",
    "PortInUse",
    "ProtocolError",
    "ServerError",
    "ServerTimeout",
    "ServerUnavailable",
    "StateMismatch",
    "StoreExists",
    "StoreNotFound",
    "TdioError",
    "TransportUnavailable",
    "UnsupportedValue",
    "WrongStoreKind",
]


class TdioError(Exception):
    """The base of every error that tdio raises on purpose."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which hides the line breaks of a message.
        return str(self.args[0]) if self.args else ""


class StoreNotFound(TdioError, KeyError):
    """No store with this ``td_id`` under this prefix on this server."""


class WrongStoreKind(TdioError, KeyError):
    """The ``td_id`` belongs to the other kind of store."""


class StoreExists(TdioError, ValueError):
    """A store with this ``td_id`` is already there; a constructor does not overwrite it."""


class IncompleteStore(TdioError, RuntimeError):
    """The writer of the store has not finished, or died half way."""


class EntryNotFound(TdioError, KeyError):
    """The store has no entry under this key, or the server lost it."""


class CorruptEntry(TdioError, ValueError):
    """What the server holds under an entry contradicts its metadata."""


class EntryMismatch(TdioError, ValueError):
    """A value does not fit the entry it is written to: keys, shape or dtype differ."""


class UnsupportedValue(TdioError, TypeError):
    """A value of this type cannot be stored or sent."""


class EntryTooLarge(TdioError, ValueError):
    """An entry is larger than the server lets one string be."""


class IndexOutOfRange(TdioError, IndexError):
    """An index lies outside the store."""


class InvalidIndex(TdioError, IndexError):
    """An index of a type or shape that cannot select rows (a float, a mask of another length)."""


class CacheUnavailable(TdioError, OSError):
    """The local cache cannot be made: no space, or no right to write there."""


class StateMismatch(TdioError, ValueError):
    """A saved state does not belong to this dataset, order or seed."""


class ServerUnavailable(TdioError, ConnectionError):
    """Nothing answers at the address, or the connection broke."""


class AuthenticationFailed(TdioError, ConnectionError):
    """The server refused the user name or the password, or the peer the key. Never retried."""


class AccessDenied(TdioError, RuntimeError):
    """The server's access rules forbid the command or the key."""


class ServerTimeout(TdioError, TimeoutError):
    """The server did not answer within the limit."""


class ServerError(TdioError, RuntimeError):
    """The server answered a command with an error."""


class EmbeddedServerError(TdioError, RuntimeError):
    """The embedded server could not be started."""


class PeerLost(TdioError, ConnectionError):
    """The other end of a pipe died, reset it, or closed it before it had read everything."""


class ProtocolError(TdioError, ValueError):
    """The other end of a pipe sent what the protocol does not allow; the pipe is closed."""


class EndOfStream(TdioError, EOFError):
    """The other end of a pipe said that it sends no more; everything it sent was received."""


class PipeClosed(TdioError, RuntimeError):
    """The pipe was closed at this end."""


class PipeTimeout(TdioError, TimeoutError):
    """The other end of a pipe did not answer, read or send within the limit."""


class PortInUse(TdioError, OSError):
    """Another process, or another listener of this one, has the port."""


class AddressUnavailable(TdioError, OSError):
    """This machine does not let anybody listen on the address: it is another machine's, say."""


class TransportUnavailable(TdioError, ImportError):
    """The library that moves the messages of a pipe is not installed, or cannot work here."""


class EventLoopRunning(TdioError, RuntimeError):
    """A call that blocks was made inside a running event loop; await its twin instead."""
