"""Numbers that users pass: whole, of any kind, and within bounds."""

from __future__ import annotations

from operator import index
from typing import Any

#: Seeds and epochs are words of the generator's key, and of a JSON file's signed numbers.
END = 2**63


def whole(name: str, value: Any, first: int, end: int = END) -> int:
    """Return a whole number of any kind as an int. Raises ValueError outside ``[first, end)``."""
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: it must be a whole number") from None
    if not first <= number < end:
        to = "2**63 - 1" if end == END else end - 1
        raise ValueError(f"{name}={number}: at least {first}, at most {to}")
    return number
