"""Cases of the walk over TensorDictBase that do not hold yet, by cause.

A case is a name and the first letters of its kinds (plain, nested, lazy, ragged, element). Each is
expected to fail; one that passes is an error that asks to take it out here.
"""

from __future__ import annotations

from _surface import KINDS

_CAUSES: dict[str, str] = {}

_RANK_CAUSES: dict[str, str] = {}


def _expand(causes: dict[str, str]) -> dict[tuple[str, str], str]:
    kinds = {kind[0]: kind for kind in KINDS}
    out = {}
    for cause, cases in causes.items():
        for case in cases.split():
            name, _, letters = case.rpartition(":")
            out.update({(kinds[letter], name): cause for letter in letters})
    return out


GAPS = _expand(_CAUSES)
RANK_GAPS = _expand(_RANK_CAUSES)
