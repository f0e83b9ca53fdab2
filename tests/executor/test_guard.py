"""No connection is made to an address that the policy refuses, however its name or spelling led there."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from aiohttp.abc import ResolveResult

from app.domain.address import PUBLIC_ONLY, REFUSED, WITH_LOOPBACK, AddressPolicy
from app.domain.outcome import Blocked, Delivered, Outcome, TimedOut, Unreachable
from app.domain.target import Target
from app.executor import deliver_request, guard
from app.executor.deliver import Deliverer, open_session
from app.executor.flight import Flight
from app.executor.guard import GuardedResolver, TargetBlocked, open_guarded_socket
from tests.eventually import eventually
from tests.executor.targets import answer_ok, serve

AMPLE = timedelta(seconds=30)


class Names:
    """The system's resolver as a test tells it to be."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | BaseException] = {}
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inside = 0
        self.peak = 0
        self._lock = threading.Lock()

    def getaddrinfo(self, host: str, port: object, **_: object) -> list[tuple[Any, ...]]:
        with self._lock:
            self.asked.append(host)
            self.inside += 1
            self.peak = max(self.peak, self.inside)
        try:
            assert self.gate.wait(30)
            answer = self.answers.get(host, ["127.0.0.1"])
            if isinstance(answer, BaseException):
                raise answer
            return [_info(address) for address in answer]
        finally:
            with self._lock:
                self.inside -= 1


def _info(address: str) -> tuple[Any, ...]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 0)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    told = Names()
    monkeypatch.setattr(socket, "getaddrinfo", told.getaddrinfo)
    yield told
    told.gate.set()


async def get(
    deliverer: Deliverer, url: str, *, deadline: timedelta = AMPLE, flight: Flight | None = None
) -> Outcome:
    outcome, _ = await deliverer.deliver(
        Target("GET", url, (), None),
        headers=(),
        deadline=deadline,
        before_send=lambda: None,
        flight=flight or Flight(),
    )
    return outcome


async def test_an_allowed_name_is_connected_to_under_its_own_name(names: Names) -> None:
    deliverer = open_session(WITH_LOOPBACK, connections=2)
    async with serve(answer_ok) as at:
        outcome = await get(deliverer, f"http://good.test:{at.port}/")
        await deliverer.close()
    assert isinstance(outcome, Delivered)
    assert at.requests[0].header("host") == [f"good.test:{at.port}"]


@pytest.mark.parametrize(
    "records",
    [
        ["10.0.0.1"],
        ["127.0.0.1", "10.0.0.1"],
        ["10.0.0.1", "127.0.0.1"],
        ["127.0.0.1"] * 30 + ["169.254.169.254"],
        ["127.0.0.1", "::ffff:10.0.0.1"],
        ["127.0.0.1", "64:ff9b::a9fe:a9fe"],
        ["127.0.0.1", "fe80::1%eth0"],
        ["127.0.0.1", "not an address"],
    ],
)
async def test_one_refused_record_refuses_the_whole_name(names: Names, records: list[str]) -> None:
    names.answers["mixed.test"] = records
    flight = Flight()
    deliverer = open_session(WITH_LOOPBACK, connections=2)
    async with serve(answer_ok) as at:
        outcome = await get(deliverer, f"http://mixed.test:{at.port}/", flight=flight)
        await deliverer.close()
    assert isinstance(outcome, Blocked)
    assert outcome.detail == REFUSED  # the same for every reason, and no address in it
    assert (at.connections, flight.is_sent) == (0, False)


@pytest.mark.parametrize(
    "failure",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        socket.gaierror(socket.EAI_FAIL, "Non-recoverable failure"),
        OSError("odd"),
        UnicodeError("label too long"),
        [],
    ],
)
async def test_a_name_that_does_not_resolve_fails_closed(
    names: Names, failure: BaseException | list[str]
) -> None:
    names.answers["gone.test"] = failure
    deliverer = open_session(WITH_LOOPBACK, connections=2)
    outcome = await get(deliverer, "http://gone.test/")
    await deliverer.close()
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("dns", False)


async def test_the_socket_is_judged_again_whatever_the_resolver_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last wall stands alone: here the resolver is one that lets everything through."""
    deliverer = open_session(PUBLIC_ONLY, connections=2)

    async def resolve(host: str, port: int = 0, family: object = None) -> list[ResolveResult]:
        return [guard._as_result(host, "127.0.0.1", port)]

    monkeypatch.setattr(deliverer._resolver, "resolve", resolve)
    async with serve(answer_ok) as at:
        outcome = await get(deliverer, f"http://rebound.test:{at.port}/")
        await deliverer.close()
    assert isinstance(outcome, Blocked)
    assert outcome.detail == REFUSED
    assert at.connections == 0


LITERALS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "0x7f.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "0177.0.0.1",
    "127.0.0.01",
    "0",
    "0.0.0.0",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "sub.localhost",
    "１２７.0.0.1",
    "127。0。0。1",
    "ｌｏｃａｌｈｏｓｔ",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[0:0:0:0:0:0:0:1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "[2001:0:7f00:1::]",
    "[::1%lo]",
    "[::1%25lo]",
    "127.0.0.1.",
]


@pytest.mark.parametrize("host", LITERALS)
async def test_no_spelling_of_a_refused_address_is_connected_to(host: str) -> None:
    deliverer = open_session(PUBLIC_ONLY, connections=2)
    async with serve(answer_ok) as at:
        outcome = await get(deliverer, f"http://{host}:{at.port}/")
        await deliverer.close()
    assert isinstance(outcome, Blocked), outcome
    assert at.connections == 0


@pytest.mark.parametrize("host", [host for host in LITERALS if host.isascii() and "%" not in host])
async def test_no_spelling_gets_past_the_connection_even_where_the_text_was_not_checked(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver_request, "url_problem", lambda url, policy: None)
    deliverer = open_session(PUBLIC_ONLY, connections=2)
    async with serve(answer_ok) as at:
        outcome = await get(deliverer, f"http://{host}:{at.port}/")
        await deliverer.close()
    assert isinstance(outcome, Blocked | Unreachable), outcome
    assert at.connections == 0


async def test_a_port_or_scheme_outside_the_policy_is_blocked() -> None:
    only_https = AddressPolicy(allowed_networks=WITH_LOOPBACK.allowed_networks, schemes=frozenset({"https"}))
    deliverer = open_session(only_https, connections=2)
    plain = await get(deliverer, "http://127.0.0.1:40000/")
    smtp = await get(deliverer, "https://127.0.0.1:25/")
    await deliverer.close()
    assert isinstance(plain, Blocked)
    assert isinstance(smtp, Blocked)


def test_a_socket_is_opened_for_an_allowed_address_only() -> None:
    allowed = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 80))
    open_guarded_socket(allowed, WITH_LOOPBACK).close()
    with pytest.raises(TargetBlocked):
        open_guarded_socket(allowed, PUBLIC_ONLY)


async def test_callers_at_the_same_time_share_one_look_up(names: Names) -> None:
    names.gate.clear()
    resolver = GuardedResolver(WITH_LOOPBACK)
    asking = [asyncio.create_task(resolver.resolve("shared.test", 80)) for _ in range(20)]
    await eventually(lambda: names.asked)
    names.gate.set()
    answers = await asyncio.gather(*asking)
    assert {answer[0]["host"] for answer in answers} == {"127.0.0.1"}
    assert names.asked == ["shared.test"]
    await resolver.close()


async def test_answers_are_kept_for_a_while_and_failures_for_less(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.answers["gone.test"] = socket.gaierror(socket.EAI_NONAME, "unknown")
    resolver = GuardedResolver(WITH_LOOPBACK)
    now = 1000.0
    monkeypatch.setattr(resolver, "_now", lambda: now)

    async def ask_both() -> None:
        await resolver.resolve("good.test", 80)
        with pytest.raises(socket.gaierror):
            await resolver.resolve("gone.test", 80)

    await ask_both()
    await ask_both()
    assert names.asked == ["good.test", "gone.test"]
    now += guard.KEEP_FAILURE_SECONDS
    await ask_both()
    assert names.asked == ["good.test", "gone.test", "gone.test"]
    now += guard.KEEP_SECONDS - guard.KEEP_FAILURE_SECONDS
    await ask_both()
    assert names.asked == ["good.test", "gone.test", "gone.test", "good.test", "gone.test"]
    await resolver.close()


async def test_the_names_that_are_kept_are_bounded(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "KEEP_NAMES", 3)
    resolver = GuardedResolver(WITH_LOOPBACK)
    for number in range(10):
        await resolver.resolve(f"host{number}.test", 80)
    assert list(resolver._cache._entries) == ["host7.test", "host8.test", "host9.test"]
    await resolver.close()


async def test_a_domain_that_never_answers_delays_no_other(names: Names) -> None:
    names.gate.clear()
    resolver = GuardedResolver(WITH_LOOPBACK)
    stuck = [asyncio.create_task(resolver.resolve(f"h{number}.evil.test", 80)) for number in range(200)]
    await eventually(lambda: names.inside == guard.CONCURRENT_LOOKUPS_PER_SITE)
    other = asyncio.create_task(resolver.resolve("other.example", 80))
    await eventually(lambda: "other.example" in names.asked)
    assert names.inside == guard.CONCURRENT_LOOKUPS_PER_SITE + 1
    names.gate.set()
    await other
    await asyncio.gather(*stuck)
    assert names.peak <= guard.CONCURRENT_LOOKUPS_PER_SITE + 1
    await resolver.close()


async def test_threads_are_bounded_over_all_domains(names: Names) -> None:
    names.gate.clear()
    resolver = GuardedResolver(WITH_LOOPBACK)
    asking = [
        asyncio.create_task(resolver.resolve(f"site{number}.test{number}", 80)) for number in range(100)
    ]
    await eventually(lambda: names.inside == guard.CONCURRENT_LOOKUPS)
    names.gate.set()
    await asyncio.gather(*asking)
    assert names.peak == guard.CONCURRENT_LOOKUPS
    await resolver.close()


async def test_a_look_up_that_nobody_waits_for_any_more_does_not_start(names: Names) -> None:
    names.gate.clear()
    resolver = GuardedResolver(WITH_LOOPBACK)
    started = [asyncio.create_task(resolver.resolve(f"h{number}.evil.test", 80)) for number in range(8)]
    await eventually(lambda: names.inside == 8)
    queued = asyncio.create_task(resolver.resolve("queued.evil.test", 80))
    await eventually(lambda: "queued.evil.test" in resolver._lookups)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert "queued.evil.test" not in resolver._lookups
    names.gate.set()
    await asyncio.gather(*started)
    assert "queued.evil.test" not in names.asked
    await resolver.close()


async def test_a_cancelled_caller_leaves_the_others_look_up_alone(names: Names) -> None:
    names.gate.clear()
    resolver = GuardedResolver(WITH_LOOPBACK)
    impatient = asyncio.create_task(resolver.resolve("shared.test", 80))
    patient = asyncio.create_task(resolver.resolve("shared.test", 80))
    await eventually(lambda: names.asked)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    names.gate.set()
    assert [found["host"] for found in await patient] == ["127.0.0.1"]
    await resolver.close()


async def test_a_name_server_that_hangs_ends_the_attempt_at_its_deadline(names: Names) -> None:
    names.gate.clear()
    deliverer = open_session(WITH_LOOPBACK, connections=2)
    outcome = await get(deliverer, "http://hangs.test/", deadline=timedelta(milliseconds=100))
    assert isinstance(outcome, TimedOut)
    assert (outcome.phase, outcome.is_maybe_delivered) == ("dns", False)
    await deliverer.close()


@pytest.mark.parametrize("close", ["while looking up", "while queued"])
async def test_closing_leaves_no_task_behind(names: Names, close: str) -> None:
    names.gate.clear()
    resolver = GuardedResolver(WITH_LOOPBACK)
    asking = [asyncio.create_task(resolver.resolve(f"h{number}.evil.test", 80)) for number in range(20)]
    ready: Callable[[], bool] = (
        (lambda: names.inside > 0) if close == "while looking up" else (lambda: len(resolver._lookups) == 20)
    )
    await eventually(ready)
    await resolver.close()
    await asyncio.gather(*asking, return_exceptions=True)
    assert resolver._lookups == {}
