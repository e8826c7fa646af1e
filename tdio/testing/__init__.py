"""Shipped conformance suites: what a backend, a pipe or a resumable loader must pass.

For a store, classes of pytest tests: subclass one and say what is tested. For what resumes,
functions: call one with what makes a loader or a node. Needs pytest.
"""

import pytest

# Before the import: a failed assertion then shows the values, as in a test module.
pytest.register_assert_rewrite("tdio.testing._samples", "tdio.testing.reads", "tdio.testing.stores")

from tdio.testing.reads import StoreReadTests  # noqa: E402
from tdio.testing.resume import run_node_resume_test, run_resume_test  # noqa: E402
from tdio.testing.stores import StoreTests  # noqa: E402

__all__ = ["StoreReadTests", "StoreTests", "run_node_resume_test", "run_resume_test"]
