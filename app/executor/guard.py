"""The guard at the connection: every address that we are about to connect to is judged, whatever name led to
it.

Two hooks, because neither is enough alone. `GuardedResolver` refuses a whole name when any of its records is
refused (the socket hook alone would let a mixed answer through by its other address). `open_guarded_socket`
sees the address of each new connection, literals included, with no time between check and connect for a name
to be rebound.

Both fail closed: what cannot be resolved or parsed is not connected to.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import AddrInfoType

from app.domain.address import REFUSED, AddressPolicy, verdict
from app.executor.flight import enter_phase

CONCURRENT_LOOKUPS = 32
"""Threads in getaddrinfo at the same time, for all targets."""

CONCURRENT_LOOKUPS_PER_SITE = 8
"""Of these for names below one parent domain: a domain whose name servers never answer delays only itself."""

KEEP_SECONDS = 30.0
KEEP_FAILURE_SECONDS = 5.0
KEEP_NAMES = 4096
MAX_ADDRESSES = 16
"""Addresses of one name that are tried; all of them are judged."""


class TargetBlocked(OSError):
    """The guard refuses the target's address. An OSError, so that the HTTP engine hands it on as a failed
    connect."""

    def __init__(self) -> None:
        super().__init__(REFUSED)


def open_guarded_socket(info: AddrInfoType, policy: AddressPolicy) -> socket.socket:
    """A socket for this resolved address. Raises TargetBlocked when `policy` refuses it."""
    family, kind, protocol, _, address = info
    if verdict(str(address[0]), policy) is not None:
        raise TargetBlocked
    return socket.socket(family, kind, protocol)


@dataclass(frozen=True, slots=True)
class _Addresses:
    found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Refused:
    pass


@dataclass(frozen=True, slots=True)
class _Failed:
    errno: int | None


_Answer = _Addresses | _Refused | _Failed


@dataclass(slots=True)
class _Lookup:
    """One name being looked up, for everybody who asked meanwhile."""

    task: asyncio.Task[_Answer]
    waiters: int = 0
    is_in_thread: bool = False


@dataclass(slots=True)
class _Cache:
    """Answers by name, the oldest dropped first; times are the event loop's seconds."""

    _entries: OrderedDict[str, tuple[float, _Answer]] = field(default_factory=OrderedDict)

    def get(self, host: str, now: float) -> _Answer | None:
        entry = self._entries.get(host)
        return entry[1] if entry is not None and now < entry[0] else None

    def put(self, host: str, answer: _Answer, now: float) -> None:
        keep = KEEP_FAILURE_SECONDS if isinstance(answer, _Failed) else KEEP_SECONDS
        self._entries.pop(host, None)
        self._entries[host] = (now + keep, answer)
        while len(self._entries) > KEEP_NAMES:
            self._entries.popitem(last=False)


class GuardedResolver(AbstractResolver):
    """Names to allowed addresses, by the system's own resolver in a bounded number of threads.

    Answers are kept for half a minute (failures 5 s) and shared by all who ask at the same time. A caller
    that is cancelled leaves the others' lookup alone; a lookup that nobody waits for any more does not start.
    """

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy
        self._cache = _Cache()
        self._lookups: dict[str, _Lookup] = {}
        self._threads = asyncio.Semaphore(CONCURRENT_LOOKUPS)
        self._sites: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - aiohttp's signature
    ) -> list[ResolveResult]:
        """The allowed addresses of `host`. Raises TargetBlocked, or socket.gaierror when it does not
        resolve."""
        answer = self._cache.get(host, self._now())
        if answer is None:
            enter_phase("dns")
            answer = await self._wait_for(host)
            enter_phase("connect")
        match answer:
            case _Refused():
                raise TargetBlocked
            case _Failed():
                raise socket.gaierror(answer.errno, "the name does not resolve")
            case _Addresses():
                return [_as_result(host, address, port) for address in answer.found]

    async def close(self) -> None:
        """Give up every lookup. Threads inside the system's resolver end on their own; they are daemons."""
        tasks = [lookup.task for lookup in self._lookups.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for(self, host: str) -> _Answer:
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = _Lookup(self._loop.create_task(self._look_up(host)))
        lookup.waiters += 1
        try:
            return await asyncio.shield(lookup.task)
        finally:
            lookup.waiters -= 1
            if lookup.waiters == 0 and not lookup.is_in_thread and not lookup.task.done():
                lookup.task.cancel()
                del self._lookups[host]

    async def _look_up(self, host: str) -> _Answer:
        site = ".".join(host.rsplit(".", 2)[-2:])
        site_slots = self._sites.setdefault(site, asyncio.Semaphore(CONCURRENT_LOOKUPS_PER_SITE))
        lookup = self._lookups[host]
        try:
            async with site_slots, self._threads:
                lookup.is_in_thread = True
                answer = await self._in_thread(host)
            self._cache.put(host, answer, self._now())
            return answer
        finally:
            if self._lookups.get(host) is lookup:
                del self._lookups[host]

    async def _in_thread(self, host: str) -> _Answer:
        """Ask the system. A daemon thread of its own: a pool's threads would be waited for at the end of the
        process."""
        done: asyncio.Future[_Answer] = self._loop.create_future()

        def ask() -> None:
            answer = _ask_system(host, self._policy)
            try:
                self._loop.call_soon_threadsafe(_set_result, done, answer)
            except RuntimeError:
                return  # the loop has ended meanwhile; nobody waits

        threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
        return await done


def _set_result(future: asyncio.Future[_Answer], answer: _Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _ask_system(host: str, policy: AddressPolicy) -> _Answer:
    try:
        infos: list[tuple[Any, ...]] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return _Failed(error.errno)
    except UnicodeError:
        return _Failed(socket.EAI_NONAME)
    addresses = tuple(dict.fromkeys(str(info[4][0]) for info in infos))
    if not addresses:
        return _Failed(socket.EAI_NONAME)
    if any(verdict(address, policy) is not None for address in addresses):
        return _Refused()
    return _Addresses(addresses[:MAX_ADDRESSES])


def _as_result(host: str, address: str, port: int) -> ResolveResult:
    return ResolveResult(
        hostname=host,
        host=address,
        port=port,
        family=socket.AF_INET6 if ":" in address else socket.AF_INET,
        proto=socket.IPPROTO_TCP,
        flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
    )
