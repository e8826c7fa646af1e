"""Pure layout maths: dtypes, key paths, specs, index to rows, rows to byte ranges, buffers.

Nothing in here does I/O; it imports torch, numpy, the standard library and ``tdio.errors``.
"""
