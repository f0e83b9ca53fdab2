"""`carillon doctor` in kafka mode: the broker, the topic, its partitions and how far the group is behind."""

from __future__ import annotations

from app.claim.kafka.topic import HintTopic
from app.cli import doctor
from app.cli.doctor import Finding
from app.settings import KafkaSettings
from tests.brokers import TANSU, BrokerPlace
from tests.ports import quiet_port


def in_kafka_mode(dsn: str, place: BrokerPlace, **changes: str) -> dict[str, str]:
    return {
        "SCHEDULER_DATABASE_URL": dsn,
        "SCHEDULER_CLAIM_MODE": "kafka",
        "SCHEDULER_KAFKA_BOOTSTRAP": place.bootstrap,
        "SCHEDULER_KAFKA_TOPIC": place.topic,
        "SCHEDULER_KAFKA_GROUP": place.group,
        "SCHEDULER_KAFKA_IDEMPOTENCE": str(place.server.has_idempotence).lower(),
    } | {f"SCHEDULER_KAFKA_{name.upper()}": value for name, value in changes.items()}


async def broker_finding(environ: dict[str, str]) -> Finding:
    found = [finding async for finding in doctor.examine(environ)]
    assert [finding.subject for finding in found if not finding.is_good] in ([], ["broker"])
    assert found[-1].subject == "broker"
    return found[-1]


async def test_the_doctor_shows_topic_partitions_and_lag(dsn: str, broker: BrokerPlace) -> None:
    settings = KafkaSettings(
        bootstrap=broker.bootstrap,
        topic=broker.topic,
        partitions=3,
        idempotence=broker.server.has_idempotence,
    )
    topic = HintTopic(settings, client_id="tests")
    assert await topic.ensure() == 3
    await topic.close()
    found = await broker_finding(in_kafka_mode(dsn, broker))
    assert found.is_good
    assert f"{broker.bootstrap}, topic {broker.topic}: 3 partitions" in found.text
    assert f"group {broker.group} lags by 0 hints" in found.text


async def test_the_doctor_says_who_makes_a_topic_that_is_missing(dsn: str, broker: BrokerPlace) -> None:
    """A broker that makes it as soon as it is asked about it has it, then."""
    found = await broker_finding(in_kafka_mode(dsn, broker))
    assert found.is_good
    assert ("the first replica makes it" in found.text) != broker.server.makes_topics_unasked


async def test_the_doctor_tells_of_a_missing_topic_that_nobody_may_make(
    dsn: str, broker: BrokerPlace
) -> None:
    found = await broker_finding(in_kafka_mode(dsn, broker, create_topic="false"))
    assert found.is_good == broker.server.makes_topics_unasked
    assert ("SCHEDULER_KAFKA_CREATE_TOPIC" in found.text) != broker.server.makes_topics_unasked


async def test_the_doctor_tells_of_a_broker_without_idempotent_producers(
    dsn: str, broker: BrokerPlace
) -> None:
    found = await broker_finding(in_kafka_mode(dsn, broker, idempotence="true"))
    assert found.is_good == (broker.server.name != TANSU)
    assert ("SCHEDULER_KAFKA_IDEMPOTENCE=false" in found.text) == (broker.server.name == TANSU)


async def test_the_doctor_tells_of_a_broker_that_is_not_there(dsn: str, broker: BrokerPlace) -> None:
    nobody = f"127.0.0.1:{quiet_port()}"
    found = await broker_finding(in_kafka_mode(dsn, broker, bootstrap=nobody))
    assert not found.is_good
    assert nobody in found.text
    assert "runs fire late" in found.text
