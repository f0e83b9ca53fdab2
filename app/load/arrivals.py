"""What the target of a load run keeps of each request: when it came, and for which delivery. 24 bytes per request.

The two columns also are the format in which they leave the target (`dump`), all numbers little-endian:

    8 bytes      the magic b"CARLOAD1"
    8 bytes      n, the number of requests, unsigned
    n x 8 bytes  arrival of each request's first byte, in nanoseconds since 1970 by the target's wall clock, signed
    n x 16 bytes the key of each request's delivery id, see `key_of`

Requests are in the order in which they were complete, which may differ a little from the order of their first bytes.
"""

from __future__ import annotations

import binascii
import hashlib
import struct
import sys
from array import array
from typing import Self

from app.errors import CarillonError

MAGIC = b"CARLOAD1"
HEAD = struct.Struct("<8sQ")
KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""The key of a request that came without a delivery id."""

UUID_DIGITS = 32


def key_of(delivery_id: bytes) -> bytes:
    """The 16 bytes that stand for a delivery id: a UUID's own bytes (`UUID.bytes`), a hash of anything else.

    >>> key_of(b"01234567-89ab-cdef-0123-456789abcdef").hex()
    '0123456789abcdef0123456789abcdef'
    """
    if not delivery_id:
        return NO_KEY
    digits = delivery_id.replace(b"-", b"")
    if len(digits) == UUID_DIGITS:
        try:
            return binascii.unhexlify(digits)
        except binascii.Error:
            pass
    return hashlib.blake2b(delivery_id, digest_size=KEY_BYTES).digest()


class Arrivals:
    """Two columns that grow together: `times` (nanoseconds since 1970) and `keys` (16 bytes each)."""

    def __init__(self) -> None:
        self.times = array("q")
        self.keys = bytearray()

    def __len__(self) -> int:
        return len(self.times)

    def add(self, arrived_ns: int, key: bytes) -> None:
        """Append one request; `key` as `key_of` makes it."""
        self.times.append(arrived_ns)
        self.keys += key

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.times = array("q")
        self.keys = bytearray()

    def dump(self) -> bytes:
        """All of it in the format of this module."""
        return b"".join((HEAD.pack(MAGIC, len(self)), _little_endian(self.times).tobytes(), self.keys))

    @classmethod
    def load(cls, dumped: bytes) -> Self:
        """The opposite of `dump`. Raises `CarillonError` when it is cut short or something else."""
        magic, count = HEAD.unpack_from(dumped) if len(dumped) >= HEAD.size else (b"", 0)
        keys_begin = HEAD.size + count * 8
        if magic != MAGIC or len(dumped) != keys_begin + count * KEY_BYTES:
            raise CarillonError(
                f"the target's ledger cannot be read: {len(dumped)} bytes, beginning {dumped[:8]!r}"
            )
        arrivals = cls()
        times = array("q")
        times.frombytes(memoryview(dumped)[HEAD.size : keys_begin])
        arrivals.times = _little_endian(times)
        arrivals.keys += memoryview(dumped)[keys_begin:]
        return arrivals


def _little_endian(times: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return times
    swapped = array("q", times)
    swapped.byteswap()
    return swapped
