"""Waiting for the first of several things to happen, or for a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable


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


async def all_of(*coroutines: Coroutine[object, object, None]) -> None:
    """Run these side by side until cancelled; the failure of one ends the others, and is raised."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def on_signals(numbers: Iterable[int], handler: Callable[[int], object]) -> None:
    """Call the handler when one of these comes; one that was ignored when we started (nohup) stays ignored."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handler, number)
