"""The coordinator: takes events off one queue, asks the job's machine, performs its commands in order."""

from __future__ import annotations

import asyncio
import logging
import time

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    Command,
    Commit,
    Conclude,
    Event,
    MemberJoined,
    MemberLost,
    Send,
    Tell,
    TimePassed,
    WorkerExited,
)
from elastic_adapter.core.job import Job, begin, deadline, step
from elastic_adapter.core.ports import Record, Registry
from elastic_adapter.core.server import Outbox
from elastic_adapter.core.wire import directive_to_wire

log = logging.getLogger(__name__)


class Coordinator:
    """Leads one job for one epoch. It knows its agents only by their streams."""

    def __init__(self, config: JobConfig, registry: Registry) -> None:
        self._registry = registry
        self._job = begin(config, time.monotonic())
        self._record = Record()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outboxes: dict[str, Outbox] = {}
        self._orders = 0
        self._epoch = 0

    @property
    def job(self) -> Job:
        return self._job

    async def lead(self, epoch: int) -> None:
        """Lead until cancelled, or until a commit is refused because another leads now (Fenced)."""
        self._epoch = epoch
        while True:
            event = await self._next_event()
            self._job, commands = step(self._job, event, time.monotonic())
            for command in commands:
                await self._perform(command)

    def next_order(self) -> int:
        self._orders += 1
        return self._orders

    def attached(self, joined: MemberJoined, exits: tuple[WorkerExited, ...], outbox: Outbox) -> None:
        previous = self._outboxes.get(joined.member.node)
        if previous is not None:
            previous.put_nowait(None)
        self._outboxes[joined.member.node] = outbox
        self.post(joined)
        for exit in exits:
            self.post(exit)

    def detached(self, node: str, outbox: Outbox) -> None:
        if self._outboxes.get(node) is outbox:
            del self._outboxes[node]
            self.post(MemberLost(node, "its stream ended"))

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def _next_event(self) -> Event:
        due = deadline(self._job)
        if due is None:
            return await self._events.get()
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, due - time.monotonic()))
        except asyncio.TimeoutError:
            return TimePassed()

    async def _perform(self, command: Command) -> None:
        match command:
            case Commit(world=world, history=history):
                self._record = Record(world, history)
                await self._registry.commit(self._epoch, self._record)
            case Conclude(outcome=outcome):
                self._record = Record(self._record.world, self._record.history, outcome)
                await self._registry.commit(self._epoch, self._record)
            case Send(node=node, directive=directive):
                outbox = self._outboxes.get(node)
                if outbox is not None:
                    outbox.put_nowait(directive_to_wire(self._epoch, directive))
            case Tell(reason=reason):
                log.info("%s", reason)
            case _:
                assert_never(command)
