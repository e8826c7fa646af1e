"""PipeStream over pairs in memory: order, memory, ends and faults."""

import asyncio
import copy
import gc
import logging
import pickle
import threading
import time

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch.utils.data import DataLoader

from tdio import PipeReader, PipeStream, TensorDictPipe, resume_position
from tdio.data._fan_in import _leaves
from tdio.errors import (
    EntryMismatch,
    PeerLost,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
    StateMismatch,
    UnsupportedValue,
)
from tdio.testing._pipe_kinds import check_same, kinds
from tdio.testing.resume import run_node_resume_test
from tdio.transport.memory import memory_pair


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "tdio-ahead"}


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert not threads()


@pytest.fixture
def produce():
    """Send from a thread; what the producer raised is in its list."""
    started = []

    def begin(work, *args, **options):
        ends = memory_pair()
        writer, reader = TensorDictPipe(ends[0], **options), TensorDictPipe(ends[1], **options)
        errors = []

        def run():
            try:
                with writer:
                    work(writer, *args)
            except (PeerLost, PipeClosed) as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        started.append(thread)
        reader.thread, reader.errors, reader.ends = thread, errors, ends
        return reader

    yield begin
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()


def item(i, rows=2, **more):
    return TensorDict(
        x=torch.full((rows, 3), i), y=torch.full((rows,), float(i)), batch_size=[rows], **more
    )


def numbers(pipe, count, start=0):
    for i in range(start, start + count):
        pipe.send(item(i))


def values(items):
    return [int(td["x"][0, 0]) for td in items]


def test_items_are_their_own(produce):
    stream = PipeStream(produce(numbers, 50))
    items = list(stream)
    assert values(items) == list(range(50))
    for i, td in enumerate(items):
        assert td.is_consolidated() and (td == item(i)).all()
    assert len({td["x"].untyped_storage().data_ptr() for td in items}) == 50
    assert not hasattr(stream, "__len__")
    with pytest.raises(TypeError):
        len(stream)


def test_without_clone_memory_is_used_again(produce):
    places, storages = [], set()
    for td in PipeStream(produce(numbers, 3000), clone=False):
        places.append(int(td["x"][0, 0]))
        assert td.is_consolidated() and bool((td["y"] == places[-1]).all())
        storages.add(td["x"].untyped_storage().data_ptr())
    assert places == list(range(3000))
    assert len(storages) <= 1026


def test_every_kind_keeps_one_storage(produce):
    want = kinds()

    def send(pipe):
        for _ in range(2):
            for td in want.values():
                pipe.send(td)

    got = list(PipeStream(produce(send)))
    assert len(got) == 2 * len(want)
    for td, other in zip(got, list(want.values()) * 2, strict=True):
        check_same(td, other)
    check_one_storage(got)


def check_one_storage(items):
    for td in items:
        places = {leaf.untyped_storage().data_ptr() for leaf in _leaves(td)}
        assert len(places) <= 1


def test_leaf_by_leaf_is_gathered(produce):
    reader = produce(numbers, 4, consolidated=False)
    items = list(PipeStream(reader))
    assert values(items) == [0, 1, 2, 3]
    assert all(td.is_consolidated() for td in items)


def test_several_pipes_as_they_arrive(produce):
    first, go = threading.Event(), threading.Event()

    def late(pipe):
        go.wait(20)
        numbers(pipe, 3, 100)

    def early(pipe):
        numbers(pipe, 3)
        first.set()

    got = []
    for td in PipeStream(produce(late), produce(early)):
        got += values([td])
        if len(got) == 3:
            assert got == [0, 1, 2]
            go.set()
    assert got == [0, 1, 2, 100, 101, 102]


def test_a_slow_consumer_bounds_what_is_received(produce):
    big = TensorDict(x=torch.zeros(4 << 20, dtype=torch.uint8))
    sent = []

    def send(pipe):
        for i in range(40):
            pipe.send(big)
            sent.append(i)

    reader = produce(send)
    stream = iter(PipeStream(reader, prefetch=2))
    next(stream)
    time.sleep(0.5)
    # 32 MiB in the pipe are not read, 2 in the ring, one in hand.
    assert len(sent) <= 8 + 2 + 1 + 1
    assert sum(1 for _ in stream) == 39


def test_a_loop_may_run(produce):
    async def main():
        return values(PipeStream(produce(numbers, 5)))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


# ---- the end


def test_break_closes(produce):
    reader = produce(numbers, 100_000)
    stream = PipeStream(reader)
    for _ in stream:
        break
    assert not threads() and reader.closed
    reader.thread.join(20)
    assert isinstance(reader.errors[0], PeerLost)
    assert stream.state_dict() == {"version": 2, "yielded": 1, "rows": 0, "items": 1}
    with pytest.raises(PipeClosed, match="read once"):
        iter(stream)


def test_an_exception_in_the_loop_closes(produce):
    reader = produce(numbers, 100_000)
    with pytest.raises(ZeroDivisionError):
        for _ in PipeStream(reader):
            raise ZeroDivisionError
    assert not threads() and reader.closed


def test_garbage_closes(produce):
    reader = produce(numbers, 100_000)
    cycle = [iter(PipeStream(reader))]
    next(cycle[0])
    cycle.append(cycle)
    assert threads()
    del cycle
    gc.collect()
    assert not threads() and reader.closed


def test_an_interpreter_that_ends_does_not_wait():
    import subprocess
    import sys

    code = """
from tdio import PipeStream, TensorDictPipe
from tdio.transport.memory import memory_pair
from tensordict import TensorDict
a, b = map(TensorDictPipe, memory_pair())
a.send(TensorDict())
items = iter(PipeStream(b))
next(items)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


def test_max_items(produce):
    reader = produce(numbers, 100)
    assert values(PipeStream(reader, max_items=3)) == [0, 1, 2]
    assert reader.closed
    assert values(PipeStream(produce(numbers, 2), max_items=3)) == [0, 1]


def test_a_silent_producer(produce):
    stop = threading.Event()

    def send(pipe):
        numbers(pipe, 2)
        stop.wait(20)

    got = []
    with pytest.raises(PipeTimeout, match=r"producer 1 of 1 \(memory"):
        for td in PipeStream(produce(send), timeout=0.2):
            got.append(td)
    stop.set()
    assert values(got) == [0, 1]


@pytest.mark.parametrize("fault", ["dies", "garbage"])
def test_a_lost_producer(produce, caplog, fault):
    def send(pipe):
        numbers(pipe, 3)
        if fault == "garbage":
            pipe._endpoint.inject(b"no frame at all, and no storage either")
        raise PeerLost("ends without an end")

    kind = ProtocolError if fault == "garbage" else PeerLost
    got = []
    with pytest.raises(kind, match=r"producer 1 of 1 \(memory"):
        for td in PipeStream(produce(send)):
            got.append(td)
    assert values(got) == [0, 1, 2]

    stream = PipeStream(produce(numbers, 5, 100), produce(send), on_lost="continue")
    with caplog.at_level(logging.WARNING):
        got = values(stream)
    assert sorted(got) == [0, 1, 2, 100, 101, 102, 103, 104]
    assert stream.lost == 1
    assert "producer 2 of 2 (memory" in caplog.text


def test_killed_in_the_middle_of_a_message(produce):
    hold = threading.Event()

    def send(pipe):
        numbers(pipe, 2)
        hold.wait(20)

    reader = produce(send)
    stream = iter(PipeStream(reader))
    next(stream)
    next(stream)
    reader.ends[1].stall()
    reader.ends[0].inject(b"x" * 128)
    # Stuck in the middle of a message: it can still be left.
    stream.close()
    hold.set()
    assert reader.closed and not threads()


def test_one_lost_of_several_is_named(produce):
    hold = threading.Event()

    def waits(pipe):
        hold.wait(20)

    def dies(pipe):
        raise PeerLost("gone")

    with pytest.raises(PeerLost, match="producer 2 of 2"):
        list(PipeStream(produce(waits), produce(dies)))
    hold.set()


# ---- rebatch


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 64])
def test_rebatch(produce, rows):
    sizes = [3, 1, 0, 8, 2, 2, 17]
    data = [
        TensorDict(
            x=torch.randn(n, 3), n=TensorDict(y=torch.arange(n), batch_size=[n]), batch_size=[n]
        )
        for n in sizes
    ]

    def send(pipe):
        for td in data:
            pipe.send(td)

    got = list(PipeStream(produce(send), rebatch=rows))
    whole = torch.cat(data)
    assert (torch.cat(got) == whole).all()
    assert [len(td) for td in got] == [len(part) for part in whole.split(rows)]
    assert all(td.is_consolidated() for td in got)
    check_one_storage(got)


def test_rebatch_yields_what_arrived_before_an_error(produce):
    def send(pipe):
        numbers(pipe, 4)  # of 2 rows
        raise PeerLost("gone")

    got = []
    with pytest.raises(PeerLost, match="producer 1 of 1"):
        for td in PipeStream(produce(send), rebatch=5):
            got.append(td)
    assert [len(td) for td in got] == [5, 3]
    assert torch.cat(got)["y"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    got = []
    stop = threading.Event()
    with pytest.raises(PipeTimeout):
        for td in PipeStream(
            produce(lambda p: (numbers(p, 2), stop.wait(20))), rebatch=5, timeout=0.5
        ):
            got.append(td)
    stop.set()
    assert [len(td) for td in got] == [4]


def test_rebatch_refuses(produce):
    def mixed(pipe):
        pipe.send(item(0))
        pipe.send(TensorDict(x=torch.zeros(2, 4), y=torch.zeros(2), batch_size=[2]))

    with pytest.raises(EntryMismatch, match=r"those of 'x' are \(4,\)"):
        list(PipeStream(produce(mixed), rebatch=3))

    def values(pipe):
        pipe.send(item(0, label=NonTensorData("a", batch_size=[2])))

    with pytest.raises(UnsupportedValue, match="label"):
        list(PipeStream(produce(values), rebatch=3))
    with pytest.raises(UnsupportedValue, match="batch dim"):
        list(PipeStream(produce(lambda pipe: pipe.send(TensorDict(x=torch.zeros(2)))), rebatch=3))


def test_rebatch_names_the_producer_that_does_not_fit(produce):
    def late(pipe):
        time.sleep(0.5)
        pipe.send(TensorDict(x=torch.zeros(2, 9), batch_size=[2]))

    pipes = [produce(lambda pipe: pipe.send(item(0))), produce(late)]
    with pytest.raises(EntryMismatch, match=r"^producer 2 of 2 .*: rebatch= .*'y'"):
        list(PipeStream(*pipes, rebatch=7))


# ---- arguments, workers


def test_arguments():
    bad = ({"prefetch": 0}, {"rebatch": 0}, {"max_items": 0}, {"on_lost": "stop"})
    for options in (*bad, {"prefetch": 1.5}, {"timeout": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PipeStream.connect("localhost", 1, **options)
    with pytest.raises(ValueError, match="producers"):
        PipeStream.serve(0, producers=0)
    with pytest.raises(ValueError, match="pipes=0"):
        PipeStream()
    for wrong in ([], ["a pipe"], "localhost:1", 1):
        with pytest.raises(TypeError, match="PipeStream.connect"):
            PipeStream(wrong)
    with pytest.raises(ValueError, match="resumable"):
        PipeStream.serve(0, producers=2, resumable=True)


def test_live_pipes_stay_in_their_process(produce):
    hold = threading.Event()
    reader = produce(lambda pipe: hold.wait(20))
    stream = PipeStream(reader)
    with pytest.raises(ValueError, match="num_workers"):
        pickle.dumps(stream)
    with pytest.raises(ValueError, match="num_workers=2"):
        list(DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    hold.set()
    reader.close()


def test_no_secret_in_a_pickle():
    for stream in (
        PipeStream.connect("localhost", 1, auth_key=b"s3cret"),
        PipeStream.serve(1, auth_key=b"s3cret"),
    ):
        assert b"s3cret" not in pickle.dumps(stream)
    copy.copy(PipeStream.connect("localhost", 1))


def test_a_loader_in_the_process(produce):
    loader = DataLoader(PipeStream(produce(numbers, 4)), batch_size=None)
    items = list(loader)
    assert values(items) == [0, 1, 2, 3] and all(td.is_consolidated() for td in items)


# ---- resuming


def honours(pipe):
    numbers(pipe, 6 - (start := resume_position(pipe)), start)


class Opens(PipeStream):
    """A stream that opens a new pair for each pass, as one of ``connect`` does."""

    def __init__(self, begin, **options):
        self._begin_producer = begin
        super().__init__(begin(), **options)

    def __iter__(self):
        from tdio.data._fan_in import Live

        if any(pipe.closed for pipe in self._source._pipes):
            self._source = Live((self._begin_producer(),))
        return super().__iter__()


def test_a_node_resumes(produce):
    run_node_resume_test(lambda: PipeReader(Opens(lambda: produce(honours), resumable=True)))


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_a_stream_resumes_within_a_tensordict(produce, rows):
    whole = list(PipeStream(produce(honours), resumable=True, rebatch=rows))
    for stop in range(1, len(whole)):
        stream = PipeStream(produce(honours), resumable=True, rebatch=rows)
        items = iter(stream)
        for _ in range(stop):
            next(items)
        state = stream.state_dict()
        items.close()
        resumed = PipeStream(produce(honours), resumable=True, rebatch=rows)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest = list(resumed)
        assert len(rest) == len(whole) - stop
        assert all((a == b).all() for a, b in zip(rest, whole[stop:], strict=True))


@pytest.mark.parametrize("rows", [None, 3])
def test_max_items_counts_those_before_a_resume(produce, rows):
    def stream(count=3):
        return PipeStream(produce(honours), resumable=True, rebatch=rows, max_items=count)

    whole = list(stream())
    assert len(whole) == 3
    for stop in range(1, 4):
        first = stream()
        items = iter(first)
        for _ in range(stop):
            next(items)
        state = first.state_dict()
        items.close()
        resumed = stream()
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == 3 - stop
        assert all((a == b).all() for a, b in zip(rest, whole[stop:], strict=True))
        # It came to its end: the next pass is a whole one.
        assert set(resumed.state_dict().values()) == {2, 0}


def test_a_live_stream_is_not_replayed(produce):
    state = {"version": 2, "yielded": 2, "rows": 0, "items": 2}
    plain = PipeStream.connect("localhost", 1)
    plain.load_state_dict(plain.state_dict())
    with pytest.raises(StateMismatch, match="cannot be replayed"):
        plain.load_state_dict(state)
    stream = PipeStream(produce(numbers, 5), resumable=True)
    stream.load_state_dict(state)
    with pytest.raises(StateMismatch, match="resume_position"):
        list(stream)
    for wrong in ({}, {**state, "version": 1}, {**state, "rows": 1}, {**state, "yielded": -1}):
        with pytest.raises(StateMismatch):
            stream.load_state_dict(wrong)


def test_a_producer_that_nobody_asks(produce):
    a, b = map(TensorDictPipe, memory_pair())
    a.send(item(0))
    with pytest.raises(ProtocolError, match="did not ask"):
        resume_position(b)
    a._drop()
    b._drop()
