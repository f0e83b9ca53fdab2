"""API keys: what a tenant presents. The text is shown once; afterwards only its SHA-256 exists.

    ck_<id>_<secret>      id: 16 characters a-z2-7      secret: 32 random bytes, base64url without padding

The id finds the row by one indexed read and may be logged; the secret part is never stored or logged. A
plain SHA-256 is right here: slow hashes defend guessable passwords, and nobody guesses 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

ID_BYTES = 10
SECRET_BYTES = 32
_SHAPE = re.compile(r"ck_([a-z2-7]{16})_([A-Za-z0-9_-]{43})")


class Scope(StrEnum):
    """What a key may do in its own tenant; `write` does not include `read`."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class MintedKey:
    """A new key. `text` is for its owner's eyes only and stays out of every `repr`."""

    id: str
    text: str = field(repr=False)
    secret_sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """A key as it came with a request: well-formed, not yet known to be genuine."""

    id: str
    secret_sha256: bytes = field(repr=False)


def mint(random_bytes: Callable[[int], bytes]) -> MintedKey:
    """A new key from `random_bytes(n)`, which must be cryptographically strong (`secrets.token_bytes`)."""
    key_id = base64.b32encode(random_bytes(ID_BYTES)).decode("ascii").lower()
    secret = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).decode("ascii").rstrip("=")
    return MintedKey(key_id, f"ck_{key_id}_{secret}", _digest(secret))


def read(text: str) -> PresentedKey | None:
    """The id and the digest of a presented key; None when the text cannot be a key at all (any text is
    allowed).
    """
    shape = _SHAPE.fullmatch(text)
    if shape is None:
        return None
    return PresentedKey(shape[1], _digest(shape[2]))


def is_genuine(presented: PresentedKey, stored_sha256: bytes) -> bool:
    """Compares in constant time, on bytes (`compare_digest` on text raises for non-ASCII)."""
    return hmac.compare_digest(presented.secret_sha256, stored_sha256)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()
