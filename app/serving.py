"""The HTTP server of one replica: its own socket, uvicorn without its signal handlers."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version

import uvicorn

from app.api.app import create_app, create_probes
from app.api.deps import ApiDeps
from app.domain.address import AddressPolicy
from app.domain.plan import Limits
from app.domain.run import RunRef
from app.errors import ConfigError
from app.loops import LoopHealth
from app.settings import Role, Settings
from app.store.pool import Pool

STOP_WITHIN_SECONDS = 5
PLANNER_PATIENCE = timedelta(seconds=15)
"""How old the planner's last success may be (ten ticks if that is longer) before this replica stops being ready."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the drain in `main`, not to uvicorn."""
        yield


class ApiServer:
    """Health and metrics always, the API where the role is on. `bind`, then `serve` until `stop`."""

    def __init__(
        self,
        settings: Settings,
        *,
        pool: Pool,
        health: LoopHealth,
        policy: AddressPolicy,
        announce: Callable[[Sequence[RunRef]], Awaitable[None]],
        is_draining: Callable[[], bool],
    ) -> None:
        self._host = settings.api.host
        self._port = settings.api.port
        is_planning = Role.PLANNER in settings.roles
        create = create_app if Role.API in settings.roles else create_probes
        app = create(
            ApiDeps(
                pool=pool,
                settings=settings.api,
                health=health,
                address_policy=policy,
                announce=announce,
                is_draining=is_draining,
                planner_patience=max(PLANNER_PATIENCE, 10 * settings.planner.tick) if is_planning else None,
                lookahead=settings.planner.lookahead,
                limits=Limits(misfire_grace=settings.planner.misfire_grace),
                version=version("carillon"),
            )
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=STOP_WITHIN_SECONDS,
            )
        )
        self._socket: socket.socket | None = None

    def bind(self) -> None:
        """Take the port now, so that a busy one is a clear error. Raises ConfigError."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._socket = socket.create_server((self._host, self._port), family=family, backlog=512)
        except OSError as error:
            raise ConfigError(
                f"SCHEDULER_API_HOST and SCHEDULER_API_PORT: cannot listen on {self._host}:{self._port} "
                f"({error.strerror}); choose a free port, or 0 for any"
            ) from None

    @property
    def url(self) -> str:
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self) -> None:
        assert self._socket is not None
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True
