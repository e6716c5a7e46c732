"""Where a job is: the state that ``job.step`` takes and gives, questions about it, and when it is to be asked again.

Read ``model.py`` before this one, and ``job.py`` after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias
from zlib import crc32

from elastic_adapter.core.blame import Inquest
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import MemberLeaving, StopRequested
from elastic_adapter.core.hang import Hang, Pulse, due
from elastic_adapter.core.ledger import Save, Saves, Stage
from elastic_adapter.core.membership import Settlement, Waiting, settle
from elastic_adapter.core.model import CheckpointRef, Endpoint, Member, Outcome, WorkerExit, World
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import History

# How long after a generation was replaced the story of its end may still be added to: nobody waits for it.
STORY_S = 1.0
# Within this time an agent that is cut off for too long has ended its workers.
KILL_S = 5.0
# When a job that waits for nodes says so for the first time.
_FIRST_WORD_S = 5.0
# For so long, at least, workers may take to their first step before it is said that none was told of.
_FIRST_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Parting:
    """A planned change of the world waits for the checkpoint that was asked for because of it."""

    # When it goes ahead regardless, or, if it insists on a checkpoint, workers are let go until the next attempt.
    until: float
    insists: bool = False
    # Nobody was asked yet, because a node is silent: until when it is waited for. None: all were.
    hear_until: float | None = None
    # Whether it may go ahead: the checkpoint is there, or will not come.
    over: bool = False


@dataclass(frozen=True, slots=True)
class Gathering:
    """No worker runs; the first world is not formed yet. ``since`` is the time of the last join."""

    since: float
    # When those who are here are told what they wait for.
    remind_at: float
    reason: str = "waiting for nodes"


@dataclass(frozen=True, slots=True)
class Running:
    """The job's world runs. ``finished`` holds the ranks that ended with code 0."""

    finished: frozenset[int] = frozenset()
    # When the last newcomer came for which the world is to be replaced.
    joined: float | None = None
    # Those who were asked to go, and when they have waited long enough for others to go with them.
    leaving: tuple[MemberLeaving, ...] = ()
    leave_at: float | None = None
    # Somebody asked for the end of the job, in good order.
    stop: StopRequested | None = None
    parting: Parting | None = None
    # Failures that are not judged yet: the cause may still come, or the loss of another node may explain them.
    exits: tuple[WorkerExit, ...] = ()
    judge_at: float | None = None
    # Workers that are about to fail: they may be the cause of those that have.
    erring: tuple[WorkerExit, ...] = ()
    pulse: Pulse = field(default_factory=Pulse)
    # Set while the stacks of workers that seem to hang are asked for.
    hang: Hang | None = None


@dataclass(frozen=True, slots=True)
class Draining:
    """The workers save and stop before a planned change; at ``until`` the change goes ahead regardless."""

    until: float
    reason: str
    finished: frozenset[int] = frozenset()
    drained: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Holding:
    """Workers are stopped until the next world can be formed."""

    since: float
    # What ended the world before, and, with it, what is still missing for the next.
    cause: str
    reason: str
    remind_at: float
    start_delay_s: float = 0.0
    # The ranks that had ended with code 0 in the world before.
    finished: frozenset[int] = frozenset()
    # Until when a checkpoint that is being written is waited for; None: no longer.
    save_until: float | None = None
    # Those who were asked to go and have a part in that, and until when they stay for it.
    leaving: tuple[MemberLeaving, ...] = ()
    leave_by: float | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """The end is decided; a checkpoint is still being written, and is waited for until then."""

    outcome: Outcome
    until: float
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: Outcome


Phase: TypeAlias = Gathering | Running | Draining | Holding | Closing | Finished


@dataclass(frozen=True, slots=True)
class Job:
    config: JobConfig
    phase: Phase
    # Those present, by node, in the order of joining. Members beyond the world are spares.
    members: tuple[Member, ...] = ()
    # The last world committed; it runs only while the phase says so.
    world: World | None = None
    history: History = field(default_factory=History)
    # Nodes of the world that have no stream but may be alive: they come back, or are lost.
    absent: frozenset[str] = frozenset()
    # Nodes of the world that were given up, and when, without proof that their workers are dead.
    doubtful: tuple[tuple[str, float], ...] = ()
    # Whether a part of the world is known to have stopped or died: what is left of it can't get on.
    broken: bool = False
    # The ports that the last generations took for their masters.
    taken: tuple[tuple[int, Endpoint], ...] = ()
    # The generation whose end is being told.
    inquest: Inquest | None = None
    # Nodes that take no part until it is known whether they are fit to.
    checking: frozenset[str] = frozenset()
    # Whether it was said that nobody tells of progress.
    said_mute: bool = False
    # The ledger: checkpoints that the next world can go on from, the newest first.
    checkpoints: tuple[CheckpointRef, ...] = ()
    # Those that the last world is making.
    saves: Saves = field(default_factory=Saves)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(member.node for member in self.members)

    def member(self, node: str) -> Member | None:
        return next((member for member in self.members if member.node == node), None)


def begin(config: JobConfig, now: float) -> Job:
    return Job(config=config, phase=_gathering(now))


def _gathering(now: float) -> Gathering:
    return Gathering(since=now, remind_at=now + _FIRST_WORD_S)


def resume(config: JobConfig, record: Record, now: float) -> Job:
    """Where a new leader goes on: with what was committed, and nobody heard of yet."""
    if record.outcome is not None:
        return Job(config, Finished(record.outcome), world=record.world, history=record.history)
    if record.world is None:
        return Job(config, _gathering(now), history=record.history)
    # Of the world that runs, what failed is told again by who saw it, and judged then.
    inquest = record.inquest
    inquest = None if inquest is None or inquest.generation == record.world.generation else inquest
    return Job(
        config,
        Running(finished=record.finished, pulse=Pulse(now)),
        world=record.world,
        history=record.history,
        absent=frozenset(record.world.nodes),
        taken=((record.world.generation, record.world.master),),
        # Those who are to be told come first.
        inquest=None if inquest is None else replace(inquest, until=now + STORY_S),
        checkpoints=record.checkpoints,
    )


def deadline(job: Job) -> float | None:
    """The time at which ``TimePassed`` would change something; None: only an event can."""
    return earliest(_phase_deadline(job), save_deadline(job), None if job.inquest is None else job.inquest.until)


def save_deadline(job: Job) -> float | None:
    """When something is to be done about checkpoints, whatever becomes of the world."""
    ask = job.saves.ask
    if isinstance(job.phase, Finished):
        return None
    answers = None if ask is None or ask.step is not None else ask.until
    return earliest(answers, *(time for each in job.saves.under_way for time in (each.staged_by, each.enter_at)))


def _phase_deadline(job: Job) -> float | None:
    match job.phase:
        case Gathering(since=since, remind_at=remind_at):
            settlement = settled(job, since, since)
            if isinstance(settlement, Waiting) and settlement.until is not None and job.members[0].ports:
                return min(settlement.until, remind_at)
            return remind_at if job.members else None
        case Running(joined=joined, leave_at=leave_at, judge_at=judge_at) as phase:
            # While a node is silent, a failure elsewhere can't be judged.
            judge_at = None if job.absent else judge_at
            drain_at = None if joined is None or phase.exits else joined + job.config.quiet_s
            change_at = earliest(leave_at, drain_at)
            if phase.parting is not None and not phase.parting.over:
                change_at = _parting_deadline(phase, phase.parting)
            return earliest(change_at, judge_at, hang_deadline(job, phase), mute_deadline(job, phase))
        case Draining(until=until):
            return until
        case Holding(since=since, remind_at=remind_at, save_until=save_until, leave_by=leave_by):
            limit = job.config.hold_timeout_s
            saved_by = earliest(save_until, leave_by) if in_flight(job) is not None else None
            return earliest(remind_at, doubt_until(job), None if limit is None else since + limit, saved_by)
        case Closing(until=until):
            return until
        case Finished():
            return None
        case _:
            assert_never(job.phase)


def _parting_deadline(phase: Running, parting: Parting) -> float | None:
    """When a change that waits for a checkpoint is looked at again."""
    if phase.exits:
        # The world is over anyway. Who leaves goes at once; an end that was asked for has its limit all the same.
        return earliest(phase.leave_at, parting.until if phase.stop is not None else None)
    # Who leaves has less time than who joins.
    return earliest(parting.until, parting.hear_until, phase.leave_at if parting.insists else None)


def hang_deadline(job: Job, phase: Running) -> float | None:
    """When a hang is found, or decided upon; None: there is none, or something else will end the world."""
    if phase.exits or job.absent or phase.parting is not None:
        return None
    return phase.hang.until if phase.hang is not None else due(job.config, phase.pulse)


def mute_deadline(job: Job, phase: Running) -> float | None:
    """When it is said that nobody tells of progress."""
    limit = job.config.hang_timeout_s
    if limit is None or job.said_mute or phase.pulse.moved_at is not None or phase.parting is not None:
        return None
    return phase.pulse.since + max(limit, _FIRST_STEP_S)


def settled(job: Job, since: float, now: float) -> Settlement:
    """Who of those present forms the next world."""
    fit = tuple(member for member in job.members if member.node not in job.checking)
    settlement = settle(fit, job.config, job.world, since, now, excluded=job.history.kept_out)
    if isinstance(settlement, Waiting) and len(fit) < len(job.members):
        names = ", ".join(sorted(job.checking))
        return replace(settlement, reason=f"{settlement.reason}; the health of {names} is checked")
    return settlement


def doubt_until(job: Job) -> float | None:
    """Until when the world before may be whole, somewhere where we can't see it; None: it is not."""
    world = job.world
    if world is None or job.broken or not job.doubtful:
        return None
    if any(member.node in world.nodes and not is_complete(job, member.node) for member in job.members):
        # That member stops its part of the world before it starts the next.
        return None
    return max(since for _, since in job.doubtful) + job.config.isolation_s + KILL_S


def accounted_for(job: Job, node: str) -> Job:
    """Its agent is on a stream: it is neither absent nor in doubt."""
    doubtful = tuple(each for each in job.doubtful if each[0] != node)
    return replace(job, absent=job.absent - {node}, doubtful=doubtful)


def with_member(job: Job, member: Member) -> Job:
    """The job with this member added, or put in the place of its older record."""
    others = (other for other in job.members if other.node != member.node)
    return replace(job, members=tuple(sorted((*others, member), key=lambda each: each.order)))


def without_member(job: Job, node: str) -> Job:
    members = tuple(member for member in job.members if member.node != node)
    return replace(job, members=members, checking=job.checking - {node})


def is_active(job: Job) -> bool:
    """Whether workers of the job's world may be running."""
    return isinstance(job.phase, Running | Draining)


def finished_ranks(job: Job) -> frozenset[int]:
    """The ranks that ended with code 0 in the last world."""
    return job.phase.finished if isinstance(job.phase, Running | Draining | Holding | Closing) else frozenset()


def is_complete(job: Job, node: str) -> bool:
    """Whether all workers of this node ended with code 0 in the last world."""
    if job.world is None or node not in job.world.nodes:
        return False
    return not isinstance(job.phase, Gathering | Finished) and finished_ranks(job).issuperset(job.world.ranks(node))


def in_flight(job: Job) -> Save | None:
    """A checkpoint that will be there soon, even if its world is over; the newest of them."""
    return next((each for each in reversed(job.saves.under_way) if is_saving(job, each)), None)


def is_saving(job: Job, save: Save) -> bool:
    """Whether all ranks have staged their parts, and those who have not written them yet are still there to do so."""
    world = job.world
    if world is None or job.member(world.nodes[0]) is None:
        return False
    if save.stage is not Stage.WRITING:
        return True
    if not save.staged.issuperset(range(world.world_size)):
        return False
    return all(job.member(node) is not None or save.written.issuperset(world.ranks(node)) for node in world.nodes)


def is_welcome(job: Job, node: str) -> bool:
    return node not in job.history.kept_out and node not in job.checking


def jitter_of(job: Job) -> float:
    """From 0 to 1: another one for each job and generation, and the same whoever asks."""
    generation = job.world.generation if job.world is not None else 0
    return crc32(f"{job.config.job_id} {generation}".encode()) / 2**32


def earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
