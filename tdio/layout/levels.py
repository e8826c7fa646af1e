"""What a level of a stored tensordict is: batch size, dim names, class.

The reference's format has none of it below the root, and no names at all; tdio keeps it in one
hash of its own, one JSON field for each level that is not the default (``docs/format.md``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tdio.errors import CorruptEntry


@dataclass(frozen=True)
class Level:
    """One level: the root (path "") or a nested tensordict.

    Attributes:
        batch: its batch size; starts with that of the root (in a lazy stack: of an element).
            -1 stands for a dim that differs between elements.
        names: names of the dims, or () for none.
        kind: the tensorclass of a nested level, or "".
    """

    batch: tuple[int, ...]
    names: tuple[str | None, ...] = ()
    kind: str = ""


def encode_level(level: Level) -> str:
    """Return the JSON field of a level."""
    fields: dict[str, object] = {"batch": list(level.batch)}
    if level.names:
        fields["names"] = list(level.names)
    if level.kind:
        fields["kind"] = level.kind
    return json.dumps(fields)


def decode_levels(
    fields: Mapping[str, str], batch: tuple[int, ...], inner: tuple[int, ...], where: str
) -> dict[str, Level]:
    """Return the levels that a hash states, by path.

    Args:
        fields: the decoded hash.
        batch: batch size of the root.
        inner: what the batch sizes of nested levels start with.
        where: names the store in errors.

    Raises:
        CorruptEntry: a field that makes no sense, or contradicts the batch size of the root.
    """
    levels = {}
    for path, text in fields.items():
        try:
            raw = json.loads(text)
            size, names, kind = tuple(raw["batch"]), tuple(raw.get("names", ())), raw.get("kind")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptEntry(f"{where}: what it says of the level {path!r} is damaged") from error
        sound = (
            all(type(n) is int and -1 <= n < 2**62 for n in size)
            and (size[: len(inner)] == inner if path else size == batch)
            and len(size) <= 64
            and (not names or len(names) == len(size))
            and all(name is None or isinstance(name, str) for name in names)
            and (kind is None or isinstance(kind, str))
        )
        if not sound:
            raise CorruptEntry(f"{where}: what it says of the level {path!r} is damaged: {text}")
        levels[path] = Level(size, names, kind or "")
    return levels
