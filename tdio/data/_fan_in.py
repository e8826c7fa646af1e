"""Where a stream's tensordicts come from, and one coroutine that takes them as they arrive."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from multiprocessing import context
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch.utils.data import get_worker_info

from tdio.data.batches import one_storage
from tdio.errors import (
    AuthenticationFailed,
    EndOfStream,
    PeerLost,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
    StateMismatch,
    TdioError,
)
from tdio.pipe.pipe import TensorDictPipe
from tdio.pipe.server import TensorDictServer
from tdio.transport.ahead import Ahead, Crew

log = logging.getLogger("tdio")

#: What the two ends of a resumable stream say before the first tensordict.
ASK, ANSWER = "resume_from", "resumed_at"
#: What makes a producer a lost one.
LOST = (PeerLost, ProtocolError, PipeTimeout, PipeClosed, AuthenticationFailed)


class Source(ABC):
    """The pipes of one pass over a stream.

    Attributes:
        count: how many there are.
        port: the port that is listened on or connected to, if there is one.
    """

    count = 1
    port: int | None = None

    @abstractmethod
    def check(self) -> None:
        """Refuse a process that cannot have the pipes. Raises ValueError or PipeClosed."""

    @abstractmethod
    def pipes(self) -> AsyncIterator[TensorDictPipe]:
        """Yield them as they come."""

    def close(self) -> None:  # noqa: B027
        """Give up what was opened before a pass; most open nothing."""


class Live(Source):
    """Pipes that are open already. They belong to this process."""

    def __init__(self, pipes: tuple[TensorDictPipe, ...]):
        self.count = len(pipes)
        self._pipes = pipes
        self._pid = os.getpid()

    def check(self) -> None:
        """Refuse other processes, and pipes that are closed."""
        worker = get_worker_info()
        if worker is not None or os.getpid() != self._pid:
            raise _not_here(f"num_workers={worker.num_workers}" if worker else "this process")
        for pipe in self._pipes:
            if pipe.closed:
                raise PipeClosed(
                    f"the pipe {pipe.name} is closed: a stream over live pipes is read once"
                )

    async def pipes(self) -> AsyncIterator[TensorDictPipe]:
        """Yield them all."""
        for pipe in self._pipes:
            yield pipe

    def __getstate__(self) -> Any:
        raise _not_here("num_workers above 0")


def _not_here(what: str) -> ValueError:
    return ValueError(
        f"a stream over a live pipe cannot be read with {what}: a connection belongs to the "
        "process that made it. Use num_workers=0, or PipeStream.connect(host, port), which each "
        "worker opens for itself"
    )


class Dial(Source):
    """A connection to an address, opened anew by each pass in the process that reads."""

    def __init__(self, host: str, port: int, timeout_s: float, options: dict[str, Any]):
        self.port: int = port
        self._host, self._timeout_s = host, timeout_s
        self._options = options

    def check(self) -> None:
        """Any process may connect."""

    async def pipes(self) -> AsyncIterator[TensorDictPipe]:
        """Connect."""
        yield await TensorDictPipe.connect(
            self._host, self.port, timeout=self._timeout_s, wait_timeout=None, **self._options
        )

    def __getstate__(self) -> dict[str, Any]:
        return _without_secret(self.__dict__)


class Serve(Source):
    """A port, and the first ``count`` clients that come there."""

    def __init__(self, host: str | None, port: int, count: int, options: dict[str, Any]):
        self.port: int = port
        self.count = count
        self._host = host
        self._options = options
        self._server: TensorDictServer | None = None

    def check(self) -> None:
        """Refuse several workers: they cannot share a port."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"num_workers={worker.num_workers} workers cannot listen on one port: use "
                "num_workers=1, or PipeStream.connect() to a server of the producer"
            )

    def start(self) -> TensorDictServer:
        """Listen, if nothing does yet."""
        if self._server is None:
            server = TensorDictServer(self.port, host=self._host, timeout=None, **self._options)
            self._server = server.start()
            self.port = server.port
        return self._server

    async def pipes(self) -> AsyncIterator[TensorDictPipe]:
        """Yield the pipe of each client; then the port is free again."""
        came = 0
        try:
            async with aclosing(aiter(self.start())) as clients:  # type: ignore[type-var]
                async for pipe in clients:
                    came += 1
                    yield pipe
                    if came == self.count:
                        return
        finally:
            self.close()

    def close(self) -> None:
        """Free the port."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __getstate__(self) -> dict[str, Any]:
        return _without_secret({**self.__dict__, "_server": None})


def _without_secret(state: dict[str, Any]) -> dict[str, Any]:
    """A key travels to the workers that this process starts, and into no file."""
    if context.get_spawning_popen() is None and isinstance(state["_options"]["auth_key"], bytes):
        return {**state, "_options": {**state["_options"], "auth_key": None}}
    return state


class FanIn:
    """One pass: reads the pipes of a source at the same time, and hands on what comes first.

    Each item that it hands on is a tensordict, and who sent it.

    Args:
        source: the pipes.
        device: where to receive; None: where the sender's storage was.
        on_lost: is told of a producer that was lost, and raises if that is an error.
        resume_at: the number of the first tensordict that is wanted, if the producer is asked.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device | str | None,
        on_lost: Callable[[str, TdioError], None],
        resume_at: int | None,
    ):
        self._source, self._device = source, device
        self._on_lost, self._resume_at = on_lost, resume_at
        self._open: dict[int, str] = {}
        self._came = 0
        #: Tensordicts that nobody needs any more, to be received into.
        self.spare: deque[Any] = deque()

    def waiting_for(self) -> str:
        """Say who has not sent the end of its stream."""
        texts = list(self._open.values())
        if missing := self._source.count - self._came:
            at = f" at port {self._source.port}" if self._source.port else ""
            texts.append(f"{missing} of {self._source.count} not connected{at}")
        return ", ".join(texts) or "nobody is left"

    async def run(self, ahead: Ahead[Any]) -> None:
        """Read until all have ended; whatever happens, no pipe is left open."""
        async with AsyncExitStack() as stack:
            crew = Crew()
            crew.start(self._gather(crew, stack, ahead))
            await crew.finish()

    async def _gather(self, crew: Crew, stack: AsyncExitStack, ahead: Ahead[Any]) -> None:
        pipes: Any = self._source.pipes()
        async with aclosing(pipes):
            async for pipe in pipes:
                await stack.enter_async_context(pipe)
                self._came += 1
                crew.start(self._read(self._came, pipe, ahead))

    async def _read(self, number: int, pipe: TensorDictPipe, ahead: Ahead[Any]) -> None:
        who = self._open[number] = f"producer {number} of {self._source.count} ({pipe.name})"
        try:
            # Left by an error this drops the pipe, else it says that all was read.
            async with pipe:
                if self._resume_at is not None:
                    await _agree(pipe, self._resume_at)
                await self._hand_on(pipe, ahead, who)
        except LOST as error:
            self._on_lost(who, error)
        finally:
            del self._open[number]

    async def _hand_on(self, pipe: TensorDictPipe, ahead: Ahead[Any], who: str) -> None:
        while True:
            into = self.spare.popleft() if self.spare else None
            try:
                td = await pipe.arecv(into, device=self._device, keep=True)
            except EndOfStream:
                return
            td, nbytes = _whole(td)
            await ahead.put((td, who), nbytes)


def _whole(td: Any) -> tuple[Any, int]:
    """Return a tensordict whose leaves share a storage, and its size; copied only if needed."""
    if td.is_consolidated():
        return td, td._consolidated["storage"].nbytes
    leaves = list(_leaves(td))
    if len({leaf.untyped_storage().data_ptr() for leaf in leaves}) > 1:
        td = one_storage(td)
    return td, sum(leaf.nbytes for leaf in leaves)


def _leaves(td: Any) -> Iterator[Any]:
    # A lazy stack's own values() stacks members, which may differ in shape.
    values = td.tensordicts if isinstance(td, LazyStackedTensorDict) else td.values()
    for value in values:
        if is_tensor_collection(value):
            yield from _leaves(value)
        elif isinstance(value, torch.Tensor):
            yield value.values() if value.is_nested else value


async def _agree(pipe: TensorDictPipe, number: int) -> None:
    """Ask the producer to begin at a tensordict. Raises StateMismatch."""
    await pipe.asend(TensorDict({ASK: torch.tensor(number)}))
    try:
        answer = await pipe.arecv()
    except EndOfStream:
        answer = TensorDict()
    if set(answer.keys()) != {ANSWER} or int(answer[ANSWER]) != number:
        raise StateMismatch(
            f"{pipe.name} was asked to begin at tensordict {number} and does not say that it does: "
            "a live stream is resumed only by a producer that calls tdio.resume_position(pipe) "
            "before it sends; pass resumable=False for others"
        )
