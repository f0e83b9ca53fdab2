"""Calls to the broker, bounded and with one of two answers; and the ends of its clients, which must come too.

aiokafka's ways, each met here: `stop` may raise CancelledError by itself (aio-libs/aiokafka#647), or wait for what a
broker that is away never answers, for 40 s or for ever. Cut off there, it leaves tasks running that try on and on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    KafkaError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnknownError,
    UnsupportedVersionError,
)

from app.errors import CarillonError, ConfigError

logger = logging.getLogger(__name__)

CALL_WITHIN = timedelta(seconds=5)
STOP_WITHIN = timedelta(seconds=2)


class TopicUnavailable(CarillonError):
    """No broker answered, or the topic cannot be used right now."""


class asked:  # noqa: N801 reads as a statement
    """Bound a call to the broker and turn what comes of it into one of our two answers.

    Leaving the block raises TopicUnavailable for everything that may be over soon, ConfigError for what will not.
    `within` is CALL_WITHIN unless told. `lacking` is what to say when the broker does not know the request, or knows
    only that it failed.
    """

    def __init__(self, what: str, *, within: timedelta | None = None, lacking: str | None = None) -> None:
        self._what = what
        self._lacking = lacking
        self._timeout = asyncio.timeout((within or CALL_WITHIN).total_seconds())

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TopicUnavailable(f"{self._what}: the broker did not answer in time") from None
        match error:
            case SaslAuthenticationFailed() | TopicAuthorizationFailedError():
                raise ConfigError(
                    f"SCHEDULER_KAFKA_*: the broker refuses us ({type(error).__name__})"
                ) from None
            case UnsupportedVersionError() | UnknownError() if self._lacking is not None:
                raise ConfigError(self._lacking) from None
            case UnsupportedVersionError():
                raise ConfigError(
                    f"SCHEDULER_KAFKA_BOOTSTRAP: the broker cannot do this ({self._what}: {error})"
                ) from None
            case KafkaError() | OSError():
                raise TopicUnavailable(f"{self._what}: {type(error).__name__}: {error}") from None
            case _:
                return


async def started(
    client: Any, what: str, *, stop: Callable[[Any], Awaitable[None]], lacking: str | None = None
) -> None:
    """Start a client; when that fails it is stopped. Raises like `asked`.

    Cut off in its start it would lose a connection, so it is given a moment to come through even when nobody wants it.
    """
    starting = asyncio.ensure_future(client.start())
    try:
        async with asked(what, lacking=lacking):
            await asyncio.shield(starting)
    except BaseException:
        await _ended(starting)
        await stop(client)
        raise


def look_at(future: asyncio.Future[Any]) -> None:
    """As a callback: its failure has been seen, also when nobody waits for it any more."""
    if not future.cancelled():
        future.exception()


def look_at_commits(consumer: AIOKafkaConsumer) -> None:
    """Its commits go on in tasks of their own when they are cut off; what comes of them then is nobody's, and would be
    logged as an error."""
    coordinator = consumer._coordinator
    commit = coordinator._do_commit_offsets

    async def commit_and_look(*offsets: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(look_at)
        await commit(*offsets)

    coordinator._do_commit_offsets = commit_and_look


async def stop_producer(producer: AIOKafkaProducer) -> None:
    """End it, with what it has not sent if need be."""
    if not await _ended(producer.stop()):
        await _ended(producer._sender.close())
        left = producer._message_accumulator
        for waiting in left._batches.values():
            left._pending_batches.update(waiting)  # where one in its second try is looked for when it ends
        for batch in left._pending_batches:
            batch.future.add_done_callback(look_at)
            batch._drain_waiter.add_done_callback(look_at)
        left.fail_all(KafkaError("stopped"))
        await _ended(producer.client.close())


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """End it; it leaves its group when the broker is there to be told."""
    if not await _ended(consumer.stop()):
        coordinator = consumer._coordinator
        if coordinator is not None:
            tasks = (
                coordinator._coordination_task,
                coordinator._heartbeat_task,
                coordinator._commit_refresh_task,
            )
            for task in tasks:
                if task is not None:
                    await _ended(_cancelled(task))
        if consumer._fetcher is not None:
            await _ended(consumer._fetcher.close())
        await _ended(consumer._client.close())


async def stop_admin(admin: AIOKafkaAdminClient) -> None:
    """End it."""
    await _ended(admin.close())


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _ended(stopping: Awaitable[Any]) -> bool:
    """Whether it came to its end in time. Failures are noted; nothing more can be done about them."""
    task = asyncio.ensure_future(stopping)
    done, _ = await asyncio.wait([task], timeout=STOP_WITHIN.total_seconds())
    if not done:
        task.cancel()
        await asyncio.wait([task], timeout=STOP_WITHIN.total_seconds())
        return False
    if task.cancelled():
        return False
    if (error := task.exception()) is not None:
        logger.info("kafka.stop_failed", extra={"error": repr(error)})
        return False
    return True
