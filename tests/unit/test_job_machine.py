"""Whatever happens, in whatever order: the rules of ``testing.Referee`` hold, and a job never gets stuck.

The same machine is run against steps that are broken on purpose, to show that it would notice.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.events import (
    Commit,
    Event,
    MemberJoined,
    MemberLeaving,
    MemberLost,
    NodeDrained,
    PortsOffered,
    Send,
    StopRequested,
    TimePassed,
    WorkerExited,
)
from elastic_adapter.core.job import Draining, Finished, Gathering, Holding, Job, Running, Step, deadline, step
from elastic_adapter.core.model import Hold, Level, Run, Succeeded, World
from elastic_adapter.core.restart import History, RestartPolicy
from elastic_adapter.core.testing import Act, BrokenRule, Story, exit_of, job_config

NODES = ("a", "b", "c", "d", "e", "f")


@st.composite
def configs(draw: st.DrawFn) -> JobConfig:
    level = draw(st.sampled_from(Level))
    fewest = draw(st.integers(1, 4))
    return job_config(
        level,
        (fewest, draw(st.integers(fewest, 4))),
        max_restarts=0 if level == Level.OFF else draw(st.integers(0, 4)),
        quiet_s=draw(st.sampled_from([0.0, 3.0])),
        drain_s=draw(st.sampled_from([0.0, 30.0])),
        hold_timeout_s=draw(st.sampled_from([None, 60.0])),
    )


class JobMachine(RuleBasedStateMachine):
    """Nodes, workers, messages and time at random. ``act`` is the step under test."""

    act: Act = staticmethod(step)

    @initialize(config=configs(), reports=st.booleans())
    def begin(self, config: JobConfig, reports: bool) -> None:
        self.story = Story(config, self.act)
        self.heard: list[Event] = []
        self.reports_drained = reports

    def tell(self, event: Event) -> None:
        self.heard.append(event)
        self.story.tell(event)

    def goes_on(self) -> bool:
        return not isinstance(self.story.job.phase, Finished)

    @property
    def world(self) -> World | None:
        return self.story.job.world

    def pick(self, data: st.DataObject, present: bool) -> str:
        here = self.story.referee.present
        return data.draw(st.sampled_from([node for node in NODES if (node in here) is present]))

    @precondition(lambda self: self.goes_on() and len(self.story.referee.present) < len(NODES))
    @rule(data=st.data(), slots=st.integers(1, 3), ports=st.integers(0, 2))
    def join(self, data: st.DataObject, slots: int, ports: int) -> None:
        self.story.join(self.pick(data, present=False), slots=slots, ports=ports)

    @precondition(lambda self: self.goes_on() and self.story.referee.present)
    @rule(data=st.data(), lag=st.integers(0, 1), ports=st.integers(0, 2))
    def come_again(self, data: st.DataObject, lag: int, ports: int) -> None:
        """The same agent on a new stream: its workers are those of the world, or older ones, or none."""
        node = self.pick(data, present=True)
        slots = self.story.referee.present[node].slots
        self.story.join(node, slots=slots, ports=ports, running=self.story.generation - lag or None)

    @precondition(lambda self: self.goes_on() and self.story.referee.present)
    @rule(data=st.data(), planned=st.booleans())
    def go(self, data: st.DataObject, planned: bool) -> None:
        node = self.pick(data, present=True)
        self.tell(MemberLeaving(node, signal.SIGTERM) if planned else MemberLost(node, "its stream broke"))

    @precondition(lambda self: self.goes_on() and self.world is not None)
    @rule(data=st.data(), status=st.sampled_from([0, 1, 9, 137]))
    def exit(self, data: st.DataObject, status: int) -> None:
        rank = data.draw(st.integers(0, self.world.world_size - 1))
        self.story.exit(rank, status, signal=9 if status == 137 else None)
        self.heard.append(self.story.last)

    @precondition(lambda self: self.goes_on() and self.world is not None)
    @rule(data=st.data())
    def finish_node(self, data: st.DataObject) -> None:
        """All workers of one node end with code 0."""
        node = data.draw(st.sampled_from(self.world.nodes))
        for rank in sorted(self.world.ranks(node)):
            self.story.exit(rank)

    @precondition(lambda self: isinstance(self.story.job.phase, Draining))
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        self.tell(NodeDrained(data.draw(st.sampled_from(self.world.nodes)), self.story.generation))

    @precondition(lambda self: self.goes_on() and self.story.referee.present)
    @rule(data=st.data(), number=st.integers(0, 2))
    def offer(self, data: st.DataObject, number: int) -> None:
        """Ports that replace the earlier ones; an offer of none takes them back."""
        self.story.tell(PortsOffered(self.pick(data, present=True), self.story.fresh_ports(number)))

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; the shell may be late and ask only after several deadlines."""
        self.story.now += seconds
        self.tell(TimePassed())

    @precondition(lambda self: deadline(self.story.job) is not None)
    @rule()
    def pass_deadline(self) -> None:
        self.story.pass_deadline()

    @rule(node=st.sampled_from(NODES), rank=st.integers(0, 12), code=st.integers(0, 1), lag=st.integers(-1, 2))
    def stray(self, node: str, rank: int, code: int, lag: int) -> None:
        """Messages of other generations, and of ranks and nodes that may not be there."""
        generation = self.story.generation - lag
        if lag:
            self.tell(NodeDrained(node, generation))
        if node not in self.story.referee.present:
            self.tell(MemberLost(node, "the stream of a stranger broke"))
        self.tell(WorkerExited(exit_of(rank, code, node=node, generation=generation)))

    @rule(meant=st.integers(0, 9))
    def stop(self, meant: int) -> None:
        if meant == 9:
            self.tell(StopRequested("a", signal.SIGINT))

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def hear_again(self, data: st.DataObject) -> None:
        """A message comes a second time, perhaps much later."""
        self.story.tell(data.draw(st.sampled_from(self.heard)))

    @precondition(lambda self: self.heard and self.heard[-1] is self.story.last)
    @rule()
    def hear_twice(self) -> None:
        """A message that comes twice in a row does nothing the second time."""
        before = self.story.job
        if not isinstance(self.heard[-1], TimePassed):
            self.story.tell(self.heard[-1])
            assert (self.story.job, self.story.commands) == (before, ()), f"{self.heard[-1]} counted twice"

    @precondition(lambda self: not self.goes_on())
    @rule(node=st.sampled_from(NODES))
    def join_after_the_end(self, node: str) -> None:
        self.story.join(node)

    def teardown(self) -> None:
        """Once the faults stop, the job comes to rest in a world, at the end, or in want of nodes."""
        if not hasattr(self, "story") or not self.story.sound:
            return
        self.calm_down()
        job, referee = self.story.job, self.story.referee
        present = len(referee.present)
        match job.phase:
            case Draining():
                raise BrokenRule("a drain ends")
            case Gathering() | Holding():
                if present >= referee.required:
                    raise BrokenRule(f"{present} nodes are here, {referee.required} are enough, and yet: {job.phase}")
                if isinstance(job.phase, Holding) and job.config.hold_timeout_s is not None:
                    raise BrokenRule("holding ends after the hold timeout")
            case Running():
                self.run_to_the_end(job)
            case Finished():
                pass

    def calm_down(self) -> None:
        """Agents without a port offer one, those that drain report it, and deadlines pass: nothing else."""
        for _ in range(8):
            for node, member in tuple(self.story.referee.present.items()):
                if not member.ports:
                    self.story.tell(PortsOffered(node, self.story.fresh_ports(1)))
            if self.reports_drained and isinstance(self.story.job.phase, Draining):
                for node in self.world.nodes:
                    self.story.tell(NodeDrained(node, self.story.generation))
            self.story.pass_deadline()
        if deadline(self.story.job) is not None:
            raise BrokenRule("deadlines come to an end")

    def run_to_the_end(self, job: Job) -> None:
        present = len(self.story.referee.present)
        if job.config.level == Level.ELASTIC and not self.story.referee.finished:
            size = len(self.world.nodes)
            if size != min(present, job.config.max_nodes):
                raise BrokenRule(f"newcomers are forgotten: {size} of {present} nodes run")
        for rank in range(self.world.world_size):
            self.story.exit(rank)
        assert self.story.job.phase == Finished(Succeeded())


LIMITS = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

JobMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, phases=(Phase.generate, Phase.shrink), **LIMITS
)
TestJobMachine = JobMachine.TestCase
