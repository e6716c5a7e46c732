"""The agent: follows the directives on this node, supervises its workers, reports what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from elastic_adapter.core.checkpoint.desk import SaveDesk
from elastic_adapter.core.config import JobConfig, NodeConfig
from elastic_adapter.core.errors import GuardLost, SpawnFailed, assert_never
from elastic_adapter.core.events import (
    MemberJoined,
    MemberLeaving,
    MemberReady,
    NodeChecked,
    NodeDrained,
    NodeProgressed,
    NodeStopped,
    PortsOffered,
    StacksDumped,
    StopRequested,
    WorkerErred,
    WorkerExited,
)
from elastic_adapter.core.hang import look_every_s
from elastic_adapter.core.health import HealthCheck
from elastic_adapter.core.model import (
    Assignment,
    Check,
    Drain,
    Drop,
    Dump,
    Explain,
    Failed,
    Halt,
    Hold,
    Mark,
    Member,
    Outcome,
    Pause,
    Prepare,
    Publish,
    Resume,
    Run,
    SaveAt,
    SaveDirective,
    Seat,
    Settle,
    Stopped,
    Verdict,
    Wait,
    WorkerExit,
    signal_name,
)
from elastic_adapter.core.notices import NoticeBoard
from elastic_adapter.core.processes import Exit
from elastic_adapter.core.reservation import Reservations
from elastic_adapter.core.session import CutOff, LinkLost, Notice, Session, Superseded
from elastic_adapter.core.standby import StandbyPool
from elastic_adapter.core.summary import explain, summarize
from elastic_adapter.core.waiting import all_of, first_of, on_signals
from elastic_adapter.core.witness import Witness
from elastic_adapter.core.workers import Starter, Worker

log = logging.getLogger(__name__)

# These end the whole job; any other handled signal asks only this node to go.
_ENDS_THE_JOB = frozenset({signal.SIGINT, signal.SIGQUIT})
# Directives that make those before them void, or may.
_DECIDING = Run | Drain | Hold | Halt | Check
# Directives that come instead of the end that a signal asked for: a checkpoint is seen to first.
_HEARD = Pause | Wait | Drain
# One for the next generation and one for the generation after it, should that follow at once.
_PORTS_OFFERED = 2
# How long a node that was told to go waits for the leader's answer; and how long when it is told again.
_UNANSWERED_S = 10.0
_INSISTING_S = 1.0
# How long the end waits until what nothing came of is removed. What is left then, the next start removes.
_TIDIED_S = 5.0
# How long a node that failed its health check waits for the leader's answer.
_UNFIT_S = 2.0
# What a worker that hangs gets between the signal and SIGKILL, at most: it will hardly handle the signal.
_HUNG_GRACE_S = 2.0
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    worker: Worker


@dataclass(frozen=True, slots=True)
class GuardEnded:
    pass


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A signal asked for the end, and nobody who leads has answered. ``insisting``: it was sent again."""

    insisting: bool = False


@dataclass(frozen=True, slots=True)
class Unfit:
    """The node failed its health check."""

    trouble: str


Incident: TypeAlias = Notice | WorkerEnded | GuardEnded | Unanswered | Unfit


class Agent:
    """One per node. Incidents come through one queue and are handled one after the other."""

    def __init__(
        self,
        job: JobConfig,
        node: NodeConfig,
        *,
        starter: Starter,
        pool: StandbyPool | None,
        session: Session,
        board: NoticeBoard,
        witness: Witness,
        desk: SaveDesk,
        health: HealthCheck | None = None,
        verdicts: list[Verdict] | None = None,
        leaving_ends_the_job: bool = False,
    ) -> None:
        self._job = job
        self._node = node
        self._starter = starter
        self._guard = starter.guard
        self._pool = pool
        self._session = session
        self._board = board
        self._witness = witness
        self._desk = desk
        desk.node = node.node
        desk.report = lambda report: self._beside(session.report(report))
        # While a checkpoint is made because of a signal, the leader's answer takes longer (monotonic).
        self._patient_until = 0.0
        self._health = health
        # Whether it runs now.
        self._checking = False
        # Why the generations that failed did so.
        self._verdicts = verdicts if verdicts is not None else []
        # The generation whose workers were found to hang.
        self._hung: int | None = None
        # What was last reported of the workers' progress.
        self._marks: tuple[int, tuple[Mark, ...]] | None = None
        self._leaving_ends_the_job = leaving_ends_the_job
        self._incidents: asyncio.Queue[Incident] = asyncio.Queue()
        # Directives that wait in the queue: a world that is already out of date is not started.
        self._directives_waiting = 0
        self._directive_came = asyncio.Event()
        self._reservations = Reservations(node.address)
        self._ports: list[int] = []
        self._assignment: Assignment | None = None
        # The last generation whose workers were started here.
        self._begun = 0
        self._workers: list[Worker] = []
        # Workers that were told to end and have not done so yet.
        self._ending: list[Worker] = []
        # The generation that runs here, or ran and ended by itself; and how its workers ended.
        self._running: int | None = None
        self._exits: list[WorkerExit] = []
        # The first signal that asked for the end.
        self._signal: int | None = None
        # Set by a second signal: whoever waits for workers to end in good order stops waiting.
        self._hurry = asyncio.Event()
        # When the failure that the next generation will answer was seen (monotonic).
        self._failed_at: float | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._reports: set[asyncio.Task[None]] = set()

    async def run(self, signals: Sequence[int] = ()) -> Outcome:
        """Take part in the job until it is over for this node. ``signals`` came before the agent was there."""
        on_signals(self._node.signals, self._signalled)
        self._reserve_ports()
        for number in signals:
            self._signalled(number)
        tasks = [self._session.attend(self), self._watch_guard(), self._watch_standbys(), self._watch_progress()]
        attending = asyncio.create_task(all_of(*tasks))
        try:
            return await self._handle_all(attending)
        finally:
            for task in (attending, *self._reports):
                task.cancel()
            if self._pool is not None:
                self._pool.close()
            self._reservations.close()

    async def _handle_all(self, attending: asyncio.Task[None]) -> Outcome:
        while True:
            incident = asyncio.create_task(self._incidents.get())
            await asyncio.wait({incident, attending}, return_when=asyncio.FIRST_COMPLETED)
            if not incident.done():
                incident.cancel()
                await attending
            outcome = await self._handle(await incident)
            if outcome is not None:
                self._tell(outcome)
                if isinstance(outcome, Stopped) and isinstance(self.request(), MemberLeaving):
                    return replace(outcome, code=self._node.leave_code)
                return outcome

    async def _handle(self, incident: Incident) -> Outcome | None:
        """Act on what happened; an outcome means that it is over."""
        if isinstance(incident, _DECIDING):
            self._directives_waiting -= 1
        match incident:
            case Run(assignment=assignment):
                await self._run_world(assignment)
            case Drain(generation=generation, grace_s=grace_s, reason=reason):
                await self._drain(generation, grace_s, reason)
            case Hold(reason=reason):
                await self._hold(reason)
            case Check(reason=reason):
                await self._check(reason)
            case Dump() | Explain() | Wait():
                self._take_word(incident)
            case Halt(outcome=outcome):
                await self._halt(outcome)
                await first_of(self._hurry.wait(), self._desk.tidied(), within_s=_TIDIED_S)
                return outcome
            case WorkerEnded(worker=worker):
                await self._report_exit(worker)
            case Pause() | SaveAt() | Prepare() | Publish() | Settle() | Drop() | Resume():
                self._desk.follow(incident)
            case _:
                return await self._handle_trouble(incident)
        return None

    def _take_word(self, incident: Dump | Explain | Wait) -> None:
        """What changes nothing here: it is told, or asked, beside all else."""
        match incident:
            case Wait(reason=reason):
                log.info("waiting: %s", reason)
            case Explain(verdict=verdict):
                # Who leads now may not know that it was told.
                if all(verdict.generation != known.generation for known in self._verdicts):
                    self._verdicts.append(verdict)
                    log.warning("%s", explain(verdict))
            case Dump(generation=generation):
                if generation == self._running:
                    self._hung = generation
                    self._beside(self._dump(generation))
            case _:
                assert_never(incident)

    async def _handle_trouble(
        self, incident: Superseded | CutOff | LinkLost | GuardEnded | Unanswered | Unfit
    ) -> Outcome | None:
        among_others = self._assignment is not None and self._assignment.group_size > 1
        match incident:
            case Superseded(generation=generation):
                await self._superseded(generation)
            case CutOff():
                await self._cut_off(incident)
            case LinkLost(why=why):
                await self._stop(signal.SIGTERM, self._node.grace_s)
                return Failed(why, alone=True)
            case Unanswered(insisting=insisting):
                if not insisting and (left := self._patient_until - time.monotonic()) > 0:
                    self._end_alone_after(left + _UNANSWERED_S)
                    return None
                assert self._signal is not None
                await self._stop(self._signal, self._node.grace_s)
                name = signal_name(self._signal)
                return Stopped(f"{name} on {self._node.node}; no leader of the job answered", self._signal, alone=True)
            case Unfit(trouble=trouble):
                return Failed(f"node {self._node.node} failed its health check: {trouble}", alone=among_others)
            case GuardEnded():
                return Failed("the guard process ended; all workers were ended with it", alone=among_others)
            case _:
                assert_never(incident)
        return None

    # What comes in.

    def _signalled(self, number: int) -> None:
        """Tell the coordinator at once, whatever this agent is waiting for; a second signal ends the waiting."""
        name = signal_name(number)
        if self._signal is not None:
            # A session that ends may send SIGHUP and SIGTERM: only an insisting user cuts the grace short.
            if number == self._signal or number in _ENDS_THE_JOB:
                log.warning("%s again: workers are killed without further grace", name)
                self._hurry.set()
                self._end_alone_after(_INSISTING_S, insisting=True)
            return
        self._signal = number
        log.info("%s received: stopping", name)
        request = self.request()
        assert request is not None
        if isinstance(request, MemberLeaving):
            self._give_notice(name)
        self._beside(self._session.report(request))
        self._end_alone_after(_UNANSWERED_S)

    def _beside(self, work: Coroutine[None, None, None]) -> None:
        """Do this beside all else."""
        task = asyncio.create_task(work)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _end_alone_after(self, seconds: float, *, insisting: bool = False) -> None:
        """A leader that can't be reached, or can't decide, does not keep anybody who was told to go."""
        asyncio.get_running_loop().call_later(seconds, self._incidents.put_nowait, Unanswered(insisting))

    def _give_notice(self, name: str) -> None:
        """Tell the workers that their node is about to leave."""
        self._board.tell(notice="leave", grace_s=self._node.grace_s, reason=f"{name} on {self._node.node}")
        if self._node.leave_signal is not None:
            for worker in self._workers:
                self._guard.signal(worker.process, self._node.leave_signal)

    def notice(self, notice: Notice) -> None:
        if isinstance(notice, _HEARD) and self._signal is not None:
            self._patient_until = time.monotonic() + self._job.drain_s
        if isinstance(notice, SaveDirective):
            # It changes nothing for the workers' lives, and is followed at once.
            self._desk.follow(notice)
            return
        if isinstance(notice, _DECIDING):
            self._directives_waiting += 1
        if isinstance(notice, CutOff):
            # Whatever this agent waits for then, its workers do not outlive this time.
            self._kill_timer = asyncio.get_running_loop().call_at(notice.kill_by, self._kill_all)
        self._directive_came.set()
        self._incidents.put_nowait(notice)

    def state(self) -> MemberJoined:
        seen = self._assignment.generation if self._assignment is not None else 0
        # Whoever leads now may not have heard of it.
        self._marks = None
        return MemberJoined(
            self._member(), self._running, seen, tuple(self._exits), self._checking, *self._desk.state()
        )

    def request(self) -> StopRequested | MemberLeaving | None:
        if self._signal is None:
            return None
        if self._signal in _ENDS_THE_JOB or self._leaving_ends_the_job:
            return StopRequested(self._node.node, self._signal)
        return MemberLeaving(self._node.node, self._signal)

    async def _watch_standbys(self) -> None:
        """A node counts as a newcomer when it could start at once."""
        if self._pool is not None:
            await self._pool.ready.wait()
            await self._session.report(MemberReady(self._node.node))
        await asyncio.Event().wait()

    async def _watch_progress(self) -> None:
        """Report how far the workers have got, whenever that has changed."""
        every_s = look_every_s(self._job)
        while every_s is not None:
            await asyncio.sleep(every_s)
            generation, workers = self._running, self._workers
            if generation is None or not workers:
                continue
            pages = (self._starter.progress.read(worker.seat.local_rank, generation) for worker in workers)
            told = generation, tuple(Mark() if page is None else Mark(page.count, page.step) for page in pages)
            if told != self._marks and any(mark.count for mark in told[1]):
                self._marks = told
                await self._session.report(NodeProgressed(self._node.node, *told))
        await asyncio.Event().wait()

    async def _watch_guard(self) -> None:
        assert self._guard.lost is not None
        await self._guard.lost
        self._incidents.put_nowait(GuardEnded())

    # Directives.

    async def _run_world(self, assignment: Assignment) -> None:
        """Start this node's part of a world, once. A leader that took over may send again what the last one sent."""
        known = self._assignment
        latest = known if known is not None and known.generation > assignment.generation else assignment
        if latest.generation <= self._begun:
            return
        if known is None or latest.generation > known.generation:
            await self._make_room(latest)
        head_start_s = self._starter.adapter.head_start_s if latest.group_rank > 0 else 0.0
        await self._wait_for_start(latest.start_delay_s + head_start_s)
        if self._directives_waiting:
            # What waits may be a later world, or an end. If it is this one again, it begins then.
            return
        self._begun = latest.generation
        await self._start(latest)

    async def _make_room(self, assignment: Assignment) -> None:
        """End whatever runs of an earlier world."""
        if self._pool is not None:
            self._pool.stop_filling()
        await self._offer_ports(assignment)
        await self._stop(signal.SIGTERM, self._node.grace_s)
        self._release_port()
        self._assignment = assignment
        self._running = assignment.generation
        self._exits = []
        self._desk.begin(assignment)

    async def _drain(self, generation: int, grace_s: float, reason: str) -> None:
        if self._assignment is None or generation != self._assignment.generation:
            return
        self._board.tell(notice="drain", grace_s=grace_s, reason=reason)
        await self._stop(signal.SIGTERM, min(grace_s, self._node.grace_s))
        self._board.clear()
        await self._session.report(NodeDrained(self._node.node, generation))

    async def _hold(self, reason: str) -> None:
        log.info("workers are stopped until the next world: %s", reason)
        await self._stop(signal.SIGTERM, self._node.grace_s)
        if self._node.master_port is not None:
            self._ports = [self._node.master_port]
        await self._report_ports()
        if self._pool is not None:
            self._pool.fill_now()

    async def _check(self, reason: str) -> None:
        """Stop the workers, and see whether this node is fit for more."""
        log.info("workers are stopped: %s", reason)
        await self._stop(signal.SIGTERM, self._node.grace_s)
        await self._report_ports()
        if not self._checking:
            self._checking = True
            self._beside(self._check_health())

    async def _check_health(self) -> None:
        trouble = await self._health.run() if self._health is not None else ""
        self._checking = False
        if trouble:
            # Whoever leads halts this node, or the job; if nobody answers, it goes by itself.
            asyncio.get_running_loop().call_later(_UNFIT_S, self._incidents.put_nowait, Unfit(trouble))
        elif self._pool is not None:
            self._pool.fill_now()
        await self._session.report(NodeChecked(self._node.node, trouble))

    async def _dump(self, generation: int) -> None:
        """Find out what the workers are doing."""
        stacks = await self._witness.look(self._workers)
        for stack in stacks:
            doing = f"waits for others in {stack.waits}, {stack.place}" if stack.waits else stack.place or stack.text
            log.warning("rank %d (pid %d): %s%s", stack.rank, stack.pid, doing, f"; {stack.file}" if stack.file else "")
        await self._session.report(StacksDumped(self._node.node, generation, stacks))

    async def _superseded(self, generation: int) -> None:
        """Etcd tells of a later generation than the one that runs here: nothing of this one may go on."""
        if self._assignment is None or generation <= self._assignment.generation or not self._workers:
            return
        log.info("generation %d is committed: workers of generation %d end", generation, self._assignment.generation)
        await self._stop(signal.SIGTERM, self._node.grace_s)

    async def _cut_off(self, cut: CutOff) -> None:
        generation = self._running
        if self._workers:
            log.error("workers are stopped: %s", cut.why)
            await self._stop(signal.SIGTERM, min(self._node.grace_s, max(0.0, cut.kill_by - time.monotonic())))
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if generation is not None:
            await self._session.report(NodeStopped(self._node.node, generation, cut.why))

    def _kill_all(self) -> None:
        for worker in (*self._workers, *self._ending):
            self._guard.signal(worker.process, signal.SIGKILL)

    async def _halt(self, outcome: Outcome) -> None:
        number = outcome.signal if isinstance(outcome, Stopped) else signal.SIGTERM
        if self._pool is not None:
            self._pool.close()
        await self._stop(number, self._node.grace_s)

    def _tell(self, outcome: Outcome) -> None:
        restarts = self._assignment.restart_count if self._assignment is not None else 0
        level = logging.ERROR if isinstance(outcome, Failed) else logging.INFO
        log.log(level, "%s", summarize(outcome, restarts))

    # Workers.

    async def _start(self, assignment: Assignment) -> None:
        begun = time.monotonic()
        # Only what the kernel does from now on can concern these workers.
        self._starter.oom.raised()
        for local_rank in range(assignment.slots):
            seat = self._seat(assignment, local_rank)
            try:
                worker = await self._start_one(seat)
            except SpawnFailed as error:
                await self._report_not_started(seat, error)
                return
            except GuardLost:
                # The queue has the news already.
                return
            self._workers.append(worker)
            worker.erred = self._erred
            worker.process.exited.add_done_callback(partial(self._ended, worker))
        warm = sum(worker.warm for worker in self._workers)
        since, origin = (self._failed_at, "the failure") if self._failed_at is not None else (begun, "its order")
        log.info(
            "generation %d: %d worker(s) started, %d of them from standby, %.3f s after %s%s",
            assignment.generation,
            len(self._workers),
            warm,
            time.monotonic() - since,
            origin,
            # The leader says why; with several nodes it is another's log.
            f": {assignment.reason}" if assignment.group_size > 1 else "",
        )
        self._failed_at = None
        if self._pool is not None:
            self._pool.follow(assignment)

    async def _start_one(self, seat: Seat) -> Worker:
        standby = await self._pool.take(seat.local_rank) if self._pool is not None else None
        if standby is not None:
            return self._starter.wake(standby, seat)
        return await self._starter.cold(seat)

    def _seat(self, assignment: Assignment, local_rank: int) -> Seat:
        return Seat(
            assignment=assignment,
            local_rank=local_rank,
            job_id=self._job.job_id,
            node=self._node.node,
            max_restarts=self._job.policy.max_restarts,
            role=self._node.role,
            error_file=str(self._starter.error_file(assignment.restart_count, local_rank)),
            notices=self._board.path,
        )

    def _ended(self, worker: Worker, _: asyncio.Future[Exit]) -> None:
        """The process is gone; exits that we brought about ourselves are nobody's news."""
        if worker in self._workers:
            self._incidents.put_nowait(WorkerEnded(worker))

    def _erred(self, worker: Worker) -> None:
        if worker in self._workers:
            self._beside(self._session.report(WorkerErred(self._starter.presumed(worker))))

    async def _report_exit(self, worker: Worker) -> None:
        if worker not in self._workers:
            return
        await self._hear_last_words()
        exit = await self._starter.account(worker, worker.process.exited.result())
        if not exit.ok:
            if self._failed_at is None:
                self._failed_at = time.monotonic()
            log.warning("rank %d (pid %d) %s", exit.rank, exit.pid, exit.how)
        self._exits.append(exit)
        await self._session.report(WorkerExited(exit))

    async def _hear_last_words(self) -> None:
        """Report first what workers had said when they ended: the leader is to know which checkpoint comes."""
        self._board.drain()
        # What is reported beside is on its way when all that was begun has had its turn.
        await asyncio.sleep(0)

    async def _report_not_started(self, seat: Seat, error: SpawnFailed) -> None:
        """A program that can't be executed counts as a worker that failed, with the shell's code for it."""
        exit = WorkerExit(
            node=self._node.node,
            generation=seat.assignment.generation,
            local_rank=seat.local_rank,
            rank=seat.rank,
            code=_NOT_EXECUTABLE if error.errno == errno.EACCES else _NOT_FOUND,
            signal=None,
            at=time.time(),
            detail_source="error",
            detail=str(error),
            error=str(error),
            age_s=0.0,
        )
        log.warning("rank %d: %s", seat.rank, error)
        self._exits.append(exit)
        await self._session.report(WorkerExited(exit))

    async def _stop(self, number: int, grace_s: float) -> None:
        """End all workers: the signal, the grace, SIGKILL, and then whatever they left behind."""
        workers, self._workers = self._workers, []
        generation, self._running = self._running, None
        if not workers:
            return
        if generation is not None and generation == self._hung:
            grace_s = min(grace_s, _HUNG_GRACE_S)
        reported = {exit.rank for exit in self._exits}
        ended = [worker for worker in workers if not worker.process.alive]
        self._ending = workers
        for worker in workers:
            self._guard.signal(worker.process, number)
        if not await self._all_ended(workers, grace_s):
            stubborn = [worker for worker in workers if worker.process.alive]
            log.warning("%d worker(s) did not end on %s: SIGKILL", len(stubborn), signal_name(number))
            for worker in stubborn:
                self._guard.signal(worker.process, signal.SIGKILL)
            await asyncio.gather(*(worker.process.exited for worker in stubborn))
        self._ending = []
        await self._guard.sweep()
        await self._hear_last_words()
        for worker in workers:
            worker.process.channel.drain()
            worker.process.channel.close()
        # What we brought about is nobody's news; but some may have failed before we got to them.
        news = [worker for worker in workers if worker in ended or worker.error is not None]
        if news := [worker for worker in news if worker.seat.rank not in reported]:
            self._beside(self._report_late(news))

    async def _report_late(self, workers: list[Worker]) -> None:
        """The world of these workers is over, but how they ended belongs to the story of its end."""
        for worker in workers:
            exit = await self._starter.account(worker, worker.process.exited.result())
            if not exit.ok:
                await self._session.report(WorkerExited(exit))

    async def _all_ended(self, workers: list[Worker], grace_s: float) -> bool:
        ended = asyncio.gather(*(worker.process.exited for worker in workers))
        await first_of(self._hurry.wait(), ended, within_s=grace_s)
        return ended.done()

    # Ports and waiting.

    def _member(self) -> Member:
        return Member(
            node=self._node.node,
            address=self._node.address,
            slots=self._node.slots,
            order=self._session.order if self._node.place is None else self._node.place + 1,
            ports=tuple(self._ports),
            control=self._session.control,
            warm=self._pool is None or self._pool.ready.is_set(),
        )

    def _reserve_ports(self) -> None:
        if self._node.master_port is not None:
            self._ports = [self._node.master_port]
            return
        while len(self._ports) < _PORTS_OFFERED:
            self._ports.append(self._reservations.reserve())

    async def _offer_ports(self, assignment: Assignment) -> None:
        """The world took one of our ports for its master: offer a fresh one in its place."""
        if assignment.master.port in self._ports and assignment.group_rank == 0:
            self._ports.remove(assignment.master.port)
            if self._node.master_port is None:
                self._reserve_ports()
            await self._report_ports(assignment)

    async def _report_ports(self, assignment: Assignment | None = None) -> None:
        seen = assignment or self._assignment
        await self._session.report(
            PortsOffered(self._node.node, tuple(self._ports), seen.generation if seen is not None else 0)
        )

    def _release_port(self) -> None:
        """The generation that ran here is over: its master's port is free for anybody."""
        if self._assignment is not None and self._assignment.group_rank == 0:
            self._reservations.release(self._assignment.master.port)

    async def _wait_for_start(self, delay_s: float) -> None:
        """Wait as the world says; a newer directive ends the waiting."""
        if delay_s > 0:
            self._directive_came.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._directive_came.wait(), delay_s)
