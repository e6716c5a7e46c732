"""Whatever happens, in whatever order: the rules of ``testing.Referee`` hold, and a job never gets stuck.

The same machine is run against steps that are broken on purpose, to show that it would notice.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from elastic_adapter.core import hang
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.events import (
    CheckpointEntered,
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    Commit,
    Enter,
    Event,
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
    TimePassed,
    WorkerErred,
    WorkerExited,
)
from elastic_adapter.core.job import Step, step
from elastic_adapter.core.model import (
    Drop,
    Dump,
    Explain,
    Hold,
    Level,
    Mark,
    Member,
    Part,
    Prepare,
    Publish,
    Resume,
    Run,
    SaveAt,
    Settle,
    Shard,
    StackReport,
    Succeeded,
    Wait,
    World,
)
from elastic_adapter.core.restart import History, RestartPolicy
from elastic_adapter.core.state import Closing, Draining, Finished, Gathering, Holding, Job, Running, deadline
from elastic_adapter.core.testing import Act, BrokenRule, Story, checkpoint, exit_of, is_last_word, job_config

NODES = ("a", "b", "c", "d", "e", "f")
# A rule's own choices: those can be made simpler by hypothesis when a rule is broken.
CHOICES = st.randoms()
# The choices of a burst: many and fast.
SEEDS = st.integers(0, 2**32)


def some_config(rng: Random) -> JobConfig:
    level = rng.choice((Level.OFF, Level.FAULT_TOLERANT, Level.ELASTIC, Level.ELASTIC))
    fewest = rng.randint(1, 4)
    return job_config(
        level,
        (fewest, rng.randint(fewest, 4)),
        max_restarts=0 if level == Level.OFF else rng.randint(0, 4),
        quiet_s=rng.choice((3.0, 0.0)),
        drain_s=rng.choice((30.0, 0.0)),
        hold_timeout_s=rng.choice((None, 60.0)),
        leave_gather_s=rng.choice((0.0, 0.2)),
        blame_s=rng.choice((0.0, 0.25)),
        isolation_s=rng.choice((0.0, 20.0)),
        exclude_after=rng.choice((0, 0, 1, 2)),
        check_after=rng.choice((0, 0, 1, 2)),
        hang_timeout_s=rng.choice((None, None, 40.0)),
        start_timeout_s=rng.choice((None, None, 70.0)),
        join_at_checkpoint=rng.random() < 0.3,
        save_wait_s=rng.choice((30.0, 30.0, 0.0)),
    )


class JobMachine(RuleBasedStateMachine):
    """Nodes, workers, messages and time at random. ``act`` is the step under test."""

    act: Act = staticmethod(step)
    # How often something about checkpoints happens, for each time that something else does.
    saving = 1.0

    @initialize(rng=CHOICES, seed=SEEDS, length=st.integers(0, 100))
    def first(self, rng: Random, seed: int, length: int) -> None:
        self.begin(rng)
        self.burst(seed, length)

    def begin(self, rng: Random) -> None:
        """Some nodes come at the start; most often that makes a first world."""
        config = some_config(rng)
        self.story = Story(config, self.act)
        self.reports_drained = rng.random() < 0.5
        # Whether nodes do what they are asked to do about checkpoints once the faults stop.
        self.saves = rng.random() < 0.7
        # How far beyond the step that they are asked to save at ranks do so.
        self.stride = rng.choice((0, 0, 3))
        # Whether a checkpoint is being written when all workers end.
        self.stages_last = bool(self.saving) and rng.random() < 0.5
        # What may be heard again: ports are left out, because an agent never offers a used one again.
        self.heard: list[Event] = []
        for node in NODES[: config.min_nodes + rng.choice((0, 0, 1, 2, -1))]:
            self.story.join(node, slots=rng.randint(1, 3), ports=rng.choice((1, 1, 2, 0)))
        self.story.pass_deadline()

    @rule(seed=SEEDS, length=st.integers(1, 100))
    def burst(self, seed: int, length: int) -> None:
        """Much happens in a short time."""
        rng = Random(seed)
        for _ in range(length):
            over = isinstance(self.story.job.phase, Finished) and rng.random() < 0.3
            happenings = SAVING if rng.random() < self.saving / (1 + self.saving) else HAPPENINGS
            getattr(self, "end" if over else rng.choice(happenings))(rng)

    @rule(rng=CHOICES)
    def join(self, rng: Random) -> None:
        if absent := [node for node in NODES if node not in self.present and node not in self.silent]:
            node = rng.choice(absent)
            warm = rng.random() < 0.8
            self.story.join(node, slots=rng.randint(1, 3), ports=rng.choice((1, 1, 2, 0)), warm=warm)

    @rule(rng=CHOICES)
    def grow(self, rng: Random) -> None:
        """A node comes that could start at once, and it is time for it to be taken in."""
        self.offer_where_none()
        if absent := [node for node in NODES if node not in self.present and node not in self.silent]:
            self.story.join(rng.choice(absent), slots=rng.randint(1, 3), ports=1)
            self.story.pass_deadline()

    @rule(rng=CHOICES)
    def get_ready(self, rng: Random) -> None:
        if self.present:
            self.tell(MemberReady(rng.choice(sorted(self.present))))

    @rule(rng=CHOICES)
    def fall_silent(self, rng: Random) -> None:
        if self.present:
            self.tell(MemberSilent(rng.choice(sorted(self.present)), "its stream broke"))

    @rule(rng=CHOICES)
    def return_or_not(self, rng: Random) -> None:
        """A silent node comes back in one of the states that it may be in, or is given up."""
        if self.silent:
            node = rng.choice(sorted(self.silent))
            if rng.random() < 0.4:
                self.tell(MemberLost(node, "its lease ended", proven=rng.random() < 0.5))
                return
            self.return_from_silence(node, rng)

    def return_from_silence(self, node: str, rng: Random) -> None:
        slots = next(each.slots for each in self.world.placements if each.node == node)
        if rng.random() < 0.5:
            self.story.come_back(node, slots=slots, ports=rng.randint(0, 2))
            return
        running = rng.choice((self.story.generation, None))
        checking = running is None and rng.random() < 0.2
        seen = rng.choice((self.story.generation, self.story.generation, self.story.generation - 1))
        rank = min(self.world.ranks(node))
        exits = (exit_of(rank, rng.choice((0, 1)), node=node, generation=seen),) if rng.random() < 0.3 else ()
        desk = self.story.desk(node)
        told = {"savers": tuple(desk.savers), "shards": tuple(desk.shards.values()), "found": desk.found}
        ports = rng.randint(0, 2)
        self.story.join(node, running, slots=slots, ports=ports, seen=seen, exits=exits, checking=checking, **told)

    @rule(rng=CHOICES)
    def sever(self, rng: Random) -> None:
        self.tell(Severed("etcd is out of reach and a node is silent"))

    @rule(rng=CHOICES)
    def stop_alone(self, rng: Random) -> None:
        """A node had to stop its workers."""
        if self.present and self.world is not None:
            self.tell(NodeStopped(rng.choice(sorted(self.present)), self.story.generation, "it is cut off"))

    @rule(rng=CHOICES)
    def come_again(self, rng: Random) -> None:
        """The same agent on a new stream: its workers are those of the world, or older ones, or none."""
        if self.present:
            node = rng.choice(sorted(self.present))
            running = rng.choice((self.story.generation, self.story.generation - 1)) or None
            slots = self.present[node].slots
            if rng.random() < 0.5:
                self.story.come_back(node, running=running, slots=slots, ports=rng.randint(0, 2))
            else:
                self.story.join(node, slots=slots, ports=rng.randint(0, 2), running=running)

    @rule(rng=CHOICES)
    def go(self, rng: Random) -> None:
        """A node is lost, or leaves; rarely the last one, because that ends the job."""
        if len(self.present) > 1 or (self.present and rng.random() < 0.1):
            node = rng.choice(sorted(self.present))
            lost = MemberLost(node, "its stream broke", proven=rng.random() < 0.5)
            self.tell(rng.choice((lost, MemberLeaving(node, signal.SIGTERM))))

    @rule(rng=CHOICES)
    def exit(self, rng: Random) -> None:
        if self.world is not None:
            code = rng.choice((1, 0, 9, 101))
            number = signal.SIGKILL if code == 9 else None
            self.story.exit(rng.randrange(self.world.world_size), code, signal=number)
            self.heard.append(self.story.last)

    @rule(rng=CHOICES)
    def err(self, rng: Random) -> None:
        """A worker is about to fail."""
        if self.world is not None:
            node = rng.choice(self.world.nodes)
            generation = self.story.generation - rng.choice((0, 0, 1))
            exit = exit_of(rng.choice(sorted(self.world.ranks(node))), node=node, generation=generation)
            self.tell(WorkerErred(exit))

    @rule(rng=CHOICES)
    def finish_node(self, rng: Random) -> None:
        """All workers of one node of several end with code 0."""
        if self.world is not None and len(self.world.nodes) > 1:
            for rank in sorted(self.world.ranks(rng.choice(self.world.nodes))):
                self.story.exit(rank)

    @rule(rng=CHOICES)
    def drain(self, rng: Random) -> None:
        if isinstance(self.story.job.phase, Draining):
            self.tell(NodeDrained(rng.choice(self.world.nodes), self.story.generation))

    @rule(rng=CHOICES)
    def offer(self, rng: Random) -> None:
        """Ports that replace the earlier ones; the offer may be older than the world that took one of them."""
        if self.present:
            node = rng.choice(sorted(self.present))
            own = [world.master.port for world in self.worlds_led[-3:] if world.nodes[0] == node]
            late = [port for port in own if rng.random() < 0.3]
            seen = self.story.generation - (3 if late else rng.randint(0, 1))
            self.story.tell(PortsOffered(node, (*late, *self.story.fresh_ports(rng.randint(0, 2))), seen))

    @rule(rng=CHOICES)
    def get_on(self, rng: Random) -> None:
        """Workers of a node tell of steps, or of none."""
        if self.world is not None:
            node = rng.choice(self.world.nodes)
            marks = tuple(Mark(count, count) for count in (rng.randint(0, 9) for _ in self.world.ranks(node)))
            self.tell(NodeProgressed(node, self.story.generation - rng.choice((0, 0, 1)), marks))

    @rule(rng=CHOICES)
    def dump(self, rng: Random) -> None:
        """The nodes tell where their workers are, asked or not."""
        for node in self.world.nodes if self.world is not None else ():
            if rng.random() < 0.7:
                waits = [rng.choice(("", "all_reduce")) for _ in self.world.ranks(node)]
                stacks = zip(sorted(self.world.ranks(node)), waits, strict=True)
                stacks = tuple(StackReport(rank, "train.py:7 in train", what, "stack") for rank, what in stacks)
                self.tell(StacksDumped(node, self.story.generation, stacks))

    @rule(rng=CHOICES)
    def check(self, rng: Random) -> None:
        """A node was checked, or says so without having been asked."""
        if self.present:
            checked = sorted(self.story.referee.checking) or sorted(self.present)
            self.tell(NodeChecked(rng.choice(checked), rng.choice(("", "", "its disk is full"))))

    @rule(rng=CHOICES)
    def clear(self, rng: Random) -> None:
        self.story.tell(NodeCleared(rng.choice(NODES)))

    @rule(rng=CHOICES)
    def wait(self, rng: Random) -> None:
        """Time passes; the shell may be late and ask only after several deadlines."""
        self.story.now += rng.choice((0.5, 3.0, 30.0))
        self.tell(TimePassed())

    @rule(rng=CHOICES)
    def pass_deadline(self, rng: Random) -> None:
        self.story.pass_deadline()

    @rule(rng=CHOICES)
    def stray(self, rng: Random) -> None:
        """Messages of other generations, and of ranks and nodes that may not be there."""
        node, generation = rng.choice(NODES), self.story.generation + rng.choice((0, -1, 1))
        self.tell(WorkerExited(exit_of(rng.randrange(12), rng.choice((1, 0)), node=node, generation=generation)))
        if generation != self.story.generation:
            self.tell(NodeDrained(node, generation))
        if node not in self.present:
            self.tell(MemberLost(node, "the stream of a stranger broke"))

    @rule(rng=CHOICES)
    def hear_again(self, rng: Random) -> None:
        """A message comes a second time, perhaps much later."""
        if self.heard:
            self.story.tell(rng.choice(self.heard))

    @rule(rng=CHOICES)
    def hear_twice(self, rng: Random) -> None:
        """A message that comes twice in a row does nothing the second time."""
        before, last = self.story.job, self.story.last
        if last in self.heard[-1:] and not isinstance(last, TimePassed):
            self.story.tell(last)
            # Whoever tells of what is done with is told so, as often as it tells.
            done = [each for each in self.story.commands if not is_last_word(each)]
            if isinstance(before.phase, Closing) and isinstance(last, MemberLeaving | StopRequested):
                # So is whoever asks to go while the end waits for a checkpoint.
                done = [each for each in done if not (isinstance(each, Send) and isinstance(each.directive, Wait))]
            if self.story.job != before or done:
                raise BrokenRule(f"{last} counts once")

    @rule(rng=CHOICES)
    def end(self, rng: Random) -> None:
        """A job that is over stays over, whoever comes, and the next one begins. Rarely somebody stops it."""
        if rng.random() < 0.1:
            self.tell(StopRequested("a", rng.choice((signal.SIGINT, signal.SIGTERM))))
        if isinstance(self.story.job.phase, Finished):
            self.story.join("a")
            self.story.wait(100.0)
            self.begin(rng)

    @rule(rng=CHOICES)
    def save(self, rng: Random) -> None:
        """Something about checkpoints."""
        if self.saving:
            getattr(self, rng.choice(SAVING))(rng)

    def open_savers(self, rng: Random) -> None:
        """One rank saves checkpoints, or all of them; and a stray message of one."""
        if self.world is None:
            return
        some = [rng.randrange(self.world.world_size)]
        for rank in range(self.world.world_size) if rng.random() < 0.7 else some:
            self.tell(CheckpointerOpened(self.story.node_of(rank), self.story.generation, rank))
        if rng.random() < 0.2:
            self.tell(CheckpointerOpened(rng.choice(NODES), self.story.generation - rng.choice((0, 1)), some[0]))

    def close_savers(self, rng: Random) -> None:
        """One rank saves no more, or somebody says so of one that never did."""
        if self.world is not None:
            rank = rng.randrange(self.world.world_size)
            node = rng.choice((self.story.node_of(rank), self.story.node_of(rank), rng.choice(NODES)))
            self.tell(CheckpointerClosed(node, self.story.generation - rng.choice((0, 0, 1)), rank))

    def want_save(self, rng: Random) -> None:
        """A worker wants a checkpoint, most often where all ranks can be asked for one."""
        if self.world is not None and rng.random() < 0.8:
            self.open_savers(rng)
        self.tell(SaveWanted(rng.choice(NODES), self.story.generation - rng.choice((0, 0, 1)), "it is time"))

    def reach(self, rng: Random) -> None:
        """Nodes say how far they are, asked or not."""
        number = self.story.job.saves.asked - rng.choice((0, 0, 0, 1))
        for node in self.world.nodes if self.world is not None else ():
            if rng.random() < 0.9:
                self.tell(
                    StepsReached(node, self.story.generation - rng.choice((0,) * 9 + (1,)), number, self.a_step(rng))
                )

    def save_all(self, rng: Random) -> None:
        """All ranks stage or write their part; mostly of the checkpoint that was asked for."""
        if self.world is not None:
            at, part = self.a_step(rng), rng.choice((Part.STAGED, Part.WRITTEN))
            for rank in range(self.world.world_size):
                self.report(Shard(rank, at, part), self.story.node_of(rank), self.story.generation)

    def save_one(self, rng: Random) -> None:
        """One rank, perhaps of a world that is over, on a node that it may not be on."""
        if self.world is not None:
            rank = rng.randrange(self.world.world_size)
            node = rng.choice((self.story.node_of(rank), self.story.node_of(rank), rng.choice(NODES)))
            part = rng.choice((Part.STAGED, Part.WRITTEN, Part.WRITTEN, Part.MISSED))
            why = "its disk is full" if part is Part.MISSED else ""
            self.report(
                Shard(rank, self.a_step(rng), part, why), node, self.story.generation - rng.choice((0, 0, 0, 1))
            )

    def prepare(self, rng: Random) -> None:
        """Rank 0's node does what it was asked to do, fails to, or somebody says so who was not asked."""
        if self.world is None:
            return
        if rng.random() < 0.7 and self.fulfil(rng, trouble=rng.random() < 0.15):
            return
        node, generation, at = rng.choice(NODES), self.story.generation - rng.choice((0, 0, 1)), self.a_step(rng)
        self.tell(CheckpointPrepared(node, generation, at, checkpoint(at, generation).uri))
        self.tell(CheckpointPublished(node, generation, at, pruned=(checkpoint(at, generation).name,)))

    def enter(self, rng: Random) -> None:
        """The ledger's answer comes; whether it can be reached changes now and then."""
        self.story.ledger_answers = rng.random() < 0.6
        if self.story.answers:
            self.story.tell(self.story.answers.pop(0))

    def change_size(self, rng: Random) -> None:
        """Somebody wants to come or to go, where that is a reason to ask for a checkpoint."""
        if self.world is None or not isinstance(self.story.job.phase, Running):
            return
        if rng.random() < 0.7:
            self.open_savers(rng)
        elsewhere = [node for node in NODES if node not in self.present and node not in self.silent]
        if rng.random() < 0.3 and len(self.present) > 1:
            self.tell(MemberLeaving(rng.choice(self.world.nodes), signal.SIGTERM))
        elif elsewhere:
            self.story.join(rng.choice(elsewhere), slots=rng.randint(1, 2), ports=1)
            self.story.pass_deadline()

    def obey(self, rng: Random) -> None:
        """All that was asked for is done."""
        self.answer()

    def save_well(self, rng: Random) -> None:
        """A checkpoint as it should be, asked for or not."""
        if self.world is not None:
            self.open_savers(rng)
            self.answer(self.a_step(rng))

    def find(self, rng: Random) -> None:
        """Rank 0, or somebody else, has looked what there is to go on from."""
        if self.world is not None:
            node = rng.choice((self.world.nodes[0], self.world.nodes[0], rng.choice(NODES)))
            found = tuple(checkpoint(at, 0) for at in (7, 5, 3)[: rng.randint(0, 3)])
            self.tell(CheckpointsFound(node, self.story.generation - rng.choice((0, 0, 1)), found))

    def fail_to_restore(self, rng: Random) -> None:
        """A rank can't load what it was told to, or something that nobody told it to."""
        if self.world is not None and rng.random() < 0.3:
            rank = rng.randrange(self.world.world_size)
            node = rng.choice((self.story.node_of(rank), self.story.node_of(rank), rng.choice(NODES)))
            names = [each.name for each in self.story.referee.clerk.ledger] or ["step-9-9"]
            name = rng.choice((names[0], rng.choice(names), "step-9-9"))
            generation = self.story.generation - rng.choice((0, 0, 1))
            self.tell(RestoreFailed(node, generation, rank, name, "a checksum is wrong"))

    def change_leader(self, rng: Random) -> None:
        """Somebody else leads. Most nodes come at once, and tell what they know."""
        if isinstance(self.story.job.phase, Finished) or rng.random() < 0.5:
            return
        running = isinstance(self.story.job.phase, Running | Draining)
        here = sorted(self.present.items())
        rng.shuffle(here)
        self.story.change_leader()
        self.heard.clear()
        for node, known in here:
            if isinstance(self.story.job.phase, Finished):
                return
            if rng.random() < 0.85 and node not in self.present:
                placed = self.world is not None and node in self.world.nodes
                state = {"slots": known.slots, "ports": rng.randint(0, 2), "warm": known.warm}
                if placed and running:
                    self.story.come_back(node, **state)
                else:
                    self.story.join(node, seen=self.story.generation, **state)

    def a_step(self, rng: Random) -> int:
        ask = self.story.job.saves.ask
        asked = ask.step if ask is not None and ask.step is not None else None
        # Some count in larger steps than one.
        asked = None if asked is None else asked + self.stride
        return asked if asked is not None and rng.random() < 0.7 else rng.choice((10, 20, 25, 30, 40, 50))

    def report(self, shard: Shard, node: str, generation: int) -> None:
        self.tell(ShardReported(node, generation, shard))

    def fulfil(self, rng: Random | None = None, *, trouble: bool = False) -> bool:
        """Rank 0's node does the first thing that it was told to; whether there was one."""
        clerk, generation = self.story.referee.clerk, self.story.generation
        due = sorted(clerk.due, key=str)
        if not due or self.world.nodes[0] not in self.present:
            return False
        kind, at = due[0] if rng is None else rng.choice(due)
        host = self.world.nodes[0]
        if kind is Publish:
            old = [each.name for each in clerk.ledger[1:]]
            pruned = (rng.choice(old),) if rng is not None and old and rng.random() < 0.3 else ()
            self.tell(CheckpointPublished(host, generation, at, "it is full" if trouble else "", pruned))
        elif trouble:
            self.tell(CheckpointPrepared(host, generation, at, trouble="its disk is full"))
        else:
            self.tell(CheckpointPrepared(host, generation, at, checkpoint(at, generation).uri))
        return True

    def answer(self, otherwise: int | None = None) -> None:
        """Nodes and ranks do all that they were asked to, and what they are at."""
        if self.world is None or not isinstance(self.story.job.phase, Running | Holding | Closing):
            return
        before = self.story.generation
        ask = self.story.job.saves.ask
        done = max((each.step for each in self.story.job.checkpoints if each.generation == before), default=0)
        for node in self.world.nodes if ask is not None and ask.step is None else ():
            if node in self.present:
                # Nobody gets back behind what it has saved.
                self.tell(StepsReached(node, before, ask.number, max(60, done + 1)))
        ask = self.story.job.saves.ask
        at = ask.step + self.stride if ask is not None and ask.step is not None else otherwise
        staged = {} if at is None or self.story.job.absent else {at: set(range(self.world.world_size))}
        for at, ranks in {**self.story.referee.clerk.staged, **staged}.items():
            for rank in sorted(ranks):
                if self.story.generation == before and self.story.node_of(rank) in self.present:
                    self.report(Shard(rank, at, Part.WRITTEN), self.story.node_of(rank), before)
        for _ in range(20):
            if self.story.generation != before or isinstance(self.story.job.phase, Finished):
                return
            if self.story.answers:
                self.story.tell(self.story.answers.pop(0))
            elif not self.fulfil():
                return

    @rule(rng=CHOICES)
    def rest(self, rng: Random) -> None:
        """Rarely: no more faults, and the next job begins."""
        if rng.random() < 0.3:
            self.come_to_rest()
            self.begin(rng)

    def tell(self, event: Event) -> None:
        self.heard.append(event)
        self.story.tell(event)

    @property
    def world(self) -> World | None:
        return self.story.job.world

    @property
    def worlds_led(self) -> list[World]:
        """Those whose ports whoever leads knows."""
        referee = self.story.referee
        return referee.worlds[max(0, referee.inherited - 1) :]

    @property
    def silent(self) -> set[str]:
        return self.story.referee.absent

    @property
    def present(self) -> dict[str, Member]:
        return self.story.referee.present

    def teardown(self) -> None:
        if hasattr(self, "story") and self.story.sound:
            self.come_to_rest()

    def come_to_rest(self) -> None:
        """Once the faults stop, the job ends in a world, at the end, or in want of nodes."""
        self.calm_down()
        job, referee = self.story.job, self.story.referee
        present = len(referee.present)
        match job.phase:
            case Draining():
                raise BrokenRule("a drain ends")
            case Closing():
                raise BrokenRule("a job that is over ends")
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
        """The silent ones are lost, the cold ones ready, agents without a port offer one, deadlines pass."""
        self.story.ledger_answers = True
        for node in sorted(self.silent):
            self.story.tell(MemberLost(node, "its lease ended", proven=False))
        for node in sorted(self.present):
            self.story.tell(MemberReady(node))
        for _ in range(20):
            self.offer_where_none()
            if self.reports_drained and isinstance(self.story.job.phase, Draining):
                for node in self.world.nodes:
                    self.story.tell(NodeDrained(node, self.story.generation))
            for node in sorted(self.story.referee.checking):
                self.story.tell(NodeChecked(node))
            if self.saves:
                self.answer()
            while self.story.answers:
                self.story.tell(self.story.answers.pop(0))
            if not self.only_a_hang_is_due():
                self.story.pass_deadline()
            elif self.story.job.phase.joined is not None:
                self.get_on_steadily()
        quiet = deadline(self.story.job) is None or self.only_a_hang_is_due()
        if not quiet and not isinstance(self.story.job.phase, Gathering | Holding) and not self.asks_for_ever():
            raise BrokenRule("deadlines come to an end")

    def get_on_steadily(self) -> None:
        """Newcomers are asked for later: until then workers make steps."""
        self.story.now += 30.0
        marks = (Mark(int(self.story.now), 1),)
        self.story.tell(NodeProgressed(self.world.nodes[0], self.story.generation, marks))
        self.story.tell(TimePassed())

    def only_a_hang_is_due(self) -> bool:
        """Whether the next that would happen by itself is that workers who get on are taken to hang."""
        job = self.story.job
        if not isinstance(job.phase, Running) or job.phase.exits or job.phase.hang is not None or job.absent:
            return False
        return deadline(job) is not None and deadline(job) == hang.due(job.config, job.phase.pulse)

    def asks_for_ever(self) -> bool:
        """Whether newcomers wait for a checkpoint that nobody makes."""
        return self.story.job.config.join_at_checkpoint and not self.saves

    def offer_where_none(self) -> None:
        for node, member in tuple(self.story.referee.present.items()):
            if not member.ports:
                self.story.tell(PortsOffered(node, self.story.fresh_ports(1), self.story.generation))

    def run_to_the_end(self, job: Job) -> None:
        referee = self.story.referee
        patient = job.config.join_at_checkpoint and (not self.saves or not referee.clerk.can_ask(referee))
        if job.config.level == Level.ELASTIC and not referee.finished and not patient:
            size, welcome = len(self.world.nodes), len(referee.welcome)
            # Whoever was excluded while it runs stays until the world is replaced.
            if size < min(welcome, job.config.max_nodes):
                raise BrokenRule(f"newcomers are forgotten: {size} of {welcome} nodes run")
        for rank in range(self.world.world_size):
            if self.stages_last:
                self.report(Shard(rank, 90, Part.STAGED), self.story.node_of(rank), self.story.generation)
        for rank in range(self.world.world_size):
            self.story.exit(rank)
        if self.saves:
            self.answer()
        for _ in range(3):
            # The ledger may be asked again, once, before the time is up.
            self.story.pass_deadline()
        if self.story.job.phase != Finished(Succeeded()):
            raise BrokenRule(f"all ranks ended with code 0, and yet: {self.story.job.phase}")


HAPPENINGS = (
    *("join", "come_again", "go", "exit", "finish_node", "drain", "offer", "wait", "pass_deadline"),
    *("stray", "hear_again", "hear_twice", "end", "rest"),
    *("get_ready", "fall_silent", "return_or_not", "sever", "stop_alone"),
    *("get_on", "dump", "check", "clear", "err", "grow"),
)
SAVING = (
    *(
        "open_savers",
        "close_savers",
        "want_save",
        "reach",
        "save_all",
        "save_all",
        "save_one",
        "prepare",
        "prepare",
        "enter",
        "enter",
    ),
    *("save_well", "find", "fail_to_restore", "change_leader", "change_size", "change_size", "obey"),
)

LIMITS = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

JobMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, phases=(Phase.generate, Phase.shrink), **LIMITS
)
TestJobMachine = JobMachine.TestCase


def never_acts(job: Job, event: Event, now: float) -> Step:
    return job, ()


def restarts_on_late_exits(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, WorkerExited) and job.world is not None:
        event = WorkerExited(replace(event.exit, generation=job.world.generation))
    return step(job, event, now)


def ignores_the_budget(job: Job, event: Event, now: float) -> Step:
    generous = replace(job.config, level=max(job.config.level, Level.FAULT_TOLERANT), policy=RestartPolicy(99))
    after, commands = step(replace(job, config=generous), event, now)
    return replace(after, config=job.config), commands


def gives_up_early(job: Job, event: Event, now: float) -> Step:
    strict = replace(job.config, policy=RestartPolicy(max(0, job.config.policy.max_restarts - 1), free_codes=(101,)))
    after, commands = step(replace(job, config=strict), event, now)
    return replace(after, config=job.config), commands


def charges_nothing(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return replace(after, history=History()), commands


def charges_a_lost_node(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, MemberLost) and job.history.count < job.config.policy.max_restarts:
        job = replace(job, history=job.history.charge(now))
    return step(job, event, now)


def takes_a_late_offer(job: Job, event: Event, now: float) -> Step:
    """It was so once: an offer that crossed the world that took its port brought the port back."""
    if isinstance(event, PortsOffered) and isinstance(job.phase, Running | Draining) and job.member(event.node):
        offered = tuple(replace(each, ports=event.ports) if each.node == event.node else each for each in job.members)
        return replace(job, members=offered), ()
    return step(job, event, now)


def charges_who_asks_for_a_restart(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    asked = isinstance(event, WorkerExited) and event.exit.code == 101 and after.world != job.world
    return (replace(after, history=after.history.charge(now)) if asked else after), commands


def reuses_a_port(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if after.world is not None and after.world != job.world:
        host = after.member(after.world.nodes[0])
        kept = replace(host, ports=(after.world.master.port, *host.ports))
        after = replace(after, members=tuple(kept if each == host else each for each in after.members))
    return after, commands


def _with_world(result: Step, change: Callable[[World], World]) -> Step:
    """The same step with another world in place of the one that it formed."""
    after, commands = result
    if not any(isinstance(command, Commit) for command in commands):
        return result
    world = change(after.world)
    swapped = {Commit: lambda old: replace(old, world=world), Send: lambda old: _resend(old, world)}
    return replace(after, world=world), tuple(swapped.get(type(each), lambda old: old)(each) for each in commands)


def _resend(old: Send, world: World) -> Send:
    if isinstance(old.directive, Run) and old.node in world.nodes:
        return Send(old.node, Run(world.assignment(old.node)))
    return old


def reverses_ranks(job: Job, event: Event, now: float) -> Step:
    return _with_world(step(job, event, now), lambda world: replace(world, placements=world.placements[::-1]))


def gives_everybody_rank_0(job: Job, event: Event, now: float) -> Step:
    def flat(world: World) -> World:
        return replace(world, placements=tuple(replace(each, rank_offset=0) for each in world.placements))

    return _with_world(step(job, event, now), flat)


def skips_a_generation(job: Job, event: Event, now: float) -> Step:
    return _with_world(step(job, event, now), lambda world: replace(world, generation=world.generation + 1))


def gives_no_reason(job: Job, event: Event, now: float) -> Step:
    return _with_world(step(job, event, now), lambda world: replace(world, reason=""))


def sends_before_it_commits(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return after, commands[::-1]


def does_not_commit(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return after, tuple(command for command in commands if not isinstance(command, Commit))


def starts_too_small(job: Job, event: Event, now: float) -> Step:
    after, commands = step(replace(job, config=replace(job.config, min_nodes=1)), event, now)
    return replace(after, config=job.config), commands


def resizes_at_level_1(job: Job, event: Event, now: float) -> Step:
    elastic = Level.ELASTIC if job.config.level == Level.FAULT_TOLERANT else job.config.level
    after, commands = step(replace(job, config=replace(job.config, level=elastic)), event, now)
    return replace(after, config=job.config), commands


def rises_from_the_dead(job: Job, event: Event, now: float) -> Step:
    if isinstance(job.phase, Finished) and job.world is not None:
        job = replace(job, phase=Running())
    return step(job, event, now)


def overlooks_a_loss(job: Job, event: Event, now: float) -> Step:
    return (job, ()) if isinstance(event, MemberLost) else step(job, event, now)


def overlooks_a_loss_while_it_waits(job: Job, event: Event, now: float) -> Step:
    """It was so once: nobody looked whether those left could go on."""
    if isinstance(event, MemberLost) and isinstance(job.phase, Gathering | Holding):
        return replace(job, members=tuple(each for each in job.members if each.node != event.node)), ()
    return step(job, event, now)


def restarts_at_level_0(job: Job, event: Event, now: float) -> Step:
    """It was so once: an agent that came back without its workers got a new world at level 0."""
    if not isinstance(event, MemberJoined):
        return step(job, event, now)
    level = max(job.config.level, Level.FAULT_TOLERANT)
    after, commands = step(replace(job, config=replace(job.config, level=level)), event, now)
    return replace(after, config=job.config), commands


def overlooks_time(job: Job, event: Event, now: float) -> Step:
    return (job, ()) if isinstance(event, TimePassed) else step(job, event, now)


def overlooks_drained_nodes_and_time(job: Job, event: Event, now: float) -> Step:
    if isinstance(job.phase, Draining) and isinstance(event, NodeDrained | TimePassed):
        return job, ()
    return step(job, event, now)


def overlooks_newcomers(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if isinstance(after.phase, Running):
        after = replace(after, phase=replace(after.phase, joined=None))
    return after, commands


def forgets_to_hold(job: Job, event: Event, now: float) -> Step:
    return without(step(job, event, now), Hold)


def lets_nodes_wait_in_silence(job: Job, event: Event, now: float) -> Step:
    return without(step(job, event, now), Wait)


def counts_an_exit_twice(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if isinstance(event, WorkerExited) and event.exit.ok and isinstance(after.phase, Running):
        missing = set(range(after.world.world_size)) - after.phase.finished
        if job.phase == after.phase and missing:
            after = replace(after, phase=replace(after.phase, finished=after.phase.finished | {min(missing)}))
    return after, commands


def forms_while_a_node_is_silent(job: Job, event: Event, now: float) -> Step:
    return step(replace(job, absent=frozenset()) if isinstance(job.phase, Holding) else job, event, now)


def trusts_that_a_cut_off_world_has_stopped(job: Job, event: Event, now: float) -> Step:
    """Without the isolation timeout a world that trains on, cut off from etcd, gets a rival."""
    return step(replace(job, doubtful=()), event, now)


def gives_up_a_silent_node_at_once(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, MemberSilent):
        event = MemberLost(event.node, event.reason)
    return step(job, event, now)


def forgets_who_leaves(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if isinstance(after.phase, Running) and after.phase.leaving:
        after = replace(after, phase=replace(after.phase, leaving=(), leave_at=None))
    return after, commands


def admits_the_cold(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, MemberReady):
        return job, ()
    return step(job, event, now)


def without(result: Step, kind: type) -> Step:
    """The same step, but this is not sent."""
    after, commands = result
    return after, tuple(each for each in commands if not isinstance(each, Send) or not isinstance(each.directive, kind))


def kills_before_it_asks_where_they_are(job: Job, event: Event, now: float) -> Step:
    return without(step(job, event, now), Dump)


def does_not_say_why(job: Job, event: Event, now: float) -> Step:
    return without(step(job, event, now), Explain)


def overlooks_a_hang(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if isinstance(after.phase, Running) and after.phase.hang is not None:
        return job, ()
    return after, commands


def waits_for_stacks_for_ever(job: Job, event: Event, now: float) -> Step:
    hanging = isinstance(job.phase, Running) and job.phase.hang is not None
    return (job, ()) if hanging and isinstance(event, TimePassed) else step(job, event, now)


def excludes_nobody(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return replace(after, history=replace(after.history, excluded=())), commands


def forgets_exclusions(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, MemberJoined):
        job = replace(job, history=replace(job.history, excluded=()))
    return step(job, event, now)


def takes_the_excluded_as_well(job: Job, event: Event, now: float) -> Step:
    after, commands = step(replace(job, history=replace(job.history, excluded=())), event, now)
    excluded = (*job.history.excluded, *after.history.excluded)
    return replace(after, history=replace(after.history, excluded=excluded)), commands


def takes_whoever_is_checked(job: Job, event: Event, now: float) -> Step:
    return step(replace(job, checking=frozenset()) if isinstance(job.phase, Holding) else job, event, now)


def waits_for_whoever_is_checked(job: Job, event: Event, now: float) -> Step:
    return (job, ()) if isinstance(event, NodeChecked) and not event.trouble else step(job, event, now)


def keeps_whoever_is_unfit(job: Job, event: Event, now: float) -> Step:
    return step(job, replace(event, trouble="") if isinstance(event, NodeChecked) else event, now)


def _configured(job: Job, event: Event, now: float, **settings: object) -> Step:
    """The same step of a job that had these settings."""
    after, commands = step(replace(job, config=replace(job.config, **settings)), event, now)
    return replace(after, config=job.config), commands


def publishes_what_is_not_in_the_ledger(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    early = (
        Send(after.world.nodes[0], Publish(each.generation, each.step)) for each in commands if type(each) is Enter
    )
    return after, (*commands, *early)


def prepares_what_is_not_written(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, ShardReported):
        event = replace(event, shard=replace(event.shard, part=Part.WRITTEN))
    return step(job, event, now)


def takes_parts_of_another_generation(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, ShardReported) and job.world is not None:
        event = replace(event, generation=job.world.generation)
    return step(job, event, now)


def lets_anybody_prepare(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, CheckpointPrepared) and job.world is not None:
        event = replace(event, node=job.world.nodes[0])
    return step(job, event, now)


def takes_silence_for_an_entry(job: Job, event: Event, now: float) -> Step:
    return step(job, replace(event, entered=True) if isinstance(event, CheckpointEntered) else event, now)


def asks_the_ledger_once(job: Job, event: Event, now: float) -> Step:
    return (job, ()) if isinstance(event, CheckpointEntered) and not event.entered else step(job, event, now)


def enters_twice(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if isinstance(event, CheckpointPublished) and after != job:
        after = replace(after, checkpoints=(*after.checkpoints[:1], *after.checkpoints))
    return after, commands


def goes_on_from_nothing(job: Job, event: Event, now: float) -> Step:
    return _with_world(step(job, event, now), lambda world: replace(world, resume_from=None))


def goes_on_from_the_oldest(job: Job, event: Event, now: float) -> Step:
    oldest = job.checkpoints[-1] if job.checkpoints else None
    return _with_world(step(job, event, now), lambda world: replace(world, resume_from=oldest))


def trusts_what_was_found(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    if isinstance(event, CheckpointsFound) and after != job:
        after = replace(after, checkpoints=event.found)
    return after, commands


def lets_the_next_one_wait(job: Job, event: Event, now: float) -> Step:
    """Meanwhile a later one may come, and it is lost."""
    after, commands = step(job, event, now)
    next_ones = [each.step for each in commands if isinstance(each, Enter)]
    if not isinstance(event, CheckpointEntered) or not next_ones:
        return after, commands
    save = after.saves.find(next_ones[0])
    assert save is not None
    after = replace(after, saves=after.saves.with_save(replace(save, enter_at=now + 1.0)))
    return after, tuple(each for each in commands if not isinstance(each, Enter))


def lets_ranks_begin_as_they_like(job: Job, event: Event, now: float) -> Step:
    return without(step(job, event, now), Resume)


def tries_the_same_again(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return (replace(after, checkpoints=job.checkpoints) if isinstance(event, RestoreFailed) else after), commands


def saves_at_the_first_step(job: Job, event: Event, now: float) -> Step:
    """Some are beyond it."""
    after, commands = step(job, event, now)
    return after, tuple(
        replace(each, directive=replace(each.directive, step=each.directive.step - 1))
        if isinstance(each, Send) and isinstance(each.directive, SaveAt) and each.directive.step is not None
        else each
        for each in commands
    )


def does_not_ask_before_a_change(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, TimePassed | MemberLeaving | StopRequested):
        job = replace(job, saves=replace(job.saves, savers=frozenset()))
    return step(job, event, now)


def never_lets_go(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return after, tuple(
        each
        for each in commands
        if not isinstance(each, Send) or not isinstance(each.directive, SaveAt) or each.directive.step is not None
    )


def waits_for_an_answer_for_ever(job: Job, event: Event, now: float) -> Step:
    asking = job.saves.ask is not None and job.saves.ask.step is None
    return (job, ()) if asking and isinstance(event, TimePassed) else step(job, event, now)


def keeps_who_leaves(job: Job, event: Event, now: float) -> Step:
    return _configured(job, event, now, drain_s=10000.0)


def takes_newcomers_without_a_checkpoint(job: Job, event: Event, now: float) -> Step:
    return _configured(job, event, now, join_at_checkpoint=False)


def does_not_wait_for_a_save(job: Job, event: Event, now: float) -> Step:
    return _configured(job, event, now, save_wait_s=0.0)


def waits_for_a_save_for_ever(job: Job, event: Event, now: float) -> Step:
    return _configured(job, event, now, save_wait_s=job.config.save_wait_s * 1000)


def never_ends(job: Job, event: Event, now: float) -> Step:
    return (job, ()) if isinstance(job.phase, Closing) and isinstance(event, TimePassed) else step(job, event, now)


def tells_rank_0s_node_once(job: Job, event: Event, now: float) -> Step:
    if isinstance(event, MemberJoined):
        return without(without(step(job, event, now), Prepare), Publish)
    return step(job, event, now)


def does_not_listen_to_who_comes_back(job: Job, event: Event, now: float) -> Step:
    return step(job, replace(event, savers=(), shards=(), found=None) if type(event) is MemberJoined else event, now)


def keeps_to_itself_what_came_of_a_save(job: Job, event: Event, now: float) -> Step:
    return without(without(step(job, event, now), Drop), Settle)


def says_it_once(job: Job, event: Event, now: float) -> Step:
    """Who was away, or comes late, is not told what became of a checkpoint."""
    after, commands = step(job, event, now)
    return (after, commands) if after != job else (after, tuple(each for each in commands if not is_last_word(each)))


def drops_what_is_committed(job: Job, event: Event, now: float) -> Step:
    after, commands = step(job, event, now)
    return after, tuple(
        replace(each, directive=Drop(each.directive.generation, each.directive.step, "it is done with"))
        if isinstance(each, Send) and isinstance(each.directive, Settle)
        else each
        for each in commands
    )


def waits_for_parts_for_ever(job: Job, event: Event, now: float) -> Step:
    patient = tuple(replace(each, staged_by=None) for each in job.saves.under_way)
    return step(replace(job, saves=replace(job.saves, under_way=patient)), event, now)


def waits_for_who_saves_no_more(job: Job, event: Event, now: float) -> Step:
    return (job, ()) if isinstance(event, CheckpointerClosed) else step(job, event, now)


def gives_up_too_early(job: Job, event: Event, now: float) -> Step:
    hasty = tuple(
        replace(each, staged_by=None if each.staged_by is None else now - 1.0) for each in job.saves.under_way
    )
    return step(replace(job, saves=replace(job.saves, under_way=hasty)), event, now)


BROKEN_SAVES = [
    keeps_to_itself_what_came_of_a_save,
    says_it_once,
    drops_what_is_committed,
    waits_for_parts_for_ever,
    waits_for_who_saves_no_more,
    gives_up_too_early,
    publishes_what_is_not_in_the_ledger,
    prepares_what_is_not_written,
    takes_parts_of_another_generation,
    lets_anybody_prepare,
    takes_silence_for_an_entry,
    asks_the_ledger_once,
    enters_twice,
    lets_the_next_one_wait,
    goes_on_from_nothing,
    goes_on_from_the_oldest,
    trusts_what_was_found,
    lets_ranks_begin_as_they_like,
    tries_the_same_again,
    saves_at_the_first_step,
    does_not_ask_before_a_change,
    never_lets_go,
    waits_for_an_answer_for_ever,
    keeps_who_leaves,
    takes_newcomers_without_a_checkpoint,
    does_not_wait_for_a_save,
    waits_for_a_save_for_ever,
    never_ends,
    tells_rank_0s_node_once,
    does_not_listen_to_who_comes_back,
]

BROKEN = [
    kills_before_it_asks_where_they_are,
    does_not_say_why,
    overlooks_a_hang,
    waits_for_stacks_for_ever,
    excludes_nobody,
    forgets_exclusions,
    takes_the_excluded_as_well,
    takes_whoever_is_checked,
    waits_for_whoever_is_checked,
    keeps_whoever_is_unfit,
    forms_while_a_node_is_silent,
    trusts_that_a_cut_off_world_has_stopped,
    gives_up_a_silent_node_at_once,
    forgets_who_leaves,
    admits_the_cold,
    never_acts,
    restarts_on_late_exits,
    ignores_the_budget,
    gives_up_early,
    charges_nothing,
    charges_a_lost_node,
    charges_who_asks_for_a_restart,
    reuses_a_port,
    takes_a_late_offer,
    reverses_ranks,
    gives_everybody_rank_0,
    skips_a_generation,
    gives_no_reason,
    sends_before_it_commits,
    does_not_commit,
    starts_too_small,
    resizes_at_level_1,
    rises_from_the_dead,
    overlooks_a_loss,
    overlooks_a_loss_while_it_waits,
    restarts_at_level_0,
    overlooks_time,
    overlooks_drained_nodes_and_time,
    overlooks_newcomers,
    forgets_to_hold,
    lets_nodes_wait_in_silence,
    counts_an_exit_twice,
]


def play(machine: type[JobMachine], seeds: Iterable[int]) -> None:
    """One story after the other, each with a burst and an end."""
    for seed in seeds:
        told = machine()
        told.begin(Random(seed))
        told.burst(seed, 100)
        told.teardown()


@pytest.mark.parametrize(
    ("broken", "saving"),
    [
        *(pytest.param(broken, 0.0, id=broken.__name__) for broken in BROKEN),
        *(pytest.param(broken, 2.0, id=broken.__name__) for broken in BROKEN_SAVES),
    ],
)
def test_the_machine_notices_a_step_that(broken: Act, saving: float) -> None:
    """A step that is broken in this way breaks a rule within few random stories."""
    machine = type("BrokenMachine", (JobMachine,), {"act": staticmethod(broken), "saving": saving})
    with pytest.raises(BrokenRule):
        play(machine, range(500))
