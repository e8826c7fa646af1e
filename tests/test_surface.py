"""The walk over the public names of TensorDictBase: each works on a store as it does locally.

A store either gives what the same call on the local tensordict gives, and leaves on the server
what that leaves in memory, or refuses with an error that says what to call instead.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import _surface_convert
import _surface_entries
import _surface_math
import _surface_texts
import pytest
from _surface import Cases, check
from _surface_gaps import GAPS
from _surface_ranks import EXCHANGES
from tensordict import TensorDictBase

CASES = Cases()
for _cases in (_surface_math, _surface_entries, _surface_texts, _surface_convert):
    for _name, _case in _cases.CASES.items():
        assert _name not in CASES, _name
        CASES[_name] = _case

#: Names that other files walk, and where.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys((name.split("/")[0] for name in EXCHANGES), "test_surface_distributed.py"),
    **dict.fromkeys(("asend", "arecv"), "the tests of the pipes"),
}


def _parameters() -> list[Any]:
    out = []
    for name, case in CASES.items():
        for kind in case.kinds:
            gap = GAPS.get((kind, name))
            marks = [pytest.mark.xfail(strict=True, reason=gap)] if gap else []
            out.append(pytest.param(kind, name, id=f"{name}-{kind}", marks=marks))
    return out


@pytest.mark.parametrize(("kind", "name"), _parameters())
def test_a_store_behaves_like_the_local_one(
    kind: str, name: str, conn: dict[str, Any], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(CASES[name], kind, conn, tmp_path)


def test_no_public_name_lacks_a_case() -> None:
    public = {name for name in dir(TensorDictBase) if not name.startswith("_")}
    walked = {name.split("/")[0] for name in CASES} | set(ELSEWHERE)
    assert public - walked == set(), "names without a case"
    assert walked - public == set(), "cases of names that TensorDictBase does not have"


def test_every_gap_is_a_case() -> None:
    cases = {(kind, name) for name, case in CASES.items() for kind in case.kinds}
    assert set(GAPS) <= cases
