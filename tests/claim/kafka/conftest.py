from __future__ import annotations

import pytest

from tests.claim.kafka.tally import Tally


@pytest.fixture
def tally() -> Tally:
    """Counts from the test's beginning on."""
    return Tally()
