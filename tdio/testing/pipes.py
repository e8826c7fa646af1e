"""``PipeTests``: what two ends of a pipe must do, whatever moves their messages."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from tdio import TensorDictPipe
from tdio.testing import _pipe_sides as sides
from tdio.transport.memory import memory_pair

Side = Callable[[TensorDictPipe], Awaitable[None]]
#: How long one side may take, in seconds.
LIMIT_S = 60.0


class PipeTests:
    """The conformance suite of pipes: a transport is right when a subclass passes.

    Each test is two coroutines, one for each end. As it stands the suite runs both in one event
    loop over a pair in memory; a subclass overrides ``both`` to bring its own connection, here or
    with one side in another process (``PeerProcess``).

    Name the subclass ``Test...`` and run it with pytest.

    Example:
        >>> from tdio.testing.pipes import PipeTests
        >>> class TestMemory(PipeTests):
        ...     pass
    """

    def both(self, left: Side, right: Side, left_options: Any, right_options: Any) -> None:
        """Connect two pipes with these options and run ``left`` on one, ``right`` on the other."""
        asyncio.run(in_memory(left, right, left_options, right_options))

    def run(self, left: Side, right: Side, **options: Any) -> None:
        """Run two sides with the same options."""
        self.both(left, right, options, options)

    def test_a_stream_is_received_whole_into_one_buffer(self) -> None:
        self.run(sides.send_stream, sides.recv_stream)

    def test_the_connecting_end_receives(self) -> None:
        self.run(sides.recv_stream, sides.send_stream)

    def test_every_kind_of_tensordict(self) -> None:
        self.run(sides.send_kinds, sides.recv_kinds)

    def test_leaf_by_leaf(self) -> None:
        self.run(sides.send_leaves, sides.recv_leaves, consolidated=False)

    def test_the_ends_need_not_agree_about_consolidated(self) -> None:
        self.both(sides.send_leaves, sides.recv_leaves, {"consolidated": False}, {})
        self.both(sides.send_stream, sides.recv_stream, {}, {"consolidated": False})

    def test_an_edited_tensordict_does_not_break_the_next(self) -> None:
        self.run(sides.send_numbers, sides.recv_and_edit)

    def test_receiving_into_a_tensordict(self) -> None:
        self.run(sides.send_numbers, sides.recv_into)

    def test_both_directions_at_once(self) -> None:
        self.run(sides.ping, sides.ping)

    def test_sends_at_once(self) -> None:
        self.run(sides.send_at_once, sides.recv_at_once)

    def test_a_slow_reader_makes_its_sender_wait(self) -> None:
        self.run(sides.send_to_slow, sides.recv_slow)

    def test_a_cancelled_receive(self) -> None:
        self.run(sides.send_late, sides.recv_cancelled)

    def test_what_is_refused(self) -> None:
        self.run(sides.send_refused, sides.recv_one)

    def test_plain_calls(self) -> None:
        self.run(sides.send_sync, sides.recv_sync)
        self.run(sides.send_sync, sides.recv_stream_of_1500)

    def test_a_peer_that_vanishes(self) -> None:
        self.run(sides.vanish, sides.recv_until_lost)
        self.both(sides.vanish, sides.recv_until_stop, {}, {"on_error": "stop"})

    def test_a_size_above_the_limit(self) -> None:
        self.both(sides.send_too_much, sides.refuse_too_much, {}, {"max_message_bytes": 1 << 19})

    def test_a_reader_that_leaves_early(self) -> None:
        self.run(sides.send_until_told, sides.leave_early)

    def test_closing_while_a_receive_waits(self) -> None:
        self.run(sides.close_while_receiving, sides.close_while_receiving)

    def test_a_key_on_both_sides(self) -> None:
        self.run(sides.send_stream, sides.recv_stream, auth_key=b"secret")

    @pytest.mark.parametrize("other", [b"wrong", None], ids=["another key", "no key"])
    def test_a_wrong_key(self, other: bytes | None) -> None:
        options = {"auth_key": b"secret"}, {"auth_key": other}
        self.both(sides.fail_to_authenticate, sides.fail_to_authenticate, *options)


async def in_memory(left: Side, right: Side, left_options: Any, right_options: Any) -> None:
    """Run two sides over a pair in memory."""
    ends = memory_pair()
    one, two = TensorDictPipe(ends[0], **left_options), TensorDictPipe(ends[1], **right_options)
    await asyncio.wait_for(asyncio.gather(left(one), right(two)), LIMIT_S)


class PeerProcess:
    """A spawned process that runs one side after the other, each on a pipe that ``opener`` opens.

    Args:
        opener: a picklable coroutine function that takes an address and options and returns a pipe.
    """

    def __init__(self, opener: Callable[..., Awaitable[TensorDictPipe]]):
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve_sides, args=(theirs, opener), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, side: Side, address: Any, options: Any) -> None:
        """Let it open a pipe and run ``side`` on it."""
        self._ours.send((side, address, options))

    def end(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the side has ended. Raises AssertionError with its traceback if it failed."""
        if not self._ours.poll(limit_s):
            raise AssertionError(f"the other side is still running after {limit_s:g} s")
        failure = self._ours.recv()
        assert failure is None, f"the other side failed:\n{failure}"

    def close(self) -> None:
        """End the process."""
        self._ours.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve_sides(connection: Any, opener: Callable[..., Awaitable[TensorDictPipe]]) -> None:
    torch.set_num_threads(1)

    async def work(side: Side, address: Any, options: Any) -> None:
        await asyncio.wait_for(side(await opener(address, **options)), LIMIT_S)

    while True:
        try:
            side, address, options = connection.recv()
        except EOFError:
            return
        try:
            asyncio.run(work(side, address, options))
        except BaseException:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)
