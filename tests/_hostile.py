"""Two stores to damage, and what every use of a damaged one must do."""

import contextlib
import resource
import sys

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdio
from tdio import TensorDictStore
from tdio.errors import TdioError
from tdio.wire.names import Names

ROWS = 6
MARGIN_BYTES = 512 * 1024 * 1024


@contextlib.contextmanager
def little_memory():
    """Let the process grow by half a gigabyte of address space: a huge allocation fails."""
    if sys.platform != "linux":
        yield
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MARGIN_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def plain_store(prefix, conn):
    """Six rows: a of 16 bytes each, deep.b of 8."""
    local = TensorDict(
        a=torch.arange(24.0).view(ROWS, 4),
        deep=TensorDict(b=torch.arange(ROWS), batch_size=[ROWS]),
        batch_size=[ROWS],
    )
    with TensorDictStore.from_tensordict(local, prefix=prefix, **conn) as store:
        yield Names(prefix, store.td_id)


@contextlib.contextmanager
def ragged_store(prefix, conn):
    """Six elements: element i of x has i rows of 8 bytes, all elements of y have one shape."""
    local = lazy_stack([TensorDict(x=torch.ones(i, 2), y=torch.ones(3)) for i in range(ROWS)])
    with TensorDictStore.from_tensordict(local, prefix=prefix, **conn) as store:
        yield Names(prefix, store.td_id)


USES = {
    "repr": repr,
    "a row": lambda s: s[0].to_tensordict(),
    "rows": lambda s: s[[1, 5]],
    "a slice": lambda s: s[1:],
    "all": lambda s: s.to_tensordict(),
    "an entry": lambda s: s["a" if isinstance(s, TensorDictStore) else "x"],
}


def refuses(conn, names, uses=USES):
    """Each use of the store, by a handle that knows nothing yet, raises an error of ours."""
    for name in uses:
        with pytest.raises(TdioError) as caught:
            store = tdio.open_store(td_id=names.td_id, prefix=names.prefix, **conn)
            with contextlib.closing(store):
                USES[name](store)
        # The store is named, or the server where it is the server's fault.
        text = str(caught.value)
        server = conn.get("unix_socket_path") or f"{conn['host']}:{conn['port']}"
        assert names.td_id in text or names.prefix in text or server in text, name


def cases(table):
    """Return the parameters of a table, by their names."""
    return [pytest.param(value, id=name) for name, value in table.items()]


READS = {name: use for name, use in USES.items() if name != "repr"}
LATER = {name: use for name, use in READS.items() if name != "a row"}
