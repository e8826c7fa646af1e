"""``PipeTests``: what two ends of a pipe must do, whatever moves their messages."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    is_non_tensor,
    lazy_stack,
    tensorclass,
)

from tdio import TensorDictPipe
from tdio.errors import (
    AuthenticationFailed,
    EndOfStream,
    EventLoopRunning,
    PeerLost,
    PipeClosed,
    ProtocolError,
    UnsupportedValue,
)
from tdio.layout.dtypes import BY_NAME
from tdio.pipe.tree import plain
from tdio.transport.memory import memory_pair

Side = Callable[[TensorDictPipe], Awaitable[None]]
#: How long one side may take, in seconds.
LIMIT_S = 60.0


@tensorclass
class Sample:
    """A tensorclass that both ends know."""

    x: torch.Tensor
    label: str


def kinds() -> dict[str, Any]:
    """Return one tensordict of each kind, by name; what differs from it after a trip is a fault."""
    bits = torch.arange(64, dtype=torch.uint8)
    dtypes = {
        # A float that is not a number is not equal to itself: bits are compared.
        name.removeprefix("torch."): bits.remainder(2).view(dtype)
        if dtype == torch.bool
        else bits.view(dtype)
        for name, dtype in BY_NAME.items()
    }
    nested = TensorDict(
        a=torch.rand(3, 2),
        deep=TensorDict(b=torch.ones(3, 5, dtype=torch.uint8), c=TensorDict(batch_size=[3])),
        batch_size=[3],
    )
    named = TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3], names=["time", None])
    jagged = torch.nested.nested_tensor([torch.rand(2), torch.rand(5)], layout=torch.jagged)
    stack = lazy_stack([TensorDict(a=torch.rand(2)), TensorDict(a=torch.rand(3), z="k")])
    return {
        "flat": TensorDict(a=torch.rand(4), b=torch.arange(3)),
        "nested": nested,
        "named": named,
        "locked": TensorDict(a=torch.rand(4)).lock_(),
        "device": TensorDict(a=torch.rand(4), device="cpu"),
        "dtypes": TensorDict(dtypes),
        "0-d": TensorDict(a=torch.tensor(3), b=torch.tensor(2.5, dtype=torch.float64)),
        "empty leaves": TensorDict(a=torch.zeros(0, 3), b=torch.ones(2), c=torch.zeros(0)),
        "no leaves": TensorDict(batch_size=[7]),
        "strided": TensorDict(a=torch.rand(6, 4).t(), b=torch.rand(9)[::2]),
        "odd names": TensorDict(
            {"leaves": TensorDict(size=TensorDict(cls=torch.ones(2))), "a.b": torch.ones(1)}
        ),
        "values": TensorDict(
            a=torch.ones(2),
            text="é\n",
            number=NonTensorData(1, batch_size=[2]),
            flag=NonTensorData(True, batch_size=[2]),
            some=NonTensorData([1, {"k": None}], batch_size=[2]),
            each=NonTensorStack("x", "y"),
            batch_size=[2],
        ),
        "tensorclass": TensorDict(s=Sample(x=torch.rand(2), label="q", batch_size=[2])),
        "jagged": TensorDict(j=jagged, batch_size=[2]),
        "lazy stack": stack,
        "lazy below": TensorDict(s=stack, batch_size=[2]),
        "gradient": TensorDict(a=torch.rand(3, requires_grad=True)),
        "consolidated": TensorDict(a=torch.rand(4), n=TensorDict(b=torch.ones(1))).consolidate(
            metadata=True
        ),
    }


#: Kinds that cannot be sent leaf by leaf, or lose structure that way.
STORAGE_ONLY = {"tensorclass", "jagged", "lazy stack", "lazy below", "nested", "named", "values"}


def leaf_kinds() -> dict[str, Any]:
    """Return what can be sent with ``consolidated=False``."""
    found = {name: td for name, td in kinds().items() if name not in STORAGE_ONLY}
    found["values"] = TensorDict(
        a=torch.ones(2),
        text="é",
        some=NonTensorData([1, {"k": None}], batch_size=[2]),
        each=NonTensorStack("x", "y"),
        batch_size=2,
    )
    found["below"] = TensorDict({("n", "m"): torch.ones(2, 3), "a": torch.ones(2)}, batch_size=[2])
    found["unbatched"] = TensorDict(a=torch.ones(2), u=UnbatchedTensor(torch.rand(5)), batch_size=2)
    return found


def check_same(got: Any, want: Any) -> None:
    """Assert that two tensordicts have the same keys, classes, shapes, dtypes, values and bits."""
    assert type(got) is type(want), f"{type(got)} is not {type(want)}"
    assert got.batch_size == want.batch_size
    assert set(got.keys()) == set(want.keys())
    if hasattr(want, "tensordicts"):
        for one, other in zip(got.tensordicts, want.tensordicts, strict=True):
            check_same(one, other)
        return
    got, want = plain(got), plain(want)
    assert got.names == want.names
    for name in want.keys():  # noqa: SIM118
        one, other = got.get(name), want.get(name)
        if isinstance(other, UnbatchedTensor):
            one, other = one.data, other.data
        if is_non_tensor(other):
            assert type(one) is type(other)
            assert repr(one.tolist()) == repr(other.tolist()), name
        elif not isinstance(other, torch.Tensor):
            check_same(one, other)
        elif other.is_nested:
            check_same_bits(one.values(), other.values(), name)
            assert torch.equal(one.offsets(), other.offsets())
        else:
            check_same_bits(one, other, name)


def check_same_bits(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Assert that two tensors have the same shape, dtype and bytes."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype), name
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    assert torch.equal(*raw), name


# ---- the two sides of each test: plain functions, so that a side can run in another process


async def send_stream(pipe: TensorDictPipe) -> None:
    """Send, then close at once."""
    for i in range(300):
        await pipe.asend(TensorDict(a=torch.full((64,), i), b=torch.full((3,), float(i))))
    await pipe.aclose()


async def recv_stream(pipe: TensorDictPipe) -> None:
    """The same schema comes into the same buffer, and nothing is lost at the end."""
    first, count = None, 0
    async for td in pipe:
        assert td["a"].eq(count).all()
        assert td["b"].eq(count).all()
        first = first if first is not None else td
        assert td is first
        assert td.is_consolidated()
        count += 1
    assert count == 300
    with pytest.raises(EndOfStream):
        await pipe.arecv()
    await pipe.aclose()
    assert pipe.closed


async def send_kinds(pipe: TensorDictPipe) -> None:
    """Each kind twice, so that each schema is new and known, and all of them once more."""
    torch.manual_seed(0)
    everything = kinds()
    for td in everything.values():
        await pipe.asend(td)
        await pipe.asend(td)
    for td in everything.values():
        await td.asend(pipe)
    await pipe.aclose()


async def recv_kinds(pipe: TensorDictPipe) -> None:
    """What comes is what was sent."""
    torch.manual_seed(0)
    everything = kinds()
    for name in [n for n in everything for _ in range(2)] + list(everything):
        check_same(await TensorDict().arecv(pipe), everything[name])
    with pytest.raises(EndOfStream):
        await pipe.arecv()
    await pipe.aclose()


async def send_leaves(pipe: TensorDictPipe) -> None:
    """The same leaf by leaf."""
    torch.manual_seed(0)
    for td in leaf_kinds().values():
        await pipe.asend(td)
    await pipe.aclose()


async def recv_leaves(pipe: TensorDictPipe) -> None:
    """What comes is what was sent."""
    torch.manual_seed(0)
    for want in leaf_kinds().values():
        got = await pipe.arecv()
        for key, value in want.items(True, True):
            if isinstance(value, torch.Tensor) and not isinstance(value, UnbatchedTensor):
                check_same_bits(got.get(key), value, str(key))
        assert set(got.keys(True, True)) == set(want.keys(True, True))
        assert got.batch_size == want.batch_size
        if "each" in want:
            check_same(got, want)
    await pipe.aclose()


async def send_numbers(pipe: TensorDictPipe) -> None:
    """Numbered tensordicts with a value beside the tensor."""
    for i in range(12):
        await pipe.asend(TensorDict(a=torch.full((4,), i), n=TensorDict(b=torch.ones(2)), s="v"))
    await pipe.aclose()


async def recv_and_edit(pipe: TensorDictPipe) -> None:
    """Whatever is done to a received tensordict, the next one is whole."""

    def set_value(td: Any) -> None:
        td["s"] = "other"

    def grow(td: Any) -> None:
        td["new"] = torch.ones(3)

    def batch(td: Any) -> None:
        td["n"].batch_size = [2]

    edits: list[Callable[[Any], Any]] = [
        lambda td: td.lock_().unlock_(),
        lambda td: td.__setitem__("a", torch.zeros(9)),
        lambda td: td["n"].__setitem__("b", torch.zeros(1)),
        lambda td: td.pop("a"),
        lambda td: td["n"].clear(),
        lambda td: td.rename_key_("a", "z"),
        set_value,
        grow,
        batch,
        lambda td: td.zero_(),
        lambda td: td.clear(),
    ]
    for i, edit in enumerate([*edits, lambda td: None]):
        td = await pipe.arecv()
        assert set(td.keys(True, True)) == {"a", ("n", "b")}
        assert td["a"].tolist() == [i] * 4
        assert td["n", "b"].tolist() == [1, 1]
        assert td["n"].batch_size == torch.Size([])
        assert td["s"] == "v"
        edit(td)
        del td
    await pipe.aclose()


async def recv_into(pipe: TensorDictPipe) -> None:
    """A tensordict that fits is filled; one that does not is left alone."""
    fits = TensorDict(a=torch.zeros(4, dtype=torch.int64), n=TensorDict(b=torch.ones(2)), s="v")
    fits = fits.consolidate(metadata=True)
    other = TensorDict(a=torch.zeros(4)).consolidate(metadata=True)
    first = await pipe.arecv()
    assert await pipe.arecv(fits) is fits
    assert fits["a"].tolist() == [1] * 4
    assert first["a"].tolist() == [0] * 4
    assert await pipe.arecv(other) is first
    assert other["a"].tolist() == [0.0] * 4
    assert await pipe.arecv(device="cpu") is first
    async for td in pipe:
        assert td is first
    await pipe.aclose()


async def ping(pipe: TensorDictPipe) -> None:
    """Both ends send and receive at once, more than one window each."""

    async def send() -> None:
        for i in range(1500):
            await pipe.asend(TensorDict(a=torch.tensor([i])))

    sending = asyncio.ensure_future(send())
    for i in range(1500):
        assert (await pipe.arecv())["a"].item() == i
    await sending
    await pipe.aclose()


async def send_at_once(pipe: TensorDictPipe) -> None:
    """Sends that overlap are serialised, also of different schemas."""
    await asyncio.gather(
        *(pipe.asend(TensorDict(a=torch.full((50 + i % 3,), i))) for i in range(40))
    )
    await pipe.aclose()


async def recv_at_once(pipe: TensorDictPipe) -> None:
    """All of them come, in order."""
    got = [td["a"][0].item() async for td in pipe]
    assert got == list(range(40))
    await pipe.aclose()


async def send_to_slow(pipe: TensorDictPipe) -> None:
    """A reader that does not read makes its sender wait."""
    sent = 0

    async def send() -> None:
        nonlocal sent
        for i in range(4000):
            await pipe.asend(TensorDict(a=torch.full((128,), i)))
            sent += 1

    sending = asyncio.ensure_future(send())
    while True:
        before = sent
        await asyncio.sleep(0.3)
        if sent == before and sent:
            break
    assert sent <= 1100, f"{sent} tensordicts were sent to a reader that reads none"
    await pipe.arecv()
    await sending
    await pipe.aclose()


async def recv_slow(pipe: TensorDictPipe) -> None:
    """Sleep first; then everything comes."""
    await asyncio.sleep(3)
    await pipe.asend(TensorDict())
    count = 0
    async for td in pipe:
        assert td["a"][0].item() == count
        count += 1
    assert count == 4000
    await pipe.aclose()


async def send_late(pipe: TensorDictPipe) -> None:
    """Send when the other end has given up once."""
    await pipe.arecv()
    await pipe.asend(TensorDict(a=torch.ones(3)))
    await pipe.aclose()


async def recv_cancelled(pipe: TensorDictPipe) -> None:
    """A receive that is cancelled before anything came has lost nothing."""
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(pipe.arecv(), 0.1)
    assert not pipe.closed
    await pipe.asend(TensorDict())
    assert (await pipe.arecv())["a"].tolist() == [1, 1, 1]
    await pipe.aclose()


async def send_refused(pipe: TensorDictPipe) -> None:
    """What cannot be sent is refused before anything is; blocking calls in a loop are too."""
    for bad in (
        TensorDict(a=NonTensorData(object())),
        TensorDict(a=torch.eye(3).to_sparse()),
        TensorDict(a=UnbatchedTensor(torch.ones(2))),
    ):
        with pytest.raises(UnsupportedValue):
            await pipe.asend(bad)
    with pytest.raises(EventLoopRunning, match=r"await pipe\.asend"):
        pipe.send(TensorDict())
    with pytest.raises(EventLoopRunning, match=r"await pipe\.arecv"):
        pipe.recv()
    with pytest.raises(EventLoopRunning, match=r"await pipe\.aclose"):
        pipe.close()
    await pipe.asend(TensorDict(a=torch.ones(2)))
    await pipe.aclose()
    with pytest.raises(PipeClosed):
        await pipe.asend(TensorDict())
    with pytest.raises(PipeClosed):
        await pipe.arecv()


async def recv_one(pipe: TensorDictPipe) -> None:
    """One comes, then the end."""
    assert (await pipe.arecv())["a"].tolist() == [1, 1]
    assert [td async for td in pipe] == []
    await pipe.aclose()


async def send_sync(pipe: TensorDictPipe) -> None:
    """Plain calls from a thread."""

    def work() -> None:
        for i in range(1500):
            pipe.send(TensorDict(a=torch.full((8,), i)))
        pipe.close()

    await asyncio.to_thread(work)


async def recv_sync(pipe: TensorDictPipe) -> None:
    """Plain calls from a thread."""

    def work() -> None:
        assert [td["a"][0].item() for td in pipe] == list(range(1500))
        with pytest.raises(EndOfStream):
            pipe.recv()
        pipe.close()

    await asyncio.to_thread(work)


async def vanish(pipe: TensorDictPipe) -> None:
    """Send two, then go without a word."""
    for i in range(2):
        await pipe.asend(TensorDict(a=torch.full((3,), i)))
    await pipe.arecv()
    pipe._drop()


async def recv_until_lost(pipe: TensorDictPipe) -> None:
    """What came before is received; then the loss is an error that is told and kept."""
    got = 0
    with pytest.raises(PeerLost):
        async for td in pipe:
            assert td["a"][0].item() == got
            got += 1
            if got == 2:
                await pipe.asend(TensorDict())
    assert got == 2
    assert pipe.closed
    assert isinstance(pipe.error, PeerLost)
    with pytest.raises(PipeClosed, match=r"lost|reset|closed"):
        await pipe.arecv()


async def recv_until_stop(pipe: TensorDictPipe) -> None:
    """With ``on_error="stop"`` the iteration ends, and the exception is kept."""
    got = 0
    async for _ in pipe:
        got += 1
        if got == 2:
            await pipe.asend(TensorDict())
    assert got == 2
    assert isinstance(pipe.error, PeerLost)


async def send_too_much(pipe: TensorDictPipe) -> None:
    """Send more than the other end accepts, and hear of it."""
    with pytest.raises(PeerLost):
        for _ in range(100):
            await pipe.asend(TensorDict(a=torch.zeros(1 << 18)))
            await asyncio.sleep(0.05)
    with pytest.raises((PeerLost, PipeClosed, ProtocolError)):
        await pipe.arecv()


async def refuse_too_much(pipe: TensorDictPipe) -> None:
    """A size above the limit closes the pipe before memory is taken."""
    with pytest.raises(ProtocolError, match="max_message_bytes"):
        await pipe.arecv()
    assert pipe.closed
    with pytest.raises(PipeClosed, match="max_message_bytes"):
        await pipe.arecv()


async def send_until_told(pipe: TensorDictPipe) -> None:
    """A reader that leaves early is an error at the sender, which lost data."""
    with pytest.raises(PeerLost, match=r"did not read|has read|lost|closed"):
        for i in range(100_000):
            await pipe.asend(TensorDict(a=torch.full((4,), i)))
    with pytest.raises((PeerLost, PipeClosed)):
        await pipe.asend(TensorDict())
    await pipe.aclose()


async def leave_early(pipe: TensorDictPipe) -> None:
    """Read a little and close."""
    for _ in range(5):
        await pipe.arecv()
    await pipe.aclose()


async def fail_to_authenticate(pipe: TensorDictPipe) -> None:
    """Another key, or none, ends in an error before any tensordict."""
    with pytest.raises((AuthenticationFailed, PeerLost)):
        await pipe.arecv()
    assert pipe.closed


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
        self.run(send_stream, recv_stream)

    def test_the_connecting_end_receives(self) -> None:
        self.run(recv_stream, send_stream)

    def test_every_kind_of_tensordict(self) -> None:
        self.run(send_kinds, recv_kinds)

    def test_leaf_by_leaf(self) -> None:
        self.run(send_leaves, recv_leaves, consolidated=False)

    def test_the_ends_need_not_agree_about_consolidated(self) -> None:
        self.both(send_leaves, recv_leaves, {"consolidated": False}, {})
        self.both(send_stream, recv_stream, {}, {"consolidated": False})

    def test_an_edited_tensordict_does_not_break_the_next(self) -> None:
        self.run(send_numbers, recv_and_edit)

    def test_receiving_into_a_tensordict(self) -> None:
        self.run(send_numbers, recv_into)

    def test_both_directions_at_once(self) -> None:
        self.run(ping, ping)

    def test_sends_at_once(self) -> None:
        self.run(send_at_once, recv_at_once)

    def test_a_slow_reader_makes_its_sender_wait(self) -> None:
        self.run(send_to_slow, recv_slow)

    def test_a_cancelled_receive(self) -> None:
        self.run(send_late, recv_cancelled)

    def test_what_is_refused(self) -> None:
        self.run(send_refused, recv_one)

    def test_plain_calls(self) -> None:
        self.run(send_sync, recv_sync)
        self.run(send_sync, recv_stream_of_1500)

    def test_a_peer_that_vanishes(self) -> None:
        self.run(vanish, recv_until_lost)
        self.both(vanish, recv_until_stop, {}, {"on_error": "stop"})

    def test_a_size_above_the_limit(self) -> None:
        self.both(send_too_much, refuse_too_much, {}, {"max_message_bytes": 1 << 19})

    def test_a_reader_that_leaves_early(self) -> None:
        self.run(send_until_told, leave_early)

    def test_a_key_on_both_sides(self) -> None:
        self.run(send_stream, recv_stream, auth_key=b"secret")

    @pytest.mark.parametrize("other", [b"wrong", None], ids=["another key", "no key"])
    def test_a_wrong_key(self, other: bytes | None) -> None:
        options = {"auth_key": b"secret"}, {"auth_key": other}
        self.both(fail_to_authenticate, fail_to_authenticate, *options)


async def recv_stream_of_1500(pipe: TensorDictPipe) -> None:
    """The async face reads what the sync one sent."""
    assert [td["a"][0].item() async for td in pipe] == list(range(1500))
    await pipe.aclose()


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
