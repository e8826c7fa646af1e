"""Key paths: a nested key's parts joined by ".", the form in which the server holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tdio.errors import UnsupportedValue

SEPARATOR = "."
Key = str | tuple[str, ...]


def path_of(key: Key) -> str:
    """Return the path of a key that is a string or a tuple of strings."""
    return key if isinstance(key, str) else SEPARATOR.join(key)


def key_of(path: str) -> Key:
    """Return the key of a path: a string at the root, else a tuple of strings."""
    parts = tuple(path.split(SEPARATOR))
    return parts[0] if len(parts) == 1 else parts


def parents(path: str) -> list[str]:
    """Return the paths of the levels above ``path``, the root left out: ``a.b.c`` has two."""
    parts = path.split(SEPARATOR)
    return [SEPARATOR.join(parts[:n]) for n in range(1, len(parts))]


def check_key(key: Key) -> str:
    """Return the path of ``key`` if it round-trips.

    Raises:
        UnsupportedValue: a part is empty, or holds a "." (it would be read back as nesting) or
            ends in ":idx" (the name of an offset table).
    """
    parts = (key,) if isinstance(key, str) else key
    for part in parts:
        if not part or SEPARATOR in part or part.endswith(":idx"):
            raise UnsupportedValue(
                f"the key {key!r} cannot be stored: {part!r} is empty, holds a '.' or ends in "
                "':idx', and would collide with another entry; rename it"
            )
    return SEPARATOR.join(parts)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"a.b": x}`` into ``{"a": {"b": x}}``, in the order given."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        if SEPARATOR not in path:
            root[path] = value
            continue
        *parents, name = path.split(SEPARATOR)
        level = root
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = value
    return root


def nest_level(root: dict[str, Any], path: str) -> None:
    """Make the level ``path`` in a nested dict, where it is not there."""
    for part in path.split(SEPARATOR):
        root = root.setdefault(part, {})
        if not isinstance(root, dict):
            return


def below(paths: Iterable[str], prefix: str) -> list[str]:
    """Return the paths under ``prefix`` (all of them for ""), relative to it, sorted."""
    if not prefix:
        return sorted(paths)
    start = prefix + SEPARATOR
    return sorted(path[len(start) :] for path in paths if path.startswith(start))
