"""A small write to existing entries in one round trip: look and write in one script.

The transaction of ``commit`` takes two: it looks at the lengths under a watch, then writes. The
script blocks the server for as long as the transaction would, and only small writes use it. Users
who may not run scripts, and servers without them, get the transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tdio.wire.changes import Change, PutRows
from tdio.wire.names import Names
from tdio.wire.reading import Tokens
from tdio.wire.requests import Arg

#: KEYS: schema, version, turn, one data string for each entry. ARGV: the schema that is known, the
#: new version, the number of entries, the length of each, then entry, offset and bytes of each
#: range.
SOURCE = b"""
if redis.call('GETRANGE', KEYS[1], 0, 15) ~= ARGV[1] then return -1 end
if redis.call('EXISTS', KEYS[3]) == 1 then return -2 end
local entries = tonumber(ARGV[3])
for i = 1, entries do
  local held = redis.call('STRLEN', KEYS[3 + i])
  if held < tonumber(ARGV[3 + i]) then return {i, held} end
end
for i = 4 + entries, #ARGV, 3 do
  redis.call('SETRANGE', KEYS[3 + ARGV[i]], ARGV[i + 1], ARGV[i + 2])
end
redis.call('SET', KEYS[2], ARGV[2])
return 0
"""
#: What the script returns where it is another writer's turn.
WAIT = -2
SHA = hashlib.sha1(SOURCE).hexdigest()
_MAX_BYTES = 64 * 1024
_MAX_RANGES = 256


def arguments(
    names: Names, known: Tokens, version: bytes, changes: Sequence[Change]
) -> tuple[Arg, ...] | None:
    """Return what follows the script in its command, or None where it is no such write."""
    if not known.schema or not changes:
        return None
    size = ranges = 0
    for change in changes:
        if not isinstance(change, PutRows) or not len(change.payload):
            return None
        size += len(change.payload)
        ranges += len(change.ranges)
    if size > _MAX_BYTES or ranges > _MAX_RANGES:
        return None
    keys: list[Arg] = [names.schema, names.version, names.turn]
    lengths: list[Arg] = []
    writes: list[Arg] = []
    for number, change in enumerate(changes, 1):
        assert isinstance(change, PutRows)
        keys.append(names.data(change.path))
        lengths.append(change.spec.nbytes)
        for start, part in change.parts():
            writes += (number, start, part)
    return (len(keys), *keys, known.schema, version, len(changes), *lengths, *writes)
