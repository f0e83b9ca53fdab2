from __future__ import annotations

import re
from datetime import timedelta

from app.claim.grant import Grants

TTL = timedelta(seconds=30)


def test_every_claim_has_a_token_of_its_own_also_among_processes_with_one_name() -> None:
    processes = [Grants("the same name", TTL) for _ in range(50)]
    tokens = [grants.new().token for grants in processes for _ in range(20)]
    assert len(set(tokens)) == len(tokens) == 1000


def test_a_token_is_the_name_64_random_bits_and_a_number() -> None:
    grants = Grants("a-1", TTL)
    assert re.fullmatch(r"a-1/[0-9a-f]{16}/1", grants.new().token)
    assert grants.new().token.endswith("/2")


def test_a_name_with_slashes_stays_one_part_and_a_long_one_is_cut() -> None:
    assert Grants("a/b/c", TTL).new().token.split("/")[0] == "a-b-c"
    assert len(Grants("x" * 500, TTL).new().token) < 120
