"""The metadata of a consolidated tensordict: read, checked in full, before memory is taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tdio.errors import ProtocolError
from tdio.layout.buffers import Slot
from tdio.layout.dtypes import BY_NAME

#: Members of a level that are not nested tensordicts. "size" is an old field, where it is no level.
FIELDS = frozenset({"cls", "non_tensors", "leaves", "cls_metadata"})
#: Names that a nested tensordict cannot have in tensordict's own format.
RESERVED = FIELDS | {"size", "_total_bytes", "_device"}
JAGGED = ("<NJT_VALUES>", "<NJT_LENGTHS>", "<NJT_OFFSETS>")
STACKS = frozenset({"LazyStackedTensorDict", "NonTensorStack"})
_MAX_DEPTH = 64
_DEVICES = frozenset({"cpu", "cuda"})


@dataclass(frozen=True)
class Leaf:
    """One tensor: its place, the item that describes it, the ragged dim of jagged offsets."""

    slot: Slot
    item: tuple[Any, ...]
    ragged: int | None


@dataclass
class Level:
    """One tensordict of the tree.

    Attributes:
        cls: ``TensorDict``, a stack class, or the text of a tensorclass.
        batch: the batch size; of a stack, that of the result.
        leaves: tensors by name, jagged parts under their prefixed names.
        non_tensors: ``(value, batch size, device or None)`` by name.
        levels: nested tensordicts by name; the members of a stack, in order.
        device: device text or None.
        names: names of the dims, or None.
        locked: whether it was locked.
        stack_dim: position of the stack dim, for stacks.
        stack_name: its name or None.
    """

    cls: str
    batch: tuple[int, ...] = ()
    leaves: dict[str, Leaf] = field(default_factory=dict)
    non_tensors: dict[str, tuple[Any, list[int], str | None]] = field(default_factory=dict)
    levels: dict[str, Level] = field(default_factory=dict)
    device: str | None = None
    names: list[str | None] | None = None
    locked: bool = False
    stack_dim: int = 0
    stack_name: str | None = None

    def walk(self) -> Iterator[Level]:
        """Yield this level and all below it."""
        yield self
        for level in self.levels.values():
            yield from level.walk()


@dataclass(frozen=True)
class Schema:
    """What a peer announced: the tree, the size of its storage, the device it lies on there."""

    root: Level
    nbytes: int
    device: str


def parse_schema(text: bytes, where: str, *, escaped: bool = False) -> Schema:
    """Read and check the metadata of a consolidated tensordict.

    Args:
        text: JSON; ``_total_bytes`` and ``_device`` may be absent.
        where: names the peer in errors.
        escaped: names of nested tensordicts begin with "/".

    Raises:
        ProtocolError: anything that does not describe tensors inside one storage.
    """
    try:
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("it is not an object")
        total, device = tree.pop("_total_bytes", None), tree.pop("_device", "cpu")
        if isinstance(total, dict) or isinstance(device, dict):
            raise ValueError("a nested tensordict has the name of a field")
        root = _level(tree, escaped, 0)
        used = _extent(root)
        total = used if total is None else _size(total)
        if total < used:
            raise ValueError(f"its leaves end at byte {used} of a storage of {total}")
        return Schema(root, total, check_device(device))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        message = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ProtocolError(f"{where} sent metadata that is refused: {message}") from error


def check_device(text: Any) -> str:
    """Return a device text if it names a device that holds bytes. Raises ValueError."""
    try:
        device = torch.device(text) if isinstance(text, str) and len(text) < 20 else None
    except RuntimeError:
        # That is how torch refuses a text, and the empty one.
        device = None
    if device is None or device.type not in _DEVICES:
        raise ValueError(f"{str(text)[:40]!r} is no device")
    return str(text)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]!r} is no size")
    return value


def sizes(value: Any) -> tuple[int, ...]:
    """Return a list of sizes as a tuple. Raises ValueError."""
    if type(value) is not list or len(value) > 64:
        raise ValueError(f"{str(value)[:80]!r} is no list of sizes")
    return tuple(_size(n) for n in value)


def _object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is no object")
    return value


def _level(tree: dict[str, Any], escaped: bool, depth: int) -> Level:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is more than {_MAX_DEPTH} levels deep")
    if type(tree["cls"]) is not str:
        raise ValueError("a level has no class")
    level = Level(tree["cls"])
    for name, item in _object(tree["leaves"], "leaves").items():
        level.leaves[name] = _leaf(name, item)
    for name, item in _object(tree["non_tensors"], "non_tensors").items():
        value, batch, device = item if type(item) is list and len(item) == 3 else (None, None, 0)
        device = None if device is None else check_device(device)
        level.non_tensors[name] = (value, list(sizes(batch)), device)
    for name, item in tree.items():
        if name in FIELDS or (name == "size" and type(item) is int):
            continue
        if escaped and not name.startswith("/"):
            raise ValueError(f"the level {name[:40]!r} is not escaped")
        level.levels[name[escaped:]] = _level(_object(item, "a level"), escaped, depth + 1)
    _names_are_unique(level)
    own = _object(tree["cls_metadata"], "cls_metadata")
    level.locked = own.get("is_locked") is True
    if level.cls in STACKS:
        _stack(level, own)
    else:
        _plain(level, own)
    return level


def _names_are_unique(level: Level) -> None:
    names = [*level.non_tensors, *level.levels]
    for name in level.leaves:
        if not name.startswith(JAGGED):
            names.append(name)
        elif name.startswith("<NJT_OFFSETS>"):
            names.append(name.removeprefix("<NJT_OFFSETS>"))
    if len(set(names)) != len(names):
        raise ValueError("an entry occurs twice")


def _leaf(name: str, item: Any) -> Leaf:
    if type(item) is not list or len(item) not in (5, 6):
        raise ValueError(f"the leaf {name[:40]!r} is not described by five items")
    dtype = BY_NAME.get(item[0]) if type(item[0]) is str else None
    if dtype is None:
        raise ValueError(f"the leaf {name[:40]!r} has the unknown dtype {str(item[0])[:40]!r}")
    shape, start, stop, pad = sizes(item[1]), _size(item[2]), _size(item[3]), _size(item[4])
    nbytes = math.prod(shape) * dtype.itemsize
    if start + nbytes + pad != stop or (start % dtype.itemsize and nbytes):
        raise ValueError(
            f"the leaf {name[:40]!r} of shape {list(shape)} and {dtype} does not fit bytes "
            f"[{start}, {stop}) with {pad} of padding"
        )
    ragged = _size(item[5]) if len(item) == 6 and item[5] is not None else None
    described = (item[0], list(shape), start, stop, pad, *item[5:])
    return Leaf(Slot(dtype, shape, start, nbytes), described, ragged)


def _plain(level: Level, own: dict[str, Any]) -> None:
    level.batch = sizes(own["batch_size"])
    device = own.get("device")
    level.device = None if device is None else check_device(device)
    names = own.get("names")
    if names is not None:
        if type(names) is not list or len(names) != len(level.batch):
            raise ValueError("it has not one name for each dim")
        if any(name is not None and type(name) is not str for name in names):
            raise ValueError("the name of a dim is no text")
        given = [name for name in names if name is not None]
        if len(set(given)) != len(given):
            raise ValueError("two dims have one name")
        level.names = names if given else None
    for name, leaf in level.leaves.items():
        if not name.startswith(JAGGED) and leaf.slot.shape[: len(level.batch)] != level.batch:
            raise ValueError(f"the leaf {name[:40]!r} does not have the batch size of its level")
    for name, below in level.levels.items():
        if below.batch[: len(level.batch)] != level.batch:
            raise ValueError(f"the level {name[:40]!r} does not have the batch size above it")
    for name, (_, batch, _) in level.non_tensors.items():
        if tuple(batch[: len(level.batch)]) != level.batch:
            raise ValueError(f"the value {name[:40]!r} does not have the batch size of its level")
    _check_jagged(level)


def _check_jagged(level: Level) -> None:
    for name, offsets in level.leaves.items():
        if not name.startswith(JAGGED):
            continue
        base = name.split(">", 1)[1]
        values = level.leaves.get(f"<NJT_VALUES>{base}")
        table = level.leaves.get(f"<NJT_OFFSETS>{base}")
        if values is None or table is None:
            raise ValueError(f"the jagged leaf {base[:40]!r} lacks its values or its offsets")
        if offsets is values:
            continue
        if offsets.slot.dtype not in (torch.int32, torch.int64) or len(offsets.slot.shape) != 1:
            raise ValueError(f"the offsets of the jagged leaf {base[:40]!r} are no list of numbers")
        if not 1 <= (table.ragged or 1) <= len(values.slot.shape):
            raise ValueError(f"the jagged leaf {base[:40]!r} has no dim {table.ragged}")
        rows = offsets.slot.shape[0] - (offsets is table)
        if rows < 0 or (level.batch and rows != level.batch[0]):
            raise ValueError(f"the jagged leaf {base[:40]!r} has {rows} rows")


def _stack(level: Level, own: dict[str, Any]) -> None:
    if level.leaves or (level.levels and level.non_tensors):
        raise ValueError("a stack holds something else than its members")
    count = len(level.levels) + len(level.non_tensors)
    if not count or {*level.levels, *level.non_tensors} != {str(i) for i in range(count)}:
        raise ValueError("the members of a stack are not numbered from 0")
    level.levels = {str(i): level.levels[str(i)] for i in range(len(level.levels))}
    level.non_tensors = {str(i): level.non_tensors[str(i)] for i in range(len(level.non_tensors))}
    batches = {below.batch for below in level.levels.values()}
    batches |= {tuple(batch) for _, batch, _ in level.non_tensors.values()}
    if len(batches) > 1:
        raise ValueError("the members of a stack differ in batch size")
    batch = list(batches.pop())
    level.stack_dim, level.stack_name = _size(own["stack_dim"]), own.get("stack_dim_name")
    if level.stack_dim > len(batch):
        raise ValueError(f"there is no dim {level.stack_dim} to stack along")
    if level.stack_name is not None and type(level.stack_name) is not str:
        raise ValueError("the name of a dim is no text")
    batch.insert(level.stack_dim, count)
    level.batch = tuple(batch)


def _extent(root: Level) -> int:
    """Return where the last leaf ends, after a check that no two of them overlap."""
    spans = sorted(
        (leaf.item[2], leaf.item[3])
        for level in root.walk()
        for leaf in level.leaves.values()
        if leaf.item[2] != leaf.item[3]
    )
    end = 0
    for start, stop in spans:
        if start < end:
            raise ValueError(f"two leaves overlap at byte {start}")
        end = stop
    return end
