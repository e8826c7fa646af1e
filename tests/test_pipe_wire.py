"""The bytes of pipes: those of tensordict to the last one, and metadata that lies."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tdio.errors import ProtocolError, UnsupportedValue
from tdio.pipe.incoming import Incoming
from tdio.pipe.outgoing import Packer
from tdio.pipe.tree import describe, plain
from tdio.testing._pipe_kinds import kinds, leaf_kinds
from tdio.transport.memory import memory_pair
from tdio.wire.frames import HEADER_BYTES, Frame, Kind, decode_frame, encode_frame
from tdio.wire.pipe_leaves import parse_leaves
from tdio.wire.pipe_schema import parse_schema

#: What tensordict cannot consolidate.
NOT_THERE = {"dtypes", "odd names"}


@pytest.mark.parametrize("name", [n for n in kinds() if n not in NOT_THERE])
def test_a_gathered_storage_has_the_bytes_of_a_consolidated_one(name):
    td = kinds()[name]
    whole = td.consolidate(metadata=True)
    packer = Packer(False, True)
    gathered, taken = packer.pack(td), packer.pack(whole)
    metadata = json.dumps(whole._consolidated["metadata"], default=str)
    storage = whole._consolidated["storage"]
    assert gathered.schema.identity == metadata
    assert torch.equal(gathered.buffers[0], storage)
    assert taken.schema.identity == metadata
    assert taken.buffers[0] is storage
    sent = json.loads(gathered.schema.text)
    assert sent.pop("_total_bytes") == storage.numel()
    assert sent.pop("_device") == "cpu"
    assert sent == json.loads(metadata)


def test_a_nested_tensordict_is_sent_without_the_storage_of_its_parent():
    incoming = Incoming("test", 1 << 30)
    parcel = Packer(True, True).pack(TensorDict(a=torch.ones(1000), n=TensorDict(b=torch.ones(2))))
    incoming.announce(parcel.schema.text, 0)
    incoming.target().copy_(parcel.buffers[0])
    below = incoming.finish()["n"]
    assert below.is_consolidated()
    assert Packer(True, True).pack(below).nbytes == 8


def test_values_of_another_type_are_another_schema():
    packer = Packer(True, True)
    texts = {
        packer.pack(TensorDict(a=torch.ones(1)).set_non_tensor("v", value)).schema.identity
        for value in (1, True, 1.0, "1", None)
    }
    whole = {
        packer.pack(
            TensorDict(a=torch.ones(1)).set_non_tensor("v", value).consolidate(metadata=True)
        ).schema.identity
        for value in (1, True, 1.0, "1", None)
    }
    assert len(texts) == 5
    assert texts == whole


@settings(deadline=None)
@given(st.sampled_from(list(Kind)), st.binary(max_size=40), st.integers(0, 200))
def test_a_frame_is_never_as_long_as_a_storage(kind, body, avoid):
    raw = encode_frame(kind, 3, 4, body, 1, avoid)
    assert len(raw) != avoid
    assert decode_frame(raw, "peer") == Frame(kind, 1, 3, 4, body)
    for size in range(HEADER_BYTES + len(body)):
        with pytest.raises(ProtocolError):
            decode_frame(raw[:size], "peer")
    with pytest.raises(ProtocolError):
        decode_frame(raw + b"xx", "peer")


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_protocol_error(raw):
    try:
        decode_frame(raw, "peer")
    except ProtocolError:
        pass


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree, path=()):
    yield path
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, value in items:
        yield from places(value, (*path, name))


def changed(tree, path, value):
    if not path:
        return value
    tree = dict(tree) if isinstance(tree, dict) else list(tree)
    tree[path[0]] = changed(tree[path[0]], path[1:], value)
    return tree


SCHEMAS = [Packer(True, True).pack(td).schema for td in kinds().values()]
TEXTS = [(json.loads(schema.text), schema.flags) for schema in SCHEMAS]
HEADERS = [json.loads(Packer(True, False).pack(td).header) for td in leaf_kinds().values()]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_metadata_changed_anywhere_is_refused_or_makes_a_tensordict_inside_its_storage(data):
    tree, flags = data.draw(st.sampled_from(TEXTS))
    path = data.draw(st.sampled_from(list(places(tree))))
    text = json.dumps(changed(tree, path, data.draw(VALUES))).encode()
    incoming = Incoming("peer", 1 << 16)
    try:
        incoming.announce(text, data.draw(st.sampled_from([flags, flags, 0, 1])))
        for _ in range(2):
            storage = incoming.target()
            storage.zero_()
            td = incoming.finish()
    except ProtocolError:
        return
    assert storage.numel() <= 1 << 16
    low = storage.data_ptr()
    for leaf in describe(plain(td))[1]:
        if leaf.numel():
            assert low <= leaf.data_ptr() <= low + storage.numel() - leaf.nbytes


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_headers_changed_anywhere_are_refused_or_make_a_tensordict(data):
    tree = data.draw(st.sampled_from(HEADERS))
    path = data.draw(st.sampled_from(list(places(tree))))
    text = json.dumps(changed(tree, path, data.draw(VALUES))).encode()
    incoming = Incoming("peer", 1 << 16)
    try:
        for buffer in incoming.announce_leaves(text):
            buffer.zero_()
        incoming.finish_leaves()
    except ProtocolError:
        return


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_metadata_or_a_protocol_error(raw):
    for parse in (lambda: parse_schema(raw, "peer"), lambda: parse_leaves(raw, 100, "peer")):
        try:
            parse()
        except ProtocolError:
            pass


FIELDS = ["cls", "non_tensors", "leaves", "cls_metadata", "size", "_total_bytes", "_device"]


@pytest.mark.parametrize("consolidate", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_entries_with_the_names_of_fields_arrive(name, consolidate):
    """As a nested tensordict, a leaf and a value, at the top and below."""
    from tdio import TensorDictPipe
    from tdio.testing._pipe_kinds import check_same

    inner = TensorDict(x=torch.arange(3.0), v="inner")
    sent = [
        TensorDict({name: inner, "a": torch.ones(2), "v": "text"}),
        TensorDict({"n": TensorDict({name: TensorDict(x=torch.ones(2), cls=torch.ones(1))})}),
        TensorDict({name: torch.arange(4)}),
        TensorDict({name: "value", "a": torch.ones(1)}),
        TensorDict({"n": TensorDict({name: "value"}), "a": torch.ones(1)}),
    ]
    pipe, reader = map(TensorDictPipe, memory_pair())
    for td in sent:
        if consolidate:
            try:
                td = td.consolidate(metadata=True)
            except (TypeError, KeyError, RuntimeError, AttributeError):
                continue  # tensordict cannot
        for _ in range(3):
            pipe.send(td)
            check_same(reader.recv(), td)
        pipe.send(td)
        check_same(reader.recv(keep=True), td)
    pipe._drop()
    reader._drop()


@pytest.mark.parametrize("part", ["<NJT_VALUES>", "<NJT_LENGTHS>", "<NJT_OFFSETS>"])
def test_a_plain_leaf_with_the_name_of_a_jagged_part(part):
    from tdio import TensorDictPipe

    td = TensorDict({"n": TensorDict({f"{part}x": torch.ones(2)})})
    ends = memory_pair()
    pipe, reader = map(TensorDictPipe, ends)
    with pytest.raises(UnsupportedValue, match=part):
        pipe.send(td)
    assert ends[0].sent == []
    pipe.send(TensorDict(a=torch.ones(1)))
    assert reader.recv()["a"].tolist() == [1]
    pipe._drop()
    reader._drop()
    ends = memory_pair()
    pipe, reader = (TensorDictPipe(end, consolidated=False) for end in ends)
    pipe.send(td)
    assert reader.recv()["n", f"{part}x"].tolist() == [1, 1]
    pipe._drop()
    reader._drop()


def leaf(dtype, shape, start, stop, pad):
    return [f"torch.{dtype}", shape, start, stop, pad]


LIES = {
    "overlap": {"a": leaf("uint8", [8], 0, 8, 0), "b": leaf("uint8", [8], 4, 12, 0)},
    "beyond the storage": {"a": leaf("uint8", [80], 0, 80, 0)},
    "shape and bytes differ": {"a": leaf("float32", [8], 0, 8, 0)},
    "negative": {"a": leaf("uint8", [8], -8, 0, 0)},
    "misaligned": {"a": leaf("float32", [1], 2, 6, 0)},
    "no dtype": {"a": leaf("float", [2], 0, 8, 0)},
    "quantized": {"a": leaf("qint8", [8], 0, 8, 0)},
    "jagged without offsets": {"<NJT_VALUES>a": leaf("float32", [2], 0, 8, 0)},
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies(name):
    own = {"device": None, "names": [], "batch_size": [], "is_locked": False}
    tree = {"cls": "TensorDict", "non_tensors": {}, "leaves": LIES[name], "cls_metadata": own}
    with pytest.raises(ProtocolError, match="refused"):
        parse_schema(json.dumps({**tree, "_total_bytes": 16, "_device": "cpu"}).encode(), "peer")


def test_one_message_for_each_tensordict_between_tdio_pipes():
    from tdio import TensorDictPipe

    end, other = memory_pair()
    pipe, reader = TensorDictPipe(end), TensorDictPipe(other)
    for _ in range(5):
        pipe.send(TensorDict(a=torch.ones(256)))
    assert end.sent[1:] == [1024] * 5
    for _ in range(5):
        reader.recv()
    pipe._drop()
    reader._drop()
