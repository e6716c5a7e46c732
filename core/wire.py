"""Between the wire's messages and the core's values. Protobuf classes stop here."""

from __future__ import annotations

from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointNoted,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    Event,
    MemberJoined,
    MemberLeaving,
    MemberReady,
    NodeChecked,
    NodeDrained,
    NodeProgressed,
    NodeStopped,
    PortsOffered,
    RestoreFailed,
    SaveWanted,
    ShardReported,
    StacksDumped,
    StepsReached,
    StopRequested,
    WorkerErred,
    WorkerExited,
)
from elastic_adapter.core.model import (
    Assignment,
    Check,
    CheckpointRef,
    Directive,
    Drain,
    Drop,
    Dump,
    Endpoint,
    Explain,
    Failed,
    Halt,
    Hold,
    Mark,
    Member,
    Outcome,
    Part,
    Pause,
    Peer,
    Prepare,
    Publish,
    Resume,
    Run,
    SaveAt,
    SaveDirective,
    Settle,
    Shard,
    StackReport,
    Stopped,
    Succeeded,
    Verdict,
    Wait,
    WorkerExit,
)
from elastic_adapter.core.state import Closing, Draining, Finished, Gathering, Holding, Job, Running
from elastic_adapter.proto import control_pb2 as pb

# What a stream carries besides its messages: the run's token, and the epoch of whoever answers.
TOKEN = "elastic-token"  # noqa: S105 (its name, not a token)
EPOCH = "elastic-epoch"

SaveReport = (
    CheckpointerOpened
    | CheckpointerClosed
    | CheckpointNoted
    | SaveWanted
    | StepsReached
    | ShardReported
    | CheckpointPrepared
    | CheckpointPublished
    | CheckpointsFound
    | RestoreFailed
)
Report = (
    PortsOffered
    | WorkerExited
    | WorkerErred
    | NodeDrained
    | NodeStopped
    | NodeProgressed
    | StacksDumped
    | NodeChecked
    | MemberReady
    | MemberLeaving
    | StopRequested
    | SaveReport
)


def hello_to_wire(state: MemberJoined) -> pb.Report:
    """An agent's full state: the first report on every stream."""
    member = state.member
    hello = pb.Hello(
        node=member.node,
        address=member.address,
        slots=member.slots,
        ports=member.ports,
        running=state.running,
        exits=[_exit_to_wire(exit) for exit in state.exits],
        seen=state.seen or 0,
        order=member.order,
        control=member.control,
        cold=not member.warm,
        checking=state.checking,
        savers=state.savers,
        shards=[_shard_to_wire(shard) for shard in state.shards],
        found=None if state.found is None else _checkpoints_to_wire(state.found),
    )
    return pb.Report(hello=hello)


def hello_from_wire(report: pb.Report, order: int) -> MemberJoined:
    """What an agent that attaches tells of itself. ``order`` is for those who do not know their own."""
    hello = report.hello
    member = Member(
        node=hello.node,
        address=hello.address,
        slots=hello.slots,
        order=hello.order or order,
        ports=tuple(hello.ports),
        control=hello.control,
        warm=not hello.cold,
    )
    return MemberJoined(
        member=member,
        running=hello.running if hello.HasField("running") else None,
        seen=hello.seen,
        exits=tuple(_exit_from_wire(exit) for exit in hello.exits),
        checking=hello.checking,
        savers=tuple(hello.savers),
        shards=tuple(_shard_from_wire(shard) for shard in hello.shards),
        found=_checkpoints_from_wire(hello.found) if hello.HasField("found") else None,
    )


def ping_to_wire(epoch: int) -> pb.Directive:
    return pb.Directive(epoch=epoch, ping=pb.Ping())


def is_ping(directive: pb.Directive) -> bool:
    return bool(directive.WhichOneof("kind") == "ping")


def pong_to_wire() -> pb.Report:
    return pb.Report(pong=pb.Pong())


def is_pong(report: pb.Report) -> bool:
    return bool(report.WhichOneof("kind") == "pong")


def report_to_wire(report: Report) -> pb.Report:
    match report:
        case PortsOffered(ports=ports, seen=seen):
            return pb.Report(ports_offered=pb.PortsOffered(ports=ports, seen=seen))
        case MemberReady():
            return pb.Report(member_ready=pb.MemberReady())
        case NodeStopped(generation=generation, reason=reason):
            return pb.Report(node_stopped=pb.NodeStopped(generation=generation, reason=reason))
        case WorkerExited() | WorkerErred() | NodeDrained() | NodeProgressed() | StacksDumped():
            return _workers_to_wire(report)
        case NodeChecked(trouble=trouble):
            return pb.Report(node_checked=pb.NodeChecked(trouble=_text(trouble)))
        case MemberLeaving(signal=signal):
            return pb.Report(leaving=pb.Leaving(signal=signal))
        case StopRequested(signal=signal):
            return pb.Report(stop_requested=pb.StopRequested(signal=signal))
        case _:
            return _save_report_to_wire(report)


def _of_a_rank_to_wire(report: CheckpointerOpened | CheckpointerClosed | CheckpointNoted) -> pb.Report:
    who = {"generation": report.generation, "rank": report.rank}
    match report:
        case CheckpointerOpened():
            return pb.Report(checkpointer_opened=pb.CheckpointerOpened(**who))
        case CheckpointerClosed():
            return pb.Report(checkpointer_closed=pb.CheckpointerClosed(**who))
        case CheckpointNoted(words=words):
            return pb.Report(checkpoint_noted=pb.CheckpointNoted(**who, words=_text(words)))
        case _:
            assert_never(report)


def _save_report_to_wire(report: SaveReport) -> pb.Report:
    generation = report.generation
    match report:
        case CheckpointerOpened() | CheckpointerClosed() | CheckpointNoted():
            return _of_a_rank_to_wire(report)
        case SaveWanted(reason=reason):
            return pb.Report(save_wanted=pb.SaveWanted(generation=generation, reason=_text(reason)))
        case StepsReached(number=number, step=step):
            return pb.Report(steps_reached=pb.StepsReached(generation=generation, number=number, step=step))
        case ShardReported(shard=shard):
            told = pb.ShardReported(generation=generation, shard=_shard_to_wire(shard))
            return pb.Report(shard_reported=told)
        case CheckpointPrepared(step=step, uri=uri, trouble=trouble):
            prepared = pb.CheckpointPrepared(generation=generation, step=step, uri=_text(uri), trouble=_text(trouble))
            return pb.Report(checkpoint_prepared=prepared)
        case CheckpointPublished(step=step, trouble=trouble, pruned=pruned):
            published = pb.CheckpointPublished(generation=generation, step=step, trouble=_text(trouble), pruned=pruned)
            return pb.Report(checkpoint_published=published)
        case CheckpointsFound(found=found):
            checkpoints = pb.CheckpointsFound(generation=generation, found=_checkpoints_to_wire(found))
            return pb.Report(checkpoints_found=checkpoints)
        case RestoreFailed(rank=rank, name=name, why=why):
            failed = pb.RestoreFailed(generation=generation, rank=rank, name=_text(name), why=_text(why))
            return pb.Report(restore_failed=failed)
        case _:
            assert_never(report)


def _workers_to_wire(
    report: WorkerExited | WorkerErred | NodeDrained | NodeProgressed | StacksDumped,
) -> pb.Report:
    match report:
        case WorkerErred(exit=exit):
            return pb.Report(worker_erred=_exit_to_wire(exit))
        case WorkerExited(exit=exit):
            return pb.Report(worker_exited=_exit_to_wire(exit))
        case NodeDrained(generation=generation):
            return pb.Report(node_drained=pb.NodeDrained(generation=generation))
        case NodeProgressed(generation=generation, marks=marks):
            told = [pb.Mark(count=mark.count, step=mark.step) for mark in marks]
            return pb.Report(node_progressed=pb.NodeProgressed(generation=generation, marks=told))
        case StacksDumped(generation=generation, stacks=stacks):
            found = [_stack_to_wire(stack) for stack in stacks]
            return pb.Report(stacks_dumped=pb.StacksDumped(generation=generation, stacks=found))
        case _:
            assert_never(report)


def report_from_wire(report: pb.Report, node: str) -> Event | None:
    """The event that a report means; None for one that this version does not know."""
    match report.WhichOneof("kind"):
        case "ports_offered":
            return PortsOffered(node, tuple(report.ports_offered.ports), report.ports_offered.seen)
        case "member_ready":
            return MemberReady(node)
        case "node_stopped":
            return NodeStopped(node, report.node_stopped.generation, report.node_stopped.reason)
        case "node_checked":
            return NodeChecked(node, report.node_checked.trouble)
        case "leaving":
            return MemberLeaving(node, report.leaving.signal)
        case "stop_requested":
            return StopRequested(node, report.stop_requested.signal)
        case _:
            return _workers_from_wire(report, node)


def _workers_from_wire(report: pb.Report, node: str) -> Event | None:
    match report.WhichOneof("kind"):
        case "worker_exited":
            return WorkerExited(_exit_from_wire(report.worker_exited))
        case "worker_erred":
            return WorkerErred(_exit_from_wire(report.worker_erred))
        case "node_drained":
            return NodeDrained(node, report.node_drained.generation)
        case "node_progressed":
            marks = tuple(Mark(mark.count, mark.step) for mark in report.node_progressed.marks)
            return NodeProgressed(node, report.node_progressed.generation, marks)
        case "stacks_dumped":
            stacks = tuple(_stack_from_wire(stack) for stack in report.stacks_dumped.stacks)
            return StacksDumped(node, report.stacks_dumped.generation, stacks)
        case _:
            return _save_report_from_wire(report, node)


def _of_a_rank_from_wire(report: pb.Report, node: str) -> Event:
    match report.WhichOneof("kind"):
        case "checkpointer_opened":
            return CheckpointerOpened(node, report.checkpointer_opened.generation, report.checkpointer_opened.rank)
        case "checkpointer_closed":
            return CheckpointerClosed(node, report.checkpointer_closed.generation, report.checkpointer_closed.rank)
        case _:
            noted = report.checkpoint_noted
            return CheckpointNoted(node, noted.generation, noted.rank, noted.words)


def _save_report_from_wire(report: pb.Report, node: str) -> Event | None:
    match report.WhichOneof("kind"):
        case "checkpointer_opened" | "checkpointer_closed" | "checkpoint_noted":
            return _of_a_rank_from_wire(report, node)
        case "save_wanted":
            return SaveWanted(node, report.save_wanted.generation, report.save_wanted.reason)
        case "steps_reached":
            reached = report.steps_reached
            return StepsReached(node, reached.generation, reached.number, reached.step)
        case "shard_reported":
            return ShardReported(node, report.shard_reported.generation, _shard_from_wire(report.shard_reported.shard))
        case "checkpoint_prepared":
            prepared = report.checkpoint_prepared
            return CheckpointPrepared(node, prepared.generation, prepared.step, prepared.uri, prepared.trouble)
        case "checkpoint_published":
            told = report.checkpoint_published
            return CheckpointPublished(node, told.generation, told.step, told.trouble, tuple(told.pruned))
        case "checkpoints_found":
            found = report.checkpoints_found
            return CheckpointsFound(node, found.generation, _checkpoints_from_wire(found.found))
        case "restore_failed":
            failed = report.restore_failed
            return RestoreFailed(node, failed.generation, failed.rank, failed.name, failed.why)
        case _:
            return None


def directive_to_wire(epoch: int, directive: Directive) -> pb.Directive:
    match directive:
        case Run(assignment=assignment):
            return pb.Directive(epoch=epoch, run=_assignment_to_wire(assignment))
        case Drain(generation=generation, grace_s=grace_s, reason=reason):
            return pb.Directive(epoch=epoch, drain=pb.Drain(generation=generation, grace_s=grace_s, reason=reason))
        case Hold(reason=reason):
            return pb.Directive(epoch=epoch, hold=pb.Hold(reason=reason))
        case Wait(reason=reason):
            return pb.Directive(epoch=epoch, wait=pb.Wait(reason=reason))
        case Halt(outcome=outcome):
            return pb.Directive(epoch=epoch, halt=_outcome_to_wire(outcome))
        case Dump(generation=generation, reason=reason):
            return pb.Directive(epoch=epoch, dump=pb.Dump(generation=generation, reason=reason))
        case Check(reason=reason):
            return pb.Directive(epoch=epoch, check=pb.Check(reason=reason))
        case Explain(verdict=verdict):
            return pb.Directive(epoch=epoch, explain=_verdict_to_wire(verdict))
        case _:
            return _save_directive_to_wire(epoch, directive)


def _save_directive_to_wire(epoch: int, directive: SaveDirective) -> pb.Directive:
    generation = directive.generation
    match directive:
        case Pause(number=number, reason=reason):
            pause = pb.Pause(generation=generation, number=number, reason=_text(reason))
            return pb.Directive(epoch=epoch, pause=pause)
        case SaveAt(number=number, step=step, hold=hold, reason=reason):
            save_at = pb.SaveAt(generation=generation, number=number, step=step, hold=hold, reason=_text(reason))
            return pb.Directive(epoch=epoch, save_at=save_at)
        case Prepare(step=step):
            return pb.Directive(epoch=epoch, prepare=pb.Prepare(generation=generation, step=step))
        case Publish(step=step):
            return pb.Directive(epoch=epoch, publish=pb.Publish(generation=generation, step=step))
        case Settle(step=step, trouble=trouble):
            settle = pb.Settle(generation=generation, step=step, trouble=_text(trouble))
            return pb.Directive(epoch=epoch, settle=settle)
        case Drop(step=step, why=why):
            return pb.Directive(epoch=epoch, drop=pb.Drop(generation=generation, step=step, why=_text(why)))
        case Resume(checkpoint=checkpoint):
            found = None if checkpoint is None else _checkpoint_to_wire(checkpoint)
            return pb.Directive(epoch=epoch, resume=pb.Resume(generation=generation, checkpoint=found))
        case _:
            assert_never(directive)


def directive_from_wire(directive: pb.Directive) -> Directive | None:
    """The directive; None for one that this version does not know."""
    match directive.WhichOneof("kind"):
        case "run":
            return Run(_assignment_from_wire(directive.run))
        case "drain":
            drain = directive.drain
            return Drain(drain.generation, drain.grace_s, drain.reason)
        case "hold":
            return Hold(directive.hold.reason)
        case "wait":
            return Wait(directive.wait.reason)
        case "halt":
            return Halt(_outcome_from_wire(directive.halt))
        case "dump":
            return Dump(directive.dump.generation, directive.dump.reason)
        case "check":
            return Check(directive.check.reason)
        case "explain":
            return Explain(_verdict_from_wire(directive.explain))
        case _:
            return _save_directive_from_wire(directive)


def _save_directive_from_wire(directive: pb.Directive) -> Directive | None:
    match directive.WhichOneof("kind"):
        case "pause":
            return Pause(directive.pause.generation, directive.pause.number, directive.pause.reason)
        case "save_at":
            save = directive.save_at
            step = save.step if save.HasField("step") else None
            return SaveAt(save.generation, save.number, step, save.hold, save.reason)
        case "prepare":
            return Prepare(directive.prepare.generation, directive.prepare.step)
        case "publish":
            return Publish(directive.publish.generation, directive.publish.step)
        case "settle":
            return Settle(directive.settle.generation, directive.settle.step, directive.settle.trouble)
        case "drop":
            return Drop(directive.drop.generation, directive.drop.step, directive.drop.why)
        case "resume":
            resume = directive.resume
            found = _checkpoint_from_wire(resume.checkpoint) if resume.HasField("checkpoint") else None
            return Resume(resume.generation, found)
        case _:
            return None


def status_to_wire(job: Job) -> pb.StatusReply:
    """The job as a person would ask for it."""
    world = job.world
    nodes = world.nodes if world is not None else ()
    members = [
        pb.MemberStatus(
            node=member.node,
            address=member.address,
            slots=member.slots,
            group_rank=nodes.index(member.node) if member.node in nodes else None,
        )
        for member in job.members
    ]
    return pb.StatusReply(
        job_id=job.config.job_id,
        phase=type(job.phase).__name__.lower(),
        reason=_phase_reason(job),
        generation=world.generation if world is not None else 0,
        world_size=world.world_size if world is not None else 0,
        restarts_used=job.history.count,
        max_restarts=job.config.policy.max_restarts,
        level=job.config.level,
        members=members,
    )


def _phase_reason(job: Job) -> str:
    match job.phase:
        case Gathering(reason=reason) | Draining(reason=reason) | Holding(reason=reason):
            return reason
        case Running():
            return job.world.reason if job.world is not None else ""
        case Closing(outcome=outcome):
            return f"a checkpoint is still being written; {outcome.reason}"
        case Finished(outcome=outcome):
            return outcome.reason
        case _:
            assert_never(job.phase)


def _exit_to_wire(exit: WorkerExit) -> pb.WorkerExited:
    return pb.WorkerExited(
        node=exit.node,
        generation=exit.generation,
        local_rank=exit.local_rank,
        rank=exit.rank,
        code=exit.code,
        signal=exit.signal,
        at=exit.at,
        pid=exit.pid,
        detail_source=exit.detail_source,
        detail=_text(exit.detail),
        error=_text(exit.error),
        age_s=exit.age_s,
        oom=exit.oom,
        step=exit.step,
        hang=_text(exit.hang),
        stack_file=_text(exit.stack_file),
    )


def _text(words: str) -> str:
    """A file's name in a traceback may hold bytes that are no text, which the wire does not take."""
    return words.encode(errors="backslashreplace").decode()


def _exit_from_wire(exit: pb.WorkerExited) -> WorkerExit:
    return WorkerExit(
        node=exit.node,
        generation=exit.generation,
        local_rank=exit.local_rank,
        rank=exit.rank,
        code=exit.code if exit.HasField("code") else None,
        signal=exit.signal if exit.HasField("signal") else None,
        at=exit.at,
        pid=exit.pid,
        detail_source=exit.detail_source,
        detail=exit.detail,
        error=exit.error,
        age_s=exit.age_s if exit.HasField("age_s") else None,
        oom=exit.oom,
        step=exit.step if exit.HasField("step") else None,
        hang=exit.hang,
        stack_file=exit.stack_file,
    )


def _stack_to_wire(stack: StackReport) -> pb.StackReport:
    return pb.StackReport(
        rank=stack.rank,
        place=_text(stack.place),
        waits=_text(stack.waits),
        text=_text(stack.text),
        file=_text(stack.file),
        pid=stack.pid,
        at=stack.at,
    )


def _stack_from_wire(stack: pb.StackReport) -> StackReport:
    return StackReport(stack.rank, stack.place, stack.waits, stack.text, stack.file, stack.pid, stack.at)


def _shard_to_wire(shard: Shard) -> pb.Shard:
    return pb.Shard(rank=shard.rank, step=shard.step, part=pb.Part.Name(shard.part), why=_text(shard.why))


def _shard_from_wire(shard: pb.Shard) -> Shard:
    # A part that a later version knows is as good as one that is not written yet.
    known = {int(part): part for part in Part}
    part = known.get(int(shard.part), Part.STAGED)
    return Shard(shard.rank, shard.step, part, shard.why)


def _checkpoint_to_wire(checkpoint: CheckpointRef) -> pb.Checkpoint:
    return pb.Checkpoint(step=checkpoint.step, generation=checkpoint.generation, uri=_text(checkpoint.uri))


def _checkpoint_from_wire(checkpoint: pb.Checkpoint) -> CheckpointRef:
    return CheckpointRef(checkpoint.step, checkpoint.generation, checkpoint.uri)


def _checkpoints_to_wire(found: tuple[CheckpointRef, ...]) -> pb.Checkpoints:
    return pb.Checkpoints(checkpoints=[_checkpoint_to_wire(each) for each in found])


def _checkpoints_from_wire(found: pb.Checkpoints) -> tuple[CheckpointRef, ...]:
    return tuple(_checkpoint_from_wire(each) for each in found.checkpoints)


def _verdict_to_wire(verdict: Verdict) -> pb.Explain:
    return pb.Explain(
        generation=verdict.generation,
        first=_exit_to_wire(verdict.first),
        others=[_exit_to_wire(exit) for exit in verdict.others],
        more=verdict.more,
        decision=verdict.decision,
        restarts_left=verdict.restarts_left,
    )


def _verdict_from_wire(explain: pb.Explain) -> Verdict:
    return Verdict(
        generation=explain.generation,
        first=_exit_from_wire(explain.first),
        others=tuple(_exit_from_wire(exit) for exit in explain.others),
        more=explain.more,
        decision=explain.decision,
        restarts_left=explain.restarts_left,
    )


def _assignment_to_wire(assignment: Assignment) -> pb.Run:
    resume = assignment.resume_from
    return pb.Run(
        generation=assignment.generation,
        restart_count=assignment.restart_count,
        group_rank=assignment.group_rank,
        group_size=assignment.group_size,
        rank_offset=assignment.rank_offset,
        slots=assignment.slots,
        world_size=assignment.world_size,
        master=pb.Endpoint(host=assignment.master.host, port=assignment.master.port),
        reason=assignment.reason,
        resume_from=_checkpoint_to_wire(resume) if resume else None,
        start_delay_s=assignment.start_delay_s,
        peers=[pb.Peer(address=each.address, slots=each.slots) for each in assignment.peers],
    )


def _assignment_from_wire(run: pb.Run) -> Assignment:
    resume = run.resume_from
    return Assignment(
        generation=run.generation,
        restart_count=run.restart_count,
        group_rank=run.group_rank,
        group_size=run.group_size,
        rank_offset=run.rank_offset,
        slots=run.slots,
        world_size=run.world_size,
        master=Endpoint(run.master.host, run.master.port),
        reason=run.reason,
        resume_from=_checkpoint_from_wire(resume) if run.HasField("resume_from") else None,
        start_delay_s=run.start_delay_s,
        peers=tuple(Peer(each.address, each.slots) for each in run.peers),
    )


def _outcome_to_wire(outcome: Outcome) -> pb.Halt:
    match outcome:
        case Succeeded(reason=reason):
            return pb.Halt(succeeded=pb.Succeeded(reason=reason))
        case Failed(reason=reason, first=first, alone=alone):
            failed = pb.Failed(
                reason=_text(reason),
                first=_exit_to_wire(first) if first else None,
                alone=alone,
                others=[_exit_to_wire(exit) for exit in outcome.others],
                more=outcome.more,
                restarts_left=outcome.restarts_left,
            )
            return pb.Halt(failed=failed)
        case Stopped(reason=reason, signal=signal, alone=alone):
            return pb.Halt(stopped=pb.Stopped(reason=reason, signal=signal, alone=alone))
        case _:
            assert_never(outcome)


def _outcome_from_wire(halt: pb.Halt) -> Outcome:
    match halt.WhichOneof("outcome"):
        case "succeeded":
            return Succeeded(halt.succeeded.reason)
        case "stopped":
            return Stopped(halt.stopped.reason, halt.stopped.signal, halt.stopped.alone)
        case _:
            failed = halt.failed
            return Failed(
                failed.reason,
                _exit_from_wire(failed.first) if failed.HasField("first") else None,
                failed.alone,
                tuple(_exit_from_wire(exit) for exit in failed.others),
                failed.more,
                failed.restarts_left if failed.HasField("restarts_left") else None,
            )
