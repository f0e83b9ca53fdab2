"""Deliveries are tested on both event loops: Carillon runs on uvloop where there is one, people debug on
asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A module that says `ON_BOTH_LOOPS = True` runs on both."""
    module = item.getparent(pytest.Module)
    if module is not None and getattr(module.obj, "ON_BOTH_LOOPS", False):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
