"""The pool of warm standbys: one idle process per slot, filled in the background, emptied by a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine
from functools import partial

from elastic_adapter.core.errors import GuardLost, SpawnFailed
from elastic_adapter.core.model import Assignment
from elastic_adapter.core.processes import Exit, Guard, Process
from elastic_adapter.core.readiness import AT_REST_CPUS, connections_to, cpu_ticks, idle_cpus, past_the_start
from elastic_adapter.core.waiting import first_of
from elastic_adapter.core.workers import Standby, Starter, discard

log = logging.getLogger(__name__)

# Looked at only while a generation starts.
_LOOK_EVERY_S = 0.25
# While workers keep the CPU busy, a standby imports for this long and then pauses for this long.
_RUN_S = 0.03
_PAUSE_S = 0.27
# A slot whose standbys end by themselves this often gets none any more.
_MOST_DEATHS = 2


class StandbyPool:
    """Keeps one standby per slot; without anything to preload it has none, but for the bare ones of the start."""

    def __init__(self, starter: Starter, preload: tuple[str, ...], slots: int) -> None:
        self._starter = starter
        self._preload = preload
        self._slots = slots
        self._preparing: list[asyncio.Task[None]] = []
        self._standbys: dict[int, Standby] = {}
        self._deaths = dict.fromkeys(range(slots), 0)
        self._filling: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        # Set while all slots have a standby, or as many as can be had.
        self.ready = asyncio.Event()
        if not preload:
            self.ready.set()

    async def prepare(self, *, importing: bool = False) -> None:
        """Start an interpreter for each slot: it boots while the agent still gets ready for the first world.

        Where other nodes have to come first, it uses the wait to import what it will need.
        """
        preload = self._preload if importing else ()
        slots = range(self._slots)
        self._preparing = [asyncio.create_task(self._prepare(local_rank, preload)) for local_rank in slots]
        if preload:
            self.fill_now()
        # Each asks the guard before it waits for the answer.
        await asyncio.sleep(0)

    def follow(self, assignment: Assignment) -> None:
        """Fill the pool once the workers of this generation are past their start."""
        self._refill(self._fill_beside(assignment))

    def fill_now(self) -> None:
        """Fill the pool at once, and quickly: nothing runs here that it could disturb."""
        self._refill(self._fill(gently=False, background=False))

    async def take(self, local_rank: int) -> Standby | None:
        """A standby for this slot, imported or still importing; None: start cold."""
        await self._prepared()
        self._preparing = []
        standby = self._standbys.pop(local_rank, None)
        if standby is not None and not standby.process.alive:
            discard(standby)
            return None
        return standby

    async def _prepared(self) -> None:
        """Not gathered: whoever stops waiting does not stop what it waits for."""
        if self._preparing:
            await asyncio.wait(self._preparing)

    def stop_filling(self) -> None:
        """Leave the CPU to whatever comes now."""
        if self._filling is not None:
            self._filling.cancel()
            self._filling = None

    def close(self) -> None:
        self.stop_filling()
        for task in self._preparing:
            task.cancel()
        standbys, self._standbys = self._standbys, {}
        for standby in standbys.values():
            discard(standby)

    async def _prepare(self, local_rank: int, preload: tuple[str, ...]) -> None:
        # One that can't be started will be started cold, and its error told then.
        with contextlib.suppress(SpawnFailed, GuardLost):
            self._standbys[local_rank] = await self._starter.standby(local_rank, preload)

    def _refill(self, filling: Coroutine[None, None, None]) -> None:
        self.stop_filling()
        if not self._preload:
            filling.close()
            return
        self._filling = asyncio.create_task(filling)

    async def _fill_beside(self, assignment: Assignment) -> None:
        rests = await _past_the_start(assignment)
        await self._fill(gently=not rests, background=True)

    async def _fill(self, *, gently: bool, background: bool) -> None:
        await self._prepared()
        cpus = os.cpu_count() or 1
        at_once = asyncio.Semaphore(max(1, cpus // 8) if background else cpus)
        making = [self._keep(slot, at_once, gently=gently, background=background) for slot in range(self._slots)]
        await asyncio.gather(*making)
        self.ready.set()
        if len(self._standbys) == self._slots:
            log.info("standbys are ready for all %d worker(s): a restart will not import anything again", self._slots)

    async def _keep(self, local_rank: int, at_once: asyncio.Semaphore, *, gently: bool, background: bool) -> None:
        """Make a standby for this slot, unless it has one or its standbys do not live."""
        async with at_once:
            while self._deaths[local_rank] < _MOST_DEATHS:
                standby = self._standbys.get(local_rank)
                if standby is None:
                    try:
                        standby = await self._starter.standby(local_rank, self._preload, background=background)
                    except (SpawnFailed, GuardLost):
                        return
                    self._standbys[local_rank] = standby
                if await self._imported(standby, gently=gently):
                    self._warn(standby)
                    standby.process.exited.add_done_callback(partial(self._died, standby))
                    return
                self._forget(standby)
            log.warning("standbys of local rank %d end while they import: its restarts will be cold", local_rank)

    async def _imported(self, standby: Standby, *, gently: bool) -> bool:
        """Wait until the standby has imported everything; False when it ended instead."""
        pacing = asyncio.create_task(_pace(self._starter.guard, standby.process)) if gently else None
        try:
            await first_of(standby.ready.wait(), standby.process.exited)
        finally:
            if pacing is not None:
                pacing.cancel()
        return standby.ready.is_set()

    def _died(self, standby: Standby, _: asyncio.Future[Exit]) -> None:
        """A standby that was ready is gone, for its memory perhaps: make another. Workers are none any more."""
        if self._forget(standby):
            log.warning("the standby of local rank %d ended: making another", standby.local_rank)
            if self._filling is None or self._filling.done():
                self._refill(self._fill(gently=False, background=True))

    def _forget(self, standby: Standby) -> bool:
        """Let go of a standby that ended; False when it was no longer ours."""
        if self._standbys.get(standby.local_rank) is not standby:
            return False
        discard(self._standbys.pop(standby.local_rank))
        self._deaths[standby.local_rank] += 1
        return True

    def _warn(self, standby: Standby) -> None:
        for module, error in standby.errors.items():
            if module not in self._warned:
                self._warned.add(module)
                log.warning("a standby could not import %s: %s", module, error)


async def _pace(guard: Guard, process: Process) -> None:
    """Let a process run for a part of the time only: a busy training feels even what it takes of caches and cores."""
    try:
        while True:
            await asyncio.sleep(_RUN_S)
            guard.signal(process, signal.SIGSTOP)
            await asyncio.sleep(_PAUSE_S)
            guard.signal(process, signal.SIGCONT)
    finally:
        guard.signal(process, signal.SIGCONT)


async def _past_the_start(assignment: Assignment) -> bool:
    """Look until the local ranks are past their start; whether the CPU rests then."""
    loop = asyncio.get_running_loop()
    started = rested = loop.time()
    joined: float | None = None
    before = cpu_ticks()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now, after = loop.time(), cpu_ticks()
        if joined is None and connections_to(assignment.master.port) >= assignment.slots:
            joined = now
        if idle_cpus(before, after) < AT_REST_CPUS:
            rested = now
        if past_the_start(now - started, now - rested, None if joined is None else now - joined):
            return now > rested
        before = after
