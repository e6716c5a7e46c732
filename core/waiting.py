"""Waiting for the first of several things to happen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine


async def first_of(
    coroutine: Coroutine[object, object, object], other: Awaitable[object], within_s: float | None = None
) -> None:
    """Return when one of the two is done or the time is over. The first is cancelled then; the second goes on."""
    task = asyncio.ensure_future(coroutine)
    future = asyncio.ensure_future(other)
    try:
        await asyncio.wait([task, future], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
