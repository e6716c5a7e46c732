"""The job's machine: ``step`` takes a state, an event and the time, and gives the next state and commands.

Everything the launcher decides is decided here or in what is called from here. The machine never waits
and never looks at a clock: ``deadline`` says when it wants to be asked again.

Commands are in order, and each must be done before the next: a world is committed before it is sent.
"""

from __future__ import annotations

from dataclasses import replace
from signal import SIGBUS, SIGFPE, SIGILL, SIGINT, SIGQUIT, SIGSEGV
from typing import TypeAlias

from elastic_adapter.core import saves
from elastic_adapter.core.blame import COMPLAINS, Inquest, by_cause, follows, listed
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    CheckpointEntered,
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointNoted,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    Command,
    Commit,
    Conclude,
    Event,
    Keep,
    MemberJoined,
    MemberLeaving,
    MemberLost,
    MemberReady,
    MemberSilent,
    NodeChecked,
    NodeCleared,
    NodeDrained,
    NodeProgressed,
    NodeStopped,
    PortsOffered,
    RestoreFailed,
    SaveWanted,
    Send,
    Severed,
    ShardReported,
    StacksDumped,
    StepsReached,
    StopRequested,
    Tell,
    TimePassed,
    WorkerErred,
    WorkerExited,
)
from elastic_adapter.core.hang import Hang, Pulse, convict, why
from elastic_adapter.core.ledger import ENTRIES_KEPT, Save, Saves
from elastic_adapter.core.levels import admits, grows, survives_loss
from elastic_adapter.core.membership import Settled, Waiting
from elastic_adapter.core.model import (
    Check,
    Directive,
    Drain,
    Dump,
    Explain,
    Failed,
    Halt,
    Hold,
    Level,
    Member,
    Outcome,
    Prepare,
    Publish,
    Resume,
    Run,
    Stopped,
    Succeeded,
    Wait,
    WorkerExit,
    World,
    signal_name,
)
from elastic_adapter.core.restart import Action, GiveUp, Ignore, Restart, decide, failure_of
from elastic_adapter.core.state import (
    STORY_S,
    Closing,
    Draining,
    Finished,
    Gathering,
    Holding,
    Job,
    Parting,
    Running,
    accounted_for,
    deadline,
    doubt_until,
    finished_ranks,
    hang_deadline,
    in_flight,
    is_active,
    is_complete,
    is_welcome,
    jitter_of,
    mute_deadline,
    save_deadline,
    settled,
    with_member,
    without_member,
)
from elastic_adapter.core.world import plan, seating

# Signals that a worker gets for what it did itself.
_CRASHES = (SIGSEGV, SIGBUS, SIGILL, SIGFPE)
# These mean now, without a checkpoint.
_IN_A_HURRY = (SIGINT, SIGQUIT)
# When newcomers that wait for a checkpoint have another one asked for, after one did not come.
_ASK_AGAIN_S = 60.0
# How long workers are held, at most, for a checkpoint without which newcomers are not taken in.
_PATIENCE_S = 600.0
# How long a planned change waits for nodes that are silent, without whom nobody can be asked to save. After a change of
# leader all are, for a moment.
_HEAR_S = 5.0
# How often a job that holds, or waits for nodes, says so.
_REMIND_S = 60.0
# How long the stacks of a world that hangs are waited for.
_STACKS_S = 10.0
_MUTE = (
    "no worker has told of progress so far, and until one does, hangs are not detected: "
    "call elastic_adapter.core.worker.progress(step) in the training loop"
)
# Of how many generations the master's port is remembered: more offers than that are never on their way.
_PORTS_KEPT = 8


Step: TypeAlias = tuple[Job, tuple[Command, ...]]


def step(job: Job, event: Event, now: float) -> Step:
    """What happens next. A repeated or late event is harmless: it is dropped by its generation or node."""
    match job.phase:
        case Finished() as phase:
            return _after_the_end(job, phase, event)
        case Closing() as phase:
            return _before_the_end(job, phase, event, now)
        case _:
            return _let_go(*_step(job, event, now), now)


def _step(job: Job, event: Event, now: float) -> Step:
    match event:
        case MemberJoined() | MemberSilent() | MemberLost() | MemberReady() | MemberLeaving():
            return _membership(job, event, now)
        case PortsOffered() | NodeChecked() | NodeCleared():
            return _node(job, event, now)
        case WorkerExited() | WorkerErred() | NodeDrained() | NodeStopped() | NodeProgressed() | StacksDumped():
            return _workers(job, event, now)
        case Severed(reason=reason):
            return _part_lost(job, reason, now) if is_active(job) and job.absent else (job, ())
        case (
            CheckpointerOpened()
            | CheckpointerClosed()
            | StepsReached()
            | ShardReported()
            | CheckpointPrepared()
            | CheckpointEntered()
            | CheckpointPublished()
        ):
            return _saved(job, event, now)
        case CheckpointNoted(node=node, rank=rank, words=words):
            return job, (Tell(f"rank {rank} on {node}: {words}", "checkpoint", bad=True),)
        case SaveWanted() | CheckpointsFound() | RestoreFailed():
            return _checkpoints(job, event, now)
        case StopRequested():
            return _stop_requested(job, event, now)
        case TimePassed():
            return _time_passed(job, now)
        case _:
            assert_never(event)


def _membership(
    job: Job, event: MemberJoined | MemberSilent | MemberLost | MemberReady | MemberLeaving, now: float
) -> Step:
    match event:
        case MemberJoined():
            return _joined(job, event, now)
        case MemberSilent(node=node, reason=reason):
            return _silent(job, node, reason, now)
        case MemberLost(node=node, reason=reason, proven=proven):
            return _lost(job, node, f"node {node} is lost: {reason}", now, proven=proven)
        case MemberReady(node=node):
            return _ready(job, node, now)
        case MemberLeaving():
            return _leaving(job, event, now)
        case _:
            assert_never(event)


def _node(job: Job, event: PortsOffered | NodeChecked | NodeCleared, now: float) -> Step:
    match event:
        case PortsOffered():
            return _offered(job, event, now)
        case NodeChecked():
            return _checked(job, event, now)
        case NodeCleared(node=node):
            return _cleared(job, node, now)
        case _:
            assert_never(event)


def _workers(
    job: Job, event: WorkerExited | WorkerErred | NodeDrained | NodeStopped | NodeProgressed | StacksDumped, now: float
) -> Step:
    match event:
        case WorkerExited(exit=exit):
            return _exited(job, exit, now)
        case WorkerErred(exit=exit):
            return _erred(job, exit), ()
        case NodeDrained(node=node, generation=generation):
            return _drained(job, node, generation, now)
        case NodeStopped():
            return _stopped(job, event, now)
        case NodeProgressed() | StacksDumped():
            return _told_of_workers(job, event, now)
        case _:
            assert_never(event)


def _after_the_end(job: Job, phase: Finished, event: Event) -> Step:
    """The end is final. Whoever asks is told."""
    match event:
        case MemberJoined(member=member):
            return job, (Send(member.node, Halt(phase.outcome)),)
        case _:
            return job, ()


def _before_the_end(job: Job, phase: Closing, event: Event, now: float) -> Step:
    """The end is decided; what is left to do is a checkpoint. Whoever is in a hurry is not kept."""
    commands: tuple[Command, ...] = ()
    match event:
        case MemberJoined(member=member):
            before, job = job, with_member(accounted_for(job, member.node), member)
            job, told = _heard_of_saves(job, event, now)
            orders = _orders(before, job, event)
            commands = (*told, *orders, Send(member.node, Wait(_closing_words(job))))
        case MemberLost(node=node) | MemberSilent(node=node):
            job = without_member(job, node)
        case MemberLeaving(node=node) if job.member(node) is None:
            return job, ()
        case MemberLeaving(signal=number) | StopRequested(signal=number) if number in _IN_A_HURRY:
            return _conclude(job, phase.outcome)
        case MemberLeaving(node=node) | StopRequested(node=node):
            # Whoever is told to go has that much time, and no more.
            phase = replace(phase, until=min(phase.until, now + job.config.drain_s))
            job = replace(job, phase=phase)
            commands = _send_to(job, (node,), Wait(_closing_words(job))) if now < phase.until else ()
        case (
            CheckpointerOpened()
            | CheckpointerClosed()
            | StepsReached()
            | ShardReported()
            | CheckpointPrepared()
            | CheckpointEntered()
            | CheckpointPublished()
        ):
            job, commands = saves.hear(job, event, now)
        case TimePassed():
            job, commands = saves.time_passed(job, now)
        case _:
            return job, ()
    save = in_flight(job)
    if save is not None and now < phase.until:
        return job, commands
    after, more = _conclude(job, phase.outcome)
    return after, (*commands, *more)


def _not_waited_for(save: Save) -> Tell:
    words = f"the checkpoint of step {save.step}, which is being written, is not waited for any longer"
    return Tell(words, "checkpoint", bad=True)


def _joined(job: Job, joined: MemberJoined, now: float) -> Step:
    """A node is here, for the first time or again, with all that it has to tell."""
    # What it has written comes first: the rest may end the world, and then that is waited for.
    heard, told = _heard_of_saves(job, joined, now)
    after, commands = _taken_in(heard, joined, now)
    node, world = joined.member.node, after.world
    if isinstance(after.phase, Finished) or world is None or world != job.world or after.member(node) is None:
        return after, (*told, *commands)
    commands = (*told, *commands, *_orders(job, after, joined))
    if is_active(after) and node in world.nodes:
        after, more = _caught_up(after, joined, world, now)
        commands = (*commands, *more)
    after, more = _saves_changed(job, after, now)
    return after, (*commands, *more)


def _heard_of_saves(job: Job, joined: MemberJoined, now: float) -> Step:
    """Take what an agent tells of checkpoints: whoever led before may not have heard of it, or nobody has."""
    world, node, generation = job.world, joined.member.node, joined.seen
    if world is None or generation != world.generation:
        return job, ()
    told: tuple[Command, ...] = ()
    if node in world.nodes:
        # Some may have closed their Checkpointer while nobody heard of it.
        others = job.saves.savers - world.ranks(node)
        job = saves.with_savers(job, others | (world.ranks(node) & set(joined.savers)))
    for shard in joined.shards:
        job, commands = saves.hear(job, ShardReported(node, generation, shard), now)
        # What this node itself is to do, it is told when it is taken in.
        told = (*told, *(each for each in commands if not isinstance(each, Send) or each.node != node))
    return job, tuple(each for each in told if not _is_order(each))


def _is_order(command: Command) -> bool:
    return isinstance(command, Send) and isinstance(command.directive, Prepare | Publish)


def _orders(before: Job, after: Job, joined: MemberJoined) -> tuple[Command, ...]:
    """What rank 0's node is to do now that this one is here; if that is the same, what was said may have been lost.

    And what this one has parts of, and is done with.
    """
    world, node = after.world, joined.member.node
    if world is None:
        return ()
    known = saves.orders(before) if node != world.nodes[0] else ()
    orders = tuple(
        command
        for order in saves.orders(after)
        if order not in known
        for command in _send_to(after, world.nodes[:1], order)
    )
    here = node in world.nodes and joined.seen == world.generation
    return (*orders, *(saves.overdue(after, node, joined.shards) if here else ()))


def _caught_up(job: Job, joined: MemberJoined, world: World, now: float) -> Step:
    """Tell a node of the world what its ranks go on from, and where they save: what was said before may be lost.

    Without a stream, workers were let go who had been asked to save.
    """
    node = joined.member.node
    commands: tuple[Command, ...] = ()
    if joined.found is not None and joined.seen == world.generation and not job.saves.resumed:
        job, commands = _found(job, CheckpointsFound(node, world.generation, joined.found))
    elif job.saves.resumed:
        commands = (Send(node, Resume(world.generation, job.saves.resume_from)),)
    ask = job.saves.ask
    if ask is None or saves.has_staged(job, node) or not isinstance(job.phase, Running):
        return job, commands
    if saves.can_ask(job):
        job, more = saves.ask(job, ask.reason, now, hold=ask.hold)
    else:
        job, more = saves.call_off(job, f"{node} lost its stream")
    return job, (*commands, *more)


def _taken_in(job: Job, joined: MemberJoined, now: float) -> Step:
    world, member = job.world, joined.member
    known = job.member(member.node)
    if known is not None:
        # The same agent on a new stream keeps its place in the queue.
        member = replace(member, order=known.order)
    expected = known is not None or member.node in job.absent
    if not expected and not admits(job.config, world) and not is_complete(job, member.node):
        reason = f"node {member.node} is refused: at fault-tolerance level 0 nobody joins after the start"
        return job, (Send(member.node, Halt(Failed(reason, alone=True))), Tell(reason))
    job = with_member(accounted_for(job, member.node), member)
    job = replace(job, checking=job.checking | {member.node} if joined.checking else job.checking - {member.node})
    match job.phase:
        case Gathering():
            return _try_to_form(replace(job, phase=replace(job.phase, since=now)), now)
        case Holding(reason=reason):
            if world is not None and member.node in world.nodes and joined.running != world.generation:
                job = replace(job, broken=job.broken or not is_complete(job, member.node))
            after, commands = _try_to_form(job, now)
            if isinstance(after.phase, Holding):
                kind = Wait if joined.running is None else Hold
                commands = (*commands, Send(member.node, kind(after.phase.reason)))
            return after, commands
        case Running() | Draining() if world is not None and member.node in world.nodes:
            return _back_in_the_world(job, joined, world, now) if expected else (job, ())
        case _:
            return _newcomer(job, joined, now)


def _back_in_the_world(job: Job, joined: MemberJoined, world: World, now: float) -> Step:
    """An agent of the world that runs is on a new stream: what it tells may be news to us."""
    node = joined.member.node
    if isinstance(job.phase, Running) and job.phase.pulse.moved_at is not None:
        # While it was silent nobody could tell how its workers get on.
        job = replace(job, phase=replace(job.phase, pulse=replace(job.phase.pulse, moved_at=now)))
    kept: tuple[Command, ...] = ()
    for exit in joined.exits:
        job, commands = _exited(job, exit, now)
        if any(not isinstance(command, Keep) for command in commands):
            # It ended the world or the job: the rest of what it told is of the past.
            return job, commands
        kept = commands or kept
    if joined.running == world.generation or is_complete(job, node):
        return job, kept
    if isinstance(job.phase, Running) and job.phase.exits:
        # It told of a failure, which will be judged, and end the world either way.
        return replace(job, broken=True), ()
    if joined.seen is not None and joined.seen < world.generation:
        # Its part of the world was lost on the way, with a stream or with the leader that sent it.
        return job, (Send(node, Run(world.assignment(node))),)
    if isinstance(job.phase, Draining):
        return _drained(job, node, world.generation, now)
    return _part_lost(replace(job, broken=True), f"node {node} came back without its workers", now)


def _newcomer(job: Job, joined: MemberJoined, now: float) -> Step:
    """A node without a place, while the world runs. What it may still run of an earlier one must end."""
    after, commands = _counted(job, joined.member, now)
    if _is_told(joined.member.node, commands):
        return after, commands
    node, running = joined.member.node, joined.running
    outdated = () if running is None else (Send(node, Hold(f"generation {running} is over")),)
    return after, (*outdated, *commands, Send(node, Wait(_prospect(after, node))))


def _prospect(job: Job, node: str) -> str:
    """What a node without a place waits for."""
    world, phase = job.world, job.phase
    assert world is not None
    if isinstance(phase, Holding):
        return phase.reason
    excluded = next((each for each in job.history.excluded if each.node == node), None)
    if excluded is not None:
        return f"{excluded}; until it is cleared, it is a last resort"
    if node in job.checking:
        return "the health of this node is checked"
    size = len(world.placements)
    state = f"generation {world.generation} runs on {size} node{'s' if size > 1 else ''}"
    if isinstance(phase, Running | Draining) and grows(job.config, world) and not phase.finished:
        return f"{state}, and takes this one in when it is ready"
    return f"{state}; this one waits as a spare"


def _is_told(node: str, commands: tuple[Command, ...]) -> bool:
    """Whether one of these says what it is to do."""
    to_it = (each.directive for each in commands if isinstance(each, Send) and each.node == node)
    return any(not isinstance(directive, Explain) for directive in to_it)


def _counted(job: Job, member: Member, now: float) -> Step:
    """A node that could start at once is a reason to replace the world, where there is room."""
    phase, world = job.phase, job.world
    if not isinstance(phase, Running) or world is None or member.node in world.nodes or not member.warm:
        return job, ()
    if not grows(job.config, world) or phase.finished or not is_welcome(job, member.node):
        return job, ()
    return _time_passed(replace(job, phase=replace(phase, joined=now)), now)


def _ready(job: Job, node: str, now: float) -> Step:
    member = job.member(node)
    if member is None or member.warm:
        return job, ()
    job = with_member(job, replace(member, warm=True))
    return _counted(job, replace(member, warm=True), now)


def _silent(job: Job, node: str, reason: str, now: float) -> Step:
    """Whether it is dead or only cut off is not known: where workers of it may be running, nothing is done yet."""
    if job.member(node) is None:
        return job, ()
    if job.world is None or node not in job.world.nodes:
        return _lost(job, node, f"node {node} is silent: {reason}", now, proven=True)
    job = replace(without_member(job, node), absent=job.absent | {node})
    if isinstance(job.phase, Holding):
        # When it is back, it asks again.
        job = _without_leave(job, node)
    return job, (Tell(f"node {node} is silent: {reason}; waiting for it until its lease ends", "silent"),)


def _lost(job: Job, node: str, reason: str, now: float, *, proven: bool) -> Step:
    if job.member(node) is None and node not in job.absent:
        return _proven_dead(job, node, reason, now) if proven else (job, ())
    if job.world is not None and node in job.world.nodes and not is_complete(job, node):
        job = replace(job, broken=True) if proven else replace(job, doubtful=(*job.doubtful, (node, now)))
    return _gone(job, node, reason, now)


def _proven_dead(job: Job, node: str, reason: str, now: float) -> Step:
    """A node that was given up is found dead: its part of the world is not running anywhere."""
    if not any(node == doubtful for doubtful, _ in job.doubtful):
        return job, ()
    job = replace(accounted_for(job, node), broken=True)
    if not isinstance(job.phase, Holding):
        return job, ()
    after, commands = _try_to_form(job, now)
    return after, (Tell(reason, "lost"), *commands)


def _gone(job: Job, node: str, reason: str, now: float) -> Step:
    job = _without_leave(replace(without_member(job, node), absent=job.absent - {node}), node)
    world = job.world
    if isinstance(job.phase, Gathering | Holding):
        # Those left may have waited for the one that is gone: for its port, as the first of them.
        after, commands = _try_to_form(job, now)
        return after, (Tell(reason, "lost"), *commands)
    if world is None or node not in world.nodes:
        return _without_waiting_joiner(job), (Tell(reason, "lost"),)
    if is_complete(job, node):
        # Its part of the work is done: only a failure elsewhere would need it again.
        job = _as_drained(job, node)
        return _drain_over(job, (Tell(f"{reason}; its workers had finished", "lost"),), now)
    return _part_lost(job, reason, now)


def _without_leave(job: Job, node: str) -> Job:
    """Who is gone leaves no more: another agent may come with its name."""
    phase = job.phase
    if not isinstance(phase, Running | Holding):
        return job
    leaving = tuple(each for each in phase.leaving if each.node != node)
    if isinstance(phase, Holding):
        return replace(job, phase=replace(phase, leaving=leaving, leave_by=phase.leave_by if leaving else None))
    return replace(job, phase=replace(phase, leaving=leaving, leave_at=phase.leave_at if leaving else None))


def _as_drained(job: Job, node: str) -> Job:
    """A node that is gone after it finished is not waited for by a drain."""
    phase = job.phase
    return replace(job, phase=replace(phase, drained=phase.drained | {node})) if isinstance(phase, Draining) else job


def _part_lost(job: Job, reason: str, now: float) -> Step:
    """Unfinished workers of the world are gone, with their node or with their agent. Not charged."""
    if not survives_loss(job.config):
        return _finish(job, Failed(f"{reason}; fault tolerance is off (level 0)"), now)
    return _replace_world(job, reason, now)


def _without_waiting_joiner(job: Job) -> Job:
    """A world is not replaced for a newcomer that has gone again."""
    phase, world = job.phase, job.world
    if not isinstance(phase, Running) or phase.joined is None or world is None:
        return job
    if any(member.node not in world.nodes and is_welcome(job, member.node) for member in job.members):
        return job
    return replace(job, phase=replace(phase, joined=None))


def _leaving(job: Job, event: MemberLeaving, now: float) -> Step:
    """A planned departure is not charged. When the last member leaves, the run ends as stopped."""
    node, phase = event.node, job.phase
    if job.member(node) is None:
        return job, ()
    if isinstance(phase, Running | Holding) and any(each.node == node for each in phase.leaving):
        return job, ()
    if job.world is None or node not in job.world.nodes:
        return _depart(job, (event,), now)
    if isinstance(phase, Holding):
        return _depart(replace(job, phase=replace(phase, leaving=())), (*phase.leaving, event), now)
    if not isinstance(phase, Running):
        return _depart(job, (event,), now)
    leave_at = phase.leave_at if phase.leave_at is not None else now + job.config.leave_gather_s
    after, commands = _time_passed(
        replace(job, phase=replace(phase, leaving=(*phase.leaving, event), leave_at=leave_at)), now
    )
    return after, (*commands, *_answer(job, after, node))


def _answer(before: Job, after: Job, node: str) -> tuple[Command, ...]:
    """Tell who asked to go that it is heard, where ranks were asked to save before that, and nobody is asked again."""
    parting = before.phase.parting if isinstance(before.phase, Running) else None
    known = parting is not None and parting.hear_until is None
    waits = isinstance(after.phase, Running) and after.phase.parting is not None and after.world == before.world
    words = Wait("the checkpoint that all ranks were asked for is waited for")
    return _send_to(after, (node,), words) if known and waits else ()


def _depart(job: Job, leaving: tuple[MemberLeaving, ...], now: float, cause: str = "") -> Step:
    """All of these go at once; ``cause`` is what else ends the world."""
    nodes = tuple(each.node for each in leaving)
    number = leaving[0].signal
    names = ", ".join(nodes)
    reason = f"node{'s' if len(nodes) > 1 else ''} {names} leave{'' if len(nodes) > 1 else 's'} ({signal_name(number)})"
    reason = f"{cause}; {reason}" if cause else reason
    if len(job.members) == len(nodes) and not job.absent:
        return _finish(job, Stopped(reason, number), now)
    world = job.world
    unfinished = world is not None and any(node in world.nodes and not is_complete(job, node) for node in nodes)
    # Who is silent asks again when it is back.
    here = tuple(each for each in leaving if job.member(each.node) is not None)
    over = bool(unfinished or cause or isinstance(job.phase, Holding))
    if over and in_flight(job) is not None and _has_part(job, here) and now < _leave_by(job, now):
        return _stay(job, here, reason, now)
    # Those who have done their part are not waited for, even if they fell silent on their way out.
    done = frozenset(node for node in nodes if is_complete(job, node))
    for node in nodes:
        job = without_member(job, node)
    # Whoever leaves ends its workers first.
    job = replace(job, broken=job.broken or unfinished, absent=job.absent - done)
    if is_active(job) and (unfinished or cause):
        after, commands = _part_lost(job, reason, now)
    else:
        after, commands = _gone(job, nodes[-1], reason, now)
    outcomes = {
        each.node: after.phase.outcome
        if isinstance(after.phase, Finished)
        else Stopped(reason, each.signal, alone=True)
        for each in leaving
    }
    return after, (*commands, *(Send(node, Halt(outcome)) for node, outcome in outcomes.items()))


def _has_part(job: Job, leaving: tuple[MemberLeaving, ...]) -> bool:
    """Whether one of these may be needed for the checkpoint that the next world would go on from."""
    world = job.world
    return world is not None and survives_loss(job.config) and any(each.node in world.nodes for each in leaving)


def _leave_by(job: Job, now: float) -> float:
    """Until when those who were asked to go stay for a checkpoint that is being written."""
    limit = now + job.config.drain_s
    match job.phase:
        case Running(parting=Parting(until=until)) | Holding(leave_by=float(until)):
            return min(limit, until)
        case _:
            return limit


def _stay(job: Job, leaving: tuple[MemberLeaving, ...], reason: str, now: float) -> Step:
    """The world is over; those who leave go when its checkpoint is written."""
    leave_by, known = _leave_by(job, now), job.phase if isinstance(job.phase, Holding) else None
    phase = known or _holding(job, reason, now)
    phase = replace(phase, leaving=leaving, leave_by=leave_by)
    job, commands = _try_to_form(replace(job, phase=phase, saves=replace(job.saves, ask=None)), now)
    assert isinstance(job.phase, Holding)
    if known is None:
        commands = (*commands, *_hold_all(job, job.phase))
        news = leaving
    else:
        news = leaving[-1:]
    return job, (*commands, *_send_to(job, tuple(each.node for each in news), Wait(job.phase.reason)))


def _offered(job: Job, offer: PortsOffered, now: float) -> Step:
    member = job.member(offer.node)
    if member is None:
        return job, ()
    # The offer may have been on its way when a world that the agent had not seen took one of its ports.
    gone = {
        endpoint.port
        for generation, endpoint in job.taken
        if endpoint.host == member.address and generation > offer.seen
    }
    job = with_member(job, replace(member, ports=tuple(port for port in offer.ports if port not in gone)))
    return _try_to_form(job, now) if isinstance(job.phase, Gathering | Holding) else (job, ())


def _exited(job: Job, exit: WorkerExit, now: float) -> Step:
    world = job.world
    rule = job.config.policy.rule(exit) if not exit.ok else None
    is_ignored = rule is not None and rule.action is Action.IGNORE
    if job.inquest is not None and exit.generation == job.inquest.generation:
        return (job if is_ignored else replace(job, inquest=job.inquest.hear(exit))), ()
    if world is None or exit.generation != world.generation or exit.rank not in world.ranks(exit.node):
        return job, ()
    if is_ignored and is_active(job):
        decision = decide(job.config.level, job.config.policy, job.history, exit, now)
        after, commands = _exited(job, replace(exit, code=0, signal=None), now)
        return after, (Tell(decision.reason), *commands)
    match job.phase:
        case (Running(finished=finished) | Draining(finished=finished)) as phase if exit.ok:
            finished = finished | {exit.rank}
            if len(finished) == world.world_size:
                return _finish(replace(job, phase=replace(phase, finished=finished)), Succeeded(), now)
            job = replace(job, phase=replace(phase, finished=finished))
            done = exit.rank not in phase.finished and is_complete(job, exit.node)
            # A node that has done its part may go, whoever leads then.
            return job, (_keep(job),) if done else ()
        case Running() as phase if all(exit.rank != each.rank for each in phase.exits):
            judge_at = phase.judge_at if phase.judge_at is not None else now + job.config.blame_s
            phase = replace(phase, exits=(*phase.exits, exit), judge_at=judge_at)
            return _judge(replace(job, phase=phase, broken=True), phase, now)
        case _:
            # Collateral: the generation is being stopped anyway.
            return job, ()


def _erred(job: Job, exit: WorkerExit) -> Job:
    """Nothing is done about it before the worker has ended: it may have something to save, or to tell."""
    phase, world = job.phase, job.world
    if not isinstance(phase, Running) or world is None or exit.generation != world.generation:
        return job
    known = any(exit.rank == each.rank for each in (*phase.erring, *phase.exits))
    if known or exit.rank not in world.ranks(exit.node) or exit.rank in phase.finished:
        return job
    return replace(job, phase=replace(phase, erring=(*phase.erring, exit)))


def _judge(job: Job, phase: Running, now: float) -> Step:
    """Decide upon the failures heard of, as soon as waiting for more would not make a difference.

    The first heard of need not be the first. What means a restart does not wait without need; an end may.
    """
    world = job.world
    assert world is not None
    assert phase.judge_at is not None
    ended = {exit.rank for exit in phase.exits}
    exits = by_cause((*phase.exits, *(exit for exit in phase.erring if exit.rank not in ended)))
    # While a node is silent, what failed elsewhere can not be judged.
    over = now >= phase.judge_at and not (job.absent and job.config.blame_s)
    all_out = len(world.nodes) == 1 and len(ended | phase.finished) == world.world_size
    if _may_be_collateral(job, exits) and not (all_out or over):
        return job, ()
    decision = decide(job.config.level, job.config.policy, job.history, exits[0], now)
    if isinstance(decision, GiveUp) and not (all_out or over):
        return job, ()
    return _failed(job, exits, now)


def _may_be_collateral(job: Job, exits: tuple[WorkerExit, ...]) -> bool:
    """Whether a node that goes may explain them: its peers' errors, or a signal that was meant for the whole node.

    On a single node only who complains of a lost peer waits for the cause of that.
    """
    if job.world is None or len(job.world.nodes) == 1:
        return follows(exits[0]) == COMPLAINS
    return all(exit.signal not in _CRASHES for exit in exits)


def _failed(job: Job, exits: tuple[WorkerExit, ...], now: float) -> Step:
    """Act on the failures of a generation, the first of which is the cause."""
    policy, first = job.config.policy, exits[0]
    match decide(job.config.level, policy, job.history, first, now, jitter=jitter_of(job)):
        case GiveUp(reason=reason):
            others, more = listed(exits[1:])
            left = policy.max_restarts - job.history.spent(policy, now)
            return _finish(job, Failed(reason, first, others=others, more=more, restarts_left=left), now)
        case Ignore():
            # Only an exit that is looked at for the first time can be ignored.
            return job, ()
        case Restart() as restart:
            return _start_again(job, restart, exits, now)


def _start_again(job: Job, restart: Restart, exits: tuple[WorkerExit, ...], now: float) -> Step:
    policy, first = job.config.policy, exits[0]
    job, told = _explain(job)
    history = job.history
    if restart.charged:
        history = history.remember(failure_of(policy, first, now)).charge(now)
    if restart.exclusion is not None:
        history = history.exclude(restart.exclusion)
    check = restart.check and job.member(first.node) is not None
    checking = job.checking | {first.node} if check else job.checking
    # Who hangs may go on, where nobody can tell it to stop: that is no proof.
    left = policy.max_restarts - history.spent(policy, now)
    until = now if first.hang else now + STORY_S
    inquest = Inquest(first.generation, exits, restart.reason, left, until)
    job = replace(job, history=history, broken=job.broken or not first.hang, checking=checking, inquest=inquest)
    after, commands = _replace_world(job, restart.reason, now, restart.delay_s)
    if first.node in after.checking and check:
        commands = (*commands, Send(first.node, Check(f"{restart.reason}; its health is checked")))
    return after, (*told, *commands)


def _explain(job: Job) -> Step:
    """Tell all nodes why the last generation failed, if that is still to be told."""
    if job.inquest is None:
        return job, ()
    verdict, decided = job.inquest.verdict(), job.inquest.exits[0]
    commands = _send_to(job, job.nodes, Explain(verdict))
    job, failures = replace(job, inquest=None), job.history.failures
    if verdict.first != decided and failures and (failures[-1].rank, failures[-1].node) == (decided.rank, decided.node):
        failure = failure_of(job.config.policy, verdict.first, failures[-1].at)
        job = replace(job, history=job.history.corrected(failure))
    return job, commands


def _keep(job: Job) -> Keep:
    inquest = None if job.inquest is None else job.inquest.brief
    return Keep(finished_ranks(job), job.history, inquest, saves.entries(job))


def _told_of_workers(job: Job, event: NodeProgressed | StacksDumped, now: float) -> Step:
    """How workers get on, or what they are doing instead."""
    world, phase, node = job.world, job.phase, event.node
    if not isinstance(phase, Running) or world is None or event.generation != world.generation:
        return job, ()
    if node not in world.nodes:
        return job, ()
    if isinstance(event, StacksDumped):
        if phase.hang is None or node in phase.hang.answered:
            return job, ()
        hang = replace(phase.hang, answered=phase.hang.answered | {node}, stacks=(*phase.hang.stacks, *event.stacks))
        phase = replace(phase, hang=hang)
        return _all_dumped(replace(job, phase=phase), phase, hang, world, now)
    ranks = sorted(world.ranks(node))
    pulse = phase.pulse.with_marks(dict(zip(ranks, event.marks, strict=False)), now)
    if pulse.moved_at == phase.pulse.moved_at:
        return replace(job, phase=replace(phase, pulse=pulse)), ()
    commands = () if phase.hang is None else (Tell(f"generation {world.generation} gets on again"),)
    return replace(job, phase=replace(phase, pulse=pulse, hang=None)), commands


def _seems_to_hang(job: Job, phase: Running, world: World, now: float) -> Step:
    """Before anything is stopped: where are they all?"""
    reason = why(job.config, phase.pulse)
    hang = Hang(reason, until=now + _STACKS_S)
    return replace(job, phase=replace(phase, hang=hang)), (
        Tell(f"generation {world.generation} hangs: {reason}; asking all workers for their stacks", "hang"),
        *_send_to(job, world.nodes, Dump(world.generation, reason)),
    )


def _all_dumped(job: Job, phase: Running, hang: Hang, world: World, now: float) -> Step:
    """Decide who is to blame, if everybody has answered, or has had the time to."""
    missing = {node for node in world.nodes if job.member(node) is not None and not is_complete(job, node)}
    if missing - hang.answered and now < hang.until:
        return job, ()
    suspect, others = convict(world, phase.pulse, hang, phase.finished)
    return _failed(job, (suspect, *others), now)


def _checked(job: Job, event: NodeChecked, now: float) -> Step:
    node, member = event.node, job.member(event.node)
    if member is None or node not in job.checking:
        return job, ()
    job = replace(job, checking=job.checking - {node})
    if event.trouble:
        reason = f"node {node} failed its health check: {event.trouble}"
        if len(job.members) == 1 and not job.absent:
            return _finish(job, Failed(reason), now)
        after, commands = _gone(job, node, reason, now)
        return after, (*commands, Send(node, Halt(Failed(reason, alone=True))))
    return _taken_back(job, member, f"node {node} passed its health check", now)


def _cleared(job: Job, node: str, now: float) -> Step:
    """Nothing is held against this node any more."""
    member, history = job.member(node), job.history.clear(node)
    job = replace(job, history=history)
    keep = _keep(job)
    reason = f"node {node} is cleared: nothing is held against it any more"
    if member is None:
        return job, (keep, Tell(reason))
    after, commands = _taken_back(job, member, reason, now)
    return after, (keep, *commands)


def _taken_back(job: Job, member: Member, reason: str, now: float) -> Step:
    """A node may take part again that could not before."""
    if isinstance(job.phase, Gathering | Holding):
        after, commands = _try_to_form(job, now)
    else:
        after, commands = _counted(job, member, now)
    return after, (Tell(reason), *commands)


def _drained(job: Job, node: str, generation: int, now: float) -> Step:
    world = job.world
    if not isinstance(job.phase, Draining) or world is None or generation != world.generation:
        return job, ()
    if node not in world.nodes:
        return job, ()
    return _drain_over(replace(_as_drained(job, node), broken=True), (), now)


def _drain_over(job: Job, commands: tuple[Command, ...], now: float) -> Step:
    """The next world, if this was the last node that a drain waited for."""
    phase, world = job.phase, job.world
    if isinstance(phase, Draining) and world is not None and phase.drained.issuperset(world.nodes):
        after, more = _replace_world(job, phase.reason, now)
        return after, (*commands, *more)
    return job, commands


def _stopped(job: Job, event: NodeStopped, now: float) -> Step:
    world, node = job.world, event.node
    if world is None or event.generation != world.generation or node not in world.nodes:
        return job, ()
    if job.member(node) is None or is_complete(job, node):
        return job, ()
    match job.phase:
        case Draining():
            return _drained(job, node, event.generation, now)
        case Running():
            return _part_lost(replace(job, broken=True), f"node {node} stopped its workers: {event.reason}", now)
        case _:
            return replace(job, broken=True), ()


def _time_passed(job: Job, now: float) -> Step:
    if job.inquest is not None and now >= job.inquest.until:
        job, told = _explain(job)
        after, commands = _time_passed(job, now)
        written = any(isinstance(each, Commit | Keep | Conclude) for each in commands)
        return after, (*told, *commands, *(() if written else (_keep(after),)))
    when = save_deadline(job)
    if when is not None and now >= when:
        before, (job, told) = job, saves.time_passed(job, now)
        after, commands = _saves_changed(before, job, now)
        return after, (*told, *commands)
    when = deadline(job)
    if when is None or now < when or (job.world is None and not isinstance(job.phase, Gathering)):
        return job, ()
    match job.phase:
        case Gathering():
            return _time_passed_while_gathering(job, now)
        case Running() if job.world is not None:
            return _time_passed_while_running(job, job.phase, job.world, now)
        case Draining(reason=reason):
            return _replace_world(job, reason, now)
        case Holding():
            return _time_passed_while_holding(job, job.phase, now)
        case _:
            return job, ()


def _time_passed_while_gathering(job: Job, now: float) -> Step:
    job, commands = _try_to_form(job, now)
    if not isinstance(job.phase, Gathering) or now < job.phase.remind_at:
        return job, commands
    reminded = replace(job.phase, remind_at=now + _REMIND_S)
    return replace(job, phase=reminded), _send_to(job, job.nodes, Wait(reminded.reason))


def _time_passed_while_running(job: Job, phase: Running, world: World, now: float) -> Step:
    change = _planned(job, phase, now)
    if change is not None and (waiting := _save_first(job, phase, change, now)) is not None:
        return waiting
    told = () if change is None else _without_checkpoint(job, phase, now)
    after, commands = _change_or_judge(job, phase, world, change, now)
    return after, (*told, *commands)


def _without_checkpoint(job: Job, phase: Running, now: float) -> tuple[Command, ...]:
    """What is lost with a change that goes ahead, though all ranks were asked to save."""
    parting = phase.parting
    if parting is None or parting.over or parting.hear_until is not None or now < parting.until:
        return ()
    if in_flight(job) is not None:
        return ()
    words = f"no checkpoint: not all ranks have saved within the {job.config.drain_s:g} s of --drain-timeout"
    return (Tell(words, "checkpoint", bad=True),)


def _change_or_judge(job: Job, phase: Running, world: World, change: str | None, now: float) -> Step:
    if phase.stop is not None and change is not None:
        return _finish(job, Stopped(change, phase.stop.signal), now)
    if phase.leaving and (change is not None or phase.exits):
        # Now, or earlier than planned because the world is to be replaced anyway. It explains what failed meanwhile.
        return _depart(replace(job, phase=replace(phase, leaving=(), leave_at=None)), phase.leaving, now)
    if phase.judge_at is not None and now >= phase.judge_at and not job.absent:
        return _judge(job, phase, now)
    hang_at, mute_at = hang_deadline(job, phase), mute_deadline(job, phase)
    if hang_at is not None and now >= hang_at:
        hang = phase.hang
        return _seems_to_hang(job, phase, world, now) if hang is None else _all_dumped(job, phase, hang, world, now)
    if mute_at is not None and now >= mute_at:
        return replace(job, said_mute=True), (Tell(_MUTE),)
    if phase.finished:
        return replace(job, phase=replace(phase, joined=None)), ()
    return _drain(job, world, now) if change is not None else (job, ())


def _planned(job: Job, phase: Running, now: float) -> str | None:
    """The change of the world that somebody wants, and that it is time for."""
    late = phase.stop is not None and phase.parting is not None and now >= phase.parting.until
    if phase.exits and not late:
        # What failed is judged first.
        return None
    if phase.stop is not None:
        return f"{signal_name(phase.stop.signal)} on {phase.stop.node}"
    if phase.leave_at is not None and now >= phase.leave_at:
        return f"{', '.join(each.node for each in phase.leaving)} leaves"
    # Workers that wait already do not wait for more nodes: those that are here come along.
    if phase.joined is not None and (phase.parting is not None or now >= phase.joined + job.config.quiet_s):
        return "nodes join"
    return None


def _save_first(job: Job, phase: Running, change: str, now: float) -> Step | None:
    """Ask for a checkpoint before a planned change, and wait for it; None: the change goes ahead."""
    insists = job.config.join_at_checkpoint and phase.stop is None and not phase.leaving
    parting, limit_s = phase.parting, job.config.drain_s
    if parting is None and insists and not saves.can_ask(job):
        # Who insists on a checkpoint waits for somebody who can be asked.
        return replace(job, phase=replace(phase, joined=None)), ()
    if parting is None:
        parting = Parting(now + (max(limit_s, _PATIENCE_S) if insists else limit_s), insists, hear_until=now + _HEAR_S)
    if parting.hear_until is not None:
        return _ask_all(job, phase, parting, change, now)
    if parting.over:
        return None
    if parting.insists and not insists:
        parting = Parting(min(parting.until, now + limit_s))
        return replace(job, phase=replace(phase, parting=parting)), ()
    if now < parting.until:
        return job, ()
    return _try_again_later(job, phase, now) if insists else None


def _ask_all(job: Job, phase: Running, parting: Parting, change: str, now: float) -> Step | None:
    """Ask all ranks to save, or wait a moment for nodes that are silent; None: nobody can be asked."""
    world = job.world
    assert world is not None
    assert parting.hear_until is not None
    if saves.can_ask(job):
        asked = replace(job, phase=replace(phase, parting=replace(parting, hear_until=None)))
        return saves.ask(asked, change, now, hold=True)
    missing = {rank for node in job.absent for rank in world.ranks(node)}
    heard = replace(job.saves, savers=job.saves.savers | missing)
    could = saves.can_ask(replace(job, absent=frozenset(), saves=heard))
    if not could or now >= min(parting.hear_until, parting.until):
        return None
    return replace(job, phase=replace(phase, parting=parting)), ()


def _try_again_later(job: Job, phase: Running, now: float) -> Step:
    """The checkpoint that newcomers wait for did not come. Nobody is kept from training for that."""
    phase = replace(_released(phase, now), joined=now + _ASK_AGAIN_S - job.config.quiet_s)
    return saves.call_off(replace(job, phase=phase), "no checkpoint")


def _let_go(job: Job, commands: tuple[Command, ...], now: float) -> Step:
    """Workers that wait for a change of the world go on if nobody wants it any more; who stayed for a save may go."""
    phase = job.phase
    if isinstance(phase, Holding) and phase.leaving and in_flight(job) is None:
        after, more = _depart(replace(job, phase=replace(phase, leaving=())), phase.leaving, now)
        return after, (*commands, *more)
    if not isinstance(phase, Running) or phase.parting is None:
        return job, commands
    # Nothing grows once a rank has ended with code 0.
    if phase.leaving or phase.stop is not None or (phase.joined is not None and not phase.finished):
        return job, commands
    asked = phase.parting.hear_until is None
    job = replace(job, phase=replace(_released(phase, now), joined=None))
    job, more = saves.call_off(job, "the change is called off") if asked else (job, ())
    return job, (*commands, *more)


def _released(phase: Running, now: float) -> Running:
    """Workers that were held get on from now on: that they did not meanwhile is no hang."""
    moved_at = None if phase.pulse.moved_at is None else now
    return replace(phase, parting=None, pulse=replace(phase.pulse, since=now, moved_at=moved_at))


def _stop_requested(job: Job, event: StopRequested, now: float) -> Step:
    """The end of the job; in good order, if there is time for it."""
    phase = job.phase
    outcome = Stopped(f"{signal_name(event.signal)} on {event.node}", event.signal)
    if event.signal in _IN_A_HURRY:
        return _conclude(job, outcome)
    if not isinstance(phase, Running):
        return _finish(job, outcome, now)
    if phase.stop is not None:
        # It is on its way. An agent tells it again on each new stream.
        return job, ()
    before, phase = job, replace(phase, stop=event)
    job = replace(job, phase=phase)
    waiting = _save_first(job, phase, outcome.reason, now) if not phase.exits else None
    if waiting is None:
        return _finish(job, outcome, now)
    after, commands = waiting
    return after, (*commands, *_answer(before, after, event.node))


def _saved(
    job: Job,
    event: CheckpointerOpened
    | CheckpointerClosed
    | StepsReached
    | ShardReported
    | CheckpointPrepared
    | CheckpointEntered
    | CheckpointPublished,
    now: float,
) -> Step:
    after, commands = saves.hear(job, event, now)
    if after == job:
        return job, commands
    after, more = _saves_changed(job, after, now)
    return after, (*commands, *more)


def _saves_changed(before: Job, job: Job, now: float) -> Step:
    """Whoever waited for a checkpoint may have waited long enough."""
    phase, world = job.phase, job.world
    if isinstance(phase, Holding):
        return _try_to_form(job, now) if in_flight(job) is None else (job, ())
    if not isinstance(phase, Running) or world is None:
        return job, ()
    parting = phase.parting
    if parting is not None and parting.hear_until is not None:
        return _time_passed_while_running(job, phase, world, now) if saves.can_ask(job) else (job, ())
    if parting is not None and not parting.over and job.saves.ask is None:
        if parting.insists and not _has_come(before.saves, job, world):
            return _try_again_later(job, phase, now)
        phase = replace(phase, parting=replace(parting, over=True))
        return _time_passed_while_running(replace(job, phase=phase), phase, world, now)
    if job.config.join_at_checkpoint and phase.joined is None and saves.can_ask(job) and _somebody_waits(job, world):
        return _time_passed(replace(job, phase=replace(phase, joined=now)), now)
    return job, ()


def _has_come(before: Saves, job: Job, world: World) -> bool:
    """Whether the checkpoint that was asked for is in the ledger."""
    asked = before.ask.step if before.ask is not None else None
    newest = job.checkpoints[0] if job.checkpoints else None
    return asked is not None and newest is not None and newest.generation == world.generation and newest.step >= asked


def _somebody_waits(job: Job, world: World) -> bool:
    """Whether a node could be taken in, and is not."""
    newcomers = (member for member in job.members if member.node not in world.nodes)
    return grows(job.config, world) and any(each.warm and is_welcome(job, each.node) for each in newcomers)


def _checkpoints(job: Job, event: SaveWanted | CheckpointsFound | RestoreFailed, now: float) -> Step:
    world = job.world
    if world is None or event.generation != world.generation or event.node not in world.nodes or not is_active(job):
        return job, ()
    match event:
        case SaveWanted(reason=reason):
            parts = isinstance(job.phase, Running) and job.phase.parting is not None
            busy = parts or saves.is_busy(job, now) or not saves.can_ask(job)
            return (job, ()) if busy else saves.ask(job, reason, now, hold=False)
        case CheckpointsFound():
            return _found(job, event)
        case RestoreFailed():
            return _not_restored(job, event, now)
        case _:
            assert_never(event)


def _found(job: Job, event: CheckpointsFound) -> Step:
    """Rank 0 has looked what there is to go on from: all ranks of the world are told the same."""
    world = job.world
    if world is None or event.node != world.nodes[0] or world.resume_from is not None or job.saves.resumed:
        return job, ()
    first = event.found[0] if event.found else None
    saved = replace(job.saves, resumed=True, resume_from=first)
    job = replace(job, saves=saved, checkpoints=job.checkpoints or event.found[:ENTRIES_KEPT])
    words = f"goes on from {first.uri}" if first is not None else "begins without a checkpoint: there is none"
    return job, (
        _keep(job),
        Tell(f"generation {world.generation} {words}", "checkpoint"),
        *_send_to(job, world.nodes, Resume(world.generation, first)),
    )


def _not_restored(job: Job, event: RestoreFailed, now: float) -> Step:
    """A rank can't load what its world goes on from: all begin anew with the one before. Not charged."""
    world = job.world
    if not isinstance(job.phase, Running) or world is None or event.rank not in world.ranks(event.node):
        return job, ()
    tried = (*job.checkpoints, world.resume_from, job.saves.resume_from)
    if all(each is None or each.name != event.name for each in tried):
        # Another world would go on from the same as this one.
        return job, ()
    reason = f"rank {event.rank} on {event.node} can't restore {event.name}: {event.why}"
    kept = tuple(each for each in job.checkpoints if each.name != event.name)
    job = replace(job, checkpoints=kept, broken=True)
    if not kept:
        return _finish(job, Failed(f"{reason}; there is no other checkpoint to go on from"), now)
    if job.config.level == Level.OFF:
        return _finish(job, Failed(f"{reason}; fault tolerance is off (level 0)"), now)
    return _replace_world(job, f"{reason}; going on from {kept[0].name}", now)


def _time_passed_while_holding(job: Job, phase: Holding, now: float) -> Step:
    limit = job.config.hold_timeout_s
    if limit is not None and now >= phase.since + limit:
        return _finish(job, Failed(f"no replacement came in {limit:g} s: {phase.reason}"), now)
    until = doubt_until(job)
    if until is not None and now >= until:
        # Whoever was cut off has stopped by now: whatever else is not known, that world is no longer whole.
        return _try_to_form(replace(job, doubtful=(), broken=True), now)
    if phase.leave_by is not None and now >= phase.leave_by:
        return _depart(replace(job, phase=replace(phase, leaving=())), phase.leaving, now)
    save = in_flight(job)
    if save is not None and phase.save_until is not None and now >= phase.save_until:
        after, commands = _try_to_form(replace(job, phase=replace(phase, save_until=None)), now)
        return after, (_not_waited_for(save), *commands)
    reminded = replace(phase, remind_at=now + _REMIND_S)
    return replace(job, phase=reminded), (
        Tell(f"still holding after {now - phase.since:.0f} s: {phase.reason}", "hold"),
    )


def _drain(job: Job, world: World, now: float) -> Step:
    newcomers = ", ".join(member.node for member in job.members if member.node not in world.nodes)
    reason = f"{newcomers} joined"
    phase = Draining(until=now + job.config.drain_s, reason=reason)
    directive = Drain(world.generation, job.config.drain_s, reason)
    return replace(job, phase=phase, saves=replace(job.saves, ask=None)), (
        Tell(f"generation {world.generation} drains: {reason}", "drain"),
        *_send_to(job, world.nodes, directive),
    )


def _replace_world(job: Job, reason: str, now: float, start_delay_s: float = 0.0) -> Step:
    """The current world is over. Form the next one, or hold the survivors until that is possible."""
    phase = job.phase
    if isinstance(phase, Running) and phase.stop is not None:
        # The end was asked for before.
        return _finish(job, Stopped(f"{signal_name(phase.stop.signal)} on {phase.stop.node}", phase.stop.signal), now)
    if isinstance(phase, Running) and phase.leaving:
        # Those who are about to go do not take part in another world.
        return _depart(replace(job, phase=replace(phase, leaving=(), leave_at=None)), phase.leaving, now, cause=reason)
    phase = _holding(job, reason, now, start_delay_s)
    after, commands = _try_to_form(replace(job, phase=phase, saves=replace(job.saves, ask=None)), now)
    if not isinstance(after.phase, Holding):
        return after, commands
    return after, (*commands, *_hold_all(after, after.phase))


def _holding(job: Job, reason: str, now: float, start_delay_s: float = 0.0) -> Holding:
    return Holding(
        since=now,
        cause=reason,
        reason=reason,
        remind_at=now + _REMIND_S,
        start_delay_s=start_delay_s,
        finished=finished_ranks(job),
        save_until=now + job.config.save_wait_s if job.config.save_wait_s else None,
    )


def _hold_all(job: Job, phase: Holding) -> tuple[Command, ...]:
    """The workers of the world that is over are stopped."""
    nodes = job.world.nodes if job.world is not None else ()
    return (Tell(f"holding: {phase.reason}", "hold"), *_send_to(job, nodes, Hold(phase.reason)))


def _try_to_form(job: Job, now: float) -> Step:
    """From Gathering or Holding: commit and send the next world if the members present can form one."""
    phase = job.phase
    assert isinstance(phase, Gathering | Holding)
    if (missing := _unaccounted(job)) is not None:
        return _wait(job, phase, missing), ()
    save_until, stay = (phase.save_until, phase.leaving) if isinstance(phase, Holding) else (None, ())
    if (stay or (save_until is not None and now < save_until)) and (save := in_flight(job)) is not None:
        return _wait(job, phase, f"waiting for the checkpoint of step {save.step}, which is being written"), ()
    if stay:
        # They go first.
        return job, ()
    since = phase.since if isinstance(phase, Gathering) else now
    match settled(job, since, now):
        case Waiting(reason=reason):
            return _wait(job, phase, reason), ()
        case Settled(members=members, reason=reason):
            seated = seating(members, job.world)
            if not seated[0].ports:
                return _wait(job, phase, f"{seated[0].node} has no port reserved for the master yet"), ()
            return _form(job, seated, phase.cause if isinstance(phase, Holding) else reason, now)


def _wait(job: Job, phase: Gathering | Holding, missing: str) -> Job:
    reason = f"{phase.cause}; {missing}" if isinstance(phase, Holding) else missing
    return replace(job, phase=replace(phase, reason=reason))


def _form(job: Job, seated: tuple[Member, ...], reason: str, now: float) -> Step:
    phase, places = job.phase, job.world.nodes if job.world is not None else ()
    world = plan(
        seated,
        job.world,
        restart_count=job.history.count,
        reason=reason,
        resume_from=job.checkpoints[0] if job.checkpoints else None,
        start_delay_s=phase.start_delay_s if isinstance(phase, Holding) else 0.0,
    )
    host = replace(seated[0], ports=seated[0].ports[1:])
    job = replace(
        with_member(job, host),
        world=world,
        phase=Running(pulse=Pulse(now + world.start_delay_s)),
        doubtful=(),
        broken=False,
        taken=(*job.taken, (world.generation, world.master))[-_PORTS_KEPT:],
        saves=Saves(),
    )
    return job, (
        Commit(world, job.history, None if job.inquest is None else job.inquest.brief, job.checkpoints),
        Tell(
            f"generation {world.generation}: {world.world_size} workers on {len(world.placements)} node(s): {reason}"
            + (f"; from step {world.resume_from.step}" if world.resume_from is not None else ""),
            "world",
        ),
        *(Send(node, Run(world.assignment(node))) for node in world.nodes),
        # Those who had a place and have none now.
        *(Send(node, Hold(_prospect(job, node))) for node in places if node in job.nodes and node not in world.nodes),
    )


def _finish(job: Job, outcome: Outcome, now: float) -> Step:
    """It is over; but not before a checkpoint is written that all ranks have staged, if there is time for that."""
    until = _leave_by(job, now) if isinstance(outcome, Stopped) else now + job.config.save_wait_s
    if in_flight(job) is None or now >= until:
        return _conclude(job, outcome)
    job, told = _explain(job)
    closing = Closing(outcome, until, finished_ranks(job))
    job = replace(job, phase=closing, absent=frozenset(), saves=replace(job.saves, ask=None))
    reason = _closing_words(job)
    nodes = job.world.nodes if job.world is not None else ()
    # Those who still train stop; those who have ended wait.
    generation = job.world.generation if job.world is not None else 0
    stop = Drain(generation, job.config.drain_s, reason)
    directive = Wait(reason) if isinstance(outcome, Succeeded) else stop
    return job, (*told, Tell(reason, "checkpoint"), *_send_to(job, nodes, directive))


def _closing_words(job: Job) -> str:
    save = in_flight(job)
    step = f"the checkpoint of step {save.step}" if save is not None else "a checkpoint"
    return f"the job is over; {step} is still being written"


def _conclude(job: Job, outcome: Outcome) -> Step:
    save = in_flight(job)
    late = () if save is None else (_not_waited_for(save),)
    job, told = _explain(job)
    return replace(job, phase=Finished(outcome)), (
        *told,
        *late,
        *saves.unfinished(job),
        Conclude(outcome),
        *_send_to(job, job.nodes, Halt(outcome)),
    )


def _unaccounted(job: Job) -> str | None:
    """Why the world before may still be getting on somewhere, so that no other one may begin."""
    if job.absent:
        names = ", ".join(sorted(job.absent))
        return f"waiting to hear of {names}, at most until the lease ends"
    until = doubt_until(job)
    if until is None:
        return None
    names = ", ".join(node for node, _ in job.doubtful)
    return (
        f"{names} may still be training, cut off from etcd: "
        f"waiting until the isolation timeout ({job.config.isolation_s:g} s) has ended that"
    )


def _send_to(job: Job, nodes: tuple[str, ...], directive: Directive) -> tuple[Command, ...]:
    """The same directive to each of these nodes that is present."""
    return tuple(Send(node, directive) for node in nodes if job.member(node) is not None)
