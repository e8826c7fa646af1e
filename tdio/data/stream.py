"""``PipeStream``: what producers send through pipes, as a dataset to iterate."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import collate

from tdio.data._fan_in import ANSWER, ASK, Dial, FanIn, Live, Serve, Source
from tdio.data._rebatch import rebatch as regroup
from tdio.data.arguments import whole
from tdio.errors import EndOfStream, ProtocolError, StateMismatch, TdioError
from tdio.pipe.opening import CONNECT_TIMEOUT_S
from tdio.pipe.pipe import MAX_MESSAGE_BYTES, TIMEOUT_S, TensorDictPipe
from tdio.transport.ahead import Ahead

log = logging.getLogger("tdio")

STATE_VERSION = 2


class Position(NamedTuple):
    """How far a stream was read: tensordicts used up, rows of the next one, items yielded."""

    yielded: int
    rows: int
    items: int


_START = Position(0, 0, 0)


class PipeStream(IterableDataset[Any]):
    """The tensordicts that producers send, received ahead while the loop works.

    Three ways to make one: ``PipeStream(pipe)`` over pipes that are open, ``connect`` to an
    address, ``serve`` a port for producers that come. Iterate it, in plain code or in a notebook,
    or give it to ``DataLoader(stream, batch_size=None, num_workers=0 or 1)``. With more workers
    each connects for itself.

    It ends when every producer has ended its stream. The iteration owns the pipes: when it ends, by
    ``break`` or an error too, they are closed. So a stream over live pipes is read once; the others
    open new connections for each pass.

    Args:
        pipes: open pipes, read at the same time.
        clone: each item has memory of its own, as if it were cloned. False for a loop that is
            done with an item when it asks for the next: the memory is received into again. Not in a
            worker of a ``DataLoader``, which asks for the next at once.
        prefetch: how many tensordicts are received ahead, at least 1; small ones up to 1 MiB in
            total. Each producer may have received one more. When that is full producers wait.
        rebatch: regroup the rows (dim 0) into batches of so many, the last one smaller.
        max_items: end after so many items, those before a resume among them.
        timeout: for how many seconds to wait for an item, of whichever producer; None for ever.
        on_lost: what to do when a producer dies, sends garbage, or is silent for as long as its
            pipe allows: ``"raise"`` the error, after what had arrived, or ``"continue"`` with the
            others, with a warning in the log and a count in ``lost``.
        device: where to receive; None: where the sender's storage was.
        resumable: ask the producer where to begin, so that ``load_state_dict`` works. It must call
            ``resume_position(pipe)`` before it sends.

    Attributes:
        lost: how many producers were lost so far; in the process that iterates.

    Raises:
        TypeError: ``pipes`` are no ``TensorDictPipe``.
        ValueError: a number below 1, no pipe, or ``resumable`` with several producers.

    While iterating:

    Raises:
        PeerLost: a producer died before it ended its stream; the message names it.
        ProtocolError: it sent what is not allowed.
        PipeTimeout: nothing came in time, or nobody answered at the address.
        PortInUse: something else listens on the port.
        PipeClosed: a pipe is closed, perhaps by an earlier iteration.
        UnsupportedValue, EntryMismatch: from ``rebatch``.
        StateMismatch: the producer does not begin where it was asked to.
        ValueError: more workers than can read it; the message names ``num_workers``.

    Example:
        >>> import threading, torch
        >>> from tensordict import TensorDict
        >>> from tdio import PipeStream, TensorDictPipe
        >>> from tdio.transport.memory import memory_pair
        >>> writer, reader = map(TensorDictPipe, memory_pair())
        >>> def produce():
        ...     with writer:
        ...         for i in range(3):
        ...             writer.send(TensorDict(x=torch.full((2,), i), batch_size=[2]))
        >>> threading.Thread(target=produce).start()
        >>> [batch["x"].tolist() for batch in PipeStream(reader, rebatch=4)]
        [[0, 0, 1, 1], [2, 2]]
    """

    def __init__(
        self,
        *pipes: TensorDictPipe | Source,
        clone: bool = True,
        prefetch: int = 2,
        rebatch: int | None = None,
        max_items: int | None = None,
        timeout: float | None = TIMEOUT_S,
        on_lost: Literal["raise", "continue"] = "raise",
        device: torch.device | str | None = None,
        resumable: bool = False,
    ):
        super().__init__()
        numbers = {"pipes": len(pipes), "prefetch": prefetch, "rebatch": rebatch}
        for name, number in {**numbers, "max_items": max_items}.items():
            if number is not None:
                whole(name, number, 1)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; it must be above 0, or None for ever")
        if on_lost not in ("raise", "continue"):
            raise ValueError(f"on_lost is {on_lost!r}; it must be 'raise' or 'continue'")
        first = pipes[0]
        for pipe in pipes:
            if not isinstance(pipe, TensorDictPipe | Source):
                raise TypeError(
                    f"PipeStream takes pipes, PipeStream(a, b), not {type(pipe).__name__}; use "
                    "PipeStream.connect(host, port) or PipeStream.serve(port) for an address"
                )
        source = first if isinstance(first, Source) else Live(pipes)  # type: ignore[arg-type]
        if resumable and source.count > 1:
            raise ValueError(
                "resumable=True with several producers: the order in which their tensordicts "
                "arrive cannot be had again; read each with a stream of its own"
            )
        self._source: Source = source
        self._clone, self._prefetch, self._rebatch = clone, prefetch, rebatch
        self._max_items, self._timeout_s, self._on_lost = max_items, timeout, on_lost
        self._device, self._resumable = device, resumable
        self.lost = 0
        #: Where the next pass begins: set by load_state_dict, for one pass.
        self._begin: Position | None = None
        self._position = _START

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        *,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        consolidated: bool = True,
        auth_key: bytes | str | Path | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        **options: Any,
    ) -> PipeStream:
        """Return a stream that connects to a producer that listens, anew for each pass.

        Nothing is opened before the iteration, and it is opened in the process that iterates: a
        ``DataLoader`` may have several workers, each with a connection, where a
        ``TensorDictServer`` listens. What each is sent is up to it.

        Args:
            host: a name, an IPv4 or an IPv6 address.
            port: its port.
            connect_timeout: for how many seconds to try.
            consolidated: as of ``TensorDictPipe``.
            auth_key: as of ``TensorDictPipe``.
            max_message_bytes: as of ``TensorDictPipe``.
            options: see the class.
        """
        pipe_options = {
            "consolidated": consolidated,
            "auth_key": auth_key,
            "max_message_bytes": max_message_bytes,
        }
        return cls(Dial(host, port, connect_timeout, pipe_options), **options)

    @classmethod
    def serve(
        cls,
        port: int,
        *,
        producers: int = 1,
        host: str | None = None,
        consolidated: bool = True,
        auth_key: bytes | str | Path | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        **options: Any,
    ) -> PipeStream:
        """Return a stream of what several producers send that connect to this process.

        Tensordicts come as they arrive; those of one producer in its order. When all producers
        have come the port is free again.

        Args:
            port: 0 for any that is free: ``start()`` the stream, and ``port`` tells it.
            producers: how many come.
            host: the address of the interface to listen on; None for all of IPv4.
            consolidated: as of ``TensorDictPipe``.
            auth_key: as of ``TensorDictPipe``; a client without it is refused and not counted.
            max_message_bytes: as of ``TensorDictPipe``.
            options: see the class.

        Raises:
            ValueError: fewer than one producer.
        """
        if producers < 1:
            raise ValueError(f"producers is {producers}; it must be at least 1")
        pipe_options = {
            "consolidated": consolidated,
            "auth_key": auth_key,
            "max_message_bytes": max_message_bytes,
        }
        return cls(Serve(host, port, producers, pipe_options), **options)

    # ---- before and after

    @property
    def port(self) -> int | None:
        """The port that is connected to or listened on; None for live pipes."""
        return self._source.port

    def start(self) -> PipeStream:
        """Listen now, so that producers can connect before the iteration begins.

        Only of use after ``serve``. Iterate in the same process, or ``close``.

        Raises:
            PortInUse: something else listens there.
            TransportUnavailable: ucxx is not installed, or cannot work in this process.
        """
        if isinstance(self._source, Serve):
            self._source.start()
        return self

    def close(self) -> None:
        """Free the port of a stream that was started and not iterated."""
        self._source.close()

    # ---- iterating

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; see the class."""
        self._source.check()
        if not self._clone and get_worker_info() is not None:
            raise ValueError(
                "clone=False in a worker of a DataLoader, which hands an item on and receives into "
                "its memory again while the trainer reads it: leave it out, or use num_workers=0"
            )
        begin, self._begin = self._begin or _START, None
        self._position = begin
        return self._pass(begin)

    def _pass(self, begin: Position) -> Iterator[Any]:
        resume_at = begin.yielded if self._resumable else None
        left = None if self._max_items is None else max(0, self._max_items - begin.items)
        fan = FanIn(self._source, self._device, self._lose, resume_at)
        ahead = Ahead(fan.run, self._prefetch)
        try:
            items = self._received(ahead, fan)
            counted = self._counted(items, begin)
            for item, position in islice(counted, left):
                self._position = position
                yield item
                # Kept here it would not be free before the next one is there.
                del item
            self._position = _START
        finally:
            ahead.close()

    def _received(self, ahead: Ahead[Any], fan: FanIn) -> Iterator[tuple[Any, str]]:
        recycle = not self._clone or self._rebatch is not None
        while True:
            try:
                td, who = ahead.get(self._timeout_s, fan.waiting_for)
            except EndOfStream:
                return
            yield td, who
            if recycle:
                fan.spare.append(td)
            del td

    def _counted(
        self, items: Iterator[tuple[Any, str]], begin: Position
    ) -> Iterator[tuple[Any, Position]]:
        """Yield items with the position after each."""
        # Counted by hand: enumerate holds an item until the next one is there.
        count = 0
        if self._rebatch is None:
            for item, _ in items:
                count += 1
                yield item, Position(begin.yielded + count, 0, begin.items + count)
                del item
        else:
            for item, (used, rows) in regroup(items, self._rebatch, begin.rows):
                count += 1
                yield item, Position(begin.yielded + used, rows, begin.items + count)
                del item

    def _lose(self, who: str, error: TdioError) -> None:
        if self._on_lost == "raise":
            raise type(error)(
                f"{who}: {error} (on_lost='continue' goes on with the other producers)"
            ) from error
        self.lost += 1
        log.warning("%s is lost, the stream goes on: %s", who, error)

    # ---- resuming

    def state_dict(self) -> dict[str, int]:
        """Return what was yielded in this pass: whole numbers, no data.

        Returns:
            ``yielded``: how many tensordicts were used up; ``rows``: with ``rebatch``, how many
            rows of the next one were; ``items``: how many items that made. Zeros before a pass,
            and after one that came to its end. In a worker of a ``DataLoader`` the worker's stream
            counts: use a ``StatefulDataLoader``, which asks it.
        """
        return {"version": STATE_VERSION, **(self._begin or self._position)._asdict()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next pass where ``state`` was taken.

        Args:
            state: of ``state_dict``.

        Raises:
            StateMismatch: the state is none of a stream, or this stream cannot go back there: a
                live stream is not replayed, only a producer can begin later (``resumable=True``).
        """
        numbers = [state.get(name) for name in ("version", *Position._fields)]
        if numbers[0] != STATE_VERSION or not all(type(n) is int and n >= 0 for n in numbers):
            raise StateMismatch(f"{state!r} is no state of a PipeStream of version {STATE_VERSION}")
        begin = Position(*(state[name] for name in Position._fields))
        if any(begin) and not self._resumable:
            raise StateMismatch(
                f"{begin.yielded} tensordicts were yielded, and a live stream cannot be replayed: "
                "pass resumable=True, and let the producer call tdio.resume_position(pipe) and "
                "begin there"
            )
        if begin.rows and self._rebatch is None:
            raise StateMismatch("the state is of a stream with rebatch=, this one has none")
        self._begin = begin


def resume_position(pipe: TensorDictPipe) -> int:
    """Answer a reader that is ``resumable``: return the number of the tensordict to begin at.

    A producer calls it once, before it sends: 0 for a fresh start.

    Raises:
        ProtocolError: the reader does not ask (it is not ``resumable``).
        PipeTimeout: it does not ask in time; likewise.
        EventLoopRunning: called inside a running event loop; await ``aresume_position``.

    Example:
        >>> def produce(pipe, count):
        ...     with pipe:
        ...         for i in range(resume_position(pipe), count):
        ...             pipe.send(TensorDict(x=torch.tensor(i)))
    """
    number = _asked(pipe.recv(), pipe)
    pipe.send(TensorDict({ANSWER: torch.tensor(number)}))
    return number


async def aresume_position(pipe: TensorDictPipe) -> int:
    """``resume_position`` for a coroutine; same result and errors."""
    number = _asked(await pipe.arecv(), pipe)
    await pipe.asend(TensorDict({ANSWER: torch.tensor(number)}))
    return number


def _asked(td: Any, pipe: TensorDictPipe) -> int:
    if set(td.keys()) != {ASK}:
        raise ProtocolError(f"{pipe.name} sent {list(td.keys())} and did not ask where to begin")
    return int(td[ASK])


_default_convert: Any = collate.default_convert


def _convert(data: Any) -> Any:
    """Convert an item as torch does; a tensordict is one already."""
    return data if is_tensor_collection(data) else _default_convert(data)


# DataLoader(batch_size=None) hands items to this function, which takes a TensorDict for a mapping,
# iterates over its rows and fails. It is looked up here when a loader is made.
collate.default_convert = _convert
