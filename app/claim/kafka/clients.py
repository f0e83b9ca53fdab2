"""How the broker's clients are made: where it is, who we are, and what is asked of it."""

from __future__ import annotations

import ssl
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from app.claim.kafka.calls import CALL_WITHIN, started, stop_producer
from app.errors import ConfigError
from app.settings import KafkaSettings

METADATA_AGE_MS = 5_000
"""A topic that was deleted and made again is noticed within this."""
NO_IDEMPOTENCE = (
    "SCHEDULER_KAFKA_IDEMPOTENCE: the broker makes no idempotent producers, as small brokers do not; set "
    "SCHEDULER_KAFKA_IDEMPOTENCE=false for this one"
)


def connection(settings: KafkaSettings) -> dict[str, Any]:
    """What every client needs to connect. Raises ConfigError when the CA certificates cannot be read."""
    options: dict[str, Any] = {
        "bootstrap_servers": settings.servers,
        "security_protocol": settings.security,
    }
    if settings.security.endswith("SSL"):
        try:
            options["ssl_context"] = ssl.create_default_context(cafile=settings.ca_file)
        except OSError as error:  # SSLError is one
            raise ConfigError(
                f"SCHEDULER_KAFKA_CA_FILE: {settings.ca_file} cannot be read ({error.strerror}); "
                "it must be a file of certificates in PEM"
            ) from None
    if settings.security.startswith("SASL"):
        password = settings.secret
        options |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.username,
            "sasl_plain_password": None if password is None else password.get_secret_value(),
        }
    return options


async def start_producer(settings: KafkaSettings, *, client_id: str) -> AIOKafkaProducer:
    """A producer that is ready. Raises ConfigError when the broker lacks what is asked of it, or TopicUnavailable."""
    producer = AIOKafkaProducer(
        client_id=client_id,
        acks="all",
        enable_idempotence=settings.idempotence,
        linger_ms=5,
        request_timeout_ms=int(CALL_WITHIN.total_seconds() * 1000),
        metadata_max_age_ms=METADATA_AGE_MS,
        **connection(settings),
    )
    lacking = NO_IDEMPOTENCE if settings.idempotence else None
    await started(producer, "open the producer", stop=stop_producer, lacking=lacking)
    return producer


async def partitions_of(admin: AIOKafkaAdminClient, name: str) -> int:
    """How many partitions the topic has; 0 when the broker knows of no such topic."""
    for topic in await admin.describe_topics([name]):
        if topic["topic"] == name and not topic["error_code"]:
            return len(topic["partitions"])
    return 0
