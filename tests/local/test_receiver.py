"""The receiver in this process: its ledger, its answers, and waiting for arrivals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from app.local.answers import Cut, Drip, Hang, Reply
from app.local.receiver import Receiver
from tests.eventually import eventually
from tests.ports import quiet_port

SHORT = timedelta(milliseconds=50)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=60)) as session:
        session._retry_connection = False  # a request that fails is not sent again behind our back
        yield session


async def post(client: aiohttp.ClientSession, url: str, delivery_id: str = "", attempt: int = 1) -> int:
    headers = {"webhook-id": delivery_id, "carillon-attempt": str(attempt)} if delivery_id else {}
    async with client.post(url, headers=headers, data=b"x") as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"])
async def test_any_method_and_path_is_answered_with_what_arrived(
    receiver: Receiver, client: aiohttp.ClientSession, method: str
) -> None:
    async with client.request(method, f"{receiver.url}/a/b?c=d%20e", data=b"12345") as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        assert json.loads(await answer.read()) == {"method": method, "path": "/a/b?c=d%20e", "bytes": 5}


async def test_a_head_request_gets_a_head_only(receiver: Receiver, client: aiohttp.ClientSession) -> None:
    for _ in range(2):  # the second shows that nothing of a body was left in the connection
        async with client.head(f"{receiver.url}/x") as answer:
            assert answer.status == 200
            assert int(answer.headers["content-length"]) > 0
            assert await answer.read() == b""


async def test_the_ledger_has_the_whole_request(receiver: Receiver, client: aiohttp.ClientSession) -> None:
    before, monotonic = datetime.now(UTC), time.monotonic()
    headers = {"webhook-id": "msg_1", "carillon-run-id": "run_1", "carillon-attempt": "3", "X-Own": "ünï"}
    async with client.put(f"{receiver.url}/path?q=1", headers=headers, data=b"\x00body") as answer:
        await answer.read()
    (received,) = await receiver.wait_for(1)
    assert (received.delivery_id, received.run_id, received.attempt) == ("msg_1", "run_1", 3)
    assert (received.method, received.path, received.body) == ("PUT", "/path?q=1", b"\x00body")
    assert received.headers["x-own"].encode("latin-1").decode() == "ünï"
    assert received.headers["content-length"] == "5"
    assert before - timedelta(milliseconds=1) <= received.arrived_at <= datetime.now(UTC)
    assert monotonic <= received.monotonic <= time.monotonic()


async def test_requests_without_our_headers_are_written_down_too(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    async with client.get(receiver.url, headers={"carillon-attempt": "three"}) as answer:
        await answer.read()
    (received,) = receiver.received
    assert (received.delivery_id, received.run_id, received.attempt) == (None, None, None)
    assert receiver.counts() == {"": 1}


async def test_deliveries_are_counted_by_their_id(receiver: Receiver, client: aiohttp.ClientSession) -> None:
    for delivery_id in ("a", "b", "a", "a"):
        await post(client, receiver.url, delivery_id)
    assert receiver.counts() == {"a": 3, "b": 1}
    receiver.clear()
    assert receiver.counts() == {}


async def test_a_sequence_of_answers_is_walked_once_and_its_last_repeats(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    receiver.answer("/flaky", Reply(503), Reply(429), Reply(204))
    assert [await post(client, f"{receiver.url}/flaky/{n}") for n in range(5)] == [503, 429, 204, 204, 204]
    assert await post(client, f"{receiver.url}/other") == 200


async def test_each_delivery_can_walk_the_sequence_by_itself(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    receiver.answer_each("/", Reply(500), Reply(200))
    statuses = [await post(client, receiver.url, delivery_id) for delivery_id in ("a", "b", "a", "b", "c")]
    assert statuses == [500, 500, 200, 200, 500]


async def test_the_longest_prefix_decides_and_a_new_answer_replaces_the_old(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    receiver.answer("/", Reply(404))
    receiver.answer_each("/a", Reply(410), Reply(200))
    assert await post(client, f"{receiver.url}/b") == 404
    assert await post(client, f"{receiver.url}/a") == 410
    receiver.answer("/a", Reply(418))
    assert [await post(client, f"{receiver.url}/a") for _ in range(2)] == [418, 418]
    receiver.answer_each("/a", Reply(410), Reply(200))
    assert await post(client, f"{receiver.url}/a") == 410


async def test_an_answer_has_the_body_and_headers_it_is_given(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    receiver.answer(
        "/", Reply(302, body=b"\xff" * 70_000, headers=(("location", "/elsewhere"), ("retry-after", "7")))
    )
    async with client.get(receiver.url, allow_redirects=False) as answer:
        assert answer.status == 302
        assert (answer.headers["location"], answer.headers["retry-after"]) == ("/elsewhere", "7")
        assert await answer.read() == b"\xff" * 70_000


async def test_a_delayed_answer_comes_after_its_delay_and_the_connection_goes_on(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    receiver.answer("/", Reply(200, delay=SHORT), Reply(201))
    begun = time.monotonic()
    assert await post(client, receiver.url) == 200
    assert time.monotonic() - begun >= SHORT.total_seconds()
    assert await post(client, receiver.url) == 201


async def test_a_client_that_leaves_before_the_delayed_answer_disturbs_nothing(receiver: Receiver) -> None:
    receiver.answer("/", Reply(delay=timedelta(hours=1)), Hang(), Reply())
    for count in (1, 2):
        _reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await receiver.wait_for(count)
        writer.close()
        await writer.wait_closed()


async def test_a_hanging_answer_never_comes(receiver: Receiver) -> None:
    receiver.answer("/", Hang())
    reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await receiver.wait_for(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), SHORT.total_seconds())
    await receiver.stop()  # drops what hangs
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", b"gibberish\r\n\r\n"]
)
async def test_a_cut_connection_shows_what_was_sent_and_ends(receiver: Receiver, sent: bytes) -> None:
    receiver.answer("/", Cut(sent))
    reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    assert await reader.read() == sent
    writer.close()
    await writer.wait_closed()


async def test_a_dripping_answer_is_complete_in_the_end(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    receiver.answer("/", Drip(b"slowly", every=timedelta(milliseconds=1)))
    async with client.get(receiver.url) as answer:
        assert answer.status == 200
        assert await answer.read() == b"slowly"


async def test_waiting_returns_at_once_when_enough_have_arrived(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    await post(client, receiver.url)
    assert len(await receiver.wait_for(1, timeout=timedelta(0))) == 1


async def test_waiting_wakes_up_with_the_arrival_that_is_waited_for(
    receiver: Receiver, client: aiohttp.ClientSession
) -> None:
    waiting = asyncio.create_task(receiver.wait_for(3))
    seen = asyncio.create_task(receiver.wait_until(lambda: receiver.counts()["b"] == 2))
    await post(client, receiver.url, "a")
    await post(client, receiver.url, "b")
    assert not waiting.done()
    await post(client, receiver.url, "b")
    assert len(await waiting) == 3
    await seen


async def test_waiting_in_vain_says_how_many_came(receiver: Receiver, client: aiohttp.ClientSession) -> None:
    await post(client, receiver.url)
    with pytest.raises(TimeoutError, match=r"1 of 2 requests arrived in 0.05 s"):
        await receiver.wait_for(2, timeout=SHORT)


async def test_a_stopped_receiver_refuses_and_comes_back_on_the_same_port(
    client: aiohttp.ClientSession,
) -> None:
    receiver = await Receiver.start(port=quiet_port())
    await post(client, receiver.url, "a")
    await receiver.stop()
    await receiver.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await post(client, receiver.url, "b")
    await receiver.resume()
    await post(client, receiver.url, "c")
    assert receiver.counts() == {"a": 1, "c": 1}
    await receiver.stop()


async def test_a_taken_port_is_an_error(receiver: Receiver) -> None:
    with pytest.raises(OSError, match="in use"):
        await Receiver.start(port=receiver.port)


async def test_many_connections_at_once_lose_nothing(receiver: Receiver) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        statuses = await asyncio.gather(*(post(client, receiver.url, f"d{n}") for n in range(300)))
    assert set(statuses) == {200}
    assert receiver.counts() == {f"d{n}": 1 for n in range(300)}


async def test_closed_connections_are_forgotten(receiver: Receiver) -> None:
    async with aiohttp.ClientSession() as client:
        await post(client, receiver.url)
    assert receiver._listener is not None
    connections = receiver._listener._connections
    await eventually(lambda: not connections)
