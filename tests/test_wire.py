import dataclasses

import numpy as np
import pytest

from tdio.layout.plan import Ranges
from tdio.transport.address import FAR_WINDOW_BYTES, WINDOW_BYTES, Address
from tdio.transport.protocol import Protocol
from tdio.wire.asking import few
from tdio.wire.ranges import encode_reads
from tdio.wire.receiving import DIRECT_BYTES, RangeReceiver, UnexpectedFrameError, groups_of
from tdio.wire.requests import Fetch, RangeRead, Reads
from tdio.wire.scatter import spread


def reads_of(*sizes_of_each):
    reads = []
    for sizes in sizes_of_each:
        sizes = np.array(sizes, np.int64)
        starts = np.arange(len(sizes), dtype=np.int64) * 7
        into = np.zeros(int(sizes.sum()), np.uint8)
        reads.append(RangeRead("k", Ranges(starts, sizes, None, 1), into, ("k", "a store")))
    return reads


def stream_of(reads, seed=0):
    rng = np.random.default_rng(seed)
    stream, payloads = b"", []
    for read in reads:
        payload = b""
        for size in read.ranges.sizes:
            part = rng.integers(0, 256, size).astype(np.uint8).tobytes()
            stream += b"$%d\r\n" % size + part + b"\r\n"
            payload += part
        payloads.append(payload)
    return stream, payloads


def feed(receiver, stream, step):
    at = 0
    while not receiver.done:
        want = receiver.want()
        n = min(sum(map(len, want)), step, len(stream) - at)
        assert n, "the receiver wants more than was sent"
        spread(want, stream[at : at + n])
        receiver.got(n)
        at += n
    return at


CASES = {
    "equal": [[10] * 50],
    "several leaves": [[256] * 9, [1] * 9, [32] * 9],
    "ragged": [[1, 99, 1000, 5, 5, 12345]],
    "large": [[DIRECT_BYTES + 1] * 3, [8]],
    "large behind small": [[8] * 30, [DIRECT_BYTES] * 40, [5] * 30, [3]],
    "more large ones than are prepared for": [[DIRECT_BYTES] * 150, [5]],
    "many sizes": [[1, 99, 1000, 5, 5, 12345] * 9, [7] * 20],
    "larger than the scratch": [[400_000, 3]],
    "a few small": [[16], [100], [7, 7]],
    "a large one behind a small one": [[16], [DIRECT_BYTES], [5], [6]],
    "many behind a small one": [[16], [600] * 20, [5]],
    "nothing": [[]],
}


@pytest.mark.parametrize("step", [10**9, 4096, 1])
@pytest.mark.parametrize("name", CASES)
def test_replies_are_stripped_whole_and_in_pieces(name, step):
    if step == 1 and "large" in name:
        step = 997
    reads = reads_of(*CASES[name])
    stream, payloads = stream_of(reads)
    used = feed(RangeReceiver(groups_of(reads)), stream, step)
    assert used == len(stream)
    assert [read.into.tobytes() for read in reads] == payloads


@pytest.mark.parametrize("step", [10**9, 100, 1])
@pytest.mark.parametrize(
    "sizes",
    [[8], [800], [16, 100], [1] * 3, [800] * 20, [DIRECT_BYTES * 9], [5, 7, 70_000], [9] * 64],
)
def test_a_few_single_ranges_are_asked_for_and_received_as_many_are(sizes, step):
    reads = reads_of(*([size] for size in sizes))
    stream, payloads = stream_of(reads)
    commands, groups = few(Reads(reads))
    assert commands == b"".join(piece for piece, _ in encode_reads(reads))
    assert feed(RangeReceiver(groups), stream, step) == len(stream)
    assert [read.into.tobytes() for read in reads] == payloads


def test_more_than_a_few_ranges_are_planned_while_the_server_works():
    for sizes in ([[8, 8]], [[8], [8, 8]], [[]], [[70_000], [5]], [[5]] * 65):
        assert few(Reads(reads_of(*sizes))) is None


@pytest.mark.parametrize("step", [10**9, 1])
@pytest.mark.parametrize(
    ("size", "count", "scattered"),
    [(10, 40, False), (10, 5, False), (DIRECT_BYTES // 2, 5, True), (DIRECT_BYTES, 40, True)],
)
@pytest.mark.parametrize(
    "frame",
    [b"-ERR no\r\n", b"$9\r\n123456789\r\n", b"$0\r\n\r\n", b"$-1\r\n", b"wrong end"],
)
@pytest.mark.parametrize("at", [0, 3])
def test_an_unexpected_frame_is_left_for_the_parser(frame, at, size, count, scattered, step):
    good = b"$%d\r\n%b\r\n" % (size, b"7" * size)
    if frame == b"wrong end":
        frame = good[:-2] + b"xx"
    stream = good * at + frame + good * 4
    reads = reads_of([size] * count)
    reads[0].ranges = Ranges(reads[0].ranges.starts, None, None, size)
    with pytest.raises(UnexpectedFrameError) as caught:
        feed(RangeReceiver(groups_of(reads)), stream, step)
    rest = caught.value.rest
    if frame.endswith(b"xx") and scattered:
        assert rest.startswith(b"x")
    else:
        assert frame.startswith(rest) or rest.startswith(frame)
    assert caught.value.size == size


@pytest.mark.parametrize("step", [10**9, 1])
@pytest.mark.parametrize(("odd", "blamed"), [("payload end", "a"), ("header", "b")])
def test_the_entry_whose_reply_is_odd_is_named(odd, blamed, step):
    reads = reads_of([10], [20])
    for read, name in zip(reads, "ab", strict=True):
        read.what = (name, "a store")
    end = b"??" if odd == "payload end" else b"\r\n"
    stream = b"$10\r\n" + b"7" * 10 + end + b"$19\r\n" + b"7" * 19 + b"\r\n"
    with pytest.raises(UnexpectedFrameError) as caught:
        feed(RangeReceiver(groups_of(reads)), stream, step)
    assert caught.value.read.what[0] == blamed


def test_a_read_is_planned_and_its_result_made_while_the_server_is_at_others():
    """What is done, in order: the first leaf is asked for before the others are planned."""
    reads, done = reads_of([20_000] * 20, [5] * 300, [7] * 300), []

    def planned():
        for name, read in zip("abc", reads, strict=True):
            done.append(f"plan {name}")
            yield read

    stream, payloads = stream_of(reads)
    stream += b"$1\r\nv\r\n"
    again = Reads(planned())
    fetch = Fetch(again, [("GET", "k")], meanwhile=lambda: done.append("meanwhile"))
    steps, got = Protocol("a server", 100_000).exchange(fetch), None
    with pytest.raises(StopIteration):
        while True:
            sending, buffer = steps.send(got)
            got = None
            if sending:
                done.append("send")
                continue
            n = min(sum(map(len, buffer)), 30_000, len(stream))
            spread(buffer, stream[:n])
            stream, got = stream[n:], n
    assert [read.into.tobytes() for read in reads] == payloads
    assert done[:3] == ["plan a", "send", "plan b"] and done.index("plan c") < 10
    assert done[-2:] == ["meanwhile", "send"] and done.count("meanwhile") == 1
    assert list(again) == list(again) == reads and done.count("plan a") == 1


@pytest.mark.parametrize("window", [100, 10_000, 300_000])
@pytest.mark.parametrize("name", CASES)
def test_no_more_is_under_way_than_the_window_and_one_batch(name, window):
    reads = reads_of(*CASES[name])
    stream, payloads = stream_of(reads)
    stream += b"$1\r\nv\r\n"
    largest = max((n for _, n in encode_reads(reads)), default=0)
    steps = Protocol("a server", window).exchange(Fetch(Reads(reads), [("GET", "k")]))
    asked, taken, most, got = 0, 0, 0, None
    try:
        while True:
            sending, buffer = steps.send(got)
            if sending:
                # What is asked for ends where the replies to the commands so far do.
                asked += bytes(buffer).count(b"GETRANGE")
                got = None
                continue
            sizes = np.concatenate([read.ranges.sizes for read in reads])
            due = int(sizes[:asked].sum()) - taken
            most = max(most, due)
            n = min(sum(map(len, buffer)), 7000, len(stream))
            spread(buffer, stream[:n])
            stream, got = stream[n:], n
            taken += n
    except StopIteration as stop:
        assert stop.value == [b"v"]
    assert [read.into.tobytes() for read in reads] == payloads
    assert most <= window + largest


@pytest.mark.parametrize(
    ("where", "far"),
    [
        ({"unix_socket_path": "/s"}, False),
        ({"host": "localhost"}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "10.0.0.7"}, True),
        ({"host": "redis.example"}, True),
    ],
)
def test_a_server_far_away_has_a_wider_window(where, far):
    assert Address(**where).window_bytes == (FAR_WINDOW_BYTES if far else WINDOW_BYTES)


def test_the_commands_ask_for_the_ranges():
    reads = reads_of([3, 4])
    ((text, size),) = list(encode_reads(reads))
    assert size == 7
    assert text == (
        b"*4\r\n$8\r\nGETRANGE\r\n$1\r\nk\r\n$1\r\n0\r\n$1\r\n2\r\n"
        b"*4\r\n$8\r\nGETRANGE\r\n$1\r\nk\r\n$1\r\n7\r\n$2\r\n10\r\n"
    )


def test_the_whole_of_a_string_is_asked_for_without_numbers():
    (read,) = reads_of([9])
    (whole,) = list(encode_reads([dataclasses.replace(read, whole=True)]))
    assert whole == (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", 9)


@pytest.mark.parametrize("size", [1, 3, 4096])
def test_commands_of_many_widths_are_encoded_in_bulk_as_one_by_one(size):
    rng = np.random.default_rng(0)
    spread = np.concatenate([10**k + rng.integers(0, 9 * 10**k, 40) for k in range(13)])
    for starts in (np.sort(spread), spread[rng.permutation(len(spread))], np.arange(20)):
        sizes = np.full(len(starts), size, np.int64)
        read = RangeRead("k%d", Ranges(starts, sizes, None, 1), np.zeros(0, np.uint8), ("k", ""))
        want = b"".join(
            b"*4\r\n$8\r\nGETRANGE\r\n$3\r\nk%%d\r\n$%d\r\n%d\r\n$%d\r\n%d\r\n"
            % (len(str(s)), s, len(str(s + size - 1)), s + size - 1)
            for s in starts.tolist()
        )
        assert b"".join(text for text, _ in encode_reads([read])) == want


@pytest.mark.parametrize("together", [False, True])
def test_what_writers_came_between_is_asked_for_in_one_piece(together):
    reads = reads_of([20_000] * 40, [5] * 300)
    stream, payloads = stream_of(reads)
    stream += b"$1\r\nv\r\n"
    fetch = Fetch(Reads(reads), [("GET", "k")], together=together)
    steps, sent, at = Protocol("a server", 100_000).exchange(fetch), [], 0
    try:
        sending, buffer = next(steps)
        while True:
            if sending:
                sent.append(bytes(buffer))
                sending, buffer = next(steps)
            else:
                n = min(sum(map(len, buffer)), len(stream) - at)
                spread(buffer, stream[at : at + n])
                at += n
                sending, buffer = steps.send(n)
    except StopIteration as stop:
        assert stop.value == [b"v"]
    assert [read.into.tobytes() for read in reads] == payloads
    assert (len(sent) == 1) == together and b"".join(sent).count(b"GETRANGE") == 340
