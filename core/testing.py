"""What tests of the job's machine share: builders of values, a story to tell, a referee who watches.

The program itself imports nothing from here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, TypeAlias, get_args

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    CheckpointEntered,
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    Command,
    Commit,
    Conclude,
    Enter,
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
from elastic_adapter.core.job import Step, step
from elastic_adapter.core.model import (
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
    Level,
    Mark,
    Member,
    Outcome,
    Part,
    Pause,
    Placement,
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
    Wait,
    WorkerExit,
    World,
)
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import RestartPolicy
from elastic_adapter.core.state import (
    KILL_S,
    Closing,
    Draining,
    Finished,
    Gathering,
    Holding,
    Job,
    Parting,
    Running,
    begin,
    deadline,
    resume,
)

Act: TypeAlias = Callable[[Job, Event, float], Step]
# What is told of the checkpoints of a world.
SaveReport: TypeAlias = (
    CheckpointerOpened | CheckpointerClosed | ShardReported | StepsReached | CheckpointPrepared | CheckpointPublished
)
_Told: TypeAlias = list[tuple[str, SaveDirective]]
# What is told of the checkpoint that it goes on from, or of one that it wants.
SaveRequest: TypeAlias = SaveWanted | CheckpointsFound | RestoreFailed


def job_config(
    level: Level = Level.FAULT_TOLERANT,
    nodes: tuple[int, int] = (1, 1),
    *,
    max_restarts: int = 0,
    quiet_s: float = 3.0,
    leave_gather_s: float = 0.0,
    blame_s: float = 0.0,
    drain_s: float = 30.0,
    hold_timeout_s: float | None = None,
    isolation_s: float = 600.0,
    exclude_after: int = 0,
    check_after: int = 0,
    hang_timeout_s: float | None = None,
    start_timeout_s: float | None = None,
    join_at_checkpoint: bool = False,
    save_wait_s: float = 30.0,
) -> JobConfig:
    return JobConfig(
        job_id="test",
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        level=level,
        policy=RestartPolicy(max_restarts, free_codes=(101,), exclude_after=exclude_after, check_after=check_after),
        quiet_s=quiet_s,
        leave_gather_s=leave_gather_s,
        blame_s=blame_s,
        drain_s=drain_s,
        hold_timeout_s=hold_timeout_s,
        isolation_s=isolation_s,
        hang_timeout_s=hang_timeout_s,
        start_timeout_s=start_timeout_s,
        join_at_checkpoint=join_at_checkpoint,
        save_wait_s=save_wait_s,
    )


def member(node: str, *, order: int = 0, slots: int = 1, ports: tuple[int, ...] = ()) -> Member:
    return Member(node=node, address=f"{node}.example", slots=slots, order=order, ports=ports)


def members(*nodes: str, ports: tuple[int, ...] = ()) -> tuple[Member, ...]:
    """Members who came in this order."""
    return tuple(member(node, order=order, ports=ports) for order, node in enumerate(nodes))


def world_of(*nodes: str, slots: int = 1, generation: int = 1) -> World:
    placements = tuple(Placement(node, f"{node}.example", slots, slots * i) for i, node in enumerate(nodes))
    return World(
        generation=generation,
        restart_count=0,
        placements=placements,
        master=Endpoint(placements[0].address, 29500),
        reason="a test made it",
    )


def exit_of(
    rank: int = 0, code: int | None = 1, *, signal: int | None = None, node: str = "a", generation: int = 1
) -> WorkerExit:
    """A worker's end; with a signal there is no code."""
    return WorkerExit(
        node=node,
        generation=generation,
        local_rank=0,
        rank=rank,
        code=code if signal is None else None,
        signal=signal,
        at=0.0,
    )


def checkpoint(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(step, generation, f"/checkpoints/step-{step}-{generation}")


def committed(commands: Iterable[Command]) -> tuple[World, ...]:
    return tuple(command.world for command in commands if isinstance(command, Commit))


def sent(commands: Iterable[Command]) -> tuple[tuple[str, Directive], ...]:
    """Who was told what, in order."""
    return tuple((command.node, command.directive) for command in commands if isinstance(command, Send))


def outline(job: Job) -> str:
    """Where a job is, in few words: ``running 2: a b, 1 charged``."""
    charged = f", {job.history.count} charged" if job.history.count else ""
    world = f" {job.world.generation}: {' '.join(job.world.nodes)}" if job.world is not None else ""
    match job.phase:
        case Gathering():
            return " ".join(("gathering:", *(member.node for member in job.members)))
        case Running() | Draining() | Holding():
            return f"{type(job.phase).__name__.lower()}{world}{charged}"
        case Closing(outcome=outcome):
            return f"closing: {type(outcome).__name__.lower()} {outcome.exit_code}"
        case Finished(outcome=outcome):
            return f"{type(outcome).__name__.lower()} {outcome.exit_code}"
        case _:
            assert_never(job.phase)


class BrokenRule(AssertionError):
    """A step of the machine broke a rule that holds for every job."""


class Referee:
    """Watches every step of one job and keeps its own account of it: what it checks, it doesn't ask the job."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        # Those present, with the ports that each holds now.
        self.present: dict[str, Member] = {}
        self.worlds: list[World] = []
        # Nodes of the last world without a stream, and those given up without proof, and since when.
        self.absent: set[str] = set()
        self.doubtful: dict[str, float] = {}
        # Whether a part of the last world is known to have stopped, failed or died.
        self.broken = False
        # Those who were asked to go and have not gone yet.
        self.leaving: set[str] = set()
        # The ranks of the last world that ended with code 0.
        self.finished: set[int] = set()
        # Those who take no part until they were checked.
        self.checking: set[str] = set()
        # Those who were blamed, and how often, and who was excluded for that.
        self.excluded: set[str] = set()
        self.clerk = Clerk(config)
        # How many worlds there were when whoever leads now began to.
        self.inherited = 0
        self._spent: dict[Endpoint, int] = {}
        self._told_by_joiner: tuple[WorkerExit, ...] = ()
        self._outcome: Outcome | None = None

    def watch(self, before: Job, event: Event, now: float, after: Job, commands: tuple[Command, ...]) -> None:
        """Raise ``BrokenRule`` unless this step keeps all rules."""
        if self._outcome is not None:
            self._check_final(after, commands)
            return
        if not isinstance(before.phase, Closing):
            self._check_dropped(before, event, now, after, commands)
        # Noted before the joiner counts as present.
        self._told_by_joiner = self._heard(event) if isinstance(event, MemberJoined) else ()
        self._note_exits(before, event)
        self._note_evidence(before, event, now, commands)
        self._note_presence(before, event, after, commands)
        self.clerk.note(before, event, now, after)
        self._check_charge(before, event, now, after)
        self._note_blame(before, event, after, commands)
        self._check_commit(after, commands, now)
        self._check_outcome(before, event, after, commands)
        self._check_sends(before, event, after, commands)
        self.clerk.check(before, event, now, after, commands, referee=self)
        self._check_state(after, now)
        self._check_words(commands)
        self._check_quiet(event, commands)

    def change_leader(self, record: Record) -> None:
        """Somebody else leads, who knows what was committed and has heard of nobody."""
        self.present.clear()
        self.absent = set(self.worlds[-1].nodes) if self.worlds else set()
        self.doubtful.clear()
        self.broken = False
        self.leaving.clear()
        self.finished = set(record.finished)
        self.checking.clear()
        self.excluded = set(record.history.kept_out)
        self.inherited = len(self.worlds)
        self.clerk.change_leader(record)

    @property
    def required(self) -> int:
        """How many nodes the next world needs at least."""
        if self.worlds and self.config.level < Level.ELASTIC:
            return len(self.worlds[0].nodes)
        return self.config.min_nodes

    def _check_final(self, after: Job, commands: tuple[Command, ...]) -> None:
        _require(isinstance(after.phase, Finished) and after.phase.outcome == self._outcome, "the end is final")
        directives = [directive for _, directive in sent(commands)]
        _require(len(directives) == len(commands), "after the end nothing is committed or concluded")
        _require(all(isinstance(each, Halt) for each in directives), "after the end there is only Halt")

    def _check_dropped(self, before: Job, event: Event, now: float, after: Job, commands: tuple[Command, ...]) -> None:
        """What comes late, early or from a stranger changes nothing."""
        match event:
            case WorkerExited(exit=exit):
                stale = not self.worlds or not _belongs(exit, self.worlds[-1])
                if before.inquest is not None and exit.generation == before.inquest.generation:
                    told = after == replace(before, inquest=after.inquest) and not commands
                    _require(told and after.inquest is not None, "a late exit adds to the story of its generation only")
                    return
            case WorkerErred() | NodeProgressed() | StacksDumped() | NodeStopped() | NodeChecked():
                stale = self._is_old_word(before, event)
            case NodeDrained(node=node, generation=generation):
                stale = not self.worlds or generation != self.worlds[-1].generation
                stale = stale or node not in self.worlds[-1].nodes
            case MemberLost(node=node, proven=proven):
                stale = node not in self.present and node not in self.absent
                stale = stale and not (proven and node in self.doubtful)
            case MemberReady(node=node):
                stale = node not in self.present or self.present[node].warm
            case MemberSilent(node=node) | MemberLeaving(node=node) | PortsOffered(node=node):
                stale = node not in self.present
            case Severed():
                stale = not self.absent
            case TimePassed():
                due = deadline(before)
                stale = due is None or now < due
            case _:
                stale = self._is_old_news(before, event)
        # Whoever tells of a checkpoint that is done with is told so.
        done = [each for each in commands if not (isinstance(event, ShardReported) and is_last_word(each))]
        _require(not stale or (after == before and not done), f"{event} is dropped")

    def _is_old_news(self, before: Job, event: Event) -> bool:
        """What is told of checkpoints that nobody makes, or looks for, any more."""
        if isinstance(event, get_args(SaveRequest)) and not isinstance(before.phase, Running | Draining):
            return True
        news = isinstance(event, get_args(SaveReport) + get_args(SaveRequest))
        return news and self.clerk.is_old_word(event)  # type: ignore[arg-type]

    def _is_old_word(
        self, before: Job, event: WorkerErred | NodeProgressed | StacksDumped | NodeStopped | NodeChecked
    ) -> bool:
        """What a node says of itself or of its workers, when nobody can want to know any more."""
        if isinstance(event, WorkerErred):
            return not isinstance(before.phase, Running) or not _belongs(event.exit, self.worlds[-1])
        if isinstance(event, NodeChecked):
            return event.node not in self.checking
        if not self.worlds or event.generation != self.worlds[-1].generation:
            return True
        known = isinstance(before.phase, Running) if not isinstance(event, NodeStopped) else event.node in self.present
        return not known or event.node not in self.worlds[-1].nodes

    def _heard(self, event: Event) -> tuple[WorkerExit, ...]:
        """The ends of workers of the last world that an event tells of."""
        match event:
            case WorkerExited(exit=exit):
                exits: tuple[WorkerExit, ...] = (exit,)
            case MemberJoined(member=member, exits=exits) if self._expected_back(member.node):
                pass
            case _:
                exits = ()
        return tuple(exit for exit in exits if self.worlds and _belongs(exit, self.worlds[-1]))

    def _expected_back(self, node: str) -> bool:
        return bool(self.worlds) and node in self.worlds[-1].nodes and (node in self.present or node in self.absent)

    def _note_exits(self, before: Job, event: Event) -> None:
        if isinstance(before.phase, Running | Draining):
            self.finished |= {exit.rank for exit in self._heard(event) if exit.ok}

    def _done(self, node: str) -> bool:
        return self.worlds[-1].ranks(node) <= self.finished

    def _note_evidence(self, before: Job, event: Event, now: float, commands: tuple[Command, ...]) -> None:
        """What is known of the last world: whether it can still be whole, and what is not known of its nodes."""
        if not self.worlds or isinstance(before.phase, Gathering):
            return
        nodes = self.worlds[-1].nodes
        self.broken |= any(not exit.ok for exit in self._heard(event)) and isinstance(before.phase, Running)
        lacks = isinstance(event, RestoreFailed) and not self.clerk.is_old_word(event)
        self.broken |= lacks and isinstance(before.phase, Running)
        match event:
            case MemberLost(node=node, proven=proven) if node in nodes and not self._done(node):
                here = node in self.present or node in self.absent
                self.broken |= proven and (here or node in self.doubtful)
                if proven:
                    self.doubtful.pop(node, None)
                elif here:
                    self.doubtful[node] = now
            case MemberJoined(member=member, running=running):
                self.doubtful.pop(member.node, None)
                begins = bool(self._behind(event)) and isinstance(before.phase, Running | Draining)
                stopped = running != self.worlds[-1].generation and not begins and not self._done(member.node)
                self.broken |= member.node in nodes and stopped
            case NodeDrained(node=node, generation=generation) if isinstance(before.phase, Draining):
                self.broken |= node in nodes and generation == self.worlds[-1].generation
            case NodeStopped(node=node, generation=generation) if generation == self.worlds[-1].generation:
                self.broken |= node in nodes and node in self.present and not self._done(node)
            case TimePassed() if isinstance(before.phase, Holding):
                until = self._doubt_until(self.worlds[-1])
                if until is not None and now >= until:
                    # Those who were cut off have stopped by themselves.
                    self.broken = True
                    self.doubtful.clear()
            case _:
                pass
        leaving = self.leaving | ({event.node} if isinstance(event, MemberLeaving) else set())
        gone = {node for node, directive in sent(commands) if isinstance(directive, Halt)} & leaving
        self.broken |= any(node in nodes and not self._done(node) for node in gone)

    def _note_presence(self, before: Job, event: Event, after: Job, commands: tuple[Command, ...]) -> None:
        closing = isinstance(before.phase, Closing)
        match event:
            case MemberJoined(member=member):
                self._note_join(member, after, commands, checking=event.checking)
            case MemberLost(node=node):
                self.present.pop(node, None)
                self.absent.discard(node)
            case MemberSilent(node=node) if node in self.present:
                del self.present[node]
                self.absent |= {node} & set(self.worlds[-1].nodes if self.worlds else ())
            case MemberReady(node=node) if node in self.present:
                self.present[node] = replace(self.present[node], warm=True)
            case MemberLeaving(node=node) if node in self.present:
                self.leaving.add(node)
            case PortsOffered(node=node) if node in self.present:
                self._note_offer(event)
            case NodeChecked(node=node) if node in self.checking and not closing:
                self._note_check(event, after)
            case _:
                pass
        # Who is silent then asks again when it is back.
        self.leaving -= self.absent if isinstance(after.phase, Holding) else set()
        self._note_departed(commands)

    def _note_departed(self, commands: tuple[Command, ...]) -> None:
        for node, directive in sent(commands):
            if isinstance(directive, Halt) and node in self.leaving:
                self.leaving.discard(node)
                self.present.pop(node, None)
                if self.worlds and self._done(node):
                    self.absent.discard(node)
        self.leaving &= self.present.keys() | self.absent
        self.checking &= self.present.keys()

    def _note_join(self, member: Member, after: Job, commands: tuple[Command, ...], *, checking: bool) -> None:
        halted = any(node == member.node and isinstance(told, Halt) for node, told in sent(commands))
        known = member.node in self.present or member.node in self.absent
        closed = self.config.level == Level.OFF and self.worlds and not known
        if halted and member.node not in self.leaving and not isinstance(after.phase, Finished):
            _require(closed, "a node is refused only at level 0 after the start")
            return
        stranger = closed and member.node not in self.worlds[-1].nodes and not self.clerk.closing
        _require(not stranger, "at level 0 nobody joins after the start")
        self.present[member.node] = member
        self.absent.discard(member.node)
        (self.checking.add if checking else self.checking.discard)(member.node)

    def _note_check(self, event: NodeChecked, after: Job) -> None:
        self.checking.discard(event.node)
        if event.trouble and not isinstance(after.phase, Closing | Finished):
            self.present.pop(event.node, None)

    def _note_offer(self, offer: PortsOffered) -> None:
        """The offer may have been on its way when a later world took one of its ports."""
        held = self.present[offer.node]
        spent = {
            endpoint.port
            for endpoint, generation in self._spent.items()
            if endpoint.host == held.address and generation > offer.seen
        }
        self.present[offer.node] = replace(held, ports=tuple(port for port in offer.ports if port not in spent))

    def _check_charge(self, before: Job, event: Event, now: float, after: Job) -> None:
        old, new = before.history.charged, after.history.charged
        told = self._heard(event) if isinstance(event, WorkerExited) else self._told_by_joiner
        free = self.config.policy.free_codes
        failing = any(not exit.ok and exit.code not in free for exit in told) and isinstance(before.phase, Running)
        suspected = isinstance(before.phase, Running) and bool(before.phase.exits or before.phase.hang)
        if new != old:
            due = failing or suspected
            _require(due and new == (*old, now), "only a failing worker of the world that runs is charged")
        elif failing:
            waits = isinstance(after.phase, Running) and bool(after.phase.exits)
            # An earlier one may have asked for the restart that this one leads to. Or somebody leaves, who explains it.
            leaves = isinstance(before.phase, Running) and bool(before.phase.leaving)
            earlier = (suspected or leaves) and (after.world != before.world or isinstance(after.phase, Holding))
            over = isinstance(after.phase, Closing | Finished)
            _require(waits or earlier or over, "a failure is charged, ends the job or is looked into")
        _require(len(new) <= self.config.policy.max_restarts, "the budget is never overdrawn")

    def _note_blame(self, before: Job, event: Event, after: Job, commands: tuple[Command, ...]) -> None:
        """Who is excluded, and who is checked: only somebody on whom a worker just failed."""
        if isinstance(event, NodeCleared) and not isinstance(before.phase, Closing):
            self.excluded.discard(event.node)
        newly = after.history.kept_out - self.excluded
        blamed = {failure.node for failure in after.history.failures[-1:]} if after.history != before.history else set()
        checked = {node for node, directive in sent(commands) if isinstance(directive, Check)}
        _require(newly | checked <= blamed, "only a node that failed is excluded or checked")
        _require(after.history.kept_out >= self.excluded, "an exclusion lasts until it is cleared")
        self.excluded |= newly
        self.checking |= checked
        limit = self.config.policy.exclude_after
        for node in blamed if limit and len(after.history.charged) > len(before.history.charged) else ():
            often = sum(failure.node == node for failure in after.history.failures) >= limit
            _require(not often or node in self.excluded, "a node that failed often enough is excluded")
        over = isinstance(after.phase, Closing | Finished)
        _require(over or after.checking == self.checking, "it is known who is checked")

    @property
    def fit(self) -> set[str]:
        return self.present.keys() - self.checking

    @property
    def welcome(self) -> set[str]:
        return self.fit - self.excluded

    def _check_commit(self, after: Job, commands: tuple[Command, ...], now: float) -> None:
        for command in commands:
            if isinstance(command, Keep):
                _require(command.finished == self.finished, "the ranks that ended are kept as they are")
                _require(command.history == after.history, "what failed is kept as it is")
                _require(command.checkpoints in self.clerk.entries, "the ledger is kept as it is")
        commits = [command for command in commands if isinstance(command, Commit)]
        _require(len(commits) <= 1, "a step commits one world at most")
        for commit in commits:
            previous = self.worlds[-1] if self.worlds else None
            self._check_world(commit.world, previous)
            self._check_safety(previous, now)
            _require(commit.history == after.history, "the budget is committed with the world")
            _require(commit.world.restart_count == len(after.history.charged), "the world knows its restarts")
            _require(isinstance(after.phase, Running), "a world that is committed runs")
            self.clerk.begin(commit, now, self.present)
            self.worlds.append(commit.world)
            self.finished.clear()
            self.doubtful.clear()
            self.broken = False
        _require(after.world == (self.worlds[-1] if self.worlds else None), "no world without a commit")

    def _check_world(self, world: World, previous: World | None) -> None:
        ranks = sorted(rank for node in world.nodes for rank in world.ranks(node))
        _require(ranks == list(range(world.world_size)), "the ranks are 0..n-1, once each")
        _require(len(set(world.nodes)) == len(world.nodes), "a node has one place")
        for placement in world.placements:
            here = self.present.get(placement.node)
            _require(here is not None, f"{placement.node} has a place but is not present")
            _require(placement.node in self.fit, f"{placement.node} has a place, but is not checked yet")
            _require(here is not None and here.slots == placement.slots, "a node runs as many workers as it has slots")
        _require(world.generation == (previous.generation + 1 if previous else 1), "a generation follows the last")
        _require(self.required <= len(world.nodes) <= self.config.max_nodes, "the size is within the bounds")
        last_resort = set(world.nodes) & self.excluded
        enough = len(self.welcome) >= self.required
        _require(not last_resort or not enough, "whoever is excluded is a last resort")
        _require(not last_resort or len(world.nodes) == self.required, "no more of the excluded than are needed")
        if previous is not None:
            _require(self.config.level != Level.OFF, "at level 0 there is one generation")
            fixed = self.config.level == Level.FAULT_TOLERANT
            _require(not fixed or len(world.nodes) == len(previous.nodes), "at level 1 the size stays")
            self._check_order(world, previous)
        self._spend(world)

    def _check_safety(self, previous: World | None, now: float) -> None:
        """Never two worlds that get on: the one before has stopped, or can't be whole, or its time is over."""
        _require(not self.absent, "no world is formed while a node of the last one is silent")
        if previous is not None and self._doubt_until(previous) is not None:
            over = all(now >= since + self.config.isolation_s + KILL_S for since in self.doubtful.values())
            _require(over, "no world is formed while the last one may be whole elsewhere")

    def _doubt_until(self, world: World) -> float | None:
        stops = any(node in world.nodes and not self._done(node) for node in self.present)
        if self.broken or stops or not self.doubtful:
            return None
        return max(self.doubtful.values()) + self.config.isolation_s + KILL_S

    def _check_order(self, world: World, previous: World) -> None:
        survivors = [node for node in previous.nodes if node in self.present]
        left_out = {node for node in survivors if node not in world.nodes}
        _require(not left_out & self.welcome, "who has a place keeps it")
        survivors = [node for node in survivors if node in world.nodes]
        _require([node for node in world.nodes if node in previous.nodes] == survivors, "survivors keep their order")
        if len(world.nodes) == len(previous.nodes):
            kept = all(world.nodes.index(node) == previous.nodes.index(node) for node in survivors)
            _require(kept, "a replacement takes the place of the one who is gone")

    def _spend(self, world: World) -> None:
        """The master's port is one that the first node holds; from now on it holds it no more."""
        host = self.present[world.nodes[0]]
        _require(world.master.host == host.address, "the master is on the first node")
        _require(world.master.port in host.ports, "the first node offered the master's port")
        _require(world.master not in self._spent, "a port serves one generation")
        self._spent[world.master] = world.generation
        left = tuple(port for port in host.ports if port != world.master.port)
        self.present[host.node] = replace(host, ports=left)

    def _check_outcome(self, before: Job, event: Event, after: Job, commands: tuple[Command, ...]) -> None:
        conclusions = [command.outcome for command in commands if isinstance(command, Conclude)]
        if not isinstance(after.phase, Closing | Finished):
            _require(not conclusions, "only the end is concluded")
            done = self.worlds and len(self.finished) == self.worlds[-1].world_size
            _require(not done, "the job ends when every rank ended with code 0")
            return
        outcome = after.phase.outcome
        if isinstance(after.phase, Finished):
            self._outcome = outcome
            _require(conclusions == [outcome], "the outcome is concluded once")
        else:
            _require(not conclusions, "only the end is concluded")
        if isinstance(before.phase, Closing):
            _require(outcome == before.phase.outcome, "the end that was decided upon is the end")
            return
        match outcome:
            case Succeeded():
                _require(len(self.finished) == self.worlds[-1].world_size, "success takes every rank")
            case Failed(first=WorkerExit() as first):
                decided = event == WorkerExited(first) or first in self._told_by_joiner
                decided |= isinstance(before.phase, Running) and first in (*before.phase.exits, *before.phase.erring)
                decided |= isinstance(before.phase, Running) and before.phase.hang is not None and bool(first.hang)
                _require(decided and not first.ok, "the first failure is the one that decided")
                budget = self.config.policy.max_restarts
                _require(len(before.history.charged) == budget, "the whole budget is used before giving up")
            case Failed():
                _require(outcome.exit_code == 1, "without a worker's failure the code is 1")
            case Stopped(signal=number):
                by_time = isinstance(event, TimePassed) or bool(commands)
                asked = isinstance(event, StopRequested | MemberLeaving) and event.signal == number
                asked |= by_time and isinstance(before.phase, Running) and bool(before.phase.leaving)
                asked |= isinstance(before.phase, Holding) and bool(before.phase.leaving)
                asked |= isinstance(before.phase, Running) and before.phase.stop is not None
                _require(asked, "a stop has somebody who asked for it")

    def _check_quiet(self, event: Event, commands: tuple[Command, ...]) -> None:
        _require(not isinstance(event, WorkerErred) or not commands, "nothing is done before a worker has ended")

    def _check_sends(self, before: Job, event: Event, after: Job, commands: tuple[Command, ...]) -> None:
        directives = sent(commands)
        guests = {event.member.node} if isinstance(event, MemberJoined) else set()
        guests |= {event.node} if isinstance(event, MemberLeaving | NodeChecked) else set()
        guests |= {each.node for each in before.phase.leaving} if isinstance(before.phase, Running | Holding) else set()
        # Those who wanted to leave, and were kept, are told the end like all others.
        guests |= set(before.nodes) if isinstance(before.phase, Closing) else set()
        strangers = {node for node, _ in directives} - self.present.keys() - guests
        _require(not strangers, f"{strangers} are told something but not present")
        done: set[int] = set()
        for command in commands:
            if isinstance(command, Commit):
                done.add(command.world.generation)
            if isinstance(command, Send) and isinstance(command.directive, Run):
                given = command.directive.assignment
                again = given.generation == self.worlds[-1].generation and command.node in self._behind(event)
                _require(given.generation in done or again, "a world is committed before it is sent")
                _require(given == self.worlds[-1].assignment(command.node), "a node is sent its part of the world")
        told: dict[type[Directive], list[str]] = {kind: [] for kind in get_args(Directive)}
        for node, directive in directives:
            told[type(directive)].append(node)
        expected = self._expected(before, event, after, committed(commands))
        for kind, nodes in expected.items():
            _require(sorted(told[kind]) == sorted(nodes), f"{kind.__name__} goes to {sorted(nodes)}, once each")
        stories = [(node, each.verdict.generation) for node, each in directives if isinstance(each, Explain)]
        _require(len(set(stories)) == len(stories), "a story is told once")
        if isinstance(after.phase, Finished):
            _require(self.present.keys() <= set(told[Halt]), "at the end everybody present is told")
        else:
            ended = before.inquest is not None and before.inquest != after.inquest
            ended = ended and (after.inquest is None or after.inquest.generation != before.inquest.generation)  # type: ignore[union-attr]
            _require(not ended or bool(told[Explain]) or not self.present, "how a generation ended is told")

    def _behind(self, event: Event) -> list[str]:
        """A node that comes back without having seen the world that runs."""
        if not isinstance(event, MemberJoined) or event.seen is None or not self.worlds:
            return []
        world, node = self.worlds[-1], event.member.node
        late = event.seen < world.generation != event.running and node in world.nodes and not self._done(node)
        return [node] if late else []

    def _expected(
        self, before: Job, event: Event, after: Job, worlds: tuple[World, ...]
    ) -> dict[type[Directive], list[str]]:
        """Who must be told to run, to hold and to drain in a step between these two states."""
        here = [node for node in self.worlds[-1].nodes if node in self.present] if self.worlds else []
        active = isinstance(before.phase, Running | Draining)
        over = isinstance(after.phase, Running) and bool(after.phase.exits)
        again = self._behind(event) if active and isinstance(after.phase, Running | Draining) and not over else []
        held = here if active and isinstance(after.phase, Holding) else []
        if isinstance(before.phase, Holding) and isinstance(after.phase, Holding):
            held = [event.member.node] if isinstance(event, MemberJoined) and event.running is not None else []
        if active and isinstance(event, MemberJoined) and event.running is not None:
            stranger = event.member.node in self.present and event.member.node not in self.worlds[-1].nodes
            held = [*held, event.member.node] if stranger else held
        if worlds and len(self.worlds) > 1:
            places = self.worlds[-2].nodes
            held = [node for node in places if node in self.present and node not in worlds[0].nodes]
        asks = isinstance(after.phase, Running) and after.phase.hang is not None
        asks = asks and isinstance(before.phase, Running) and before.phase.hang is None
        return {
            Dump: here if asks else [],
            Run: list(worlds[0].nodes) if worlds else again,
            Hold: held,
            Wait: self._waiting(before, event, after),
            Drain: here if self._is_stopped(before, after) else [],
        }

    def _is_stopped(self, before: Job, after: Job) -> bool:
        """Whether workers are told to stop in good order: a world that changes, or a job that failed and waits."""
        if isinstance(after.phase, Closing):
            return not isinstance(before.phase, Closing) and not isinstance(after.phase.outcome, Succeeded)
        return isinstance(before.phase, Running) and isinstance(after.phase, Draining)

    def _waiting(self, before: Job, event: Event, after: Job) -> list[str]:
        """Who must be told what it waits for: whoever comes while a world runs, and all, now and then, before one."""
        waiting: list[str] = []
        if isinstance(after.phase, Closing) and not isinstance(before.phase, Closing):
            done = isinstance(after.phase.outcome, Succeeded)
            waiting = [node for node in self.worlds[-1].nodes if node in self.present] if done else []
        if isinstance(before.phase, Gathering) and isinstance(after.phase, Gathering):
            reminded = isinstance(event, TimePassed) and after.phase.remind_at != before.phase.remind_at
            return list(self.present) if reminded else []
        if isinstance(after.phase, Holding):
            known = before.phase.leaving if isinstance(before.phase, Holding) else ()
            waiting = [each.node for each in after.phase.leaving if each not in known]
        if isinstance(event, MemberLeaving | StopRequested):
            if isinstance(before.phase, Closing) and isinstance(after.phase, Closing):
                return [event.node] if event.node in self.present else []
            return self._answered(before, event, after) or waiting
        if not isinstance(event, MemberJoined) or event.member.node not in self.present:
            return waiting
        if isinstance(before.phase, Closing):
            return [event.member.node]
        if isinstance(before.phase, Holding) and isinstance(after.phase, Holding):
            return [event.member.node] if event.running is None else []
        active = isinstance(before.phase, Running | Draining) and not isinstance(after.phase, Finished)
        # Whoever had a place in the world before, and has none in a new one, is told to hold.
        placed = self.worlds[-2].nodes if after.world != before.world and len(self.worlds) > 1 else ()
        without = active and event.member.node not in (*self.worlds[-1].nodes, *placed)
        return [*waiting, event.member.node] if without else waiting

    def _answered(self, before: Job, event: MemberLeaving | StopRequested, after: Job) -> list[str]:
        """Who wants to go while all were asked to save already is told that it is heard, once."""
        if not isinstance(before.phase, Running) or not isinstance(after.phase, Running):
            return []
        known = before.phase.leaving == after.phase.leaving and before.phase.stop == after.phase.stop
        asked = before.phase.parting is not None and before.phase.parting.hear_until is None
        return [event.node] if asked and not known and event.node in self.present else []

    def _check_state(self, after: Job, now: float) -> None:
        if isinstance(after.phase, Finished):
            return
        if isinstance(after.phase, Closing):
            _require(set(after.nodes) == self.present.keys(), "the members are those present")
            return
        by_node = {member.node: (member.ports, member.warm) for member in after.members}
        _require(len(by_node) == len(after.members), "a node is a member once")
        mine = {node: (member.ports, member.warm) for node, member in self.present.items()}
        _require(by_node == mine, "the members are those present, with the ports they hold, as warm as they are")
        orders = [member.order for member in after.members]
        _require(orders == sorted(orders), "the members are in the order of joining")
        if isinstance(after.phase, Running | Draining):
            world = self.worlds[-1]
            _require(after.phase.finished == self.finished, "the ranks that ended are known")
            # Of a world that somebody else led, a charge may be known that its end was to lead to.
            inherited = len(self.worlds) <= self.inherited
            charges = len(after.history.charged)
            fine = world.restart_count == charges or (inherited and world.restart_count < charges)
            _require(fine, "every charge led to a world")
            for node in world.nodes:
                fine = node in self.present or node in self.absent or world.ranks(node) <= self.finished
                _require(fine, f"{node} is gone with unfinished workers, but the world runs on")
        if isinstance(after.phase, Gathering | Holding) and len(self.fit) >= self.required:
            able = all(self.present[node].ports for node in self.fit) and not self.absent
            quiet = isinstance(after.phase, Gathering) and now < after.phase.since + self.config.quiet_s
            doubt = bool(self.worlds) and self._doubt_until(self.worlds[-1]) is not None
            saving = self.clerk.is_waited_for(now, self.present)
            due = deadline(after)
            saving |= isinstance(after.phase, Holding) and bool(after.phase.leaving)
            # Of several things that are due, each has its turn.
            saving |= due is not None and due <= now
            _require(
                quiet or doubt or saving or not able, "a job that lacks nothing waits for nothing but the quiet time"
            )
        if isinstance(after.phase, Running) and self.config.level == Level.ELASTIC and not self.finished:
            size = len(self.worlds[-1].nodes)
            ready = len({node for node in self.welcome if self.present[node].warm} | set(self.worlds[-1].nodes))
            room = size < min(ready, self.config.max_nodes)
            # Either way there is another world soon.
            over = bool(after.phase.exits or after.phase.leaving)
            due = over or (after.phase.joined is not None and deadline(after) is not None)
            # Without a checkpoint nobody is taken in.
            due |= self.config.join_at_checkpoint and not self.clerk.can_ask(self)
            _require(not room or due, "a newcomer for whom there is room is not forgotten")
        if isinstance(after.phase, Draining):
            _require(self.config.level == Level.ELASTIC, "only an elastic job drains")

    def _check_words(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            _require(len(_words(command)) > len("because"), f"{command} gives a reason in words")


class Clerk:
    """The referee's own account of checkpoints: what was told of them, and what may follow from that."""

    # How long nodes may take to say how far their workers are, and workers may be held for the sake of newcomers.
    ANSWER_S, PATIENCE_S = 5.0, 600.0
    # How soon a ledger that could not be reached is asked again.
    AGAIN_S = 1.0
    # How long ranks may take to stage their parts, after the first of them, and how many checkpoints may lack parts.
    STAGED_S, MOST_LACKING = 660.0, 4
    # How many checkpoints the ledger knows.
    KEPT = 64

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.ledger: tuple[CheckpointRef, ...] = ()
        self.world: World | None = None
        self.closing = False
        self._forget()

    def _forget(self) -> None:
        """What is known of the checkpoints of one world begins anew."""
        self.savers: set[int] = set()
        # The ranks whose parts of a checkpoint are staged and written, by its step.
        self.staged: dict[int, set[int]] = {}
        self.written: dict[int, set[int]] = {}
        # When the first part of it was heard of.
        self.since: dict[int, float] = {}
        # The folders of those that are put together, by step; those that the ledger was asked to take; those that it
        # has taken and that have no name yet; those that are done with.
        self.prepared: dict[int, str] = {}
        self.entering: set[int] = set()
        self.entered: set[int] = set()
        self.settled: set[int] = set()
        # Of the ask that is open: its number, since when, who has said how far it is, where all save, since when they
        # hold there.
        self.number = 0
        self.asked_at: float | None = None
        self.reached: dict[str, int] = {}
        self.save_at: int | None = None
        self.held_at: float | None = None
        # Since when somebody who does not wait for ever wants the world to end.
        self.pressed_at: float | None = None
        # When the world was over.
        self.over_at: float | None = None
        self.resumed = False
        self.resume_from: CheckpointRef | None = None
        # What this step asks of rank 0's node, as far as it was not asked before.
        self._due_before: set[tuple[type, int]] = set()
        # Whether it was decided in this step what the world goes on from.
        self._decided = False
        # What was given up in this step, and what has its name since then, or had before.
        self._given_up: set[int] = set()
        self._named: set[int] = set()
        self.named: set[int] = set()

    def begin(self, commit: Commit, now: float, present: Iterable[str]) -> None:
        """A new world: what it goes on from, and what nobody waits for any more."""
        if self.world is not None and self.over_at is None:
            self.over_at = now
        _require(not self.is_waited_for(now, present), "a checkpoint that is being written is waited for")
        _require(commit.checkpoints == self.ledger, "the ledger is committed with the world")
        newest = self.ledger[0] if self.ledger else None
        _require(commit.world.resume_from == newest, "a world goes on from the newest checkpoint")
        self.world = commit.world
        self._forget()

    def change_leader(self, record: Record) -> None:
        self.ledger = record.checkpoints
        self._forget()

    @property
    def entries(self) -> tuple[tuple[CheckpointRef, ...], ...]:
        """What may be kept: the ledger, and the ledger with what it was asked to take."""
        return (self.ledger, *(self._with_entry(step) for step in self.prepared if step not in self.entered))

    def can_ask(self, referee: Referee) -> bool:
        """Whether all ranks are there and save checkpoints."""
        fine = self.world is not None and not referee.finished and not referee.absent
        return fine and self.world is not None and self.savers >= set(range(self.world.world_size))

    def is_old_word(self, event: SaveReport | SaveRequest) -> bool:
        """What comes from another generation, from a node that has no say in it, or for the second time."""
        world = self.world
        if world is None or event.generation != world.generation or event.node not in world.nodes:
            return True
        match event:
            case CheckpointerOpened(rank=rank):
                return rank not in world.ranks(event.node)
            case CheckpointerClosed(rank=rank):
                return rank not in world.ranks(event.node) or rank not in self.savers
            case RestoreFailed(rank=rank, name=name):
                named = (*self.ledger, world.resume_from, self.resume_from)
                known = any(each is not None and each.name == name for each in named)
                return rank not in world.ranks(event.node) or not known
            case ShardReported(shard=shard):
                return not self._counts(event.node, shard)
            case CheckpointPrepared(step=step):
                return event.node != world.nodes[0] or (Prepare, step) not in self.due
            case CheckpointPublished(step=step):
                return event.node != world.nodes[0] or (Publish, step) not in self.due
            case CheckpointsFound():
                return event.node != world.nodes[0] or self.resumed or world.resume_from is not None
            case StepsReached(number=number):
                return self.asked_at is None or self.save_at is not None or number != self.number
            case _:
                return False

    def _counts(self, node: str, shard: Shard) -> bool:
        """Whether this is news of a checkpoint that can still be made."""
        world, step = self.world, shard.step
        if world is None or shard.rank not in world.ranks(node) or self._is_over(step):
            return False
        known = self.staged if shard.part is Part.STAGED else self.written
        written = self._is_written(step) or step in self.entered
        return not written and shard.rank not in known.get(step, ())

    def _is_over(self, step: int) -> bool:
        """Whether a checkpoint is done with: something came of it, or nothing will."""
        generation = self.world.generation if self.world is not None else 0
        later = any(each.generation == generation and each.step > step for each in self.ledger)
        return step not in self.staged and (later or step in self.settled)

    def _is_written(self, step: int) -> bool:
        return self.world is not None and self.written.get(step, set()) >= set(range(self.world.world_size))

    def _ref(self, step: int) -> CheckpointRef:
        assert self.world is not None
        return CheckpointRef(step, self.world.generation, self.prepared[step])

    def _with_entry(self, step: int) -> tuple[CheckpointRef, ...]:
        return (self._ref(step), *(each for each in self.ledger if each != self._ref(step)))[: self.KEPT]

    @property
    def due(self) -> set[tuple[type, int]]:
        """What rank 0's node has to do."""
        prepare = {(Prepare, step) for step in self.written if self._is_written(step) and step not in self.prepared}
        return {*prepare, *((Publish, step) for step in self.entered)}

    def is_in_flight(self, present: Iterable[str]) -> bool:
        """Whether a checkpoint that all ranks have staged can still be finished."""
        world, here = self.world, set(present)
        if world is None or world.nodes[0] not in here:
            return False
        away = {rank for node in world.nodes if node not in here for rank in world.ranks(node)}
        everybody = set(range(world.world_size))
        return any(
            step in self.entered or (ranks >= everybody and self.written.get(step, set()) >= away)
            for step, ranks in self.staged.items()
        )

    def is_waited_for(self, now: float, present: Iterable[str]) -> bool:
        """Whether the next world has to wait for a checkpoint."""
        if self.over_at is None or now >= self.over_at + self.config.save_wait_s:
            return False
        return self.is_in_flight(present)

    def note(self, before: Job, event: Event, now: float, after: Job) -> None:
        """Write down what an event tells."""
        self._due_before, self._decided = self.due, False
        self._given_up, self._named = set(), set()
        match event:
            case MemberJoined() if self.world is not None and event.member.node in self.world.nodes:
                self._note_join(event, now, after)
            case (
                CheckpointerOpened()
                | CheckpointerClosed()
                | ShardReported()
                | StepsReached()
                | CheckpointPrepared()
                | CheckpointPublished()
            ):
                if not self.is_old_word(event):
                    self._note_save(event, now)
            case CheckpointEntered():
                self._note_entered(event)
            case CheckpointsFound() | RestoreFailed() if isinstance(before.phase, Running | Draining):
                if not self.is_old_word(event):
                    self._note_choice(before, event)
            case _:
                pass
        active = isinstance(after.phase, Running | Draining) and after.world == before.world
        if self.over_at is None and self.world is not None and not active:
            self.over_at = now

    def _note_join(self, joined: MemberJoined, now: float, after: Job) -> None:
        world, node = self.world, joined.member.node
        assert world is not None
        if joined.seen != world.generation:
            return
        self.savers = (self.savers - world.ranks(node)) | (set(joined.savers) & world.ranks(node))
        for shard in joined.shards:
            if self._counts(node, shard):
                self._note_shard(shard, now)
        if joined.found is not None and isinstance(after.phase, Running | Draining) and after.world == world:
            found = CheckpointsFound(node, world.generation, joined.found)
            if not self.is_old_word(found):
                self._note_choice(after, found)

    def _note_save(self, event: SaveReport, now: float) -> None:
        match event:
            case CheckpointerOpened(rank=rank):
                self.savers.add(rank)
            case CheckpointerClosed(rank=rank):
                self.savers.discard(rank)
            case ShardReported(shard=shard):
                self._note_shard(shard, now)
            case StepsReached(node=node, step=step):
                self.reached[node] = step
            case CheckpointPrepared(step=step, trouble=trouble) if trouble:
                self._give_up(step)
            case CheckpointPrepared(step=step, uri=uri):
                self.prepared[step] = uri
            case CheckpointPublished(step=step, pruned=pruned):
                self.ledger = tuple(each for each in self.ledger if each.name not in pruned)
                self._settle(*(each for each in self.staged if each <= step))
                self._named = {step}
                self.named.add(step)
                if self.save_at is not None and self.save_at <= step:
                    self.asked_at = None
            case _:
                assert_never(event)

    def _note_shard(self, shard: Shard, now: float) -> None:
        step, world = shard.step, self.world
        assert world is not None
        entry = [each for each in self.ledger if (each.generation, each.step) == (world.generation, step)]
        if entry:
            # Whoever led before had it entered.
            self.staged.setdefault(step, set())
            self.prepared[step] = entry[0].uri
            self.entered.add(step)
            return
        if shard.part is Part.MISSED:
            self._give_up(step)
            return
        self.since.setdefault(step, now)
        self.staged.setdefault(step, set()).add(shard.rank)
        if shard.part is Part.WRITTEN:
            self.written.setdefault(step, set()).add(shard.rank)
        for each in self.lacking:
            if each < step and shard.rank not in self.staged[each]:
                self._give_up(each)
        for each in self.lacking[: -self.MOST_LACKING]:
            self._give_up(each)

    @property
    def lacking(self) -> list[int]:
        """The checkpoints of which parts are not written."""
        return sorted(step for step in self.staged if not self._is_written(step) and step not in self.entered)

    @property
    def late_at(self) -> dict[int, float]:
        """Until when each that some ranks have not staged is waited for."""
        everybody = set(range(self.world.world_size)) if self.world is not None else set()
        return {step: self.since[step] + self.STAGED_S for step in self.lacking if self.staged[step] < everybody}

    def _give_up(self, step: int) -> None:
        """No checkpoint comes of it; if it is the one that ranks were asked for, they have no other answer."""
        asked = self.save_at
        if asked is not None and asked <= step and not any(asked <= each < step for each in self.staged):
            self.asked_at = None
        self._settle(step)
        self._given_up.add(step)

    def _settle(self, *steps: int) -> None:
        for each in steps:
            self.settled.add(each)
            for known in (self.staged, self.written, self.prepared, self.since):
                known.pop(each, None)
            self.entered.discard(each)

    def _note_entered(self, event: CheckpointEntered) -> None:
        world, step = self.world, event.step
        if world is None or event.generation != world.generation or step not in self.entering:
            return
        self.entering.discard(step)
        if not event.entered or step not in self.prepared:
            return
        self.ledger = self._with_entry(step)
        self.entered.add(step)
        overtaken = {each for each in self.staged if each < step and each not in self.entered}
        self._settle(*overtaken)
        self._given_up |= overtaken

    def _note_choice(self, job: Job, event: CheckpointsFound | RestoreFailed) -> None:
        if isinstance(event, CheckpointsFound):
            self.resumed = self._decided = True
            self.resume_from = event.found[0] if event.found else None
            self.ledger = self.ledger or event.found[: self.KEPT]
        elif isinstance(job.phase, Running):
            self.ledger = tuple(each for each in self.ledger if each.name != event.name)

    def check(
        self, before: Job, event: Event, now: float, after: Job, commands: tuple[Command, ...], *, referee: Referee
    ) -> None:
        """Raise ``BrokenRule`` unless what was done is what this account allows."""
        _require(after.checkpoints == self.ledger, f"the ledger is {self.ledger}, not {after.checkpoints}")
        _require(len(set(self.ledger)) == len(self.ledger), "a checkpoint is in the ledger once")
        for command in commands:
            if isinstance(command, Enter):
                self._check_enter(command)
        self._check_next_entry(before, event, after)
        worlds = (before.world, after.world)
        told = [(node, directive) for node, directive in sent(commands) if isinstance(directive, SaveDirective)]
        for _, directive in told:
            known = any(each is not None and each.generation == directive.generation for each in worlds)
            _require(known, f"{directive} is of the world that runs")
        same = after.world == before.world and not isinstance(after.phase, Finished)
        if isinstance(event, TimePassed) and same:
            self._note_late(now, after)
        if same and self.world is not None:
            self._check_last_words(before, event, told, referee)
        self._check_orders(event, told, referee, same=same)
        self._check_resume(event, after, told, referee, same=same)
        self._check_asks(before, event, told, now, referee)
        self._check_change(before, event, after, referee)
        self._check_end(before, event, now, after, referee)
        if same and isinstance(after.phase, Running):
            self._check_patience(before, event, now, after)
        else:
            self.held_at = self.asked_at = self.pressed_at = None
        due = deadline(after)
        if same and any(step not in self.entering | self.entered for step in self.prepared):
            _require(due is not None and due <= now + self.AGAIN_S, "the ledger is asked again")
        for late_at in self.late_at.values() if same else ():
            _require(due is not None and due <= late_at, "a part that does not come is not waited for")
        self.closing = isinstance(after.phase, Closing)

    def _check_enter(self, enter: Enter) -> None:
        world = self.world
        _require(world is not None and enter.generation == world.generation, "only the world that runs is entered")
        fine = enter.step in self.prepared and enter.step not in self.entered
        _require(fine, "the ledger takes what all ranks have written and rank 0's node has put together")
        _require(not self.entering, "the ledger is asked to take one after the other")
        _require(enter.checkpoints == self._with_entry(enter.step), "the newest is put before the others")
        self.entering.add(enter.step)

    def _check_next_entry(self, before: Job, event: Event, after: Job) -> None:
        """What was ready while the ledger took another one is not overtaken by what is ready later."""
        if isinstance(event, CheckpointEntered) and event.entered and after.world == before.world:
            waiting = [step for step in self.prepared if step not in self.entered]
            fine = not waiting or isinstance(after.phase, Finished) or min(waiting) in self.entering
            _require(fine, "the ledger takes the next one when it has taken one")

    def _note_late(self, now: float, after: Job) -> None:
        """What is given up because parts of it do not come: there may be nobody here to be told."""
        for at, late_at in self.late_at.items():
            if after.saves.find(at) is None:
                _require(now >= late_at, "a checkpoint that may still come is not given up")
                self._give_up(at)

    def _check_last_words(self, before: Job, event: Event, sends: _Told, referee: Referee) -> None:
        """All nodes are told what became of a checkpoint; and once more, if it seems that one did not hear it."""
        world = self.world
        assert world is not None
        told: dict[Settle | Drop, list[str]] = {}
        for node, each in sends:
            if isinstance(each, Settle | Drop):
                told.setdefault(each, []).append(node)
        for word in told:
            _require(self._is_over(word.step), "a checkpoint that may still come is not done with")
            entry = any((ref.generation, ref.step) == (world.generation, word.step) for ref in self.ledger)
            has_name = word.step in self.named or entry
            _require(has_name == isinstance(word, Settle), "nothing is removed of what is committed, and all else is")
        here = {node for node in world.nodes if node in referee.present}
        teller, shards = self._teller(event)
        again = {shard.step for shard in shards if self._is_over(shard.step)} if teller in here else set()
        news = self._given_up | self._named
        nodes = {word.step: who for word, who in told.items()}
        _require(len(nodes) == len(told), "all are told the same of a checkpoint")
        joiner = {event.member.node} if isinstance(event, MemberJoined) else set()
        for at in news | again | nodes.keys():
            # Who comes has to know of that only of which it has a part.
            who, wanted = nodes.get(at, []), here - joiner if at in news else set()
            wanted |= {teller} if at in again else set()
            # Some may be told and then be allowed to leave.
            most = wanted | set(before.nodes) if at in news else wanted
            fine = len(set(who)) == len(who) and wanted <= set(who) <= most
            _require(fine, f"{sorted(wanted)} are told what became of step {at}, not {who}")

    def _teller(self, event: Event) -> tuple[str, tuple[Shard, ...]]:
        """Who tells of which parts of the world that runs."""
        world = self.world
        assert world is not None
        match event:
            case ShardReported(node=node, generation=world.generation, shard=shard) if shard.rank in world.ranks(node):
                return node, (shard,)
            case MemberJoined(member=member, seen=world.generation, shards=shards) if member.node in world.nodes:
                return member.node, tuple(each for each in shards if each.rank in world.ranks(member.node))
            case _:
                return "", ()

    def _check_orders(self, event: Event, told: _Told, referee: Referee, *, same: bool) -> None:
        """Rank 0's node is told what it has to do, when that is known, and again when it comes back."""
        host = self.world.nodes[0] if self.world is not None else ""
        orders = [(node, each) for node, each in told if isinstance(each, Prepare | Publish)]
        due = self.due
        _require(all(node == host for node, _ in orders), "rank 0's node puts checkpoints together")
        done = {(type(each), each.step) for _, each in orders}
        _require(done <= due, "what is not written is not prepared, what is not entered is not published")
        _require(len(done) == len(orders), "rank 0's node is told once")
        back = isinstance(event, MemberJoined) and event.member.node == host
        expected = due if back else due - self._due_before
        if same and host in referee.present:
            _require(done == expected, f"rank 0's node is told of {expected}")

    def _check_resume(self, event: Event, after: Job, sends: _Told, referee: Referee, *, same: bool) -> None:
        """All ranks of a world that named none go on from the same."""
        told = {node: each for node, each in sends if isinstance(each, Resume)}
        for each in told.values() if same else ():
            fine = self.resumed and self.world is not None and self.world.resume_from is None
            _require(fine and each.checkpoint == self.resume_from, "all go on from what rank 0 found")
        if self.world is None or not same or not self.resumed or not isinstance(after.phase, Running | Draining):
            return
        here = {node for node in self.world.nodes if node in referee.present}
        if isinstance(event, MemberJoined) and not self._decided:
            here &= {event.member.node}
        elif not self._decided:
            here = set()
        _require(told.keys() == here, f"{sorted(here)} are told what they go on from")

    def _check_asks(self, before: Job, event: Event, told: _Told, now: float, referee: Referee) -> None:
        world = before.world
        if not told or world is None:
            return
        groups: dict[Pause | SaveAt, list[str]] = {}
        for node, directive in told:
            if isinstance(directive, Pause | SaveAt):
                groups.setdefault(directive, []).append(node)
        here = {node for node in world.nodes if node in referee.present}
        back = {event.member.node} if isinstance(event, MemberJoined) else set[str]()
        for directive, nodes in groups.items():
            # Some may be told and then be allowed to leave, also one that has just come back.
            fine = len(set(nodes)) == len(nodes) and here <= set(nodes) <= here | set(before.nodes) | back
            _require(fine, f"{directive} goes to {sorted(here)}, once each")
            if world != self.world:
                # It is over already.
                continue
            if isinstance(directive, Pause):
                _require(directive.number > self.number, "each ask has a number of its own")
                fine = self.can_ask(referee) and isinstance(before.phase, Running) and not before.phase.exits
                _require(fine, "only a world is asked to save all of whose ranks can")
                self.number, self.asked_at, self.reached, self.save_at = directive.number, now, {}, None
                self.held_at = None
            elif directive.step is None:
                self.asked_at = self.held_at = None
                self.number = directive.number
            else:
                fine = self.asked_at is not None and directive.number == self.number
                _require(fine and self.reached.keys() == set(world.nodes), "all say where they are before all save")
                _require(directive.step == max(self.reached.values()), "all save at the first step that all can")
                self.save_at = directive.step
                self.held_at = now if directive.hold else None

    def _check_change(self, before: Job, event: Event, after: Job, referee: Referee) -> None:
        """A planned change of a world whose ranks can save comes after a checkpoint, or after its time."""
        if not isinstance(before.phase, Running) or after.world != before.world:
            return
        drains = isinstance(after.phase, Draining)
        if drains and self.config.join_at_checkpoint:
            newest = self.ledger[0] if self.ledger else None
            there = newest is not None and self.world is not None and newest.generation == self.world.generation
            _require(there, "nobody joins without a checkpoint")
        asked = before.phase.parting is not None
        gentle = isinstance(event, StopRequested) and event.signal == signal.SIGTERM and before.phase.stop is None
        planned = drains or gentle or isinstance(event, MemberLeaving)
        ended = not isinstance(after.phase, Running)
        # A hang that is found at the same moment ends the world without that.
        able = self.can_ask(referee) and not before.phase.exits and before.phase.hang is None
        if planned and ended and able:
            _require(asked, "all ranks are asked to save before a planned change")

    def _check_patience(self, before: Job, event: Event, now: float, after: Job) -> None:
        """Nobody is left waiting: for an answer, for a checkpoint that does not come, for a change nobody wants."""
        phase = after.phase
        assert isinstance(phase, Running)
        due = deadline(after)
        here = set(after.nodes) & set(self.world.nodes if self.world is not None else ())
        if after.saves.ask is None and not set(self.world.nodes if self.world is not None else ()) & set(before.nodes):
            # There was nobody to be told that it is called off.
            self.asked_at = None
        if self.asked_at is not None:
            later = [ranks for step, ranks in self.staged.items() if self.save_at is not None and step >= self.save_at]
            gone = set(range(self.world.world_size if self.world is not None else 0)) - self.savers
            _require(gone <= set().union(*later), "nobody waits for the answer of who saves no more")
        if self.asked_at is not None and self.save_at is None:
            late = isinstance(event, TimePassed) and now >= self.asked_at + self.ANSWER_S
            fine = due is not None and not late if here else True
            _require(fine, "who does not answer in time is not waited for")
            self.asked_at = None if late else self.asked_at
        if phase.stop is not None or (phase.leave_at is not None and now >= phase.leave_at):
            self.pressed_at = now if self.pressed_at is None else self.pressed_at
            # The shell may ask late, and be told what is due by then.
            in_time = due is not None and due <= max(self.pressed_at + self.config.drain_s, now)
            _require(in_time, "a leave, or the end, is not kept waiting for a checkpoint for long")
        if self.held_at is None or not here:
            # Who has no stream lets its workers go.
            self.held_at = None
            return
        wanted = phase.leaving or phase.stop is not None or phase.joined is not None
        _require(wanted, "workers are let go when nobody wants a change any more")
        limit = max(self.held_at + max(self.config.drain_s, self.PATIENCE_S), now + self.config.quiet_s)
        _require(phase.exits or (due is not None and due <= limit), "nobody is held for ever")

    def _check_end(self, before: Job, event: Event, now: float, after: Job, referee: Referee) -> None:
        """An end waits for a checkpoint that is being written, but not for long."""
        saving = isinstance(after.phase, Closing | Finished) and self.is_in_flight(referee.present)
        hurried = isinstance(event, StopRequested) and event.signal in (signal.SIGINT, signal.SIGQUIT)
        match after.phase:
            case Holding(leaving=leaving, leave_by=float(until)) if leaving:
                # Of several things that are due, each has its turn.
                due = deadline(after)
                in_time = now < until or (due is not None and due <= now)
                stays = in_time and self.is_in_flight(referee.present)
                _require(stays, "who leaves stays for nothing but a checkpoint")
                _require(until <= self._leave_by(before, now), "who leaves does not stay for long")
            case Holding(leaving=leaving):
                _require(not leaving, "who leaves does not stay for ever")
            case Closing(outcome=outcome, until=until):
                _require(not hurried, "who is in a hurry is not kept")
                _require(saving and now < until, "an end waits for nothing but a checkpoint")
                _require(self.over_at is not None and deadline(after) is not None, "an end does not wait for ever")
                if isinstance(before.phase, Closing):
                    asked = isinstance(event, MemberLeaving) and event.node in before.nodes
                    asked |= isinstance(event, StopRequested)
                    fine = until == min(before.phase.until, now + self.config.drain_s if asked else before.phase.until)
                elif isinstance(outcome, Stopped):
                    fine = until <= self._leave_by(before, now)
                else:
                    fine = until == now + self.config.save_wait_s
                _require(fine, "an end waits no longer than it may")
            case Finished(outcome=Succeeded() | Failed()) if not isinstance(before.phase, Closing):
                _require(not saving or not self.config.save_wait_s, "an end waits for a checkpoint")
            case Finished() if not isinstance(before.phase, Closing):
                late = now >= self._leave_by(before, now)
                _require(hurried or not saving or late, "an end waits for a checkpoint")
            case Finished():
                over = isinstance(before.phase, Closing) and now >= before.phase.until
                over |= isinstance(event, MemberLeaving | StopRequested) and not self.config.drain_s
                _require(hurried or over or not saving, "an end waits for a checkpoint")
            case _:
                pass

    def _leave_by(self, before: Job, now: float) -> float:
        """Until when a checkpoint may keep whoever asked for an end, or to leave."""
        match before.phase:
            case Running(parting=Parting(until=until)) | Holding(leave_by=float(until)):
                return until
            case _:
                return now + self.config.drain_s


def is_last_word(command: Command) -> bool:
    """Whether it tells a node what became of a checkpoint."""
    return isinstance(command, Send) and isinstance(command.directive, Settle | Drop)


def _belongs(exit: WorkerExit, world: World) -> bool:
    return exit.generation == world.generation and exit.rank in world.ranks(exit.node)


def _words(command: Command) -> str:
    match command:
        case Commit(world=world):
            return world.reason
        case Keep(finished=finished):
            return f"finished: {sorted(finished)}"
        case Conclude(outcome=outcome) | Send(directive=Halt(outcome=outcome)):
            return outcome.reason
        case Send(directive=Run(assignment=assignment)):
            return assignment.reason
        case Send(directive=Drain(reason=reason) | Hold(reason=reason) | Wait(reason=reason)) | Tell(reason=reason):
            return reason
        case Send(directive=Dump(reason=reason) | Check(reason=reason)):
            return reason
        case Send(directive=Explain(verdict=verdict)):
            return verdict.decision
        case Send(directive=Pause(reason=reason) | SaveAt(reason=reason) | Drop(why=reason)):
            return reason
        case Send(directive=Prepare() | Publish() | Settle() | Resume()) | Enter():
            return str(command)
        case _:
            raise AssertionError(f"unhandled value: {command!r}")


def _require(condition: object, rule: str) -> None:
    if not condition:
        raise BrokenRule(rule)


@dataclass(slots=True)
class Desk:
    """What one node keeps in mind of the checkpoints of its world."""

    savers: set[int] = field(default_factory=set)
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    found: tuple[CheckpointRef, ...] | None = None


class Story:
    """One job driven by hand: the nodes' side is played, time is a number, the referee watches every step."""

    def __init__(self, config: JobConfig, act: Act = step) -> None:
        self.now = 0.0
        self.job = begin(config, self.now)
        self.referee = Referee(config)
        # What the last step asked for.
        self.commands: tuple[Command, ...] = ()
        self.told: list[Event] = []
        # What is committed, whether the ledger can be reached, and its answers that are on their way.
        self.record = Record()
        self.ledger_answers = True
        self.answers: list[CheckpointEntered] = []
        # What each node would tell of its checkpoints to whoever leads next.
        self.desks: dict[str, Desk] = {}
        # Whether every step so far kept the rules.
        self.sound = True
        self._act = act
        self._orders = count(1)
        self._ports = count(29500)

    @property
    def generation(self) -> int:
        return self.job.world.generation if self.job.world is not None else 0

    @property
    def last(self) -> Event | None:
        return self.told[-1] if self.told else None

    def tell(self, event: Event) -> None:
        before = self.job
        self.told.append(event)
        self._remember(event)
        self.job, self.commands = self._act(before, event, self.now)
        for command in self.commands:
            self._perform(command)
        try:
            self.referee.watch(before, event, self.now, self.job, self.commands)
        except BrokenRule as broken:
            self.sound = False
            events = "\n  ".join(str(each) for each in self.told)
            raise BrokenRule(f"{broken}; {before.config} was told:\n  {events}") from None

    def _perform(self, command: Command) -> None:
        """What the coordinator does at once: the truth is what it wrote."""
        match command:
            case Commit(world=world, history=history, inquest=inquest, checkpoints=checkpoints):
                self.record = Record(world, history, inquest=inquest, checkpoints=checkpoints)
                self.desks.clear()
            case Keep(finished=finished, history=history, inquest=inquest, checkpoints=checkpoints):
                kept = replace(self.record, finished=finished, history=history)
                self.record = replace(kept, inquest=inquest, checkpoints=checkpoints)
            case Enter(generation=generation, step=step, checkpoints=checkpoints):
                if self.ledger_answers:
                    self.record = replace(self.record, checkpoints=checkpoints)
                self.answers.append(CheckpointEntered(generation, step, self.ledger_answers))
            case Conclude(outcome=outcome):
                self.record = replace(self.record, outcome=outcome)
            case Send(node=node, directive=Settle(generation=self.generation, step=step)):
                shards = self.desk(node).shards
                self.desk(node).shards = {key: shard for key, shard in shards.items() if shard.step > step}
            case Send(node=node, directive=Drop(generation=self.generation, step=step)):
                shards = self.desk(node).shards
                self.desk(node).shards = {key: shard for key, shard in shards.items() if shard.step != step}
            case _:
                pass

    def _remember(self, event: Event) -> None:
        """What the agent that reports this keeps in mind."""
        match event:
            case CheckpointerOpened(node=node, generation=self.generation, rank=rank):
                self.desk(node).savers.add(rank)
            case CheckpointerClosed(node=node, generation=self.generation, rank=rank):
                self.desk(node).savers.discard(rank)
            case ShardReported(node=node, generation=self.generation, shard=shard):
                self.desk(node).shards[shard.rank, shard.step] = shard
            case CheckpointsFound(node=node, generation=self.generation, found=found):
                self.desk(node).found = found
            case _:
                pass

    def desk(self, node: str) -> Desk:
        return self.desks.setdefault(node, Desk())

    def change_leader(self) -> None:
        """Somebody else leads: it goes on from what was committed, and has heard of nobody yet."""
        self.told.append(TimePassed())
        self.answers.clear()
        self.job = resume(self.job.config, self.record, self.now)
        self.referee.change_leader(self.record)

    def come_back(self, node: str, running: int | None = None, **state: Any) -> None:
        """An agent of the world on a new stream, with all that it has to tell."""
        desk, generation = self.desk(node), self.generation
        self.join(
            node,
            generation if running is None else running,
            seen=generation,
            savers=tuple(sorted(desk.savers)),
            shards=tuple(desk.shards.values()),
            found=desk.found,
            **state,
        )

    def fresh_ports(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ports) for _ in range(number))

    def join(
        self,
        node: str,
        running: int | None = None,
        *,
        slots: int = 1,
        ports: int = 9,
        seen: int | None = None,
        exits: tuple[WorkerExit, ...] = (),
        warm: bool = True,
        checking: bool = False,
        savers: tuple[int, ...] = (),
        shards: tuple[Shard, ...] = (),
        found: tuple[CheckpointRef, ...] | None = None,
    ) -> None:
        """A node comes, or comes again: then it still holds the ports that no world has taken."""
        held = self.referee.present[node].ports if node in self.referee.present else ()
        offer = (*held, *self.fresh_ports(max(0, ports - len(held))))
        joiner = replace(member(node, order=next(self._orders), slots=slots, ports=offer), warm=warm)
        self.tell(MemberJoined(joiner, running, seen, exits, checking, savers, shards, found))

    def exit(self, rank: int, code: int = 0, *, signal: int | None = None, generation: int | None = None) -> None:
        """The worker with this rank ends, on the node where it runs."""
        number = self.generation if generation is None else generation
        self.tell(WorkerExited(exit_of(rank, code, signal=signal, node=self.node_of(rank), generation=number)))

    def node_of(self, rank: int) -> str:
        world = self.job.world
        return next((node for node in world.nodes if rank in world.ranks(node)), "nobody") if world else "nobody"

    def report(self, rank: int, step: int, part: Part, generation: int | None = None, why: str = "") -> None:
        """What has become of a rank's part of a checkpoint."""
        number = self.generation if generation is None else generation
        self.tell(ShardReported(self.node_of(rank), number, Shard(rank, step, part, why)))

    def wait(self, seconds: float) -> None:
        """Time passes, and the machine is asked at each deadline that it named."""
        end = self.now + seconds
        while (due := deadline(self.job)) is not None and due <= end:
            self.pass_deadline()
        self.now = end
        self.tell(TimePassed())

    def pass_deadline(self) -> None:
        """Time passes until the next deadline; being asked then must lead somewhere."""
        before, due = self.job, deadline(self.job)
        if due is None:
            return
        self.now = max(self.now, due)
        self.tell(TimePassed())
        _require(self.job != before, f"a deadline leads somewhere, but nothing happened in {outline(before)}")

    def play(self, script: str) -> str:
        """Act out lines such as ``join a b; wait 3; fail 0:9; lose b`` and give the outline of the end.

        A verb is done to each of its words in turn. ``0:9`` is rank 0 with code 9, ``@2`` names a generation.
        """
        for line in script.split(";"):
            verb, *words = line.split()
            if verb == "repeat":
                self.tell(self.told[-1])
            for word in words:
                self._verbs[verb](word)
        return outline(self.job)

    @cached_property
    def _verbs(self) -> dict[str, Callable[[str], None]]:
        return {
            "join": lambda node: self.join(*_at(node)),
            "join-without-ports": lambda node: self.join(node, ports=0),
            "offer": lambda node: self.tell(PortsOffered(node, self.fresh_ports(1))),
            "join-cold": lambda node: self.join(node, warm=False),
            "join-behind": lambda node: self.join(node, seen=self.generation - 1),
            "ready": lambda node: self.tell(MemberReady(node)),
            "hush": lambda node: self.tell(MemberSilent(node, "its stream broke")),
            "sever": lambda _: self.tell(Severed("etcd is out of reach and a node is silent")),
            "lose": lambda node: self.tell(MemberLost(node, "its stream broke")),
            "give-up": lambda node: self.tell(MemberLost(node, "its lease ended", proven=False)),
            "stopped": self._stopped,
            "leave": lambda node: self.tell(MemberLeaving(node, signal.SIGTERM)),
            "stop": lambda node: self.tell(StopRequested(node, signal.SIGINT)),
            "term": lambda node: self.tell(StopRequested(node, signal.SIGTERM)),
            "lead": lambda _: self.change_leader(),
            "back": self.come_back,
            "behind": lambda node: self.join(node, self.generation - 1, seen=self.generation - 1),
            "saver": lambda rank: self.tell(CheckpointerOpened(self.node_of(int(rank)), self.generation, int(rank))),
            "closed": lambda rank: self.tell(CheckpointerClosed(self.node_of(int(rank)), self.generation, int(rank))),
            "want": lambda node: self.tell(SaveWanted(node, self.generation, "every 10 minutes")),
            "reached": self._reached,
            "staged": lambda word: self._reported(word, Part.STAGED),
            "written": lambda word: self._reported(word, Part.WRITTEN),
            "missed": lambda word: self._reported(word, Part.MISSED),
            "stage": lambda step: self._all_report(int(step), Part.STAGED),
            "write": lambda step: self._all_report(int(step), Part.WRITTEN),
            "prepared": self._prepared,
            "spoilt": lambda step: self._prepared(step, "the disk is full"),
            "entered": lambda step: self._entered(int(step), entered=True),
            "not-entered": lambda step: self._entered(int(step), entered=False),
            "published": self._published,
            "checkpoint": self._checkpoint,
            "found": self._found,
            "unrestored": self._not_restored,
            "drained": self._drained,
            "ok": lambda rank: self._exited(rank, 0),
            "fail": lambda rank: self._exited(rank, 1),
            "kill": lambda rank: self.exit(int(rank), signal=signal.SIGKILL),
            "crash": lambda rank: self.exit(int(rank), signal=signal.SIGSEGV),
            "wait": lambda seconds: self.wait(float(seconds)),
            "due": lambda _: self.pass_deadline(),
            "progress": self._progressed,
            "dumped": self._dumped,
            "fit": lambda node: self.tell(NodeChecked(node)),
            "unfit": lambda node: self.tell(NodeChecked(node, "its disk is full")),
            "clear": lambda node: self.tell(NodeCleared(node)),
        }

    def _reached(self, word: str) -> None:
        """``a:12``: no worker of node a gets beyond step 12; ``a:12:1``: that is the answer to the first ask."""
        node, step, *number = word.split(":")
        asked = int(number[0]) if number else self.job.saves.asked
        self.tell(StepsReached(node, self.generation, asked, int(step)))

    def _reported(self, word: str, part: Part) -> None:
        """``0:40``: of rank 0, at step 40."""
        head, generation = _at(word)
        rank, step = head.split(":")
        self.report(int(rank), int(step), part, generation, "the disk is full" if part is Part.MISSED else "")

    def _all_report(self, step: int, part: Part) -> None:
        world = self.job.world
        for rank in range(world.world_size if world is not None else 0):
            self.report(rank, step, part)

    def _prepared(self, word: str, trouble: str = "") -> None:
        """``40``: by rank 0's node; ``40:b``: by node b."""
        step, node = self._host(word)
        uri = "" if trouble else checkpoint(step, self.generation).uri
        self.tell(CheckpointPrepared(node, self.generation, step, uri, trouble))

    def _published(self, word: str) -> None:
        step, node = self._host(word)
        self.tell(CheckpointPublished(node, self.generation, step))

    def _checkpoint(self, step: str) -> None:
        """All that it takes."""
        self.play(f"write {step}; prepared {step}; entered {step}; published {step}")

    def _host(self, word: str) -> tuple[int, str]:
        step, _, node = word.partition(":")
        return int(step), node or self.node_of(0)

    def _entered(self, step: int, *, entered: bool) -> None:
        self.answers = [each for each in self.answers if each.step != step]
        self.tell(CheckpointEntered(self.generation, step, entered))

    def _found(self, word: str) -> None:
        """``a:30:20``: what rank 0 found, on node a; ``a``: nothing."""
        node, *steps = word.split(":")
        self.tell(CheckpointsFound(node, self.generation, tuple(checkpoint(int(step), 0) for step in steps)))

    def _not_restored(self, word: str) -> None:
        """``0:step-30-1``: rank 0 can't load this one."""
        rank, name = word.split(":")
        self.tell(RestoreFailed(self.node_of(int(rank)), self.generation, int(rank), name, "a checksum is wrong"))

    def _drained(self, word: str) -> None:
        node, generation = _at(word)
        self.tell(NodeDrained(node, self.generation if generation is None else generation))

    def _stopped(self, word: str) -> None:
        node, generation = _at(word)
        number = self.generation if generation is None else generation
        self.tell(NodeStopped(node, number, "it is cut off"))

    def _progressed(self, word: str) -> None:
        """``a:3:4``: the workers of node a have made so many steps."""
        node, *counts = word.split(":")
        self.tell(NodeProgressed(node, self.generation, tuple(Mark(int(each), int(each)) for each in counts)))

    def _dumped(self, word: str) -> None:
        """``a:wait:work``: what the workers of node a are doing."""
        node, *doing = word.split(":")
        world = self.job.world
        assert world is not None
        stacks = tuple(
            StackReport(rank, "train.py:7 in train", "all_reduce" if what == "wait" else "", "stack", f"{rank}.txt")
            for rank, what in zip(sorted(world.ranks(node)), doing, strict=True)
        )
        self.tell(StacksDumped(node, self.generation, stacks))

    def _exited(self, word: str, default: int) -> None:
        head, generation = _at(word)
        rank, _, code = head.partition(":")
        self.exit(int(rank), int(code) if code else default, generation=generation)


def _at(word: str) -> tuple[str, int | None]:
    head, _, generation = word.partition("@")
    return head, int(generation) if generation else None
