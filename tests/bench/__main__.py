"""``python -m tests.bench loader|pipe|store [--json FILE] [--only NAME] [--runs N]``."""

from __future__ import annotations

import argparse

from tests.bench import loader, pipe, store
from tests.bench._measure import report

SUITES = {"loader": loader.run, "pipe": pipe.run, "store": store.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--json", metavar="FILE", help="write the rows as a JSON list")
    parser.add_argument("--only", default="", help="part of the name of the benches to run")
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each side")
    args = parser.parse_args()
    rows = SUITES[args.suite](args.only, args.runs)
    if not rows:
        parser.error(f"no row has {args.only!r} in its name")
    report(rows, args.json)


if __name__ == "__main__":
    main()
