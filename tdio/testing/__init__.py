"""Shipped conformance suites: what a backend, a pipe or a resumable loader must pass."""
