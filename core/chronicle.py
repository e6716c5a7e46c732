"""What happened to a job, written down beside the decisions: it never holds one up, and is no part of the truth."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from elastic_adapter.core.errors import Fenced, OutOfReach
from elastic_adapter.core.events import (
    Command,
    Conclude,
    Event,
    MemberJoined,
    MemberLeaving,
    Send,
    StopRequested,
    Tell,
    WorkerExited,
)
from elastic_adapter.core.model import Explain, Verdict, signal_name
from elastic_adapter.core.ports import Note, Registry
from elastic_adapter.core.state import Job

# One transaction of etcd takes 128 operations by default.
_AT_ONCE = 50
# What can't be written for long is forgotten, the oldest first.
_KEPT = 500
_AGAIN_S = 1.0


def notes_of(before: Job, event: Event, commands: tuple[Command, ...]) -> list[tuple[str, str]]:
    """What a step is worth remembering for: kind and words. Pure."""
    found: list[tuple[str, str]] = []
    match event:
        case MemberJoined(member=member) if before.member(member.node) is None and member.node not in before.absent:
            found.append(("joined", f"node {member.node} joined with {member.slots} worker(s)"))
        case MemberLeaving(node=node, signal=number):
            found.append(("leaving", f"node {node} leaves ({signal_name(number)})"))
        case StopRequested(node=node, signal=number):
            found.append(("stop", f"{signal_name(number)} on {node}"))
        case WorkerExited(exit=exit):
            found.append(("exit", f"rank {exit.rank} on {exit.node} {exit.how} (generation {exit.generation})"))
        case _:
            pass
    for command in commands:
        match command:
            case Tell(reason=reason, kind=kind):
                found.append((kind, reason))
            case Send(directive=Explain(verdict=verdict)) if not any(kind == "cause" for kind, _ in found):
                found.append(("cause", _cause(verdict)))
            case Conclude(outcome=outcome):
                found.append(("end", f"{type(outcome).__name__.lower()}: {outcome.reason}"))
            case _:
                pass
    return found


def _cause(verdict: Verdict) -> str:
    first, others = verdict.first, len(verdict.others) + verdict.more
    words = f": {first.error}" if first.error else ""
    more = f", and {others} other failure{'s' if others > 1 else ''}" if others else ""
    return f"generation {verdict.generation} failed: rank {first.rank} on {first.node} {first.how}{words}{more}"


class Chronicle:
    """Writes notes in order, as long as its leader leads."""

    def __init__(self, registry: Registry, epoch: Callable[[], int]) -> None:
        self._registry = registry
        self._epoch = epoch
        self._waiting: deque[Note] = deque(maxlen=_KEPT)
        self._number = 0
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def note(self, kind: str, text: str) -> None:
        self._number += 1
        self._waiting.append(Note(self._epoch(), self._number, time.time(), kind, text))
        self._idle.clear()
        self._news.set()

    async def write(self) -> None:
        """Write until cancelled, or until somebody else leads."""
        with contextlib.suppress(Fenced):
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    batch = tuple(self._waiting)[:_AT_ONCE]
                    try:
                        await self._registry.note(self._epoch(), batch)
                    except OutOfReach:
                        await asyncio.sleep(_AGAIN_S)
                        continue
                    for written in batch:
                        if self._waiting and self._waiting[0] is written:
                            self._waiting.popleft()
                self._idle.set()

    async def written(self, within_s: float) -> None:
        """Wait until all is written, but not for long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within_s)
