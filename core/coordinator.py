"""The coordinator: takes events off one queue, asks the job's machine, performs its commands in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

from elastic_adapter.core.chronicle import Chronicle, notes_of
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.errors import OutOfReach, assert_never
from elastic_adapter.core.events import (
    CheckpointEntered,
    Command,
    Commit,
    Conclude,
    Enter,
    Event,
    Keep,
    MemberJoined,
    MemberLost,
    MemberSilent,
    Send,
    Severed,
    Tell,
    TimePassed,
)
from elastic_adapter.core.job import step
from elastic_adapter.core.model import Directive, Halt, Hold
from elastic_adapter.core.ports import Record, Registry
from elastic_adapter.core.probe import probe
from elastic_adapter.core.server import Outbox
from elastic_adapter.core.state import Job, deadline, resume
from elastic_adapter.core.succession import Answer
from elastic_adapter.core.wire import directive_to_wire, ping_to_wire

log = logging.getLogger(__name__)

# How long an agent whose lease ended may take to answer on its stream.
_ANSWER_S = 1.0
# An agent that dies closes its stream a moment before its port: look again after these pauses.
_LOOK_AGAIN_S = (0.0, 0.01, 0.03, 0.1)
_KEEP_LOOKING_S = 0.5
# An etcd that refuses at once is asked again no sooner than this.
_COMMIT_AGAIN_S = 0.1
# How long the end of a job waits for etcd.
_CONCLUDE_S = 8.0
_LAST_NOTES_S = 1.0


class Coordinator:
    """Leads one job for one epoch. It knows its agents by their streams, and where they listen."""

    def __init__(
        self,
        config: JobConfig,
        registry: Registry,
        epoch: int,
        record: Record | None = None,
        registry_answers: Callable[[], bool] = lambda: True,
    ) -> None:
        self.epoch = epoch
        self._registry = registry
        self._registry_answers = registry_answers
        self._record = record or Record()
        # What to add to our clock for the wall clock.
        self._clock = time.time() - time.monotonic()
        self._job = resume(config, self._record.on_clock(self._clock), time.monotonic())
        self._chronicle = Chronicle(registry, lambda: self.epoch)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outboxes: dict[str, Outbox] = {}
        # Set while nobody has a stream.
        self._deserted = asyncio.Event()
        self._deserted.set()
        # Where each node's agent listens.
        self._controls: dict[str, str] = {}
        # Set when an agent answered a ping.
        self._answered: dict[str, asyncio.Event] = {}
        # Nodes whose lease has ended, and who have not come back since.
        self._expired: set[str] = set()
        self._orders = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._writing: asyncio.Task[None] | None = None
        world = self._record.world
        for placement in world.placements if world is not None else ():
            self._controls[placement.node] = placement.control

    @property
    def job(self) -> Job:
        return self._job

    @property
    def record(self) -> Record:
        """What this leader last committed or found committed."""
        return self._record

    async def lead(self) -> None:
        """Lead until cancelled, or until a commit is refused (Fenced) or can't be had (OutOfReach)."""
        # Some may have attached before this began.
        for node in self._job.absent - self._outboxes.keys():
            self._start(node, self._look_for(node))
        self._writing = asyncio.create_task(self._chronicle.write())
        while True:
            event = await self._next_event()
            before = self._job
            self._job, commands = step(before, event, time.monotonic())
            for kind, text in notes_of(before, event, commands):
                self._chronicle.note(kind, text)
            for command in commands:
                await self._perform(command)

    def next_order(self) -> int:
        self._orders += 1
        return self._orders

    # Agents.

    def attached(self, joined: MemberJoined, outbox: Outbox) -> None:
        node = joined.member.node
        previous = self._outboxes.get(node)
        if previous is not None:
            previous.put_nowait(None)
        self._outboxes[node] = outbox
        self._deserted.clear()
        self._controls[node] = joined.member.control
        self._stop(node)
        self.post(joined)

    def detached(self, node: str, outbox: Outbox) -> None:
        if self._outboxes.get(node) is outbox:
            self._forget(node)
            self._start(node, self._give_up(node) if node in self._expired else self._look_for(node))

    def answered(self, node: str) -> None:
        self._answered.setdefault(node, asyncio.Event()).set()

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    def lease_ended(self, node: str) -> None:
        """The node's member key is gone: whoever lives answers; whoever does not is given up."""
        self._expired.add(node)
        self._start(node, self._give_up(node))

    def lease_began(self, node: str) -> None:
        self._expired.discard(node)

    def registry_is_silent(self) -> None:
        """What is left of a world that has lost a part can only hang while nothing can be committed."""
        if self._job.absent:
            names = ", ".join(sorted(self._job.absent))
            self.post(Severed(f"etcd is out of reach, and so is {names}"))

    async def close(self, within_s: float = 0.0) -> None:
        """End all streams; what was sent before is delivered first, for as long as that takes at most."""
        for node in list(self._tasks):
            self._stop(node)
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._deserted.wait(), within_s)
        for node in list(self._tasks):
            self._stop(node)
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    async def notes_written(self) -> None:
        """Wait until what happened is written down, if that can be had soon."""
        await self._chronicle.written(_LAST_NOTES_S)

    async def _look_for(self, node: str) -> None:
        """The node has no stream. Its port tells whether its agent is dead; silence tells nothing."""
        control = self._controls.get(node, "")
        if not control:
            self.post(MemberLost(node, "its stream ended"))
            return
        answer = Answer.OPEN
        for pause in _LOOK_AGAIN_S:
            await asyncio.sleep(pause)
            answer = await probe(control)
            if node in self._outboxes:
                # It came while we looked, and calling this off came too late.
                return
            if answer is not Answer.OPEN:
                break
        if answer is not Answer.REFUSED:
            alive = "it listens, but its stream ended" if answer is Answer.OPEN else "it does not answer"
            self.post(MemberSilent(node, alive))
            if not self._registry_answers():
                self.post(Severed(f"etcd is out of reach, and so is {node}"))
        await self._until_refused(node, answer)

    async def _until_refused(self, node: str, answer: Answer) -> None:
        """Give the node up for dead as soon as its port refuses; ``answer`` is what it said last."""
        control = self._controls.get(node, "")
        while answer is not Answer.REFUSED:
            await asyncio.sleep(_KEEP_LOOKING_S)
            answer = await probe(control)
        if node in self._outboxes:
            return
        self.post(MemberLost(node, f"nobody listens at {control} any more"))

    async def _give_up(self, node: str) -> None:
        outbox = self._outboxes.get(node)
        answer = Answer.SILENT
        if outbox is not None:
            heard = self._answered[node] = asyncio.Event()
            outbox.put_nowait(ping_to_wire(self.epoch))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(heard.wait(), _ANSWER_S)
                return
            if self._outboxes.get(node) is outbox:
                self._forget(node)
            outbox.put_nowait(None)
            self.post(MemberLost(node, f"its lease ended and it did not answer in {_ANSWER_S:g} s", proven=False))
        else:
            answer = await probe(self._controls.get(node, ""))
            if node in self._outboxes:
                return
            proven = answer is Answer.REFUSED
            self.post(MemberLost(node, "its lease ended and it has no stream", proven=proven))
        # Proof that it is dead may still come, and be waited for.
        await self._until_refused(node, answer)

    def _forget(self, node: str) -> None:
        del self._outboxes[node]
        if not self._outboxes:
            self._deserted.set()

    def _start(self, node: str, task: Coroutine[None, None, None]) -> None:
        self._stop(node)
        self._tasks[node] = asyncio.create_task(task)

    def _stop(self, node: str) -> None:
        task = self._tasks.pop(node, None)
        if task is not None:
            task.cancel()

    # The machine.

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
            case Commit(world=world, history=history, inquest=inquest, checkpoints=checkpoints):
                record = Record(world, history, clock=self._clock, inquest=inquest, checkpoints=checkpoints)
                await self._commit(record)
            case Keep(finished=finished, history=history, inquest=inquest, checkpoints=checkpoints):
                record = replace(
                    self._record,
                    finished=finished,
                    history=history,
                    clock=self._clock,
                    inquest=inquest,
                    checkpoints=checkpoints,
                )
                await self._try_to_commit(record)
            case Enter(generation=generation, step=step, checkpoints=checkpoints):
                entered = await self._try_to_commit(replace(self._record, checkpoints=checkpoints))
                self.post(CheckpointEntered(generation, step, entered))
            case Conclude(outcome=outcome):
                await self._conclude(replace(self._record, outcome=outcome, ended_at=time.time()))
            case Send(node=node, directive=directive):
                self._send(node, directive)
            case Tell(reason=reason, bad=bad):
                log.log(logging.WARNING if bad else logging.INFO, "%s", reason)
            case _:
                assert_never(command)

    async def _try_to_commit(self, record: Record) -> bool:
        """Make it the truth, if that can be had now. Nothing that runs depends on it."""
        try:
            await self._registry.commit(self.epoch, record, after=self._record.generation)
        except OutOfReach:
            return False
        self._record = record
        return True

    async def _conclude(self, record: Record) -> None:
        """Write down the end. Where that can't be done, it is an end all the same: whoever is told of it stops."""
        try:
            await self._write(record, _CONCLUDE_S)
        except OutOfReach as error:
            log.warning("the end of the job could not be written to etcd: %s", error)
        self._record = record

    async def _commit(self, record: Record) -> None:
        """Make it the truth. While the registry is silent the workers are stopped: their world is over anyway."""

        def stop_workers() -> None:
            log.warning("etcd is out of reach: what comes next can't be committed")
            for node in self._outboxes:
                self._send(node, Hold("etcd is out of reach: the next world can't be committed"))

        await self._write(record, self._job.config.lease_s, stop_workers)
        self._record = record

    async def _write(self, record: Record, within_s: float, silent: Callable[[], None] = lambda: None) -> None:
        """Commit, again and again while there is no answer; ``silent`` is called once then. Raises OutOfReach."""
        end = time.monotonic() + within_s
        told = False
        while True:
            try:
                return await self._registry.commit(self.epoch, record, after=self._record.generation)
            except OutOfReach:
                if time.monotonic() >= end:
                    raise
                if not told:
                    told = True
                    silent()
                await asyncio.sleep(_COMMIT_AGAIN_S)

    def _send(self, node: str, directive: Directive) -> None:
        outbox = self._outboxes.get(node)
        if outbox is not None:
            outbox.put_nowait(directive_to_wire(self.epoch, directive))
            if isinstance(directive, Halt):
                # Nothing follows a Halt.
                outbox.put_nowait(None)
