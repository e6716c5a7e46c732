"""The job's machine: ``step`` takes a state, an event and the time, and gives the next state and commands.

Everything the launcher decides is decided here or in what is called from here. The machine never waits
and never looks at a clock: ``deadline`` says when it wants to be asked again.

Commands are in order, and each must be done before the next: a world is committed before it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    Command,
    Commit,
    Conclude,
    Event,
    MemberJoined,
    MemberLeaving,
    MemberLost,
    NodeDrained,
    PortsOffered,
    Send,
    StopRequested,
    Tell,
    TimePassed,
    WorkerExited,
)
from elastic_adapter.core.levels import admits, grows, survives_loss
from elastic_adapter.core.membership import Settled, Waiting, settle
from elastic_adapter.core.model import (
    Directive,
    Drain,
    Failed,
    Halt,
    Hold,
    Member,
    Outcome,
    Run,
    Stopped,
    Succeeded,
    WorkerExit,
    World,
    signal_name,
)
from elastic_adapter.core.restart import GiveUp, History, Restart, decide
from elastic_adapter.core.world import plan, seating


@dataclass(frozen=True, slots=True)
class Gathering:
    """No worker runs; the first world is not formed yet. ``since`` is the time of the last join."""

    since: float
    reason: str = "waiting for nodes"


@dataclass(frozen=True, slots=True)
class Running:
    """The job's world runs. ``finished`` holds the ranks that ended with code 0."""

    finished: frozenset[int] = frozenset()
    # When the last newcomer came for which the world is to be replaced.
    joined: float | None = None


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
    start_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: Outcome


Phase: TypeAlias = Gathering | Running | Draining | Holding | Finished


@dataclass(frozen=True, slots=True)
class Job:
    config: JobConfig
    phase: Phase
    # Those present, by node, in the order of joining. Members beyond the world are spares.
    members: tuple[Member, ...] = ()
    # The last world committed; it runs only while the phase says so.
    world: World | None = None
    history: History = field(default_factory=History)

    def member(self, node: str) -> Member | None:
        return next((member for member in self.members if member.node == node), None)


Step: TypeAlias = tuple[Job, tuple[Command, ...]]


def begin(config: JobConfig, now: float) -> Job:
    return Job(config=config, phase=Gathering(since=now))


def deadline(job: Job) -> float | None:
    """The time at which ``TimePassed`` would change something; None: only an event can."""
    match job.phase:
        case Gathering(since=since):
            settlement = settle(job.members, job.config, job.world, since, since)
            if isinstance(settlement, Waiting) and settlement.until is not None and job.members[0].ports:
                return settlement.until
            return None
        case Running(joined=joined):
            return None if joined is None else joined + job.config.quiet_s
        case Draining(until=until):
            return until
        case Holding(since=since):
            limit = job.config.hold_timeout_s
            return None if limit is None else since + limit
        case Finished():
            return None
        case _:
            assert_never(job.phase)


def step(job: Job, event: Event, now: float) -> Step:
    """What happens next. A repeated or late event is harmless: it is dropped by its generation or node."""
    if isinstance(job.phase, Finished):
        return _after_the_end(job, job.phase, event)
    match event:
        case MemberJoined(member=member, running=running):
            return _joined(job, member, running, now)
        case MemberLost(node=node, reason=reason):
            return _gone(job, node, f"node {node} is lost: {reason}", now)
        case MemberLeaving(node=node, signal=number):
            return _leaving(job, node, number, now)
        case PortsOffered(node=node, ports=ports):
            return _offered(job, node, ports, now)
        case WorkerExited(exit=exit):
            return _exited(job, exit, now)
        case NodeDrained(node=node, generation=generation):
            return _drained(job, node, generation, now)
        case StopRequested(node=node, signal=number):
            return _finish(job, Stopped(f"{signal_name(number)} on {node}", number))
        case TimePassed():
            return _time_passed(job, now)
        case _:
            assert_never(event)


def _after_the_end(job: Job, phase: Finished, event: Event) -> Step:
    """The end is final. Whoever asks is told."""
    match event:
        case MemberJoined(member=member):
            return job, (Send(member.node, Halt(phase.outcome)),)
        case _:
            return job, ()


def _joined(job: Job, member: Member, running: int | None, now: float) -> Step:
    world = job.world
    known = job.member(member.node)
    if known is not None:
        # The same agent on a new stream keeps its place in the queue.
        member = replace(member, order=known.order)
    if world is not None and member.node in world.nodes and _active(job):
        if running == world.generation:
            return _with(job, member), ()
        if known is not None and not _complete(job, member.node):
            reason = f"node {member.node} came back without its workers"
            return _part_lost(_with(job, member), reason, now)
    if known is None and not admits(job.config, world):
        reason = f"node {member.node} is refused: at fault-tolerance level 0 nobody joins after the start"
        return job, (Send(member.node, Halt(Failed(reason))), Tell(reason))
    job = _with(job, member)
    match job.phase:
        case Gathering():
            return _try_to_form(replace(job, phase=replace(job.phase, since=now)), now)
        case Holding():
            return _try_to_form(job, now)
        case Running(finished=finished) if world is not None:
            if member.node not in world.nodes and grows(job.config, world) and not finished:
                return _time_passed(replace(job, phase=replace(job.phase, joined=now)), now)
            return job, ()
        case _:
            return job, ()


def _gone(job: Job, node: str, reason: str, now: float) -> Step:
    if job.member(node) is None:
        return job, ()
    job = replace(job, members=tuple(member for member in job.members if member.node != node))
    world = job.world
    if isinstance(job.phase, Gathering | Holding):
        # Those left may have waited for the one that is gone: for its port, as the first of them.
        after, commands = _try_to_form(job, now)
        return after, (Tell(reason), *commands)
    if world is None or node not in world.nodes:
        return _without_waiting_joiner(job), (Tell(reason),)
    if _complete(job, node):
        # Its part of the work is done: only a failure elsewhere would need it again.
        return job, (Tell(f"{reason}; its workers had finished"),)
    return _part_lost(job, reason, now)


def _part_lost(job: Job, reason: str, now: float) -> Step:
    """Unfinished workers of the world are gone, with their node or with their agent. Not charged."""
    if not survives_loss(job.config):
        return _finish(job, Failed(f"{reason}; fault tolerance is off (level 0)"))
    return _replace_world(job, reason, now)


def _without_waiting_joiner(job: Job) -> Job:
    """A world is not replaced for a newcomer that has gone again."""
    phase, world = job.phase, job.world
    if not isinstance(phase, Running) or phase.joined is None or world is None:
        return job
    if any(member.node not in world.nodes for member in job.members):
        return job
    return replace(job, phase=replace(phase, joined=None))


def _leaving(job: Job, node: str, number: int, now: float) -> Step:
    """A planned departure is not charged. When the last member leaves, the run ends as stopped."""
    if job.member(node) is None:
        return job, ()
    reason = f"node {node} leaves ({signal_name(number)})"
    if len(job.members) == 1:
        return _finish(job, Stopped(reason, number))
    after, commands = _gone(job, node, reason, now)
    return after, (*commands, Send(node, Halt(Stopped(reason, number))))


def _offered(job: Job, node: str, ports: tuple[int, ...], now: float) -> Step:
    member = job.member(node)
    if member is None:
        return job, ()
    if _active(job) and job.world is not None and job.world.nodes[0] == node:
        # The offer may have been on its way when the world that runs took one of its ports.
        ports = tuple(port for port in ports if port != job.world.master.port)
    job = _with(job, replace(member, ports=ports))
    return _try_to_form(job, now) if isinstance(job.phase, Gathering | Holding) else (job, ())


def _exited(job: Job, exit: WorkerExit, now: float) -> Step:
    world = job.world
    if world is None or exit.generation != world.generation or exit.rank not in world.ranks(exit.node):
        return job, ()
    match job.phase:
        case (Running(finished=finished) | Draining(finished=finished)) as phase if exit.ok:
            finished = finished | {exit.rank}
            if len(finished) == world.world_size:
                return _finish(job, Succeeded())
            return replace(job, phase=replace(phase, finished=finished)), ()
        case Running():
            return _failed(job, exit, now)
        case _:
            # Collateral: the generation is being stopped anyway.
            return job, ()


def _failed(job: Job, exit: WorkerExit, now: float) -> Step:
    match decide(job.config.level, job.config.policy, job.history, exit):
        case GiveUp(reason=reason):
            return _finish(job, Failed(reason, exit))
        case Restart(reason=reason, delay_s=delay_s):
            return _replace_world(replace(job, history=job.history.charge(now)), reason, now, delay_s)


def _drained(job: Job, node: str, generation: int, now: float) -> Step:
    world = job.world
    if not isinstance(job.phase, Draining) or world is None or generation != world.generation:
        return job, ()
    phase = replace(job.phase, drained=job.phase.drained | {node})
    job = replace(job, phase=phase)
    if phase.drained.issuperset(world.nodes):
        return _replace_world(job, phase.reason, now)
    return job, ()


def _time_passed(job: Job, now: float) -> Step:
    due = deadline(job)
    if due is None or now < due or (job.world is None and not isinstance(job.phase, Gathering)):
        return job, ()
    match job.phase:
        case Gathering():
            return _try_to_form(job, now)
        case Running(finished=finished) if job.world is not None:
            if finished:
                return replace(job, phase=replace(job.phase, joined=None)), ()
            return _drain(job, job.world, now)
        case Draining(reason=reason):
            return _replace_world(job, reason, now)
        case Holding(reason=reason):
            return _finish(job, Failed(f"no replacement came in {job.config.hold_timeout_s:g} s: {reason}"))
        case _:
            return job, ()


def _drain(job: Job, world: World, now: float) -> Step:
    newcomers = ", ".join(member.node for member in job.members if member.node not in world.nodes)
    reason = f"{newcomers} joined"
    phase = Draining(until=now + job.config.drain_s, reason=reason)
    directive = Drain(world.generation, job.config.drain_s, reason)
    return replace(job, phase=phase), (
        Tell(f"generation {world.generation} drains: {reason}"),
        *_send_to(job, world.nodes, directive),
    )


def _replace_world(job: Job, reason: str, now: float, start_delay_s: float = 0.0) -> Step:
    """The current world is over. Form the next one, or hold the survivors until that is possible."""
    holding = replace(job, phase=Holding(since=now, cause=reason, reason=reason, start_delay_s=start_delay_s))
    after, commands = _try_to_form(holding, now)
    if not isinstance(after.phase, Holding):
        return after, commands
    nodes = job.world.nodes if job.world is not None else ()
    return after, (Tell(f"holding: {after.phase.reason}"), *_send_to(job, nodes, Hold(after.phase.reason)))


def _try_to_form(job: Job, now: float) -> Step:
    """From Gathering or Holding: commit and send the next world if the members present can form one."""
    phase = job.phase
    assert isinstance(phase, Gathering | Holding)
    since = phase.since if isinstance(phase, Gathering) else now
    match settle(job.members, job.config, job.world, since, now):
        case Waiting(reason=reason):
            return _wait(job, phase, reason), ()
        case Settled(members=members, reason=reason):
            seated = seating(members, job.world)
            if not seated[0].ports:
                return _wait(job, phase, f"{seated[0].node} has no port reserved for the master yet"), ()
            return _form(job, seated, phase.cause if isinstance(phase, Holding) else reason)


def _wait(job: Job, phase: Gathering | Holding, missing: str) -> Job:
    reason = f"{phase.cause}; {missing}" if isinstance(phase, Holding) else missing
    return replace(job, phase=replace(phase, reason=reason))


def _form(job: Job, seated: tuple[Member, ...], reason: str) -> Step:
    phase = job.phase
    world = plan(
        seated,
        job.world,
        restart_count=job.history.count,
        reason=reason,
        start_delay_s=phase.start_delay_s if isinstance(phase, Holding) else 0.0,
    )
    host = replace(seated[0], ports=seated[0].ports[1:])
    job = replace(_with(job, host), world=world, phase=Running())
    return job, (
        Commit(world, job.history),
        Tell(f"generation {world.generation}: {world.world_size} workers on {len(world.placements)} node(s): {reason}"),
        *(Send(node, Run(world.assignment(node))) for node in world.nodes),
    )


def _finish(job: Job, outcome: Outcome) -> Step:
    return replace(job, phase=Finished(outcome)), (
        Conclude(outcome),
        *_send_to(job, tuple(member.node for member in job.members), Halt(outcome)),
    )


def _with(job: Job, member: Member) -> Job:
    """The job with this member added, or put in the place of its older record."""
    others = (other for other in job.members if other.node != member.node)
    return replace(job, members=tuple(sorted((*others, member), key=lambda each: each.order)))


def _active(job: Job) -> bool:
    """Whether workers of the job's world may be running."""
    return isinstance(job.phase, Running | Draining)


def _complete(job: Job, node: str) -> bool:
    """Whether all workers of this node ended with code 0 in the world that runs."""
    if isinstance(job.phase, Running | Draining) and job.world is not None:
        return job.phase.finished.issuperset(job.world.ranks(node))
    return False


def _send_to(job: Job, nodes: tuple[str, ...], directive: Directive) -> tuple[Command, ...]:
    """The same directive to each of these nodes that is present."""
    return tuple(Send(node, directive) for node in nodes if job.member(node) is not None)
