"""Leaving in order when a signal asks for it, with children to be stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from app.local.processes import Child


class Departure:
    """What SIGINT and SIGTERM do: the first one ends us in order, another one does not let us wait.

    An exception raised by a signal handler may land where it is swallowed (a callback of the event loop, the hooks of
    fork), and a Ctrl-C would be lost. So the first one is noted, and cancels the event loop's task; a server that is
    just starting is waited for.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self.is_asked = False
        self._is_starting = True
        self._children = children
        self._cancel: Callable[[], object] = lambda: None

    def listen(self) -> None:
        """Take both signals over. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask)

    def ask(self, _number: int, _frame: object) -> None:
        if not self.is_asked:
            self.is_asked = True
            self._cancel()
        elif self._is_starting:
            raise KeyboardInterrupt
        else:
            for child in self._children:
                child.process.send_signal(signal.SIGTERM)

    async def watch(self, work: Coroutine[Any, Any, int]) -> int:
        """Do the work; cancelled when we are asked to go, and not begun when we were."""
        loop = asyncio.get_running_loop()
        working = loop.create_task(work)
        self._is_starting = False
        self._cancel = lambda: loop.call_soon_threadsafe(working.cancel)
        if self.is_asked:
            working.cancel()
        try:
            return await working
        finally:
            self._cancel = lambda: None
