"""Alternating runs of two sides, medians, ratios, and the table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ratio`` above 1 means that ours is faster."""

    name: str
    ours: float
    theirs: float
    unit: str
    ratio: float


def _seconds(work: Callable[[], Any], after: Callable[[Any], Any]) -> float:
    began = time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    after(result)
    return took


def compare(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    amount: tuple[float, float],
    unit: str,
    runs: int,
    after: Callable[[Any], Any] = lambda result: None,
) -> Row:
    """Time both sides in turn after one warm-up each; who begins alternates.

    ``amount`` is what one call of each side moves, in ``unit``'s numerator. ``after`` tidies up
    what a call returned, outside the time.
    """
    sides = (ours, theirs)
    for side in sides:
        after(side())
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(runs):
        for which in (0, 1) if run % 2 else (1, 0):
            times[which].append(_seconds(sides[which], after))
    a = amount[0] / statistics.median(times[0])
    b = amount[1] / statistics.median(times[1])
    return Row(name, a, b, unit, a / b)


def report(rows: list[Row], path: str | None) -> None:
    print(f"{'name':<32}{'ours':>14}{'theirs':>14}  {'unit':<8}{'ratio':>8}")
    for row in rows:
        print(
            f"{row.name:<32}{row.ours:>14,.1f}{row.theirs:>14,.1f}  {row.unit:<8}{row.ratio:>7.2f}x"
        )
    if path:
        Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1))


def peak_extra_bytes(work: Callable[[], Any]) -> int:
    """Peak resident memory during ``work`` above what was resident before, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
