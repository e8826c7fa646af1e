"""Benches: ratios of both sides in one run. ``python -m tests.bench store``."""
