"""Shipped conformance suites: what a backend, a pipe or a resumable loader must pass.

They are classes of pytest tests: subclass one and say what is tested. Needs pytest.
"""

import pytest

# Before the import: a failed assertion then shows the values, as in a test module.
pytest.register_assert_rewrite("tdio.testing._samples", "tdio.testing.reads", "tdio.testing.stores")

from tdio.testing.reads import StoreReadTests  # noqa: E402
from tdio.testing.stores import StoreTests  # noqa: E402

__all__ = ["StoreReadTests", "StoreTests"]
