"""API keys: their form, and that only the whole right text is genuine."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import api_key
from app.domain.api_key import MintedKey


def mint() -> MintedKey:
    return api_key.mint(secrets.token_bytes)


@given(seed=st.binary(min_size=42, max_size=42))
def test_every_minted_key_is_read_back_as_genuine(seed: bytes) -> None:
    pieces = iter((seed[:10], seed[10:]))
    minted = api_key.mint(lambda _: next(pieces))
    presented = api_key.read(minted.text)
    assert presented is not None
    assert presented.id == minted.id
    assert api_key.is_genuine(presented, minted.secret_sha256)
    assert len(minted.secret_sha256) == 32


def test_the_secret_has_256_random_bits_and_no_key_comes_twice() -> None:
    asked: list[int] = []

    def counting(count: int) -> bytes:
        asked.append(count)
        return secrets.token_bytes(count)

    keys = {api_key.mint(counting).text for _ in range(50)}
    assert len(keys) == 50
    assert asked[:2] == [10, 32]


@given(st.integers(0, 62), st.characters(codec=None))
def test_one_other_character_makes_it_another_key(place: int, character: str) -> None:
    minted = mint()
    changed = minted.text[:place] + character + minted.text[place + 1 :]
    presented = api_key.read(changed)
    is_same = changed == minted.text
    good = (
        presented is not None
        and presented.id == minted.id
        and api_key.is_genuine(presented, minted.secret_sha256)
    )
    assert good == is_same


@pytest.mark.parametrize(
    "text", ["", "ck_", "ck__", "ck_a_b", "CK_" + "a" * 16 + "_" + "A" * 43, "\ud800", "\0"]
)
def test_what_cannot_be_a_key_is_none(text: str) -> None:
    assert api_key.read(text) is None


@given(st.text(max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    api_key.read(text)
    api_key.read("ck_" + text)


def test_trailing_newlines_and_spaces_are_not_part_of_a_key() -> None:
    text = mint().text
    for changed in (text + "\n", " " + text, text + " "):
        assert api_key.read(changed) is None


def test_no_repr_shows_the_secret() -> None:
    minted = mint()
    presented = api_key.read(minted.text)
    assert presented is not None
    shown = repr(minted) + repr(presented)
    assert minted.text.split("_", 2)[2] not in shown
    assert repr(minted.secret_sha256) not in shown
